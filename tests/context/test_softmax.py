"""Do parts of attention, each over some of the keys, make the whole? Against softmax in fp64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.context import softmax
from spmd.context.softmax import Sum, attend, attend_at, combine

NEVER = float("-inf")


def attention(queries, keys, values, scale, mask=None):
    """In fp64, from the definition: o [L, H, dv], lse [L, H]; rows that see nothing: 0 and -inf."""
    scores = torch.einsum("lhd,nhd->lhn", queries.double(), keys.double()) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], NEVER)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return torch.einsum("lhn,nhd->lhd", weights, values.double()), lse


def parts_of(scores, values, ends):
    """Scores [T, H, n] and values [n, dv], cut at `ends`: every part's o and its (largest, sum) in fp32, NaN where it
    saw nothing, and what all of it is in fp64."""
    o, stats = [], []
    for first, end in zip([0, *ends], [*ends, scores.shape[-1]], strict=True):
        some = scores[..., first:end].double()
        top = some.amax(-1) if end > first else torch.full(some.shape[:-1], NEVER, dtype=torch.float64)
        weights = (some - top.masked_fill(top.isneginf(), 0.0)[..., None]).exp()
        total = weights.sum(-1)
        o.append((weights @ values[first:end].double() / total[..., None]).float())  # 0 / 0 is NaN
        stats.append(torch.stack([top, total], -1).float())
    everything = scores.double()
    top = everything.amax(-1, keepdim=True)
    weights = (everything - top.masked_fill(top.isneginf(), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    truth = weights @ values.double() / total.masked_fill(total == 0, 1.0)
    return torch.stack(o), torch.stack(stats), truth


def near(made, truth, o, within=1e-6):
    """made and truth [T, H, dv]: `within` of the largest number of the row's parts."""
    largest = o.nan_to_num(0.0).abs().amax(0).amax(-1, keepdim=True)
    assert not made.isnan().any()
    assert ((made.double() - truth).abs() <= within * largest).all()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.lists(st.integers(0, 40), min_size=1, max_size=15),
    st.sampled_from([0.0, 1.0, 30.0, 1e4]),
)
def test_parts_combine_to_the_whole(seed, tokens, lengths, spread):
    """Up to 16 parts of every length, some of nothing, scores of up to +-1e4."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths) + 3
    scores = (torch.rand(tokens, 2, n, generator=generator) * 2 - 1) * spread
    values = torch.randn(n, 5, generator=generator)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    o, stats, truth = parts_of(scores, values, ends)
    near(combine(o, stats), truth, o)


def test_the_largest_scores_may_be_anywhere():
    """One part at 1e4, the others at -1e4: they count for nothing, and nothing overflows."""
    values = torch.randn(12, 4)
    for where in range(3):
        scores = torch.full((2, 3, 12), -1e4)
        scores[..., 4 * where : 4 * where + 4] = 1e4
        o, stats, truth = parts_of(scores, values, [4, 8])
        made = combine(o, stats)
        near(made, truth, o)
        assert torch.equal(made, o[where])


def test_a_part_that_saw_nothing_is_not_read():
    scores, values = torch.randn(4, 2, 9), torch.randn(9, 6)
    o, stats, truth = parts_of(scores, values, [0, 5, 5])
    assert o[0].isnan().all() and o[2].isnan().all() and (stats[0, ..., 1] == 0).all()
    near(combine(o, stats), truth, o)
    for rubbish in (float("nan"), float("inf"), 1e30):
        o[0] = rubbish
        stats[0, ..., 0] = rubbish  # its largest score says nothing either
        near(combine(o, stats), truth, o[1:2])


def test_a_row_that_nobody_saw_is_zero():
    o, stats = torch.full((3, 2, 1, 4), float("nan")), torch.tensor([NEVER, 0.0]).expand(3, 2, 1, 2).clone()
    assert torch.equal(combine(o, stats), torch.zeros(2, 1, 4))
    o[1, 1], stats[1, 1] = 2.0, torch.tensor([-5.0, 3.0])  # the other row of the batch was seen by one
    assert torch.equal(combine(o, stats), torch.tensor([0.0, 2.0]).view(2, 1, 1).expand(2, 1, 4))


def test_no_rows_and_one_part():
    assert combine(torch.empty(4, 0, 3, 8), torch.empty(4, 0, 3, 2)).shape == (0, 3, 8)
    o, stats, _ = parts_of(torch.randn(1, 2, 7), torch.randn(7, 4), [])
    assert torch.allclose(combine(o, stats), o[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_are_rounded_once(dtype):
    """As the fp32 sum of what was sent, rounded at the end."""
    o, stats, _ = parts_of(torch.randn(5, 3, 64), torch.randn(64, 8), list(range(4, 64, 4)))
    o = o.to(dtype)
    assert combine(o, stats).dtype == dtype
    assert torch.equal(combine(o, stats), combine(o.float(), stats).to(dtype))


# ---------------------------------------------------------------------- attention over some keys


def case(length, n, heads=3, d=8, dv=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in ((length, heads, d), (n, heads, d), (n, heads, dv))]


def equal(made, truth):
    (o, lse), (want, want_lse) = made, truth
    assert o.shape == want.shape and lse.shape == want_lse.shape and lse.dtype == torch.float32
    assert torch.allclose(o.double(), want, atol=2e-6)
    assert torch.allclose(lse.double(), want_lse, atol=2e-6)


@pytest.mark.parametrize("length,n", [(1, 1), (1, 40), (7, 7), (33, 70), (70, 33)])
@pytest.mark.parametrize("dv", [8, 5, 1])
@pytest.mark.parametrize("how", ["all", "causal", "mask", "some see nothing"])
def test_attention_is_softmax(length, n, dv, how):
    queries, keys, values = case(length, n, dv=dv)
    if how == "all":
        return equal(attend(queries, keys, values, 0.3), attention(queries, keys, values, 0.3))
    if how == "causal":
        ahead = torch.ones(length, n, dtype=torch.bool).tril()
        return equal(attend(queries, keys, values, 0.3, causal=True), attention(queries, keys, values, 0.3, ahead))
    mask = torch.rand(length, n, generator=torch.Generator().manual_seed(length)) < 0.5
    mask[torch.arange(length), torch.arange(length) % n] = True
    if how == "some see nothing":
        mask[::2] = False
    return equal(attend(queries, keys, values, 0.3, mask), attention(queries, keys, values, 0.3, mask))


@pytest.mark.parametrize("elements", [1, 7, 20, 60, 1000])
def test_masks_are_met_in_tiles(elements, monkeypatch):
    """Also where one row is longer than a tile."""
    monkeypatch.setattr(softmax, "_MASK", elements)
    queries, keys, values = case(13, 20, dv=4)
    positions, places, window = torch.arange(8, 21), torch.randperm(20, generator=torch.Generator().manual_seed(3)), 6
    mask = (places <= positions[:, None]) & (positions[:, None] - places < window)
    seen, called = [], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counted(q, *rest, attn_mask, **more):
        seen.append(attn_mask.numel())
        return called(q, *rest, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", counted)
    made = attend_at(queries, positions, keys, values, places, 1.0, window)
    equal(made, attention(queries, keys, values, 1.0, mask))
    assert sum(seen) == 13 * 20 and max(seen) <= max(elements, 20)


def test_no_queries_and_no_keys():
    queries, keys, values = case(3, 5, dv=4)
    o, lse = attend(queries, keys[:0], values[:0], 1.0)
    assert torch.equal(o, torch.zeros(3, 3, 4)) and lse.isneginf().all()
    o, lse = attend(queries[:0], keys, values, 1.0)
    assert o.shape == (0, 3, 4) and lse.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_have_fp32_sums(dtype):
    queries, keys, values = (x.to(dtype) for x in case(9, 50, dv=4))
    o, lse = attend(queries, keys, values, 0.3)
    want, want_lse = attention(queries, keys, values, 0.3)
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert torch.allclose(o.double(), want, atol=0.02) and torch.allclose(lse.double(), want_lse, atol=0.02)


def test_large_scores_do_not_overflow():
    """Scores of about +-1e4, as of a prompt's first tokens in some models."""
    queries, keys, values = case(6, 30)
    want, want_lse = attention(queries, keys, values, 1e3)
    o, lse = attend(queries, keys, values, 1e3)
    assert want_lse.abs().max() > 5e3
    assert torch.allclose(o.double(), want, atol=2e-2) and torch.allclose(lse.double(), want_lse, rtol=1e-6)


