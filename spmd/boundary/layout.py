"""The state of an activation inside one pipeline stage, and the moves that change it: sets of digits, nothing else.

A digit is a factor of the stage's rank number. The model view (tp, cp), the attention view (attn_dp, attn_tp, attn_cp)
and the expert view (moe_tp, moe_cluster, moe_ep, cp) number the same ranks; their common refinement names the digits,
and every axis is a set of them. A state is

    layout     the digits along which the rows differ from rank to rank; along all others ranks hold copies
    partial    the digits over which the values still have to be summed

Digits of size 1 do not exist, so equal states are equal sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, combinations, pairwise
from math import prod
from typing import NamedTuple

from spmd.errors import InputError
from spmd.topology.mapping import Mapping
from spmd.topology.radix import Radix

Digits = frozenset[str]
NONE: Digits = frozenset()


class State(NamedTuple):
    layout: Digits
    partial: Digits = NONE


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path. The collectives and cut:

        all_reduce(over)  reduce_scatter(over)  all_gather(gather)  cut(cut)  exchange(over, gather, cut)

    exchange: every rank publishes its rows and reads the rows it is to hold from all who owe a part of them.
    fold: one rank of each group that owes a sum adds the residual to it. norm: the residual, unless it was folded or is
    still to come, is added and the sum normalised; add: the same without a norm, at the end of a stage. For fold, norm
    and add, gather and cut are what is done to the residual first, and keep what it is cut along afterwards. rides: the
    norm is part of the collective before it.
    """

    op: str
    over: Digits = NONE
    gather: Digits = NONE
    cut: Digits = NONE
    keep: Digits = NONE
    rides: bool = False

    @property
    def moves(self) -> bool:
        """Whether it is a move of the activation itself between ranks."""
        return self.op in COLLECTIVES

    def after(self, state: State) -> State:
        """The activation's state afterwards."""
        if self.op in ("fold", "norm", "add"):
            return state
        cut = self.over if self.op == "reduce_scatter" else self.cut
        return State(state.layout - self.gather | cut, state.partial - self.over)


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "exchange")


def subsets(digits: Digits) -> Iterator[Digits]:
    """All of them, the empty one first."""
    ordered = sorted(digits)
    return map(frozenset, chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1)))


class Stage:
    """The ranks of one pipeline stage, numbered by digits.

    digits: {digit: size}, slowest first, as a Radix; axes: the digits of every axis of the views. Errors: InputError
    where two views cut the rank number so that neither boundary divides the other (2 x 3 against 3 x 2).
    """

    def __init__(self, views: dict[str, dict[str, int]]) -> None:
        cuts = {1}
        for axes in views.values():
            below = 1
            for size in reversed(axes.values()):
                below *= size
                cuts.add(below)
        ordered = sorted(cuts)
        for low, high in pairwise(ordered):
            if high % low:
                raise InputError(f"the {' and the '.join(views)} view have no common refinement: {low} and {high}")
        self.digits = Radix({f"d{low}": high // low for low, high in reversed(list(pairwise(ordered)))})
        self.axes: dict[str, Digits] = {}
        for axes in views.values():
            below = 1
            for axis, size in reversed(axes.items()):
                self.axes[axis] = frozenset(d for d in self.digits.sizes if below <= int(d[1:]) < below * size)
                below *= size
        self.every: Digits = frozenset(self.digits.sizes)

    @classmethod
    def of(cls, mapping: Mapping, experts: bool = True) -> Stage:
        """The stages of a mapping; experts: whether the expert view takes part."""
        views = {"model": mapping.model, "attention": mapping.attention}
        if experts:
            views["experts"] = mapping.experts
        return cls({name: {a: n for a, n in radix.sizes.items() if a != "pp"} for name, radix in views.items()})

    def of_axes(self, *axes: str) -> Digits:
        return NONE.union(*(self.axes[axis] for axis in axes))

    def span(self, digits: Digits) -> int:
        """Ranks that differ along these digits only."""
        return prod(self.digits.sizes[digit] for digit in digits)

    def say(self, digits: Digits) -> str:
        """The digits as the axes they make up, largest first; those of no axis by their own names."""
        said: list[str] = []
        for axis, whole in sorted(self.axes.items(), key=lambda item: -len(item[1])):
            if whole and whole <= digits:
                said, digits = [*said, axis], digits - whole
        return " x ".join(said + sorted(digits))

    def moves(self, state: State, goal: Digits, useful: Digits) -> Iterator[Step]:
        """The single steps that can be part of a cheapest path: what the goal holds apart is never gathered, and copies
        are cut only along `useful` digits, among them the goal's."""
        layout, partial = state
        copies, apart = (self.every - layout - partial) & useful, layout - goal
        for over in subsets(partial):
            if over:
                yield Step("all_reduce", over)
                yield Step("reduce_scatter", over)
        for gather in subsets(apart):
            if gather:
                yield Step("all_gather", gather=gather)
        for cut in subsets(copies):
            if cut:
                yield Step("cut", cut=cut)
        for over in subsets(partial):
            for gather in subsets(apart):
                for cut in subsets(copies | over):
                    if (over and (gather or (cut and cut != over))) or (gather and cut):
                        yield Step("exchange", over, gather, cut)


class ScatterMode(Enum):
    """The layouts that have a name, as SGLang calls them: who holds the same rows."""

    SCATTERED = "scattered"  # nobody: every rank its own
    TP_ATTN_FULL = "tp_attn_full"  # the ranks that attend together
    FULL = "full"  # all

    def layout(self, stage: Stage) -> Digits:
        if self == ScatterMode.SCATTERED:
            return stage.every
        return stage.of_axes("attn_dp") if self == ScatterMode.TP_ATTN_FULL else NONE

    def group_size(self, mapping: Mapping) -> int:
        """Ranks that hold the same rows: 1, attn_tp or tp."""
        return {"SCATTERED": 1, "TP_ATTN_FULL": mapping.attn_tp_size, "FULL": mapping.tp_size}[self.name]

    @classmethod
    def of(cls, stage: Stage, layout: Digits) -> ScatterMode | None:
        """The name of a layout; None where it has none. Where two coincide, the one with more holders."""
        return next((mode for mode in reversed(list(cls)) if mode.layout(stage) == layout), None)
