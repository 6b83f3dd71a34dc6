"""Mixture of experts: the router, this rank's experts, and the ways in which tokens meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

from spmd.collectives import gather
from spmd.collectives.moe import ExpertExchange, MoEAllReduceParams, MoePartial, add_experts, finished
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.memory.symmetric import allocate
from spmd.nn.linear import Source, fill
from spmd.nn.rows import swiglu
from spmd.topology.mapping import Mapping
from spmd.topology.split import split, split_first


@dataclass(frozen=True)
class MoeConfig:
    """Sizes and options of the sparse layers.

    scoring: of the router's logits, "softmax" or "sigmoid" (then with a bias per expert that only chooses). groups: of
    experts, of which the kept_groups with the best score are looked at: their best expert (group_score 1) or the sum
    of their two best (2). normalise: the weights of a token's top_k sum to 1; scale: what they are multiplied with.
    shared: width of the expert that all tokens go to, 0 for none; shared_gate: it has a gate of its own.
    """

    num_experts: int
    top_k: int
    intermediate: int
    normalise: bool = True
    scoring: str = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_score: int = 1
    scale: float = 1.0
    shared: int = 0
    shared_gate: bool = False


def choose(
    logits: torch.Tensor, config: MoeConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts, best first, and their weights: logits [T, E] -> int64 [T, k], fp32 [T, k].

    bias [E]: is added to the scores for the choice, not to the weights. Sources: Shazeer et al., Outrageously Large
    Neural Networks, 2017; DeepSeek-V2 and V3 for groups and bias, 2024.
    """
    scores = logits.float()
    scores = scores.sigmoid() if config.scoring == "sigmoid" else scores.softmax(-1)
    judged = scores if bias is None else scores + bias
    if config.groups > 1:
        grouped = judged.unflatten(1, (config.groups, -1))
        of_group = grouped.topk(config.group_score, dim=-1).values.sum(-1)
        kept = torch.zeros_like(of_group).scatter_(1, of_group.topk(config.kept_groups, dim=-1).indices, 1).bool()
        judged = judged.masked_fill(~kept.repeat_interleave(grouped.shape[-1], dim=1), float("-inf"))
    ids = judged.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.scoring == "sigmoid" else 0.0))
    return ids, weights * config.scale


def all_at_once(rows: int, config: MoeConfig) -> bool:
    """Whether all experts run on all rows (`MoEAllReduce`'s min-latency form): few rows, which would read almost every
    expert's weights anyway."""
    return 0 < rows <= 8 and rows * config.top_k >= config.num_experts


