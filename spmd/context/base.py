"""What attention asks of context parallelism, and the cache of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spmd.control.mpi import Group
from spmd.errors import InputError


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one sequence: its cache slot, how many tokens that holds, how many come."""

    slot: int
    start: int
    length: int


class Heads(Protocol):
    """The query heads of a rank, and how they read what the cache keeps of a position."""

    @property
    def count(self) -> int: ...
    @property
    def value_width(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...

    def part(self, heads: range) -> Heads:
        """Some of them, which read what `rows_of` them keeps."""

    def rows_of(self, rows: torch.Tensor, heads: range) -> torch.Tensor:
        """The part of cache rows [n, ...] that some of the heads read."""

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows [n, ...] as keys [n, count, d] and values [n, count, value_width]."""

    def attend_one(self, queries: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token's queries [1, count, d] over all of the rows: o [1, count, value_width], stats [1, count, 2]."""


class SequenceCache:
    """Of one layer, what this rank keeps of every sequence: rows [capacity, ...] and their positions, as they came."""

    def __init__(self, slots: int, capacity: int, row: Sequence[int], dtype: torch.dtype) -> None:
        self._rows = list(torch.empty(slots, capacity, *row, dtype=dtype))
        self._positions = torch.empty(slots, capacity, dtype=torch.int64)
        self._filled = [0] * slots

    def append(self, slot: int, rows: torch.Tensor, positions: torch.Tensor, start: int) -> None:
        """What comes from position `start` on takes the place of all that was there. InputError when it is full."""
        at = self._filled[slot]
        kept = self._positions[slot, :at] < start
        if not kept.all():
            at = int(kept.sum())
            self._rows[slot][:at] = self._rows[slot][: len(kept)][kept]
            self._positions[slot, :at] = self._positions[slot, : len(kept)][kept]
        end = at + len(rows)
        if end > len(self._rows[slot]):
            raise InputError(f"{end} positions in a KV cache of {len(self._rows[slot])}: raise max_length")
        self._rows[slot][at:end], self._positions[slot, at:end] = rows, positions
        self._filled[slot] = end

    def __getitem__(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, positions) of a sequence."""
        end = self._filled[slot]
        return self._rows[slot][:end], self._positions[slot, :end]


class Context(Protocol):
    """One way to cut sequences over ranks, for attention of so many heads.

    heads: the query heads that a rank projects; output_heads: those whose product with o_proj is its own, of a sum that
    is owed over attn_tp, under HELIX over attn_cp as well. pieces(length): of a new sequence's tokens, those that this
    rank (or another) projects; None: all of them, on every rank. capacity(n): the positions of a sequence of n that it
    keeps. attend(...): queries [T, heads, d], rotated, and
    cache rows [T, ...] of the tokens on this rank, chunk after chunk: [T, output heads, value_width]. All ranks of a
    group call together. Errors: InputError for heads that do not cover the ranks.
    """

    heads: range
    output_heads: range
    size: int
    rank: int

    @property
    def group(self) -> Group: ...
    def pieces(self, length: int, rank: int | None = None) -> list[range] | None: ...
    def capacity(self, length: int) -> int: ...
    def attend(
        self, queries: torch.Tensor, rows: torch.Tensor, heads: Heads, chunks: Sequence[Chunk], cache: SequenceCache
    ) -> torch.Tensor: ...


def cut(context: Context | None, chunks: Sequence[Chunk]) -> bool:
    """Whether a forward's rows are cut over ranks: new sequences under a way that cuts them."""
    if context is None or context.pieces(1) is None or not chunks:
        return False
    fresh = [chunk.start == 0 for chunk in chunks]
    if all(fresh):
        return True
    if any(fresh) or any(chunk.length > 1 for chunk in chunks):
        raise InputError("sequences cut over cp go on one token at a time, all new ones apart: split the batch")
    return False


def held(context: Context | None, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, list[range]]]:
    """The chunks, and of each the tokens that are on this rank, by their numbers in the chunk."""
    whole = not cut(context, chunks)
    for chunk in chunks:
        pieces = None if whole or context is None else context.pieces(chunk.length)
        yield chunk, [range(chunk.length)] if pieces is None else pieces
