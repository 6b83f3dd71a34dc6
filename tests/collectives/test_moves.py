"""How are uneven rows padded where a backend needs equal ones?"""

import pytest

from spmd.collectives.moves import Padding


@pytest.mark.parametrize(
    ("counts", "decode", "chosen"),
    [
        ([4, 4], True, Padding.MAX_LEN),
        ([4, 0], True, Padding.MAX_LEN),  # 2 * 4 >= 4 * 2: the bound itself
        ([4, 0, 0], True, Padding.SUM_LEN),
        ([5, 1, 1, 2], True, Padding.SUM_LEN),
        ([5, 1, 2, 2], True, Padding.MAX_LEN),
        ([0, 0], True, Padding.MAX_LEN),
        ([4, 4], False, Padding.SUM_LEN),
        ([0, 0], False, Padding.SUM_LEN),
    ],
)
def test_the_rule(counts, decode, chosen):
    assert Padding.AUTO.of(counts, decode) == chosen


@pytest.mark.parametrize("named", [Padding.NONE, Padding.MAX_LEN, Padding.SUM_LEN])
def test_what_was_asked_for_is_taken(named):
    assert {named.of(counts, decode) for counts in ([4, 0, 0], [4, 4]) for decode in (True, False)} == {named}
