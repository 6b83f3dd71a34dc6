"""Helix: the cache is cut by sequence, block by block over cp; every rank attends with all heads over its part.

Position p is kept by rank (p // block) % cp. What the ranks make of their parts is exchanged once, each rank getting
its share of the heads, and combined in fp32. What follows, o_proj, FFN and experts, sees the cp ranks as more tp ranks.
Source: Bhatia et al., Helix Parallelism, 2025; names as in TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from spmd.collectives import library
from spmd.collectives.arguments import describe, refuse
from spmd.collectives.cpu import DTYPES
from spmd.context.base import Chunk, Heads, SequenceCache
from spmd.context.softmax import attend_at, combine, visible
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.memory.workspace import Workspace
from spmd.topology.mapping import Mapping
from spmd.topology.split import split

_LINE = 64  # bytes of a cache line: where the rows begin behind their stats
BLOCK = 32  # positions in a row on one rank, by default


class Helix:
    """See `base.Context`. cp_config: "tokens_per_block" positions lie together; "use_nccl_for_alltoall": the exchange
    goes by the library even where the ranks share memory."""

    def __init__(self, mapping: Mapping, num_heads: int) -> None:
        self.mapping, self.size, self.rank = mapping, mapping.attn_cp_size, mapping.attn_cp_rank
        self.block = mapping.cp_config.get("tokens_per_block", BLOCK)
        if type(self.block) is not int or self.block < 1:
            raise InputError(f"tokens_per_block must be a whole number above 0, but is {self.block!r}")
        self.by_library = bool(mapping.cp_config.get("use_nccl_for_alltoall", False))
        self.heads = mapping.q_heads(num_heads)
        shards, first = mapping.attn_tp_size * self.size, mapping.attn_tp_rank * self.size
        parts = [split(num_heads, shards, first + rank) for rank in range(self.size)]
        self.output_heads = parts[self.rank]
        # of the heads here, those that each rank gets
        self.shares = [range(part.start - self.heads.start, part.stop - self.heads.start) for part in parts]

    @cached_property
    def group(self) -> Group:
        return Distributed.get(self.mapping).along("attn_cp")

    def pieces(self, length: int, rank: int | None = None) -> list[range] | None:
        return None

    def owned(self, positions: torch.Tensor) -> torch.Tensor:
        """bool: the positions that this rank keeps."""
        return positions // self.block % self.size == self.rank

    def capacity(self, length: int) -> int:
        return int(self.owned(torch.arange(length)).sum())

    def attend(
        self, queries: torch.Tensor, rows: torch.Tensor, heads: Heads, chunks: Sequence[Chunk], cache: SequenceCache
    ) -> torch.Tensor:
        parts, at = [(queries[:0, :, : heads.value_width], torch.empty(0, heads.count, 2))], 0
        for chunk in chunks:
            positions = torch.arange(chunk.start, chunk.start + chunk.length)
            mine, here = self.owned(positions), slice(at, at + chunk.length)
            cache.append(chunk.slot, rows[here][mine], positions[mine], chunk.start)
            parts.append(self.part(queries[here], heads, positions, *cache[chunk.slot]))
            at += chunk.length
        o, stats = (torch.cat(part) if len(part) > 2 else part[-1] for part in zip(*parts, strict=True))
        return exchange(o, stats, self.shares, self.group, self.by_library)

    def part(
        self, queries: torch.Tensor, heads: Heads, positions: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one chunk: o [L, H, dv] over what is kept here, and stats [L, H, 2]; nothing kept: 0, -inf and 0."""
        if len(queries) == 1 and len(rows) and visible(positions, seen, heads.window) is None:
            return heads.attend_one(queries, rows)
        o, lse = attend_at(queries, positions, *heads.keys_values(rows), seen, heads.scale, heads.window)
        return o, torch.stack([lse, (~lse.isneginf()).float()], -1)


def exchange(
    o: torch.Tensor, stats: torch.Tensor, shares: Sequence[range], group: Group, by_library: bool = False
) -> torch.Tensor:
    """What every rank made of its part of the sequence, exchanged and combined: [T, heads of this rank, dv].

    o [T, H, dv] fp32, bf16 or fp16, each row divided by its own sum; stats fp32 [T, H, 2]: a row's largest score and
    the sum of exp(score - largest), 0 where it saw nothing: then its o may hold anything. shares: the heads that each
    rank gets. Through shared memory where there is some (one synchronisation, the parts combined where they lie), else
    by `alltoall_helix`. Errors: those of collectives.
    """
    workspace, own = None if by_library else Workspace.of(group), shares[group.rank]
    lent = None
    if workspace is not None:
        behind = -(-stats.nbytes // _LINE) * _LINE
        lent = workspace.lend((max(behind + o.nbytes, _LINE),), torch.uint8)
    if workspace is not None and lent is not None:
        lent[: stats.nbytes].view(torch.float32).view(stats.shape).copy_(stats)
        lent[behind : behind + o.nbytes].view(o.dtype).view(o.shape).copy_(o)
        if group.checked:
            group.agree(f"helix all-to-all {describe(o)} shares {[len(share) for share in shares]}")
        out = o.new_empty(len(o), len(own), o.shape[2])
        at, rows, heads, width = lent.data_ptr(), *o.shape
        dtype, to = DTYPES[o.dtype], out.data_ptr()
        if status := workspace.plane.combine_parts(at, rows, heads, own.start, own.stop, width, dtype, to):
            workspace.fail(status)
        return out
    largest = max(map(len, shares))
    padded = [part[:, list(share) + [share.start] * (largest - len(share))] for part in (o, stats) for share in shares]
    outs, all_stats = alltoall_helix(padded, group)
    return combine(outs[:, :, : len(own)], all_stats[:, :, : len(own)])


def alltoall_helix(inputs: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Several all-to-alls at once: of every `size` inputs, equal in shape, rank r gets the r-th.

    Returns for each such block a tensor [size, *shape], by source; also of a group of one. Errors: InputError for a
    number of inputs that is no multiple of the group's size, and for shapes or types that differ within a block.
    """
    n = group.size
    if not inputs or len(inputs) % n:
        refuse("alltoall_helix", group, f"{len(inputs)} inputs for {n} ranks: needs a multiple, one for each rank")
    outs = []
    for first in range(0, len(inputs), n):
        block = inputs[first : first + n]
        if any(x.shape != block[0].shape or x.dtype != block[0].dtype for x in block):
            refuse("alltoall_helix", group, f"a block of {', '.join(map(describe, block))}: they must be equal")
        stacked = torch.stack(list(block))
        outs.append(library.all_to_all(stacked, group, dim=0) if n > 1 else stacked)
    return outs
