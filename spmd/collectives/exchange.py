"""The general one-shot exchange: sum over some axes, gather over others, keep a cut, in one synchronisation.

Every rank publishes its rows; every rank reads just the rows it is to hold, from all who owe a part of them. Of this
all-reduce, all-gather and reduce-scatter are special cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd.collectives import fusion
from spmd.collectives.arguments import check, describe, refuse
from spmd.collectives.cpu import DTYPES, Route
from spmd.collectives.epilogue import AllReduceParams, Finish
from spmd.control.mpi import Group
from spmd.control.record import OPS
from spmd.memory.workspace import FORCED, Workspace
from spmd.topology.radix import Radix
from spmd.topology.rows import pieces_of, rows_held

_EXCHANGE = OPS.index("exchange")


class Exchange:
    """The exchange of a group along given axes, `move(x, rows, fold=..., params=...)`; see `exchange` for what it does.

    What the arguments allow is found out here, what row counts imply at the first call with them. Making one is not
    collective.
    """

    def __init__(
        self,
        group: Group,
        shape: Radix,
        *,
        held: Sequence[str],
        over: Sequence[str] = (),
        gather: Sequence[str] = (),
        cut: Sequence[str] = (),
    ) -> None:
        self.group, self.shape = group, shape
        self._axes: dict[str, Any] = {
            "held": tuple(held),
            "over": tuple(over),
            "gather": tuple(gather),
            "cut": tuple(cut),
        }
        said = ", ".join(f"{name} {[*axes]}" for name, axes in self._axes.items())
        if shape.size != group.size:
            refuse("exchange", group, f"{shape} numbers {shape.size} ranks, the group has {group.size}")
        if not {*held, *over, *gather, *cut} <= shape.sizes.keys():
            refuse("exchange", group, f"{said}: axes are {list(shape.sizes)}")
        if not set(gather) <= set(held) or set(cut) & set(held) or set(over) & set(held):
            refuse("exchange", group, f"{said} contradict each other")
        self._blocks = math.prod(shape.sizes[axis] for axis in {*held, *cut})
        self._adds = all(shape.coordinate(group.rank, axis) == 0 for axis in over)
        self._routes: dict[tuple[int, ...], tuple[Route, Route]] = {}
        self._known: dict[tuple[torch.Size, torch.dtype, tuple[int, ...]], tuple[Route, Workspace]] = {}

    def route(self, rows: Sequence[int], folds: bool = False) -> Route:
        """What such a call moves; pure."""
        rows = tuple(rows)
        found = self._routes.get(rows)
        if found is None:
            if len(rows) != self._blocks or min(rows, default=0) < 0:
                refuse("exchange", self.group, f"rows {list(rows)} must be {self._blocks} numbers, none below 0")
            shape, held = self.shape, self._axes["held"]
            axes = {*held, *self._axes["cut"]}
            blocks = Radix({axis: size for axis, size in shape.sizes.items() if axis in axes})
            published = [rows_held(shape, rank, rows, held, blocks) for rank in range(shape.size)]
            moved = pieces_of(shape, self.group.rank, rows, blocks=blocks, **self._axes)
            pieces = moved, published[self.group.rank], max(published)
            key = (shape.sizes, rows, self._axes)
            if len(self._routes) > 1024:
                self._routes.clear()
                self._known.clear()
            found = self._routes[rows] = Route(*pieces, *key, False), Route(*pieces, *key, True)
        return found[folds]

    def __call__(
        self,
        x: torch.Tensor,
        rows: Sequence[int],
        *,
        fold: torch.Tensor | None = None,
        params: AllReduceParams | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See `exchange`."""
        group, rows = self.group, tuple(rows)
        known = self._known.get((x.shape, x.dtype, rows))
        if known is not None and fold is None and params is None and x.is_cpu and x.is_contiguous():
            return known[0].run(_EXCHANGE, known[1], x, None, True)
        route = self.route(rows, fold is not None)
        check("exchange", group, x, fold)
        if x.dtype not in DTYPES or x.dim() != 2:
            refuse("exchange", group, f"{describe(x)}: it takes [rows, n] of a float type")
        if len(x) != route.rows:
            whose = f"rank {group.ranks[group.rank]} holds {len(x)} rows"
            refuse("exchange", group, f"{whose}, but by rows {list(rows)} it has {route.rows}")
        workspace = Workspace.of(group)
        if workspace is None and group.size > 1:
            refuse("exchange", group, "its ranks are on several hosts: exchange inside the node group")
        if workspace is not None and x.shape[1] * x.element_size() > workspace.plane.slot_bytes:
            long, slot = x.shape[1] * x.element_size(), workspace.plane.slot_bytes
            refuse("exchange", group, f"a row of {long} bytes does not fit the workspace's {slot}: raise {FORCED}")
        x, folded = x.contiguous(), fold.contiguous() if self._adds and fold is not None else None
        finish = None
        if params is not None and (params.fusion_op != fusion.AllReduceFusionOp.NONE or params.bias is not None):
            finish = Finish(params, x, group, shape=torch.Size((route.rows_out, x.shape[1])))
        if group.checked:
            folds = "" if fold is None else " fold"
            group.agree(f"exchange{folds} {describe(x, 0)} {self.shape} {self._axes} rows {list(rows)}")
        if workspace is None:
            alone = x.clone() if folded is None else x + folded
            if finish is None:
                return alone
            finish.local(alone)
        elif finish is None:
            if fold is None and not group.checked:
                self._known[x.shape, x.dtype, rows] = route, workspace
            return route.run(_EXCHANGE, workspace, x, folded, summed=True)
        elif route.most:
            address = 0 if folded is None else folded.data_ptr()
            how, to = (x.data_ptr(), address, route.signature), finish.addresses
            status = workspace.plane.exchange_rows(_EXCHANGE, route.map, *how, finish.fixed, *to)
            if status:
                workspace.fail(status)
        return finish.result if len(finish.result) > 1 else finish.result[0]


class _Bound(dict[Any, Exchange]):
    """A group's exchanges by their axes."""

    def close(self) -> None:
        self.clear()


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
    given = (tuple(shape.sizes.items()), tuple(held), tuple(over), tuple(gather), tuple(cut))
    bound = group.kept.setdefault("exchanges", _Bound())
    assert isinstance(bound, _Bound)
    move = bound.get(given)
    if move is None:
        move = bound[given] = Exchange(group, shape, held=held, over=over, gather=gather, cut=cut)
    return move(x, rows, fold=fold, params=params)
