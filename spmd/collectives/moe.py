"""The all-reduce at the end of an expert layer: weigh and add this rank's experts, sum over the ranks, add and norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spmd.collectives.allreduce import AllReduce
from spmd.collectives.arguments import describe, refuse
from spmd.collectives.epilogue import AllReduceParams
from spmd.collectives.fusion import AllReduceFusionOp

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class MoEAllReduceParams(AllReduceParams):
    """What one call asks for, on top of residual [T, H], norm_weight [H] and eps.

    Min-latency (is_cutlass_min_latency): device_num_experts (how many of the given experts this rank uses, a number or
    an integer tensor of one), expert_scale_factor fp32 [experts, T], shared_expert_output [T, H].
    Finalise: expanded_idx_to_permuted_idx int32 [T, k] (the row of token t's k-th expert; -1: not on this rank),
    expert_scale_factor fp32 [T, k] or None, shared_expert_output [T, H] or None.
    """

    device_num_experts: torch.Tensor | int | None = None
    expert_scale_factor: torch.Tensor | None = None
    expanded_idx_to_permuted_idx: torch.Tensor | None = None
    shared_expert_output: torch.Tensor | None = None
    is_cutlass_min_latency: bool = True

    def is_valid(self) -> bool:
        """Whether the tensors that the form needs are there."""
        if self.is_cutlass_min_latency:
            needed = (self.device_num_experts, self.expert_scale_factor, self.shared_expert_output)
            return all(tensor is not None for tensor in needed)
        return self.expanded_idx_to_permuted_idx is not None


class MoEAllReduce(AllReduce):
    """`moe_ar(x, all_reduce_params=MoEAllReduceParams(...))` -> (norm, residual), both [T, H], on every rank.

    x: min-latency: outputs of the active experts [experts, T, H]; finalise: permuted rows [P, H]. The rank's experts
    are added in fp32, experts first and the shared output last, and rounded once; then comes RESIDUAL_RMS_NORM of
    `AllReduce`. Any T, also 0. Errors: InputError for missing or misshapen tensors; those of `AllReduce`.
    """

    def _call(  # type: ignore[override]
        self,
        x: torch.Tensor,
        all_reduce_params: MoEAllReduceParams,
        *,
        out: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        p = all_reduce_params
        if not p.is_valid():
            needs = "device_num_experts, expert_scale_factor and shared_expert_output"
            form = "the min-latency form" if p.is_cutlass_min_latency else "finalise"
            needs = needs if p.is_cutlass_min_latency else "expanded_idx_to_permuted_idx"
            refuse("moe_all_reduce", self.group, f"{form} needs {needs}")
        if p.bias is not None:
            refuse("moe_all_reduce", self.group, "a bias has no place here: add it to shared_expert_output")
        partial = self._min_latency(x, p) if p.is_cutlass_min_latency else self._finalise(x, p)
        if p.shared_expert_output is not None:
            if p.shared_expert_output.shape != partial.shape:
                shared = describe(p.shared_expert_output)
                refuse("moe_all_reduce", self.group, f"shared_expert_output is {shared}, but needs {[*partial.shape]}")
            partial += p.shared_expert_output.float()
        tail = AllReduceParams(
            strategy=p.strategy,
            fusion_op=AllReduceFusionOp.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM,
            residual=p.residual,
            norm_weight=p.norm_weight,
            eps=p.eps,
            enable_allreduce=p.enable_allreduce,
            norm_weight_offset=p.norm_weight_offset,
        )
        return super()._call(partial.to(x.dtype), tail, out=out)

    def _min_latency(self, x: torch.Tensor, p: MoEAllReduceParams) -> torch.Tensor:
        count, scale = int(p.device_num_experts), p.expert_scale_factor  # type: ignore[arg-type]
        assert scale is not None
        if x.dim() != 3 or not 0 <= count <= len(x) or scale.dim() != 2 or len(scale) < count:
            given = f"experts {describe(x)}, {count} of them active, scales {describe(scale)}"
            refuse("moe_all_reduce", self.group, f"{given}: needs [experts, T, H] and [experts, T]")
        if scale.shape[1] != x.shape[1]:
            refuse("moe_all_reduce", self.group, f"scales {describe(scale)} for {x.shape[1]} tokens")
        total = torch.zeros(x.shape[1:], dtype=torch.float32)
        for expert in range(count):
            total += x[expert].float() * scale[expert].unsqueeze(1)
        return total

    def _finalise(self, x: torch.Tensor, p: MoEAllReduceParams) -> torch.Tensor:
        index, scale = p.expanded_idx_to_permuted_idx, p.expert_scale_factor
        assert index is not None
        if x.dim() != 2 or index.dim() != 2 or (scale is not None and scale.shape != index.shape):
            shapes = f"rows {describe(x)}, index {describe(index)}" + (
                f", scales {describe(scale)}" if scale is not None else ""
            )
            refuse("moe_all_reduce", self.group, f"{shapes}: needs [P, H], [T, k] and [T, k]")
        if index.is_floating_point() or index.dtype == torch.bool:
            refuse("moe_all_reduce", self.group, f"the index is {describe(index)}: it needs integers")
        if index.numel() and not -1 <= int(index.min()) <= int(index.max()) < len(x):
            refuse("moe_all_reduce", self.group, f"an index outside -1 ... {len(x) - 1}")
        total = torch.zeros(len(index), x.shape[1])
        for k in range(index.shape[1]):
            here = (index[:, k] >= 0).nonzero().squeeze(1)  # rows of others are not read: they may hold anything
            rows = x[index[here, k].long()].float()
            total[here] += rows if scale is None else rows * scale[here, k].unsqueeze(1)
        return total