class Experts:
    """forward(x [T, hidden]) -> a sum [T, hidden] that is owed as the boundary plan says: a MoePartial, which an
    all-reduce with a norm finishes as `MoEAllReduce`, or after an all-to-all a tensor.

    Expert e is held by the moe_ep rank of every cluster that owns it (`Mapping.ep_experts`), cut over moe_tp by its
    inner width. Without all-to-all x has the rows of the whole cluster, and the sum is owed over moe_tp and moe_ep.
    With it the rows differ over moe_ep: every token goes to each rank that owns any of its experts, and what those
    make of it comes back; the sum is owed over moe_tp. Under dwdp (ranks that attend alone) every rank runs all
    experts on its own rows: each keeps some in memory that its peers see, and no row moves.

    A rank's experts are added in fp32, in their order, and rounded once; so are the rows that come back, in rank order.
    The shared expert is cut over the ranks that owe the sum. Errors: InputError for more ranks than experts.
    """

    def __init__(
        self, hidden: int, config: MoeConfig, mapping: Mapping, dtype: torch.dtype, alltoall: bool = False
    ) -> None:
        self.config, self.mapping, self.hidden, self.dtype = config, mapping, hidden, dtype
        self.alltoall = alltoall and mapping.moe_ep_size > 1
        if config.num_experts < mapping.moe_ep_size:
            raise InputError(f"{config.num_experts} experts cannot be split over moe_ep_size {mapping.moe_ep_size}")
        shared_weights = mapping.dwdp_size > 1
        over, at = (1, 0) if shared_weights else (mapping.moe_tp_size, mapping.moe_tp_rank)
        self.width = split(config.intermediate, over, at)
        if not (alltoall or shared_weights):
            over, at = over * mapping.moe_ep_size, at * mapping.moe_ep_size + mapping.moe_ep_rank
        self.shared_width = split(config.shared, over, at)
        inner, shared = len(self.width), len(self.shared_width)
        self.gate = torch.empty(config.num_experts, hidden, dtype=dtype)
        self.bias = torch.zeros(config.num_experts) if config.scoring == "sigmoid" else None
        # experts: those that this rank's rows meet, the first of them number `first`; own: those that it loads
        self.experts: list[tuple[torch.Tensor, torch.Tensor]]
        self.stacked: tuple[torch.Tensor, torch.Tensor] | None = None
        if shared_weights:
            self.own = split_first(config.num_experts, mapping.dwdp_size, mapping.dwdp_rank)
            self.first, self.experts = 0, self._shared_memory(inner)
        else:
            self.own = mapping.ep_experts(config.num_experts)
            self.first, count = self.own.start, len(self.own)
            gate_up, down = (count, 2 * inner, hidden), (count, hidden, inner)
            self.stacked = torch.empty(gate_up, dtype=dtype), torch.empty(down, dtype=dtype)
            self.experts = list(zip(*self.stacked, strict=True))
        self.shared_gate_up = torch.empty(2 * shared, hidden, dtype=dtype)
        self.shared_down = torch.empty(hidden, shared, dtype=dtype)
        self.shared_gate = torch.empty(1, hidden, dtype=dtype) if config.shared_gate else None

    def _shared_memory(self, inner: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All experts, each in the memory of the rank of the dwdp group that owns it: peers read them where they are.
        Collective over that group. InputError where it spans hosts."""
        size, experts = self.mapping.dwdp_size, self.config.num_experts
        group = Distributed.get(self.mapping).group("dwdp")
        half = self.hidden * inner  # elements of the down projection; gate and up are two more
        memory = allocate(group, -(-experts // size) * 3 * half * self.dtype.itemsize)
        made = []
        for rank in range(size):
            elements = memory.peer(rank).view(self.dtype)
            for at in range(0, 3 * half * len(split_first(experts, size, rank)), 3 * half):
                gate_up, down = elements[at : at + 2 * half], elements[at + 2 * half : at + 3 * half]
                made.append((gate_up.view(2 * inner, self.hidden), down.view(self.hidden, inner)))
        return made

    def loaded(self) -> None:
        """After loading: nobody reads a peer's experts before they are there. Collective over a dwdp group."""
        if self.mapping.dwdp_size > 1:
            Distributed.get(self.mapping).group("dwdp").barrier()

    @cached_property
    def group(self) -> Group:
        """The ranks that tokens are sent between."""
        return Distributed.get(self.mapping).along("moe_ep")

    @cached_property
    def exchange(self) -> ExpertExchange:
        ranks, count = range(self.mapping.moe_ep_size), self.config.num_experts
        starts = [split_first(count, len(ranks), rank).start for rank in ranks]
        return ExpertExchange(self.group, [*starts, count])

    def load_expert(self, number: int, gate: Source, up: Source, down: Source) -> None:
        """Copy this rank's part of a stored expert that it owns: gate and up [I, hidden], down [hidden, I]."""
        _load(*self.experts[number - self.first], self.width, gate, up, down)

    def load_shared(self, gate: Source, up: Source, down: Source) -> None:
        """Copy this rank's part of the shared expert."""
        _load(self.shared_gate_up, self.shared_down, self.shared_width, gate, up, down)

    def __call__(self, x: torch.Tensor, sizes: Sequence[int] = ()) -> torch.Tensor | MoePartial:
        """sizes: with all-to-all, the rows of all ranks that tokens are sent between."""
        ids, weights = choose(F.linear(x, self.gate), self.config, self.bias)
        ids, order = ids.sort(1)  # they are added in this order
        weights = weights.gather(1, order)
        if self.alltoall:
            return finished(self._alltoall(x, ids, weights, sizes), self._shared(x), x.dtype, None)
        return MoePartial(*self._local(x, ids - self.first, weights, self._shared(x)))

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's part, in fp32."""
        if not self.config.shared:
            return None
        shared = F.linear(swiglu(F.linear(x, self.shared_gate_up)), self.shared_down).float()
        return shared if self.shared_gate is None else shared.mul_(F.linear(x, self.shared_gate).float().sigmoid())

    def _local(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, MoEAllReduceParams]:
        """What this rank's experts, by numbers from 0, make of these rows, as `MoEAllReduce` takes it."""
        if self.stacked is not None and all_at_once(len(x), self.config):
            made = torch.bmm(swiglu(torch.matmul(x, self.stacked[0].mT)), self.stacked[1].mT)
            scale = torch.zeros(self.config.num_experts + 1, len(x))  # the last: of experts of others
            mine = (ids >= 0) & (ids < len(made))
            scale.t().scatter_(1, torch.where(mine, ids, -1).long() % len(scale), weights)
            shared = x.new_zeros(x.shape) if shared is None else shared
            return made, MoEAllReduceParams(
                device_num_experts=len(made), expert_scale_factor=scale, shared_expert_output=shared
            )
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(len(self.experts) + 1)).tolist()
        rows, first = order // ids.shape[1], ends[0]
        made = x.new_empty(ends[-1] - first, self.hidden)
        for (gate_up, down), (begin, end) in zip(self.experts, pairwise(ends), strict=True):
            if begin < end:
                inner = swiglu(torch.mm(x[rows[begin:end]], gate_up.t()))
                torch.mm(inner, down.t(), out=made[begin - first : end - first])
        index = torch.full_like(flat, -1)
        index[order[first : ends[-1]]] = torch.arange(len(made), dtype=flat.dtype)
        return made, MoEAllReduceParams(
            expanded_idx_to_permuted_idx=index.view(ids.shape),
            expert_scale_factor=weights,
            shared_expert_output=shared,
            is_cutlass_min_latency=False,
        )

    def _alltoall(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        sent = self.exchange.dispatch(x, ids.to(torch.int32), weights, sizes)
        if sent is not None:
            sent.rows.copy_(add_experts(*self._local(sent.rows, sent.ids, sent.weights)))
            return self.exchange.combine(sent).float()
        # ranks that share no memory, or too little of it: an all-gather and a reduce-scatter
        rows, numbers, scale = (gather.all_gather(part, self.group, dim=0, sizes=sizes) for part in (x, ids, weights))
        made = add_experts(*self._local(rows, numbers - self.first, scale))
        return gather.reduce_scatter(made, self.group, dim=0, sizes=sizes)


def _load(
    gate_up: torch.Tensor, down: torch.Tensor, width: range, gate: Source, up: Source, down_stored: Source
) -> None:
    part, hidden, inner = slice(width.start, width.stop), slice(0, len(down)), len(width)
    for target, stored in ((gate_up[:inner], gate), (gate_up[inner:], up)):
        fill(target, stored[part, hidden], stored)
    fill(down, down_stored[hidden, part], down_stored)
