"""Row-wise arithmetic between the products: native on CPU tensors, the same in torch elsewhere.

Each function has a torch reference under the same name with `_reference`: what other devices run, and what the tests
compare with. Types: fp32, bf16, fp16, all tensors of a call alike; every result is rounded to the type once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import spmd._cpu as _cpu

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _native(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the native kernels take x and another tensor of the call (its weight, its residual, its cache)."""
    return x.dtype in _CODES and x.dtype == other.dtype and x.is_cpu and x.is_contiguous() and other.is_contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""
    if not _native(x, weight):
        return rms_norm_reference(x, weight, eps)
    y, n = torch.empty_like(x), x.shape[-1]
    _cpu.rms_norm(x.data_ptr(), 0, weight.data_ptr(), y.data_ptr(), 0, x.numel() // n, n, eps, _CODES[x.dtype])
    return y


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """In place: residual += x, rounded; then x = rms_norm(residual)."""
    if not (_native(x, residual) and weight.dtype == x.dtype):
        return add_rms_norm_reference_(x, residual, weight, eps)
    at, total, n = x.data_ptr(), residual.data_ptr(), x.shape[-1]
    _cpu.rms_norm(at, total, weight.data_ptr(), at, total, x.numel() // n, n, eps, _CODES[x.dtype])


def add_rms_norm_reference_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual += x
    x.copy_(rms_norm_reference(residual, weight, eps))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [..., 2n], the gate first: [..., n]; silu is rounded before the product."""
    if not _native(gate_up, gate_up):
        return swiglu_reference(gate_up)
    n = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype)
    _cpu.swiglu(gate_up.data_ptr(), y.data_ptr(), y.numel() // n, n, _CODES[y.dtype])
    return y


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).to(gate.dtype) * up


def rotate_store(qkv: torch.Tensor, rotation: torch.Tensor, cache: torch.Tensor) -> None:
    """Rotate queries in place and put rotated keys, and values, into the cache.

    qkv: [T, heads + 2 * kv_heads, d]; rotation: complex64 [T, d / 2], of adjacent channel pairs; cache:
    [T, 2, kv_heads, d]. Rotated in fp32.
    """
    if not (_native(qkv, cache) and rotation.is_contiguous()):
        return rotate_store_reference(qkv, rotation, cache)
    rows, places, d = qkv.shape
    kv_heads = cache.shape[2]
    _cpu.rotate_store(
        qkv.data_ptr(),
        rotation.data_ptr(),
        cache.data_ptr(),
        rows,
        places - 2 * kv_heads,
        kv_heads,
        d,
        _CODES[qkv.dtype],
    )


def rotate_store_reference(qkv: torch.Tensor, rotation: torch.Tensor, cache: torch.Tensor) -> None:
    kv_heads = cache.shape[2]
    turning = qkv[:, :-kv_heads].float()
    turning = torch.view_as_real(torch.view_as_complex(turning.unflatten(-1, (-1, 2))) * rotation.unsqueeze(1)).flatten(
        -2
    )
    qkv[:, : -2 * kv_heads] = turning[:, :-kv_heads].to(qkv.dtype)
    cache[:, 0] = turning[:, -kv_heads:].to(qkv.dtype)
    cache[:, 1] = qkv[:, -kv_heads:]


def attend(
    queries: torch.Tensor, cache: torch.Tensor, heads: int, lead: int, share: int, stats: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one token over its sequence's cache: softmax(q k / sqrt(d)) v in fp32 -> [1, heads * d].

    queries: [1, heads or more, d], of which the first `heads` are used; cache: [count, 2, kv_heads, d]. Query head h
    reads key/value head (lead + h) // share. stats: fp32 [heads, 2], is given each head's largest score, and the sum of
    exp(score - largest).
    """
    if not _native(queries, cache):
        return attend_reference(queries, cache, heads, lead, share, stats)
    count, _, kv_heads, d = cache.shape
    out = torch.empty((1, heads * d), dtype=queries.dtype)
    at = queries.data_ptr(), cache.data_ptr(), out.data_ptr()
    to = 0 if stats is None else stats.data_ptr()
    _cpu.attend(*at, heads, kv_heads, d, count, lead, share, to, _CODES[out.dtype])
    return out


def attend_reference(
    queries: torch.Tensor, cache: torch.Tensor, heads: int, lead: int, share: int, stats: torch.Tensor | None = None
) -> torch.Tensor:
    keys, values = cache[:, :, [(lead + head) // share for head in range(heads)]].float().permute(1, 2, 0, 3)
    scores = torch.einsum("hd,hpd->hp", queries[0, :heads].float(), keys) * queries.shape[-1] ** -0.5
    if stats is not None:
        stats[:, 0] = scores.amax(-1)
        stats[:, 1] = (scores - stats[:, :1]).exp().sum(-1)
    return torch.einsum("hp,hpd->hd", scores.softmax(-1), values).reshape(1, -1).to(queries.dtype)
