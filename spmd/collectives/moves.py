"""Moves of rows between the ranks of a stage, by the digits along which they differ and over which they are owed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from enum import StrEnum
from typing import Any, Self

import torch

from spmd.collectives import library, overlap
from spmd.collectives.allreduce import AllReduce
from spmd.collectives.arguments import NAMES, describe, refuse
from spmd.collectives.cpu import Route
from spmd.collectives.epilogue import ResidualNorm
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.moe import MoEAllReduce, MoePartial
from spmd.collectives.overlap import Partial, made
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.control.record import OPS
from spmd.memory.workspace import Workspace
from spmd.topology.mapping import Mapping
from spmd.topology.radix import Radix
from spmd.topology.rows import pieces_of, rows_held
from spmd.topology.stage import NONE, Digits, Stage

Junction = Callable[[Any, Any], tuple[Any, Any]]  # (x, residual) -> (x, residual)
Move = Callable[[Any, Any], Any]  # (x, residual) -> rows, or with a norm at its end (norm, sum)


class Padding(StrEnum):
    """How rows move where a backend only knows fixed shapes. Blocks never see a row of padding.

    MAX_LEN: all ranks send as many as the one with the most; SUM_LEN: each puts its own into zeros of the size of all,
    and those are summed; NONE: as many as there are; AUTO: MAX_LEN at decode unless it more than doubles the rows, else
    SUM_LEN. The names and the rule are SGLang's.
    """

    NONE = "none"
    AUTO = "auto"
    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"

    def of(self, counts: Sequence[int], decode: bool) -> Padding:
        """The way for these rows of the attention groups, the same on all ranks."""
        if self != Padding.AUTO:
            return self
        return Padding.MAX_LEN if decode and 2 * sum(counts) >= max(counts) * len(counts) else Padding.SUM_LEN


class RowMoves:
    """Moves of rows between the ranks of one stage, by digits: over which a sum is owed, along which rows are gathered
    or cut. rows: of the finest blocks, which all digits number (`rows_of`); ranks hold theirs in that order."""

    def __init__(self, mapping: Mapping, stage: Stage, hidden: int, dtype: torch.dtype) -> None:
        self.mapping, self.stage, self.hidden, self.dtype = mapping, stage, hidden, dtype
        self.radix, self.pp_start = self.stage.digits, mapping.pp_rank * self.stage.digits.size
        self.me = mapping.rank - self.pp_start
        self._groups: dict[Digits, Group] = {}
        self._all_reduces: dict[Digits, AllReduce] = {}
        self._moe_all_reduces: dict[Digits, MoEAllReduce] = {}
        self.padding = Padding.NONE

    def padded(self, padding: Padding) -> Self:
        """The same moves in another form."""
        made = copy(self)  # they share their groups
        made.padding = padding
        return made

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

    def moe_all_reduce(self, digits: Digits) -> MoEAllReduce:
        """Of what experts have not added yet."""
        if digits not in self._moe_all_reduces:
            self._moe_all_reduces[digits] = MoEAllReduce(group=self.group(digits))
        return self._moe_all_reduces[digits]

    def rows_of(self, counts: Sequence[int], held: Digits) -> tuple[int, ...]:
        """Rows of the finest blocks: counts, of ranks that hold different rows along `held`, each cut evenly."""
        cells, rest = ([d for d in self.radix.sizes if (d in held) == inside] for inside in (True, False))
        here, inner = (Radix({d: self.radix.sizes[d] for d in digits}) for digits in (cells, rest))

        def number(radix: Radix, block: int) -> int:
            return sum(self.radix.coordinate(block, digit) * radix.strides[digit] for digit in radix.sizes)

        places = [(counts[number(here, block)], number(inner, block)) for block in range(self.radix.size)]
        return tuple((i + 1) * n // inner.size - i * n // inner.size for n, i in places)

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

    def sizes(self, rows: tuple[int, ...], held: Digits, along: Digits) -> list[int]:
        """The rows of this rank's group along some digits."""
        members = self.radix.group(self.me, *along)
        return [rows_held(self.radix, member, rows, held, self.radix) for member in members]

    def kept(self, rows: tuple[int, ...], held: Digits, cut: Digits) -> Callable[[torch.Tensor], torch.Tensor]:
        """A cut: the part of a rank's own rows that it keeps."""
        if not cut:
            return lambda x: x
        axes: dict[str, Digits] = {"held": held, "cut": cut}
        pieces = pieces_of(self.radix, self.me, rows, blocks=self.radix, **axes)
        spans = [(piece.start, piece.start + piece.rows) for piece in pieces]
        if len(spans) == 1:
            ((first, end),) = spans
            return lambda x: x[first:end]
        return lambda x: torch.cat([x[first:end] for first, end in spans])

    def moved(self, op: str, group: Group, route: Route, summed: bool, tail: ResidualNorm | None) -> Move:
        """(x, residual) -> the rows that a step brings here, or with a tail (their norm, their sum)."""
        workspace = Workspace.of(group)
        fits = workspace is not None and self.hidden * self.dtype.itemsize <= workspace.plane.slot_bytes
        if workspace is None or not fits or self.padding != Padding.NONE:
            return _by_library(group, route, tail, self.padding)
        number, hidden, dtype = OPS.index(op), self.hidden, self.dtype
        if tail is None:
            move: Move = lambda x, residual: route.run(number, workspace, x, None, summed)  # noqa: E731
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

        def checked(x: torch.Tensor | Partial, residual: torch.Tensor | None) -> Any:
            x = made(x)
            for given, shape in ((x, before), (residual, after)):
                if given is not None and (given.shape != shape or given.dtype != dtype):
                    refuse(op, group, f"{describe(given)} where the plan has {NAMES[dtype]}{[*shape]}")
            if group.checked:
                group.agree(f"{op} {describe(x, 0)} of rows {route.signature}")
            return move(x, residual)

        return checked

    def summed(self, rows: tuple[int, ...], held: Digits, over: Digits, tail: ResidualNorm | None, adds: bool) -> Move:
        """The sum over whole groups: products go to memory that peers read, long ones while they are still made.

        adds: whether there is a residual to add before the tail's norm."""
        all_reduce, moe_all_reduce, dtype = self.all_reduce(over), self.moe_all_reduce(over), self.dtype
        shape = (self.rows_here(rows, held), self.hidden)
        params = tail.params() if tail is not None and adds else None
        parts = overlap.worth(shape[0])

        def total(x: torch.Tensor | Partial) -> Any:
            if isinstance(x, MoePartial) and params is not None:
                asked, asked.residual = x.params, params.residual
                asked.norm_weight, asked.eps = params.norm_weight, params.eps
                return moe_all_reduce(x.input, asked)
            if isinstance(x, Partial):
                if parts and not isinstance(x, MoePartial):
                    done = overlap.product_and_sum(x.product, x.input, x.width, all_reduce, params)
                    if done is not None:
                        return done
                x = x.into(all_reduce.lend(shape, dtype))
            return all_reduce(x, params)

        if tail is None:
            return lambda x, residual: total(x)
        if params is None:
            return lambda x, residual: tail(total(x))

        def fused(x: torch.Tensor | Partial, residual: torch.Tensor) -> Any:
            params.residual = residual
            return total(x)

        return fused

    def bring(self, rows: tuple[int, ...], held: Digits | None, gather: Digits, cut: Digits) -> Callable[[Any], Any]:
        """A residual to where it is needed; held: its layout, None where there is none."""
        if held is None or not gather:
            return self.kept(rows, held or NONE, cut if held is not None else NONE)
        group, route = self.route(rows, held, NONE, gather, cut)
        move = self.moved("all_gather", group, route, False, None)
        return lambda residual: move(residual, None)

    def fold(self, owed: Digits, bring: Callable[[Any], Any], joins: bool) -> Junction:
        """Adds the residual to the part of the rank that is first of those who owe a sum; joins: bringing it moves.

        The part is made on all of them, so that no rank takes another way to sum it."""
        if all(self.radix.coordinate(self.me, digit) == 0 for digit in owed):
            return lambda x, residual: (made(x) + bring(residual), None)
        if not joins:
            return lambda x, residual: (made(x), None)

        def joined(x: Any, residual: torch.Tensor) -> tuple[Any, Any]:
            bring(residual)  # the others read mine
            return made(x), None

        return joined

    def tune(self, sums: Sequence[tuple[Digits, int]]) -> float:
        """Time the ways to make these sums, (over, rows), in an order that all ranks share. Returns the seconds."""
        calls: dict[Digits, dict[tuple[tuple[int, int], torch.dtype, AllReduceFusionOp, bool], None]] = {}
        for over, rows in sorted(sums, key=lambda one: -one[1]):
            if over not in calls and self.group(over).size > 1:  # the largest: none grows in a forward
                self.all_reduce(over).lend((rows, self.hidden), self.dtype)
            calls.setdefault(over, {})
            if not overlap.worth(rows):
                calls[over][(rows, self.hidden), self.dtype, AllReduceFusionOp.RESIDUAL_RMS_NORM, True] = None
        return sum(self.all_reduce(over).tune(calls[over]) for over in sorted(calls, key=sorted))


