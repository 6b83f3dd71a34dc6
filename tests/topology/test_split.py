"""Does every part of a split know its own share, and do the shares cover the whole exactly once?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.topology.split import split, split_first

TOTALS, PARTS, BLOCKS = st.integers(0, 200), st.integers(1, 17), st.integers(1, 33)


@pytest.mark.parametrize(
    "total, parts, block, bounds",
    [
        (7, 3, 1, [0, 2, 4, 7]),
        (2, 4, 1, [0, 0, 1, 1, 2]),
        (0, 3, 1, [0, 0, 0, 0]),
        (10, 3, 4, [0, 4, 8, 10]),
        (10, 4, 4, [0, 0, 4, 8, 10]),
    ],
)
def test_split_example(total, parts, block, bounds):
    shares = [split(total, parts, index, block=block) for index in range(parts)]
    assert [(share.start, share.stop) for share in shares] == list(zip(bounds, bounds[1:], strict=False))


@settings(max_examples=200, deadline=None)
@given(TOTALS, PARTS, BLOCKS)
def test_split_follows_its_formula_and_cuts_between_blocks(total, parts, block):
    shares = [split(total, parts, index, block) for index in range(parts)]
    blocks = -(-total // block)
    assert [index for share in shares for index in share] == list(range(total))
    for index, share in enumerate(shares):
        first, last = index * blocks // parts, (index + 1) * blocks // parts
        assert isinstance(share, range)
        assert (share.start, share.stop) == (min(first * block, total), min(last * block, total))


@settings(max_examples=200, deadline=None)
@given(TOTALS, PARTS)
def test_split_first_gives_the_remainder_to_the_first_parts(total, parts):
    shares = [split_first(total, parts, index) for index in range(parts)]
    assert [index for share in shares for index in share] == list(range(total))
    assert [len(share) for share in shares] == [total // parts + (index < total % parts) for index in range(parts)]
    assert all(isinstance(share, range) for share in shares)
