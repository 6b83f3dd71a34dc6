"""What moves around experts: tokens to the ranks that own their experts and back (`ExpertExchange`), and the all-reduce
at the end of an expert layer (`MoEAllReduce`): weigh and add this rank's experts, sum over the ranks, add and norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spmd.collectives.allreduce import AllReduce
from spmd.collectives.arguments import describe, refuse
from spmd.collectives.cpu import DTYPES
from spmd.collectives.epilogue import AllReduceParams
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.overlap import Partial
from spmd.memory.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spmd.control.mpi import Group


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
        self._check_form(x, p)
        total, shared = add_experts(x, p), p.shared_expert_output
        if shared is not None and shared.shape != total.shape:
            refuse(
                "moe_all_reduce", self.group, f"shared_expert_output is {describe(shared)}, but needs {[*total.shape]}"
            )
        lent = self.lend((len(total), x.shape[-1]), x.dtype)
        partial = finished(total, shared, x.dtype, lent)
        tail = AllReduceParams(
            p.strategy,
            AllReduceFusionOp.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM,
            residual=p.residual,
            norm_weight=p.norm_weight,
            eps=p.eps,
            enable_allreduce=p.enable_allreduce,
            norm_weight_offset=p.norm_weight_offset,
        )
        return super()._call(partial, tail, out=out)

    def _check_form(self, x: torch.Tensor, p: MoEAllReduceParams) -> None:
        scale, index = p.expert_scale_factor, p.expanded_idx_to_permuted_idx
        if p.is_cutlass_min_latency:
            count = int(p.device_num_experts)  # type: ignore[arg-type]
            assert scale is not None
            if x.dim() != 3 or not 0 <= count <= len(x) or scale.dim() != 2 or len(scale) < count:
                given = f"experts {describe(x)}, {count} of them active, scales {describe(scale)}"
                refuse("moe_all_reduce", self.group, f"{given}: needs [experts, T, H] and [experts, T]")
            if scale.shape[1] != x.shape[1]:
                refuse("moe_all_reduce", self.group, f"scales {describe(scale)} for {x.shape[1]} tokens")
            return
        assert index is not None
        if x.dim() != 2 or index.dim() != 2 or (scale is not None and scale.shape != index.shape):
            scales = f", scales {describe(scale)}" if scale is not None else ""
            given = f"rows {describe(x)}, index {describe(index)}{scales}"
            refuse("moe_all_reduce", self.group, f"{given}: needs [P, H], [T, k] and [T, k]")
        if index.is_floating_point() or index.dtype == torch.bool:
            refuse("moe_all_reduce", self.group, f"the index is {describe(index)}: it needs integers")
        if index.numel() and not -1 <= int(index.min()) <= int(index.max()) < len(x):
            refuse("moe_all_reduce", self.group, f"an index outside -1 ... {len(x) - 1}")


def add_experts(x: torch.Tensor, p: MoEAllReduceParams) -> torch.Tensor:
    """The weighted sum of a rank's own experts [T, H] in fp32: x and p as `MoEAllReduce` takes them."""
    index, scale = p.expanded_idx_to_permuted_idx, p.expert_scale_factor
    if p.is_cutlass_min_latency:
        assert scale is not None
        total = torch.zeros(x.shape[1:], dtype=torch.float32)
        for expert in range(int(p.device_num_experts)):  # type: ignore[arg-type]
            total += x[expert].float() * scale[expert].unsqueeze(1)
        return total
    assert index is not None
    total = torch.zeros(len(index), x.shape[1])
    for k in range(index.shape[1]):
        here = (index[:, k] >= 0).nonzero().squeeze(1)  # rows of others are not read: they may hold anything
        rows = x[index[here, k].long()].float()
        total[here] += rows if scale is None else rows * scale[here, k].unsqueeze(1)
    return total


