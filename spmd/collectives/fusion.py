"""What can follow an all-reduce in the same pass over memory: bias, residual, RMSNorm, quantisation.

The operations, their outputs and a torch reference. The kernels (kernels/common/epilogue.h) round where the reference
rounds and add squares in its order: on the CPU both give the same bits.
Source: the operations and their order of outputs are TensorRT-LLM's; RMSNorm: Zhang and Sennrich, 2019; e4m3: OCP OFP8;
NVFP4: e2m1 with an e4m3 scale for 16 elements, scales in the layout of cuBLAS.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F

from spmd.errors import InputError

BLOCK = 16  # elements that share an NVFP4 scale
_LANES = 32  # accumulators of a row's sum of squares
_TILE_ROWS, _TILE_BLOCKS = 128, 4  # of the swizzled scales
_FP8, _FP8_MAX, _FP8_NAN = torch.float8_e4m3fn, 448.0, 0x7F
_FP4_MAX, _FP4_MAX_CODE = 6.0, 7
# between two codes of e2m1 (0 0.5 1 1.5 2 3 4 6); a tie goes to the even code
_FP4_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class AllReduceFusionOp(IntEnum):
    """What follows the sum. LAST_PROCESS_FOR_UB and MOE_FINALIZE... end as RESIDUAL_RMS_NORM does."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = 6
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = 7
    MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM = 8
    RMS_NORM = 9


_Op = AllReduceFusionOp
# names of an op's outputs, in the documented order; "norm" is the sum itself where there is no norm
OUTPUTS: dict[AllReduceFusionOp, tuple[str, ...]] = {
    _Op.NONE: ("norm",),
    _Op.RESIDUAL_RMS_NORM: ("norm", "residual"),
    _Op.LAST_PROCESS_FOR_UB: ("norm", "residual"),
    _Op.RESIDUAL_RMS_PREPOST_NORM: ("norm", "residual"),
    _Op.RESIDUAL_RMS_NORM_QUANT_FP8: ("quant", "residual"),
    _Op.RESIDUAL_RMS_NORM_QUANT_NVFP4: ("quant", "scale", "residual"),
    _Op.RESIDUAL_RMS_NORM_OUT_QUANT_FP8: ("norm", "quant", "residual"),
    _Op.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4: ("norm", "quant", "scale", "residual"),
    _Op.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM: ("norm", "residual"),
    _Op.RMS_NORM: ("norm",),
}
NEED_RESIDUAL = frozenset(op for op, names in OUTPUTS.items() if "residual" in names)
NEED_SCALE = frozenset(op for op, names in OUTPUTS.items() if "quant" in names)


