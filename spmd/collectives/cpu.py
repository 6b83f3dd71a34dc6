"""The native path: collectives on CPU tensors through the shared memory of one host, for any group size.

The functions are those of `library`, with the same arguments, results and errors. All are the same one-shot kernel
under different row maps: every rank publishes its rows, every rank reads the rows it is to hold from those who own or
owe them. Sums are made in fp32, in rank order from +0, and rounded once.

Errors on top of those of `library`: DesyncError when ranks call different things, DeadlineError when one does not come
within SPMD_TIMEOUT, LostRankError when its process has ended; always, not only under SPMD_CHECK=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from zlib import crc32

import torch

from spmd._cpu import RowMap
from spmd.collectives.arguments import (
    back,
    check,
    check_root,
    check_sizes,
    describe,
    dimension,
    even,
    front,
    own_size,
    refuse,
    row_size,
)
from spmd.control.mpi import Group
from spmd.control.record import OPS
from spmd.memory.workspace import Workspace
from spmd.topology.rows import Piece

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # those that are summed
_BYTES = 3  # any type, moved and not summed


class Route:
    """Which rows go where in a call like this one: pieces, one after the other, of tensors of which this rank's has
    `rows` rows and the longest of all ranks' `most`. signature: of whatever ranks must agree on."""

    def __init__(self, pieces: Sequence[Piece], rows: int, most: int, *signature: object) -> None:
        self.pieces, self.rows, self.most = pieces, rows, most
        self.rows_out = sum(piece.rows for piece in pieces)
        self.signature = crc32(repr(signature).encode())
        self.map = self._map(1)

    def _map(self, parts: int) -> RowMap:
        """parts: that every row is cut into."""
        ends = accumulate(piece.rows for piece in self.pieces)
        placed = [
            ((end - piece.rows) * parts, piece.start * parts, piece.rows * parts, list(piece.sources))
            for end, piece in zip(ends, self.pieces, strict=True)
            if piece.rows
        ]
        return RowMap(placed, self.rows * parts, self.most * parts)

    def run(
        self,
        number: int,
        workspace: Workspace,
        x: torch.Tensor,
        fold: torch.Tensor | None = None,
        summed: bool = False,
    ) -> torch.Tensor:
        """x [rows, ...], contiguous -> [rows_out, ...]. number: of the operation in OPS; fold: see `exchange`."""
        shape, plane = x.shape, workspace.plane
        out = torch.empty((self.rows_out, *shape[1:]), dtype=x.dtype)
        n = shape[1] if len(shape) == 2 else row_size(x)
        code, row_bytes = DTYPES[x.dtype] if summed else _BYTES, n * x.dtype.itemsize
        if self.most == 0 or n == 0:
            return out
        n = n if summed else row_bytes
        rows = self.map
        if row_bytes > plane.slot_bytes:  # long rows pass in parts
            rows, n = self._map(n), 1
        folded = 0 if fold is None else fold.data_ptr()
        status = plane.exchange(number, rows, x.data_ptr(), out.data_ptr(), n, code, folded, self.signature)
        if status:
            workspace.fail(status)
        return out


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


_GATHER, _SCATTER, _SWAP, _BROADCAST = (
    OPS.index(op) for op in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
)


@lru_cache(maxsize=1024)
def _gathered(sizes: tuple[int, ...], rank: int, *key: object) -> Route:
    pieces = [Piece(0, size, (source,)) for source, size in enumerate(sizes)]
    return Route(pieces, sizes[rank], max(sizes), sizes, *key)


@lru_cache(maxsize=1024)
def _scattered(sizes: tuple[int, ...], rank: int, *key: object) -> Route:
    pieces = [Piece(_starts(sizes)[rank], sizes[rank], tuple(range(len(sizes))))]
    return Route(pieces, sum(sizes), sum(sizes), sizes, *key)


