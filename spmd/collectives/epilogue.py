"""What one call of an all-reduce asks for, and its epilogue as the kernels take it: tensors checked, outputs made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

import spmd._cpu as _cpu
from spmd.collectives import fusion
from spmd.collectives.arguments import NAMES, describe, refuse
from spmd.collectives.cpu import DTYPES
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.strategy import AllReduceStrategy
from spmd.control.mpi import Group
from spmd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spmd.collectives.allreduce import Plan


@dataclass(slots=True)
class AllReduceParams:
    """What one call asks for.

    strategy: overrules the layer's unless AUTO. fusion_op: what follows the sum; the tensors it needs: residual (of the
    input's shape), norm_weight and norm_pre_residual_weight [n], bias [n] (added to the sum), scale fp32 [1] of the
    quantisation. norm_weight_offset: 1.0 where the norm multiplies by 1 + weight, as Gemma's does.
    enable_allreduce=False leaves the sum unfinished: somebody else completes it, a reduce-scatter for example.
    trigger_completion_at_end: on GPUs, when a dependent launch is released; no effect on the CPU.
    """

    strategy: AllReduceStrategy = AllReduceStrategy.AUTO
    fusion_op: AllReduceFusionOp = AllReduceFusionOp.NONE
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    norm_pre_residual_weight: torch.Tensor | None = None
    eps: float = 1e-6
    enable_allreduce: bool = True
    trigger_completion_at_end: bool = True
    norm_weight_offset: float = 0.0
    _plan: Plan | None = field(default=None, repr=False, compare=False)

    def has_affine(self) -> int:
        """1 when the norm has a weight. These three choose the kernel's variant: an absent tensor is never read."""
        return int(self.norm_weight is not None)

    def has_bias(self) -> int:
        """1 when a bias is added."""
        return int(self.bias is not None)

    def has_scale(self) -> int:
        """1 when the quantisation has a scale."""
        return int(self.scale is not None)


class Finish:
    """The epilogue of one call: its tensors checked, its outputs made, all as the kernels take them.

    outputs: what to write to instead of new tensors, in the documented order; shape: of the result, x's by default.
    """

    def __init__(
        self,
        params: AllReduceParams,
        x: torch.Tensor,
        group: Group,
        outputs: Sequence[torch.Tensor] | None = None,
        shape: torch.Size | None = None,
    ) -> None:
        op, n = params.fusion_op, x.shape[-1] if x.dim() else 1
        shape = x.shape if shape is None else shape
        rows = shape.numel() // max(n, 1)
        names = fusion.OUTPUTS[op]
        residual = params.residual if op in fusion.NEED_RESIDUAL else None
        if op in fusion.NEED_RESIDUAL and residual is None:
            refuse("all_reduce", group, f"{op.name} needs a residual")
        self._keep: list[torch.Tensor] = []
        at = {
            "residual": self._address(group, "residual", residual, x.dtype, shape),
            "bias": self._address(group, "bias", params.bias, x.dtype, (n,)),
            "weight": self._address(group, "norm_weight", params.norm_weight, x.dtype, (n,)),
            "pre": self._address(group, "norm_pre_residual_weight", params.norm_pre_residual_weight, x.dtype, (n,)),
            "scale": self._address(group, "scale", params.scale, torch.float32, (1,)),
        }
        if op in fusion.NEED_SCALE and params.scale is None:
            refuse("all_reduce", group, f"{op.name} needs a scale: fp32 [1]")
        if "scale" in names and n % fusion.BLOCK:
            refuse("all_reduce", group, f"{op.name} of rows of {n}: they need whole blocks of {fusion.BLOCK}")
        fresh = fusion.empty_outputs(op, x if shape == x.shape else x.new_empty(shape))
        made = dict(zip(names, fresh if outputs is None else outputs, strict=True))
        for name, wanted in zip(names, fresh, strict=True):
            got = made[name]
            if got.dtype != wanted.dtype or got.shape != wanted.shape or not got.is_contiguous():
                refuse("all_reduce", group, f"out for {name} is {describe(got)}, but the result {describe(wanted)}")
        self.result = tuple(made[name] for name in names)
        self.rows, self.op = rows, op
        self.fixed = _cpu.Epilogue(
            op,
            DTYPES[x.dtype],
            n,
            at["bias"],
            at["weight"],
            at["pre"],
            at["scale"],
            params.eps,
            params.norm_weight_offset,
        )
        outs = [made[name].data_ptr() if name in made else 0 for name in ("norm", "residual", "quant", "scale")]
        self.addresses = (at["residual"], *outs)

    def _address(
        self, group: Group, name: str, x: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> int:
        if x is None:
            return 0
        if x.dtype != dtype or x.shape != shape or not x.is_cpu:
            refuse("all_reduce", group, f"{name} is {describe(x)}, but needs {NAMES[dtype]}{list(shape)}")
        x = x.contiguous()
        self._keep.append(x)
        return x.data_ptr()

    def local(self, total: torch.Tensor) -> None:
        """Do it to a finished sum of the input's type: no communication."""
        total = total.contiguous()
        _cpu.finish(total.data_ptr(), self.rows, self.fixed, *self.addresses)


class ResidualNorm:
    """The RMSNorm of a residual stream as the tail of any collective: norm and residual rows, [rows, n] of one type.

    after(rows): the outputs for so many rows, and the addresses that a kernel takes after the fixed part.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        n, dtype = len(weight), DTYPES[weight.dtype]
        ops = (AllReduceFusionOp.RMS_NORM, AllReduceFusionOp.RESIDUAL_RMS_NORM)
        self._fixed = [_cpu.Epilogue(op, dtype, n, 0, weight.data_ptr(), 0, 0, eps, 0.0) for op in ops]

    def params(self) -> AllReduceParams:
        """For an all-reduce, whose residual is still to be set in them."""
        op = AllReduceFusionOp.RESIDUAL_RMS_NORM
        return AllReduceParams(fusion_op=op, norm_weight=self.weight, eps=self.eps)

    def tail(self, residual: torch.Tensor | None) -> _cpu.Epilogue:
        """The fixed part: with a residual to add, or without."""
        return self._fixed[residual is not None]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, n], contiguous -> (norm of x + residual, x + residual), no rank involved. No residual: x stays."""
        if x.dtype != self.weight.dtype or x.shape[1:] != self.weight.shape or not x.is_contiguous():
            raise InputError(f"a norm of {describe(self.weight)} takes contiguous rows of its type, not {describe(x)}")
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise InputError(f"the residual is {describe(residual)}, but the rows {describe(x)}")
        norm = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        kept, out = (0, 0) if residual is None else (residual.data_ptr(), total.data_ptr())
        _cpu.finish(x.data_ptr(), len(x), self.tail(residual), kept, norm.data_ptr(), out, 0, 0)
        return norm, total
