"""Do the native row kernels compute what their torch references compute, with the same roundings?"""

import pytest
import torch

from spmd.nn import rows
from spmd.nn.rotary import RopeConfig, Rotary

# fp32 sums are added in another order; half types are rounded once from fp32, so at most one step apart
STEPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
TYPES = list(STEPS)


def close(a, b, atol=None):
    torch.testing.assert_close(a, b, rtol=STEPS[a.dtype], atol=STEPS[a.dtype] * 1e-2 if atol is None else atol)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 32), (5, 33), (1, 576), (7, 100), (0, 64)])
def test_rms_norm(dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.rand(shape[-1]).to(dtype)
    close(rows.rms_norm(x, weight, 1e-5), rows.rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 33), (4, 576), (0, 8)])
def test_add_rms_norm_rounds_the_sum_first(dtype, shape):
    x, residual = torch.randn(shape).to(dtype), (torch.randn(shape) * 100).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    y, total = x.clone(), residual.clone()
    rows.add_rms_norm_(y, total, weight, 1e-5)
    assert torch.equal(total, residual + x)
    close(y, rows.rms_norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 1536])
def test_swiglu(dtype, n):
    gate_up = (torch.randn(3, 2 * n) * 20).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0  # where e^x leaves the range
    close(rows.swiglu(gate_up), rows.swiglu_reference(gate_up))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (4, 2), (5, 3)])
def test_rotate_store(dtype, heads, kv_heads):
    positions, d = torch.tensor([0, 1, 77]), 16
    rotation = Rotary(RopeConfig(d, 10000.0)).at(positions)
    qkv = torch.randn(3, heads + 2 * kv_heads, d).to(dtype)
    ours, theirs = qkv.clone(), qkv.clone()
    cache, expected = (torch.full((3, 2, kv_heads, d), float("nan"), dtype=dtype) for _ in range(2))
    rows.rotate_store(ours, rotation, cache)
    rows.rotate_store_reference(theirs, rotation, expected)
    # a difference of two products: where they cancel, its error is theirs
    close(cache, expected, STEPS[dtype])
    close(ours[:, :heads], theirs[:, :heads], STEPS[dtype])
    assert torch.equal(cache[:, 1], qkv[:, -kv_heads:])


def test_tensors_that_are_not_contiguous_take_the_reference():
    x = torch.randn(6, 8).t()
    close(rows.rms_norm(x, torch.ones(6), 1e-5), rows.rms_norm_reference(x, torch.ones(6), 1e-5))


def test_nan_stays_nan_in_bf16():
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    x[0, 1] = float("nan")
    assert rows.rms_norm(x, torch.ones(4, dtype=torch.bfloat16), 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "heads,kv_heads,lead,share", [(9, 3, 0, 3), (4, 2, 0, 3), (5, 2, 1, 3), (1, 1, 7, 8), (2, 2, 0, 1)]
)
@pytest.mark.parametrize("count", [1, 2, 15, 33, 300])
def test_attend(dtype, heads, kv_heads, lead, share, count):
    torch.manual_seed(count)
    queries = torch.randn(1, heads + 2 * kv_heads, 24).to(dtype) * 5
    cache = torch.randn(count + 1, 2, kv_heads, 24).to(dtype)
    cache[count] = float("nan")  # what is not asked for is not read
    ours = rows.attend(queries, cache[:count], heads, lead, share)
    torch.testing.assert_close(
        ours,
        rows.attend_reference(queries, cache[:count], heads, lead, share),
        rtol=STEPS[dtype] * 2,
        atol=STEPS[dtype] * 4,
    )


def test_attend_large_scores():
    queries, cache = torch.ones(1, 3, 16) * 1e4, torch.randn(40, 2, 1, 16)
    ours = rows.attend(queries, cache, 1, 0, 1)
    assert torch.equal(ours[0], cache[cache[:, 0, 0].sum(-1).argmax(), 1, 0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("where", ["query", "first key", "last key", "value"])
def test_attend_shows_nan(dtype, where):
    queries, cache = torch.ones(1, 3, 16, dtype=dtype), torch.ones(5, 2, 1, 16, dtype=dtype)
    {"query": queries[0, 0], "first key": cache[0, 0, 0], "last key": cache[4, 0, 0], "value": cache[2, 1, 0]}[where][
        3
    ] = float("nan")
    assert rows.attend(queries, cache, 1, 0, 1).isnan().any()


@pytest.mark.parametrize("dtype", TYPES)
def test_swiglu_shows_nan(dtype):
    gate_up = torch.ones(1, 66, dtype=dtype)
    gate_up[0, 5] = float("nan")
    assert rows.swiglu(gate_up).isnan().sum() == 1
