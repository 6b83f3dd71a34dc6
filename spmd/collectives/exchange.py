"""The general one-shot exchange: sum over some axes, gather over others, keep a cut, in one synchronisation.

Every rank publishes its rows; every rank reads just the rows it is to hold, from all who owe a part of them. Of this
all-reduce, all-gather and reduce-scatter are special cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from spmd.collectives import fusion
from spmd.collectives.arguments import check, describe, refuse
from spmd.collectives.cpu import DTYPES, Piece, row_map, run, signature_of
from spmd.collectives.epilogue import AllReduceParams, Finish
from spmd.control.mpi import Group
from spmd.control.record import OPS
from spmd.memory.workspace import FORCED, Workspace
from spmd.topology.radix import Radix


def exchange_pieces(
    shape: Radix,
    rank: int,
    rows: Sequence[int],
    *,
    held: Sequence[str],
    over: Sequence[str] = (),
    gather: Sequence[str] = (),
    cut: Sequence[str] = (),
) -> tuple[tuple[Piece, ...], int, int]:
    """What `rank` reads of whom, in the order of its rows afterwards; how many rows it publishes itself; and how many
    the rank that publishes most.

    Arguments as in `exchange`; pure.
    """
    before, after = set(held), (set(held) - set(gather)) | set(cut)
    blocks = Radix({axis: size for axis, size in shape.sizes.items() if axis in before | after})

    def holds(who: int, block: int, axes: set[str]) -> bool:
        return all(shape.coordinate(who, axis) == blocks.coordinate(block, axis) for axis in axes)

    def published(who: int, end: int) -> int:
        return sum(rows[block] for block in range(end) if holds(who, block, before))

    pieces = []
    for block in range(blocks.size):
        if holds(rank, block, after):
            sources = [who for who in shape.group(rank, *before, *over) if holds(who, block, before)]
            pieces.append(Piece(published(sources[0], block), rows[block], tuple(sources)))
    most = max(published(who, blocks.size) for who in range(shape.size))
    return tuple(pieces), published(rank, blocks.size), most


_pieces = lru_cache(maxsize=1024)(
    lambda sizes, rank, rows, held, over, gather, cut: exchange_pieces(
        Radix(dict(sizes)), rank, rows, held=held, over=over, gather=gather, cut=cut
    )
)


def exchange(
    x: torch.Tensor,
    group: Group,
    shape: Radix,
    rows: Sequence[int],
    *,
    held: Sequence[str],
    over: Sequence[str] = (),
    gather: Sequence[str] = (),
    cut: Sequence[str] = (),
    fold: torch.Tensor | None = None,
    params: AllReduceParams | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Finish the sums over `over`, gather along `gather`, and keep of copies the part along `cut`.

    shape numbers the ranks of the group by axes. Ranks that differ along `held` hold different rows, along `over`
    unfinished sums of the same rows, along all others copies. `gather` is part of `held`; `cut` is not, but may be part
    of `over` (a reduce-scatter). The finest blocks of rows are numbered by the axes of held and cut, in the order of
    shape, and rows[block] of them, 0 allowed; a rank's rows are its blocks in that order.

    x: [rows held here, n] fp32, bf16 or fp16. Every rank gets [rows held afterwards, n]. fold: of x's shape, added into
    the sum in flight by the one rank per sum whose coordinates along `over` are 0; each addend is rounded to x's type.
    params: the epilogue of the finished rows; its residual has the rows held afterwards, its outputs are those of
    AllReduce. Errors: InputError for arguments that cannot be; those of `cpu`.
    """
    check("exchange", group, x, None if fold is None else fold)
    workspace = Workspace.of(group)
    if x.dtype not in DTYPES or x.dim() != 2 or shape.size != group.size:
        refuse("exchange", group, f"{describe(x)} over {shape}: it takes [rows, n] of a float type, of all ranks")
    if not set(gather) <= set(held) or set(cut) & set(held) or set(over) & set(held):
        refuse("exchange", group, f"held {held}, over {over}, gather {gather}, cut {cut} contradict each other")
    what = (tuple(shape.sizes.items()), tuple(rows), tuple(held), tuple(over), tuple(gather), tuple(cut))
    if not {*held, *over, *gather, *cut} <= shape.sizes.keys():
        refuse("exchange", group, f"held {held}, over {over}, gather {gather}, cut {cut}: axes are {list(shape.sizes)}")
    blocks = math.prod(shape.sizes[axis] for axis in {*held, *cut})
    if len(rows) != blocks or min(rows, default=0) < 0:
        refuse("exchange", group, f"rows {list(rows)} must be {blocks} numbers, none below 0")
    pieces, mine, most = _pieces(what[0], group.rank, *what[1:])
    if len(x) != mine:
        refuse("exchange", group, f"rank {group.ranks[group.rank]} holds {len(x)} rows, but by rows {mine}")
    adds = fold is not None and all(shape.coordinate(group.rank, axis) == 0 for axis in over)
    x, folded = x.contiguous(), fold.contiguous() if adds and fold is not None else None
    if workspace is not None and x.shape[1] * x.element_size() > workspace.plane.slot_bytes:
        long, slot = x.shape[1] * x.element_size(), workspace.plane.slot_bytes
        refuse("exchange", group, f"a row of {long} bytes does not fit the workspace's {slot}: raise {FORCED}")
    if workspace is None and group.size > 1:
        refuse("exchange", group, "its ranks are on several hosts: exchange inside the node group")
    finish = None
    if params is not None and (params.fusion_op != fusion.AllReduceFusionOp.NONE or params.bias is not None):
        out_rows = sum(piece.rows for piece in pieces)
        finish = Finish(params, x, group, shape=torch.Size((out_rows, x.shape[1])))
    if group.checked:
        group.agree(f"exchange {describe(x, 0)} {what}")
    signature = signature_of(what, fold is None)
    if finish is None:
        if workspace is None:
            return x.clone() if folded is None else x + folded
        return run("exchange", workspace, x, pieces, most, signature, folded, summed=True)
    if workspace is None:
        finish.local(x if folded is None else x + folded)
    elif most:
        status = workspace.plane.exchange_rows(
            OPS.index("exchange"),
            row_map(pieces, len(x), most),
            x.data_ptr(),
            0 if folded is None else folded.data_ptr(),
            signature,
            finish.fixed,
            *finish.addresses,
        )
        if status:
            workspace.fail(status)
    return finish.result if len(finish.result) > 1 else finish.result[0]
