"""Does every part of a split know its own share, and do the shares cover the whole exactly once?"""

from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.topology.split import split, split_first

TOTALS, PARTS, BLOCKS = st.integers(0, 200), st.integers(1, 17), st.integers(1, 33)


def test_example():
    assert [split(7, 3, index) for index in range(3)] == [range(2), range(2, 4), range(4, 7)]
    assert [split(10, 3, index, block=4) for index in range(3)] == [range(4), range(4, 8), range(8, 10)]
    assert [split(10, 4, index, block=4) for index in range(1, 4)] == [range(4), range(4, 8), range(8, 10)]
    assert [split_first(10, 4, index) for index in range(4)] == [range(3), range(3, 6), range(6, 8), range(8, 10)]


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