@lru_cache(maxsize=1024)
def _swapped(table: tuple[tuple[int, ...], ...], rank: int, *key: object) -> Route:
    pieces = [Piece(_starts(row)[rank], row[rank], (source,)) for source, row in enumerate(table)]
    return Route(pieces, sum(table[rank]), max(map(sum, table)), table, *key)


@lru_cache(maxsize=1024)
def _sent(rows: int, root: int, *key: object) -> Route:
    return Route([Piece(0, rows, (root,))], rows, rows, root, *key)


def all_gather(
    x: torch.Tensor, group: Group, workspace: Workspace, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """As `library.all_gather`."""
    check("all_gather", group, x)
    dim = dimension("all_gather", group, x, dim)
    sizes = own_size("all_gather", group, sizes, x, dim)
    if group.checked:
        group.agree(f"all_gather {describe(x, dim)} dim {dim} sizes {list(sizes)}")
    route = _gathered(tuple(sizes), group.rank, x.dtype, dim)
    return back(route.run(_GATHER, workspace, front(x, dim)), dim)


def reduce_scatter(
    x: torch.Tensor, group: Group, workspace: Workspace, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """As `library.reduce_scatter`."""
    check("reduce_scatter", group, x)
    dim = dimension("reduce_scatter", group, x, dim)
    rows = x.shape[dim]
    sizes = even("reduce_scatter", group, rows, "sizes") if sizes is None else sizes
    check_sizes("reduce_scatter", group, sizes, rows)
    if group.checked:
        group.agree(f"reduce_scatter {describe(x)} dim {dim} sizes {list(sizes)}")
    route = _scattered(tuple(sizes), group.rank, dim)
    return back(route.run(_SCATTER, workspace, front(x, dim), summed=True), dim)


def all_to_all(
    x: torch.Tensor,
    group: Group,
    workspace: Workspace,
    *,
    dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """As `library.all_to_all`. Uneven sizes cost one more exchange: where my part begins is the sender's to say."""
    check("all_to_all", group, x)
    dim = dimension("all_to_all", group, x, dim)
    equal = send_sizes is None
    send_sizes = even("all_to_all", group, x.shape[dim], "send_sizes") if send_sizes is None else send_sizes
    check_sizes("all_to_all", group, send_sizes, x.shape[dim], "send_sizes")
    if recv_sizes is not None:
        check_sizes("all_to_all", group, recv_sizes, name="recv_sizes")
    if group.checked:
        how = f"{'equal' if equal else 'given'}, {'asked' if recv_sizes is None else 'given'}"
        group.agree(f"all_to_all {describe(x, None if equal else dim)} dim {dim} sizes {how}")
    if equal:
        table = [list(send_sizes)] * group.size
    else:
        counts = _gathered((1,) * group.size, group.rank, "sizes", x.dtype, dim)
        table = counts.run(_SWAP, workspace, torch.tensor([send_sizes])).tolist()
    sent_here = [row[group.rank] for row in table]
    if recv_sizes is not None and group.checked:
        right = list(recv_sizes) == sent_here
        group.agree(
            "all_to_all sizes" + ("" if right else f" {list(recv_sizes)} to receive where {sent_here} are sent")
        )
    elif recv_sizes is not None and list(recv_sizes) != sent_here:
        refuse("all_to_all", group, f"recv_sizes are {list(recv_sizes)}, but {sent_here} are sent here")
    route = _swapped(tuple(map(tuple, table)), group.rank, x.dtype, dim)
    return back(route.run(_SWAP, workspace, front(x, dim)), dim)


def broadcast(
    x: torch.Tensor, group: Group, workspace: Workspace, *, root: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `library.broadcast`."""
    check("broadcast", group, x, out)
    check_root("broadcast", group, root)
    if group.checked:
        group.agree(f"broadcast {describe(x)} root {root}")
    flat = x.contiguous().view(-1, 1)
    made = _sent(len(flat), root, x.dtype).run(_BROADCAST, workspace, flat).view(x.shape)
    return made if out is None else out.copy_(made)