def finished(
    total: torch.Tensor, shared: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """With the shared expert's output, rounded once."""
    if shared is not None:
        total = total + shared.float()
    return total.to(dtype) if out is None else out.copy_(total)


class MoePartial(Partial):
    """What a rank's experts made, not added yet: x and params are of `MoEAllReduce`, but for the residual and norm."""

    __slots__ = ("params",)

    def __init__(self, x: torch.Tensor, params: MoEAllReduceParams) -> None:
        super().__init__(self._sum, x, x.shape[-1])
        self.params = params

    def _sum(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return finished(add_experts(x, self.params), self.params.shared_expert_output, x.dtype, out)


@dataclass(slots=True)
class Dispatched:
    """The tokens that a rank's experts get, in the order of their source ranks and there of the tokens.

    rows [R, H], in memory that the sources will read: what the experts make of them is written over them. ids int32
    [R, k]: this rank's experts from 0, -1 for those of others; weights fp32 [R, k]; counts int64 [ranks]: how many came
    from each source. routed: the ids of this rank's own tokens. All is good until the next dispatch of the group.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    routed: torch.Tensor
    place: int
    room: int


class ExpertExchange:
    """Dispatch and combine between the ranks of a group that own consecutive experts, through shared memory.

    bounds: rank r owns the experts bounds[r] ... bounds[r + 1] - 1. A token goes once to every rank that owns any of
    its experts; ranks say how many they send, and write them where they go. All ranks call
    together, also without tokens, with the same `sizes`: the tokens of every rank. None where it cannot be done, alike
    on all ranks: the group shares no memory, or its budget is too small. Errors: those of `cpu`.
    Source of the form: DeepEP's dispatch and combine.
    """

    def __init__(self, group: Group, bounds: Sequence[int]) -> None:
        self.group, self.bounds = group, torch.tensor(bounds, dtype=torch.int32)
        self._offsets: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
        self._views: dict[tuple[int, int, int, torch.dtype, int], tuple[torch.Tensor, ...]] = {}

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]
    ) -> Dispatched | None:
        """x [T, H] fp32, bf16 or fp16; ids int32 [T, k], the numbers of all ranks' experts; weights fp32 [T, k]."""
        self._check(x, ids, weights, sizes)
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        group, k, row_bytes = self.group, ids.shape[1], x.shape[1] * x.element_size()
        workspace = Workspace.of(group)
        if workspace is None:
            return None
        plane, most = workspace.plane, sum(sizes)
        room = max(1 << (most - 1).bit_length() if most else 0, 16)  # a few sizes: each needs memory of its own
        if (offsets := self._offsets.get((room, k, row_bytes))) is None:
            offsets = self._offsets[room, k, row_bytes] = plane.arrivals(room, k, row_bytes)
        place = workspace.lend((offsets[-1],), torch.uint8)
        if place is None:
            return None
        if group.checked:
            group.agree(f"dispatch {describe(x, 0)} top {k} of {self.bounds.tolist()} tokens {list(sizes)}")
        at, mine = place.data_ptr(), (x.data_ptr(), ids.data_ptr(), weights.data_ptr())
        if status := plane.dispatch(at, len(x), k, row_bytes, *mine, self.bounds.data_ptr(), room, k):
            workspace.fail(status)
        key = (at, room, k, x.dtype, row_bytes)
        counts, own, scale, rows = self._views.get(key) or self._view(place, key, offsets)
        count = sum(counts.tolist())
        return Dispatched(rows[:count], own[:count], scale[:count], counts, ids, at, room)

    def _view(
        self, place: torch.Tensor, key: tuple[int, int, int, torch.dtype, int], offsets: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        """What has come: counts, numbers, weights and rows, the last three for as many as there is room for."""
        (_, room, k, dtype, row_bytes), (came, numbers, scales, first, end) = key, offsets
        if len(self._views) >= 16:  # batches of many sizes
            self._views.clear()
        self._views[key] = (
            place[came : came + 8 * self.group.size].view(torch.int64),
            place[numbers : numbers + 4 * room * k].view(torch.int32).view(room, k),
            place[scales : scales + 4 * room * k].view(torch.float32).view(room, k),
            place[first:end].view(dtype).view(room, row_bytes // dtype.itemsize),
        )
        return self._views[key]

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]) -> None:
        floats = x.dtype in DTYPES and x.dim() == 2 and ids.dtype == torch.int32 and weights.dtype == torch.float32
        together = ids.dim() == 2 and ids.shape == weights.shape and len(ids) == len(x)
        if floats and together and len(sizes) == self.group.size and sizes[self.group.rank] == len(x):
            return
        given = f"tokens {describe(x)}, ids {describe(ids)}, weights {describe(weights)}"
        why = f"by sizes {list(sizes)} (index {self.group.rank})"
        if not floats:
            why = "it takes [T, H] of a float type, int32 [T, k] and fp32 [T, k]"
        refuse("dispatch", self.group, f"{given}: {why if together or not floats else 'they do not belong together'}")

    def combine(self, sent: Dispatched, out: torch.Tensor | None = None) -> torch.Tensor:
        """Per token that was dispatched the sum, in fp32 and in rank order, of what the ranks with its experts wrote
        over their `rows`, rounded once: [T, H]."""
        workspace, ids, n, dtype = Workspace.of(self.group), sent.routed, sent.rows.shape[1], sent.rows.dtype
        assert workspace is not None
        if out is None:
            out = sent.rows.new_empty(len(ids), n)
        if out.shape != (len(ids), n) or out.dtype != dtype or not out.is_contiguous():
            refuse("combine", self.group, f"out is {describe(out)}, but {len(ids)} rows of {n} come back")
        where = (ids.data_ptr(), self.bounds.data_ptr(), sent.room, n, DTYPES[dtype], out.data_ptr())
        if status := workspace.plane.combine(sent.place, len(ids), ids.shape[1], *where):
            workspace.fail(status)
        return out