def chained(first: Junction, second: Junction) -> Junction:
    """One after the other."""
    return lambda x, residual: second(*first(x, residual))


def alone(move: Move) -> Junction:
    """A move of the activation, the residual staying where it is."""
    return lambda x, residual: (move(x, None), residual)


def ridden(move: Move, bring: Callable[[Any], Any], keep: Callable[[Any], Any]) -> Junction:
    """A move with a norm at its end: of the residual, brought here, and of which `keep` is what stays."""

    def step(x: Any, residual: Any) -> tuple[Any, Any]:
        x, residual = move(x, bring(residual))
        return x, keep(residual)

    return step


def norm(tail: ResidualNorm | None, bring: Callable[[Any], Any], keep: Callable[[Any], Any]) -> Junction:
    """The residual, brought here, is added and the sum normalised; keep: what stays of it. tail None: only the sum."""

    def step(x: torch.Tensor | Partial, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = made(x), bring(residual)
        if tail is None:
            total = x if residual is None else x + residual
            return total, total
        normed, total = tail(x, residual)
        return normed, keep(total)

    return step


def _by_library(group: Group, route: Route, tail: ResidualNorm | None, padding: Padding) -> Move:
    """Between hosts, for rows longer than a slot, and with padding: all rows by the library, and then those needed."""
    sizes = group.allgather_int64([route.rows])[:, 0].tolist()
    room = [max(sizes)] * len(sizes) if padding == Padding.MAX_LEN else sizes
    starts = [sum(room[:index]) for index in range(len(room))]

    def everyone(x: torch.Tensor) -> torch.Tensor:
        if padding == Padding.SUM_LEN:
            spread = x.new_zeros(sum(room), *x.shape[1:])
            spread[starts[group.rank] :][: len(x)] = x
            return library.all_reduce(spread, group)
        if len(x) < room[group.rank]:
            poison = float("nan") if group.checked else 0.0
            x = torch.cat([x, x.new_full((room[group.rank] - len(x), *x.shape[1:]), poison)])
        return library.all_gather(x, group, dim=0, sizes=room)

    def move(x: torch.Tensor | Partial, residual: torch.Tensor | None) -> Any:
        x = made(x)
        published, parts = everyone(x), []
        for piece in route.pieces:
            owed = [published[starts[s] + piece.start :][: piece.rows] for s in piece.sources]
            parts.append(owed[0] if len(owed) == 1 else torch.stack(owed).float().sum(0).to(x.dtype))
        out = torch.cat(parts) if parts else x[:0]
        return out if tail is None else tail(out, residual)

    return move
