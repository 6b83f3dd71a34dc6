"""Ulysses: a new sequence's tokens are cut over cp; for attention itself, heads are.

    [T / cp, H, d]  - all-to-all ->  [T, H / cp, d]  - attention ->  [T, H / cp, d]  - all-to-all ->  [T / cp, H, d]

Neither heads nor tokens need divide. A rank keeps the whole sequence for the key/value heads that its query heads read.
Later tokens are on all ranks: each attends with its heads, and the heads are gathered before o_proj.
Source: Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from spmd.collectives import gather
from spmd.context.base import Chunk, Heads, SequenceCache, cut
from spmd.context.softmax import attend, attend_at, visible
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.topology.mapping import Mapping
from spmd.topology.split import split


class Ulysses:
    """See `base.Context`: rows are cut over cp; a rank projects its tp rank's heads and attends with 1/cp of them."""

    def __init__(self, mapping: Mapping, num_heads: int) -> None:
        self.mapping, self.size, self.rank = mapping, mapping.cp_size, mapping.cp_rank
        if mapping.attn_dp_size > 1:
            raise InputError(
                f"ULYSSES with attn_dp_size {mapping.attn_dp_size}: its ranks share their requests, use HELIX or RING"
            )
        mapping.q_heads(num_heads)  # says so when there are too few for the flat split over tp * cp
        self.heads = self.output_heads = split(num_heads, mapping.tp_size, mapping.tp_rank)
        shards, first = mapping.tp_size * self.size, mapping.tp_rank * self.size
        parts = [split(num_heads, shards, first + r) for r in range(self.size)]
        self.shares = [range(part.start - self.heads.start, part.stop - self.heads.start) for part in parts]

    @cached_property
    def group(self) -> Group:
        return Distributed.get(self.mapping).along("cp")

    def pieces(self, length: int, rank: int | None = None) -> list[range] | None:
        return [split(length, self.size, self.rank if rank is None else rank)]

    def capacity(self, length: int) -> int:
        return length

    def attend(
        self, queries: torch.Tensor, rows: torch.Tensor, heads: Heads, chunks: Sequence[Chunk], cache: SequenceCache
    ) -> torch.Tensor:
        mine = self.shares[self.rank]
        few, sizes = heads.part(mine), None
        if cut(self, chunks):
            sizes = [sum(len(split(chunk.length, self.size, r)) for chunk in chunks) for r in range(self.size)]
            queries = self._to_heads([queries[:, share.start : share.stop] for share in self.shares], sizes)
            rows = self._to_heads([heads.rows_of(rows, share) for share in self.shares], sizes)
            order = self._order(chunks)
            queries, rows = queries[order], rows[order]
        else:
            queries, rows = queries[:, mine.start : mine.stop].contiguous(), heads.rows_of(rows, mine)
        outs, at = [queries[:0, :, : heads.value_width]], 0
        for chunk in chunks:
            here = slice(at, at + chunk.length)
            positions = torch.arange(chunk.start, chunk.start + chunk.length)
            cache.append(chunk.slot, rows[here], positions, chunk.start)
            outs.append(one(queries[here], *cache[chunk.slot], few, positions))
            at += chunk.length
        out = torch.cat(outs)
        widths = list(map(len, self.shares))
        if sizes is None:
            return gather.all_gather(out, self.group, dim=1, sizes=widths)
        back = torch.empty_like(out)
        back[order] = out
        return self._to_rows(back, sizes, widths)

    def _order(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Where the rows of each chunk are among those of all ranks: they came rank by rank."""
        sizes = [[len(split(chunk.length, self.size, r)) for chunk in chunks] for r in range(self.size)]
        starts, at = {}, 0
        for r, of in enumerate(sizes):
            for c, size in enumerate(of):
                starts[c, r], at = at, at + size
        return torch.cat(
            [
                torch.arange(starts[c, r], starts[c, r] + sizes[r][c])
                for c in range(len(chunks))
                for r in range(self.size)
            ]
        )

    def _to_heads(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """What each rank is to get of this rank's rows, all with the same inner width: mine of everybody's rows."""
        width = parts[0].shape[-1]
        vectors = torch.cat([part.reshape(-1, width) for part in parts])
        each = [part.shape[1:].numel() // width for part in parts]
        here, shape = sizes[self.rank], parts[self.rank].shape[1:]
        own = shape.numel() // width
        sent, came = [here * n for n in each], [size * own for size in sizes]
        got = gather.all_to_all(vectors, self.group, dim=0, send_sizes=sent, recv_sizes=came)
        return got.view(-1, *shape)

    def _to_rows(self, x: torch.Tensor, sizes: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
        """Mine of everybody's heads, for my rows: the way back."""
        d, here = x.shape[2], sizes[self.rank]
        sent = [size * x.shape[1] for size in sizes]
        got = gather.all_to_all(
            x.reshape(-1, d), self.group, dim=0, send_sizes=sent, recv_sizes=[here * n for n in widths]
        )
        parts = got.split([here * n for n in widths])
        return torch.cat([part.view(here, n, d) for part, n in zip(parts, widths, strict=True)], 1)


def one(
    queries: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, heads: Heads, positions: torch.Tensor
) -> torch.Tensor:
    """Attention of one chunk over all that its sequence has: [L, heads, value_width]."""
    if len(queries) == 1 and visible(positions, seen, heads.window) is None:
        return heads.attend_one(queries, rows)[0]
    if len(queries) == len(rows) and not (heads.window and len(rows) > heads.window):
        return attend(queries, *heads.keys_values(rows), heads.scale, causal=True)[0]
    return attend_at(queries, positions, *heads.keys_values(rows), seen, heads.scale, heads.window)[0]