# ---------------------------------------------------------------------- parts as they come


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.randoms(use_true_random=False)
)
def test_parts_are_added_in_any_order(seed, lengths, order):
    """Each to some of the rows: rows 2 ... 5 miss every second part, and see nothing when there is one alone."""
    n = sum(lengths)
    queries, keys, values = case(6, n, dv=5, seed=seed % 1000)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = list(enumerate(pairwise(ends)))
    mask = torch.zeros(6, n, dtype=torch.bool)
    order.shuffle(spans)
    total = Sum(6, 3, 5)
    for number, (first, end) in spans:
        rows = slice(0, 2) if number % 2 == 0 else slice(0, 6)
        mask[rows, first:end] = True
        total.add(rows, *attend(queries[rows], keys[first:end], values[first:end], 0.5))
    equal((total.o, total.lse), attention(queries, keys, values, 0.5, mask))


def test_one_part_is_added_as_it_is():
    queries, keys, values = case(4, 11)
    o, lse = attend(queries, keys, values, 0.5)
    total = Sum(4, 3, 8)
    total.add(slice(0, 4), o, lse)
    assert torch.equal(total.o, o) and torch.equal(total.lse, lse)
    total.add(slice(0, 4), *attend(queries, keys[:0], values[:0], 0.5))  # and nothing changes nothing
    assert torch.equal(total.o, o) and torch.equal(total.lse, lse)
