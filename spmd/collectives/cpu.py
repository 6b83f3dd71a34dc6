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
from typing import NamedTuple
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

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # those that are summed
_BYTES = 3  # any type, moved and not summed


class Piece(NamedTuple):
    """Rows [start, start + rows) of every source's tensor, summed over the sources in their order."""

    start: int
    rows: int
    sources: tuple[int, ...]  # group ranks


@lru_cache(maxsize=1024)
def row_map(pieces: tuple[Piece, ...], rows: int, most: int) -> RowMap:
    ends = accumulate(piece.rows for piece in pieces)
    placed = [
        (end - piece.rows, piece.start, piece.rows, list(piece.sources))
        for end, piece in zip(ends, pieces, strict=True)
        if piece.rows
    ]
    return RowMap(placed, rows, most)


@lru_cache(maxsize=1024)
def signature_of(*what: object) -> int:
    """A number that differs where arguments differ; all ranks pass the same."""
    return crc32(repr(what).encode())


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def run(
    op: str,
    workspace: Workspace,
    x: torch.Tensor,
    pieces: tuple[Piece, ...],
    most: int,
    signature: int,
    fold: torch.Tensor | None = None,
    summed: bool = False,
) -> torch.Tensor:
    """x [rows, ...], contiguous -> the pieces one after the other. most: rows of the rank that has most."""
    out = x.new_empty((sum(piece.rows for piece in pieces), *x.shape[1:]))
    n, code = row_size(x), DTYPES[x.dtype] if summed else _BYTES
    if not summed:
        n *= x.element_size()
    if most == 0 or n == 0:
        return out
    if n * (1 if code == _BYTES else x.element_size()) > workspace.plane.slot_bytes:  # long rows pass in parts
        pieces = tuple(Piece(piece.start * n, piece.rows * n, piece.sources) for piece in pieces)
        x, most, n = x.view(-1) if summed else x.view(-1).view(torch.uint8), most * n, 1
    rows = row_map(pieces, len(x), most)
    folded = 0 if fold is None else fold.data_ptr()
    number = OPS.index(op)
    status = workspace.plane.exchange(number, rows, x.data_ptr(), out.data_ptr(), n, code, folded, signature)
    if status:
        workspace.fail(status)
    return out


def all_gather(
    x: torch.Tensor, group: Group, workspace: Workspace, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """As `library.all_gather`."""
    check("all_gather", group, x)
    dim = dimension("all_gather", group, x, dim)
    sizes = own_size("all_gather", group, sizes, x, dim)
    if group.checked:
        group.agree(f"all_gather {describe(x, dim)} dim {dim} sizes {list(sizes)}")
    pieces = tuple(Piece(0, size, (rank,)) for rank, size in enumerate(sizes))
    signature = signature_of(tuple(sizes), x.dtype, dim)
    return back(run("all_gather", workspace, front(x, dim), pieces, max(sizes), signature), dim)


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
    pieces = (Piece(_starts(sizes)[group.rank], sizes[group.rank], tuple(range(group.size))),)
    signature = signature_of(tuple(sizes), dim)
    return back(run("reduce_scatter", workspace, front(x, dim), pieces, rows, signature, summed=True), dim)


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
        mine = torch.tensor([send_sizes])
        every = tuple(Piece(0, 1, (rank,)) for rank in range(group.size))
        table = run("all_to_all", workspace, mine, every, 1, signature_of("sizes", x.dtype, dim)).tolist()
    sent_here = [row[group.rank] for row in table]
    if recv_sizes is not None and group.checked:
        right = list(recv_sizes) == sent_here
        group.agree(
            "all_to_all sizes" + ("" if right else f" {list(recv_sizes)} to receive where {sent_here} are sent")
        )
    elif recv_sizes is not None and list(recv_sizes) != sent_here:
        refuse("all_to_all", group, f"recv_sizes are {list(recv_sizes)}, but {sent_here} are sent here")
    pieces = tuple(Piece(_starts(row)[group.rank], row[group.rank], (rank,)) for rank, row in enumerate(table))
    signature = signature_of(tuple(map(tuple, table)), x.dtype, dim)
    return back(run("all_to_all", workspace, front(x, dim), pieces, max(map(sum, table)), signature), dim)


def broadcast(
    x: torch.Tensor, group: Group, workspace: Workspace, *, root: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `library.broadcast`."""
    check("broadcast", group, x, out)
    check_root("broadcast", group, root)
    if group.checked:
        group.agree(f"broadcast {describe(x)} root {root}")
    flat = x.contiguous().view(-1, 1)
    pieces = (Piece(0, len(flat), (root,)),)
    made = run("broadcast", workspace, flat, pieces, len(flat), signature_of(root, x.dtype)).view(x.shape)
    return made if out is None else out.copy_(made)
