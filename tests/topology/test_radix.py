"""Does a mixed-radix view turn ranks into coordinates and groups, and back, without ever listing the world?"""

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.topology.radix import Radix

VIEW = Radix({"pp": 2, "tp": 4, "cp": 2})


@st.composite
def radices(draw):
    """A radix of one to four axes, and some of its axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = [f"axis{i}" for i in range(len(sizes))]
    axes = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return Radix(dict(zip(names, sizes, strict=True))), axes


def test_example():
    assert VIEW.sizes == {"pp": 2, "tp": 4, "cp": 2}
    assert VIEW.size == 16
    assert VIEW.coordinates(13) == {"pp": 1, "tp": 2, "cp": 1}
    assert VIEW.coordinate(13, "tp") == 2
    assert VIEW.rank({"cp": 1, "pp": 1, "tp": 2}) == 13
    assert VIEW.group(13, "tp") == range(9, 16, 2)
    assert VIEW.group(13, "tp", "cp") == range(8, 16)
    assert VIEW.group(13, "pp", "cp") == VIEW.group(13, "cp", "pp") == (4, 5, 12, 13)
    assert list(VIEW.groups("tp")) == [range(0, 8, 2), range(1, 8, 2), range(8, 16, 2), range(9, 16, 2)]
    assert list(VIEW.groups("pp", "cp")) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]


@settings(max_examples=100, deadline=None)
@given(radices())
def test_coordinates_count_like_digits(case):
    radix, _ = case
    names, sizes = list(radix.sizes), list(radix.sizes.values())
    assert radix.size == prod(sizes)
    for rank, digits in enumerate(product(*map(range, sizes))):
        assert radix.coordinates(rank) == dict(zip(names, digits, strict=True))
        assert [radix.coordinate(rank, name) for name in names] == list(digits)
        assert radix.rank(radix.coordinates(rank)) == rank


@settings(max_examples=100, deadline=None)
@given(radices())
def test_groups_hold_the_ranks_that_differ_along_their_axes_only(case):
    radix, axes = case
    groups, expected = radix.groups(*axes), {}
    for rank in range(radix.size):
        rest = tuple(digit for name, digit in radix.coordinates(rank).items() if name not in axes)
        expected.setdefault(rest, []).append(rank)
    assert isinstance(groups, Sequence)
    assert [list(group) for group in groups] == [expected[rest] for rest in sorted(expected)]
    for index, group in enumerate(groups):
        steps = {b - a for a, b in pairwise(group)}
        assert type(group) is (range if len(steps) <= 1 else tuple)
        assert groups[index] == groups[index - len(groups)] == group
        assert all(radix.group(rank, *axes) == group for rank in group)
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            groups[index]


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: Radix({"pp": 2, "tp": -3}), "-3"),
        (lambda: VIEW.coordinates(-1), "-1"),
        (lambda: VIEW.coordinate(0, "ep"), "ep"),
        (lambda: VIEW.group(16, "tp"), "16"),
        (lambda: VIEW.groups("ep"), "ep"),
        (lambda: VIEW.rank({"pp": 0, "tp": 7, "cp": 0}), "7"),
        (lambda: VIEW.rank({"pp": 0, "tp": 0, "cp": 0, "ep": 0}), "ep"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(call, word):
    with pytest.raises(ValueError) as caught:
        call()
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
