"""Which rows a rank holds, and whose it reads when rows move: pure arithmetic on a numbering of the ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from spmd.topology.radix import Radix


class Piece(NamedTuple):
    """Rows [start, start + rows) of every source's tensor, summed over the sources in their order."""

    start: int
    rows: int
    sources: tuple[int, ...]


def held_blocks(shape: Radix, blocks: Radix, rank: int, along: Collection[str]) -> list[int]:
    """The blocks that a rank holds whose rows differ along these axes, ascending: those with its coordinates there.

    blocks numbers them by axes of `shape`, `along` among them."""
    free = [axis for axis in blocks.sizes if axis not in along]
    coordinates = shape.coordinates(rank)
    base = sum(coordinates[axis] * blocks.strides[axis] for axis in blocks.sizes if axis in along)
    return list(blocks.group(base, *free)) if free else [base]


def pieces_of(
    shape: Radix,
    rank: int,
    rows: Sequence[int],
    *,
    held: Collection[str],
    over: Collection[str] = (),
    gather: Collection[str] = (),
    cut: Collection[str] = (),
    blocks: Radix | None = None,
) -> list[Piece]:
    """What `rank` reads of whom, in the order of its rows afterwards.

    Ranks of `shape` that differ along `held` hold different rows, along `over` unfinished sums, along all others
    copies; see `exchange` for the rest. rows[block]: of the finest blocks, which `blocks` numbers (None: by the axes of
    held and cut); every rank holds its blocks in ascending order. A source is a rank of shape that shares all
    coordinates with `rank` but those along over and gather."""
    before, after = set(held), (set(held) - set(gather)) | set(cut)
    if blocks is None:
        blocks = Radix({axis: size for axis, size in shape.sizes.items() if axis in before | after})
    starts: dict[int, dict[int, int]] = {}
    pieces: list[Piece] = []
    summed = shape.group(rank, *over)
    lead = [axis for axis in gather if axis in blocks.sizes]
    for block in held_blocks(shape, blocks, rank, after):
        move = sum(
            (blocks.coordinate(block, axis) - shape.coordinate(rank, axis)) * shape.strides[axis] for axis in lead
        )
        sources = tuple(source + move for source in summed)
        first = sources[0]
        if first not in starts:
            starts[first], end = {}, 0
            for at in held_blocks(shape, blocks, first, before):
                starts[first][at] = end
                end += rows[at]
        start, last = starts[first][block], pieces[-1] if pieces else None
        if last is not None and last.sources == sources and last.start + last.rows == start:
            pieces[-1] = Piece(last.start, last.rows + rows[block], sources)
        else:
            pieces.append(Piece(start, rows[block], sources))
    return pieces


def rows_held(shape: Radix, rank: int, rows: Sequence[int], along: Collection[str], blocks: Radix) -> int:
    """How many rows a rank holds whose rows differ along these axes."""
    return sum(rows[block] for block in held_blocks(shape, blocks, rank, along))
