"""Moves of rows between the ranks of a stage, by the digits along which they differ and over which they are owed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.collectives import library
from spmd.collectives.allreduce import AllReduce
from spmd.collectives.arguments import NAMES, describe, refuse
from spmd.collectives.cpu import Route
from spmd.collectives.epilogue import ResidualNorm
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.control.record import OPS
from spmd.memory.workspace import Workspace
from spmd.topology.mapping import Mapping
from spmd.topology.rows import pieces_of, rows_held
from spmd.topology.stage import Digits, Stage


class RowMoves:
    """Moves of rows between the ranks of one stage, by digits: over which a sum is owed, along which rows are gathered
    or cut. rows: of the finest blocks, which all digits number (`rows_of`); ranks hold theirs in that order."""

    def __init__(self, mapping: Mapping, stage: Stage, hidden: int, dtype: torch.dtype) -> None:
        self.mapping, self.stage, self.hidden, self.dtype = mapping, stage, hidden, dtype
        self.radix, self.pp_start = self.stage.digits, mapping.pp_rank * self.stage.digits.size
        self.me = mapping.rank - self.pp_start
        self._groups: dict[Digits, Group] = {}
        self._all_reduces: dict[Digits, AllReduce] = {}

    def group(self, digits: Digits) -> Group:
        """The ranks that differ along these digits only."""
        if digits not in self._groups:
            ranks = [self.pp_start + rank for rank in self.radix.group(self.me, *digits)]
            self._groups[digits] = Distributed.get(self.mapping).along(self.stage.say(digits), ranks)
        return self._groups[digits]

    def all_reduce(self, digits: Digits) -> AllReduce:
        if digits not in self._all_reduces:
            self._all_reduces[digits] = AllReduce(group=self.group(digits))
        return self._all_reduces[digits]

    def rows_of(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Rows of the finest blocks: those of each attention group, cut evenly over its ranks."""
        k = self.radix.size // self.stage.span(self.stage.axes["attn_dp"])
        return tuple((i + 1) * n // k - i * n // k for n in counts for i in range(k))

    def route(
        self, rows: tuple[int, ...], held: Digits, over: Digits, gather: Digits, cut: Digits
    ) -> tuple[Group, Route]:
        """The rows that such a move brings to this rank, by numbers inside the group that takes part."""
        digits, radix = over | gather, self.radix
        members = list(radix.group(self.me, *digits))
        axes: dict[str, Digits] = {"held": held, "over": over, "gather": gather, "cut": cut}
        pieces = [
            piece._replace(sources=tuple(members.index(source) for source in piece.sources))
            for piece in pieces_of(radix, self.me, rows, blocks=radix, **axes)
        ]
        published = [rows_held(radix, member, rows, held, radix) for member in members]
        key = (rows, *(sorted(of) for of in axes.values()))
        return self.group(digits), Route(pieces, published[members.index(self.me)], max(published), *key)

    def rows_here(self, rows: tuple[int, ...], held: Digits) -> int:
        return rows_held(self.radix, self.me, rows, held, self.radix)

    def kept(self, rows: tuple[int, ...], held: Digits, cut: Digits) -> Callable[[torch.Tensor], torch.Tensor]:
        """A cut: the part of a rank's own rows that it keeps."""
        axes: dict[str, Digits] = {"held": held, "cut": cut}
        pieces = pieces_of(self.radix, self.me, rows, blocks=self.radix, **axes)
        spans = [(piece.start, piece.start + piece.rows) for piece in pieces]
        if len(spans) == 1:
            ((first, end),) = spans
            return lambda x: x[first:end]
        return lambda x: torch.cat([x[first:end] for first, end in spans])

    def moved(
        self, op: str, group: Group, route: Route, summed: bool, tail: ResidualNorm | None
    ) -> Callable[[torch.Tensor, torch.Tensor | None], Any]:
        """(x, residual) -> the rows that a step brings here, or with a tail (their norm, their sum)."""
        workspace = Workspace.of(group)
        if workspace is None or self.hidden * self.dtype.itemsize > workspace.plane.slot_bytes:
            return _by_library(group, route, tail)
        number, hidden, dtype = OPS.index(op), self.hidden, self.dtype
        if tail is None:
            move = lambda x, residual: route.run(number, workspace, x, None, summed)  # noqa: E731
        else:
            exchange_rows = workspace.plane.exchange_rows

            def move(x: torch.Tensor, residual: torch.Tensor | None) -> Any:
                norm = torch.empty(route.rows_out, hidden, dtype=dtype)
                total = torch.empty_like(norm)
                if route.most:
                    kept = 0 if residual is None else residual.data_ptr()
                    how = (number, route.map, x.data_ptr(), 0, route.signature, tail.tail(residual))
                    status = exchange_rows(*how, kept, norm.data_ptr(), total.data_ptr(), 0, 0)
                    if status:
                        workspace.fail(status)
                return norm, total

        before, after = torch.Size((route.rows, hidden)), torch.Size((route.rows_out, hidden))

        def checked(x: torch.Tensor, residual: torch.Tensor | None) -> Any:
            for given, shape in ((x, before), (residual, after)):
                if given is not None and (given.shape != shape or given.dtype != dtype):
                    refuse(op, group, f"{describe(given)} where the plan has {NAMES[dtype]}{[*shape]}")
            if group.checked:
                group.agree(f"{op} {describe(x, 0)} of rows {route.signature}")
            return move(x, residual)

        return checked


def _by_library(group: Group, route: Route, tail: ResidualNorm | None) -> Any:
    """Between hosts, and for rows longer than a slot: all rows by the library, and then those that are needed."""
    sizes = group.allgather_int64([route.rows])[:, 0].tolist()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]

    def move(x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        everyone = library.all_gather(x.contiguous(), group, dim=0, sizes=sizes)
        parts = []
        for piece in route.pieces:
            owed = [everyone[starts[s] + piece.start :][: piece.rows] for s in piece.sources]
            parts.append(owed[0] if len(owed) == 1 else torch.stack(owed).float().sum(0).to(x.dtype))
        out = torch.cat(parts) if parts else x[:0]
        return out if tail is None else tail(out, residual)

    return move
