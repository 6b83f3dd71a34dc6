"""The state of an activation inside one pipeline stage, and the moves that change it: sets of digits, nothing else.

Digits: see `topology.stage`. A state is

    layout     the digits along which the rows differ from rank to rank; along all others ranks hold copies
    partial    the digits over which the values still have to be summed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, combinations, product
from typing import NamedTuple

from spmd.topology.mapping import Mapping
from spmd.topology.stage import NONE, Digits, Stage


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

    @property
    def shifts(self) -> bool:
        """Whether it is a step of the activation alone: a move or a cut."""
        return self.moves or self.op == "cut"

    def after(self, state: State) -> State:
        """The activation's state afterwards."""
        if not self.shifts:
            return state
        cut = self.over if self.op == "reduce_scatter" else self.cut
        return State(state.layout - self.gather | cut, state.partial - self.over)

    def apply(self, state: State, where: Digits | None) -> tuple[State, Digits | None]:
        """The activation's state and the residual's layout afterwards; None: there is none, or it was folded."""
        if self.shifts:
            return self.after(state), where
        return state, None if self.op == "fold" else state.layout | self.keep


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "exchange")


def subsets(digits: Digits) -> Iterator[Digits]:
    """All of them, the empty one first."""
    ordered = sorted(digits)
    return map(frozenset, chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1)))


def move(over: Digits, gather: Digits, cut: Digits) -> Step:
    """The one step that does all of it."""
    if over and not gather and cut in (NONE, over):
        return Step("reduce_scatter" if cut else "all_reduce", over)
    if not over and not (gather and cut):
        return Step("all_gather", gather=gather) if gather else Step("cut", cut=cut)
    return Step("exchange", over, gather, cut)


def moves(stage: Stage, state: State, goal: Digits, useful: Digits) -> Iterator[Step]:
    """The single steps that can be part of a cheapest path: what the goal holds apart is never gathered, and copies
    are cut only along `useful` digits, among them the goal's."""
    copies = (stage.every - state.layout - state.partial) & useful
    for over, gather in product(subsets(state.partial), subsets(state.layout - goal)):
        yield from (move(over, gather, cut) for cut in subsets(copies | over) if over or gather or cut)


class ScatterMode(Enum):
    """The layouts that have a name, as SGLang calls them: who holds the same rows."""

    SCATTERED = "scattered"  # nobody: every rank its own
    TP_ATTN_FULL = "tp_attn_full"  # the ranks that attend together
    FULL = "full"  # all

    def layout(self, stage: Stage) -> Digits:
        return {"SCATTERED": stage.every, "TP_ATTN_FULL": stage.of_axes("attn_dp"), "FULL": NONE}[self.name]

    def group_size(self, mapping: Mapping) -> int:
        """Ranks that hold the same rows: 1, attn_tp or tp."""
        return {"SCATTERED": 1, "TP_ATTN_FULL": mapping.attn_tp_size, "FULL": mapping.tp_size}[self.name]

    @classmethod
    def of(cls, stage: Stage, layout: Digits) -> ScatterMode | None:
        """The name of a layout; None where it has none. Where two coincide, the one with more holders."""
        return next((mode for mode in reversed(list(cls)) if mode.layout(stage) == layout), None)
