"""Does a mixed-radix view turn ranks into coordinates and groups, and back, without ever listing the world?"""

from collections.abc import Sequence
from itertools import product
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


@settings(max_examples=60, deadline=None)
@given(radices())
def test_coordinates_count_like_digits(case):
    radix, _ = case
    names, sizes = list(radix.sizes), list(radix.sizes.values())
    assert radix.size == prod(sizes)
    for rank, digits in enumerate(product(*map(range, sizes))):
        coordinates = dict(zip(names, digits, strict=True))
        assert radix.coordinates(rank) == coordinates
        assert [radix.coordinate(rank, name) for name in names] == list(digits)
        assert radix.rank(coordinates) == rank


@settings(max_examples=60, deadline=None)
@given(radices())
def test_a_group_is_what_differs_along_its_axes_only(case):
    radix, axes = case
    fixed = [name for name in radix.sizes if name not in axes]
    key = [[radix.coordinate(rank, name) for name in fixed] for rank in range(radix.size)]
    for rank in range(radix.size):
        group = radix.group(rank, *axes)
        members = [other for other in range(radix.size) if key[other] == key[rank]]
        steps = {b - a for a, b in zip(members, members[1:], strict=False)}
        assert list(group) == members
        assert type(group) is (range if len(steps) <= 1 else tuple)


@settings(max_examples=60, deadline=None)
@given(radices())
def test_groups_is_a_sequence_that_partitions_the_world(case):
    radix, axes = case
    groups = radix.groups(*axes)
    listed = list(groups)
    assert isinstance(groups, Sequence)
    assert len(groups) == len(listed) == radix.size // prod(radix.sizes[name] for name in axes)
    assert sorted(rank for group in listed for rank in group) == list(range(radix.size))
    assert [group[0] for group in listed] == sorted(group[0] for group in listed)
    for index, group in enumerate(listed):
        assert groups[index] == groups[index - len(groups)] == group == radix.group(group[-1], *axes)
    for index in (len(groups), -len(groups) - 1):
        with pytest.raises(IndexError):
            groups[index]


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: Radix({"pp": 2, "tp": -3}), "-3"),
        (lambda: VIEW.coordinates(-1), "-1"),
        (lambda: VIEW.coordinate(99, "tp"), "99"),
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
