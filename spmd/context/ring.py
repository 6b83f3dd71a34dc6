"""Ring attention: a new sequence's tokens are cut over cp, and keys and values travel from rank to rank.

Rank c projects pieces c and 2 * cp - 1 - c of 2 * cp (zigzag: every rank then has as much to do under causality), and
keeps their keys and values. They go round in tiles: while a tile is attended to, the next one is on its way, so what a
rank needs besides its own part does not grow with the sequence. Later tokens are on all ranks; position p is kept by
rank p % cp, and what the ranks make of their parts is gathered and combined.
Source: Liu et al., Ring Attention, 2023; Brandon et al., Striped Attention, 2023, for the balance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from spmd._cpu import monotonic_ns
from spmd.collectives import gather
from spmd.context.base import Chunk, Heads, SequenceCache, cut
from spmd.context.softmax import Sum, attend, attend_at, combine, visible
from spmd.control import mpi
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.control.record import recorder
from spmd.topology.mapping import Mapping
from spmd.topology.split import split

TILE = 1024  # positions of keys and values that travel together, and queries that meet them at a time


class Ring:
    """See `base.Context`: rows are cut over attn_cp, heads over attn_tp."""

    def __init__(self, mapping: Mapping, num_heads: int) -> None:
        self.mapping, self.size, self.rank = mapping, mapping.attn_cp_size, mapping.attn_cp_rank
        self.heads = self.output_heads = mapping.q_heads(num_heads)

    @cached_property
    def group(self) -> Group:
        return Distributed.get(self.mapping).along("attn_cp")

    def pieces(self, length: int, rank: int | None = None) -> list[range] | None:
        return self._pieces(length, self.rank if rank is None else rank)

    def _pieces(self, length: int, rank: int) -> list[range]:
        return [split(length, 2 * self.size, piece) for piece in (rank, 2 * self.size - 1 - rank)]

    def capacity(self, length: int) -> int:
        return -(-length // self.size) + 3  # a rounding of each piece, and of the tokens that come later

    def attend(
        self, queries: torch.Tensor, rows: torch.Tensor, heads: Heads, chunks: Sequence[Chunk], cache: SequenceCache
    ) -> torch.Tensor:
        if cut(self, chunks):
            return self._prefill(queries, rows, heads, chunks, cache)
        parts = [(queries[:0, :, : heads.value_width], torch.empty(0, heads.count, 2))]
        for at, chunk in enumerate(chunks):
            here, positions = slice(at, at + 1), torch.tensor([chunk.start])
            mine = positions % self.size == self.rank
            cache.append(chunk.slot, rows[here][mine], positions[mine], chunk.start)
            kept, seen = cache[chunk.slot]
            if len(kept) and visible(positions, seen, heads.window) is None:
                parts.append(heads.attend_one(queries[here], kept))
                continue
            keys, values = heads.keys_values(kept)
            o, lse = attend_at(queries[here], positions, keys, values, seen, heads.scale, heads.window)
            parts.append((o, torch.stack([lse, (~lse.isneginf()).float()], -1)))
        o, stats = (torch.cat(part) for part in zip(*parts, strict=True))
        return combine(*(gather.all_gather(part.unsqueeze(0), self.group, dim=0) for part in (o, stats)))

    # ------------------------------------------------------------------ new sequences

    def _prefill(
        self, queries: torch.Tensor, rows: torch.Tensor, heads: Heads, chunks: Sequence[Chunk], cache: SequenceCache
    ) -> torch.Tensor:
        outs, at = [queries[:0, :, : heads.value_width]], 0
        for chunk in chunks:
            pieces = self._pieces(chunk.length, self.rank)
            here = slice(at, at + sum(map(len, pieces)))
            positions = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
            cache.append(chunk.slot, rows[here], positions, 0)
            outs.append(self._sequence(queries[here], rows[here], heads, chunk.length))
            at = here.stop
        return torch.cat(outs) if len(outs) > 2 else outs[-1]

    def _tiles(self, length: int, rank: int) -> list[range]:
        """A rank's part of a sequence as tiles of positions, in the order in which they go round: odd ranks begin with
        their later piece, so that in every round all have about as much to do."""
        pieces = self._pieces(length, rank)
        return [
            range(first, min(first + TILE, piece.stop))
            for piece in (pieces[::-1] if rank % 2 else pieces)
            for first in range(piece.start, piece.stop, TILE)
        ]

    def _sequence(self, queries: torch.Tensor, rows: torch.Tensor, heads: Heads, length: int) -> torch.Tensor:
        """Attention of this rank's part of one new sequence over all of it."""
        total = Sum(len(queries), heads.count, heads.value_width)
        tiles, (early, late) = [self._tiles(length, rank) for rank in range(self.size)], self._pieces(length, self.rank)
        own = []  # with where their rows are
        for tile in tiles[self.rank]:
            first = tile.start - early.start if tile.start in early else len(early) + tile.start - late.start
            own.append((tile, slice(first, first + len(tile))))
        for turn in range(max(map(len, tiles))):
            part = rows[own[turn][1]] if turn < len(own) else rows[:0]
            for tile, visiting in self._round(part, [of[turn] if turn < len(of) else range(0) for of in tiles]):
                if tile:
                    keys, values = heads.keys_values(visiting)
                    for some, where in own:
                        self._meet(total, where, queries[where], some, keys, values, tile, heads)
        return total.o.to(queries.dtype)

    def _meet(
        self,
        total: Sum,
        where: slice,
        queries: torch.Tensor,
        some: range,
        keys: torch.Tensor,
        values: torch.Tensor,
        tile: range,
        heads: Heads,
    ) -> None:
        """Queries of the positions `some` over a tile of keys: all of it, none, or what is not ahead of each."""
        if tile.start >= some.stop or (heads.window and tile.stop <= some.start - heads.window + 1):
            return
        if tile == some and not (heads.window and len(tile) > heads.window):
            total.add(where, *attend(queries, keys, values, heads.scale, causal=True))
            return
        at, seen = torch.arange(some.start, some.stop), torch.arange(tile.start, tile.stop)
        total.add(where, *attend_at(queries, at, keys, values, seen, heads.scale, heads.window))

    def _round(self, part: torch.Tensor, tiles: Sequence[range]) -> Iterator[tuple[range, torch.Tensor]]:
        """One tile of every rank: this rank's `part` first, then those of the ranks before it as they come round."""
        part, comm = part.contiguous(), self.group.data
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for step in range(self.size):
            coming = tiles[(self.rank - step - 1) % self.size]
            requests, arriving = [], part.new_empty(len(coming), *part.shape[1:])
            if step + 1 < self.size:
                requests = [comm.Irecv(_bytes(arriving), behind), comm.Isend(_bytes(part), ahead)]
            yield tiles[(self.rank - step) % self.size], part
            begin = monotonic_ns()
            if requests:
                mpi.wait(requests)
                recorder.add("ring", self.group.name, part.nbytes, begin)
            part = arriving


def _bytes(x: torch.Tensor) -> object:
    return x.view(torch.uint8).numpy()