def empty_outputs(op: AllReduceFusionOp, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """New tensors for the outputs of `op`, in the documented order, for an input x [..., n].

    norm, residual: like x. quant: float8_e4m3fn [..., n], or for NVFP4 uint8 [..., n / 2], two values a byte. scale:
    uint8, flat, whole tiles of 128 rows x 4 blocks of 16, zero. InputError: n is not a multiple of 16 for NVFP4.
    """
    n, names = x.shape[-1], OUTPUTS[op]
    fp4 = "scale" in names
    _check_blocks(op, n)

    def empty(name: str) -> torch.Tensor:
        if name == "scale":
            return x.new_zeros(_swizzled_size(x.shape[:-1].numel(), n // BLOCK), dtype=torch.uint8)
        if name == "quant":
            return x.new_empty((*x.shape[:-1], n // 2 if fp4 else n), dtype=torch.uint8 if fp4 else _FP8)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return tuple(empty(name) for name in names)


def _check_blocks(op: AllReduceFusionOp, n: int) -> None:
    if "scale" in OUTPUTS[op] and n % BLOCK:
        raise InputError(f"{op.name}: rows of {n} elements do not divide into NVFP4 blocks of {BLOCK}")


def reference(
    total: torch.Tensor,
    dtype: torch.dtype,
    op: AllReduceFusionOp,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_pre_residual_weight: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """The outputs of `op` for finished sums, in the documented order, as `empty_outputs` describes them.

    total: fp32 [..., n]; residual: `dtype`, of its shape; bias and weights: `dtype` [n], None: absent; scale: fp32 [1].
    The sum, + bias, the norm before the residual, + residual and the norm are each rounded to dtype; a norm is computed
    in fp32 from rounded values and multiplied by weight_offset + weight (1: Gemma). InputError: no residual or no scale
    where the op needs one, n not a multiple of 16 for NVFP4.
    """
    if op in NEED_RESIDUAL and residual is None:
        raise InputError(f"{op.name} needs a residual of shape {list(total.shape)}")
    if op in NEED_SCALE and scale is None:
        raise InputError(f"{op.name} needs a scale: fp32 [1]")
    _check_blocks(op, total.shape[-1])
    made = {}
    x = total.to(dtype)
    if bias is not None:
        x = x + bias
    if op == _Op.RESIDUAL_RMS_PREPOST_NORM:
        x = _rms_norm(x, norm_pre_residual_weight, eps, weight_offset)
    if residual is not None and op in NEED_RESIDUAL:
        made["residual"] = x = x + residual
    if op != _Op.NONE:
        x = _rms_norm(x, norm_weight, eps, weight_offset)
    made["norm"] = x
    if scale is not None and op in NEED_SCALE:
        if "scale" in OUTPUTS[op]:
            made["quant"], made["scale"] = _nvfp4(x.float(), scale)
        else:
            made["quant"] = _e4m3(x.float() / scale)
    return tuple(made[name] for name in OUTPUTS[op])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    v = x.float()
    lanes = torch.zeros((*v.shape[:-1], _LANES), device=v.device)
    for part in F.pad(v * v, (0, -v.shape[-1] % _LANES)).split(_LANES, dim=-1):
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, dim=-1)
        lanes = low + high
    mean = lanes / v.shape[-1] + eps
    v = v * (1.0 / mean.double().sqrt().float())  # torch's fp32 root is not always the nearest number
    return (v if weight is None else v * (offset + weight.float())).to(x.dtype)


def _e4m3(v: torch.Tensor) -> torch.Tensor:
    """fp32 to e4m3, saturating; NaN to 0x7f."""
    codes = v.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).view(torch.uint8)
    return codes.masked_fill(v.isnan(), _FP8_NAN).view(_FP8)


def _e2m1(v: torch.Tensor) -> torch.Tensor:
    """fp32 to codes of e2m1 in uint8, saturating; NaN to that of 6."""
    size = v.abs()
    codes = sum((size > tie if index % 2 == 0 else size >= tie).to(torch.uint8) for index, tie in enumerate(_FP4_TIES))
    assert isinstance(codes, torch.Tensor)
    return torch.where(v.isnan(), _FP4_MAX_CODE, codes | v.signbit().to(torch.uint8) << 3).to(torch.uint8)


def _nvfp4(v: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., n] to pairs of codes [..., n / 2], the first in the low nibble, and swizzled scales."""
    blocks = v.unflatten(-1, (-1, BLOCK))
    block_scale = _e4m3(scale * blocks.abs().amax(-1) / _FP4_MAX)
    back = block_scale.float()
    codes = _e2m1(blocks * torch.where(back == 0, 0.0, scale / back).unsqueeze(-1)).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, _swizzle(
        block_scale.view(torch.uint8).reshape(-1, block_scale.shape[-1])
    )


def _swizzled_size(rows: int, blocks: int) -> int:
    return (rows + -rows % _TILE_ROWS) * (blocks + -blocks % _TILE_BLOCKS)


def _swizzle(scales: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] to tiles of 128 x 4, row-major; in one, (row % 32, row % 128 // 32, block % 4)."""
    rows, blocks = scales.shape
    padded = F.pad(scales, (0, -blocks % _TILE_BLOCKS, 0, -rows % _TILE_ROWS))
    tiles = padded.unflatten(1, (-1, _TILE_BLOCKS)).unflatten(0, (-1, _TILE_ROWS // 32, 32))
    return tiles.permute(0, 3, 2, 1, 4).flatten()
