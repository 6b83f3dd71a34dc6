"""policy="seed": the choices that SGLang's LayerCommunicator makes, junction by junction, as paths of the same steps.

What is pinned: the residual is kept in attention layout, or scattered around MLPs that take scattered rows; the norm
before attention is done where the block before left the rows; before an MLP of whole rows it is done on the small side
if a rank owns its rows alone, else after the residual has been folded into the sum in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spmd.boundary.layout import State, Step
from spmd.boundary.plan import Boundary, Options, needs
from spmd.topology.mapping import Mapping
from spmd.topology.stage import Digits


def stack(
    boundary: Boundary,
    mapping: Mapping,
    kinds: Sequence[str],
    options: Options,
    start: State,
    end: Literal["norm", "add"],
) -> tuple[list[tuple[Step, ...]], list[Digits | None]]:
    """As `plan.stack`."""
    stage = boundary.stage
    attention = needs(stage, mapping, "attention", options)
    home, state, residual = attention.takes, start, None
    paths: list[tuple[Step, ...]] = []
    residuals: list[Digits | None] = []
    for kind in kinds:
        block = needs(stage, mapping, kind, options)
        scattered = options.dense_dp if kind == "dense" else options.a2a or mapping.dwdp_size > 1
        residuals.append(residual)
        first, residual = _to_attention(boundary, state, home, residual, "norm", options.defer_mlp_sum)
        residuals.append(residual)
        second, residual = _to_mlp(boundary, attention.leaves, block.takes, residual, scattered)
        paths += [first, second]
        state = block.leaves
    residuals.append(residual)
    paths.append(_to_attention(boundary, state, home, residual, end, options.defer_mlp_sum)[0])
    return paths, residuals


def _with(op: str, layout: Digits, residual: Digits | None, rides: bool = False) -> Step:
    """A norm, fold or add in this layout, the residual brought there first."""
    where = layout if residual is None else residual
    return Step(op, gather=where - layout, cut=layout - where, rides=rides)


def _to_attention(
    boundary: Boundary, state: State, home: Digits, residual: Digits | None, middle: Literal["norm", "add"], ride: bool
) -> tuple[tuple[Step, ...], Digits]:
    """From a block's output: finish its sum, cut what is whole, norm, gather what is scattered."""
    steps: list[Step] = []
    layout, owed = state
    if owed and home <= owed and owed == boundary.stage.every and home == boundary.stage.every:
        steps.append(Step("reduce_scatter", owed))  # a rank owns its rows alone
        layout = home
    elif owed and layout:
        steps.append(Step("reduce_scatter", owed))  # what experts by all-to-all leave
        layout = layout | owed
    elif owed:
        steps.append(Step("all_reduce", owed))
    if home - layout:
        steps.append(Step("cut", cut=home - layout))
        layout = layout | home
    rides = ride and middle == "norm" and bool(steps) and steps[-1].moves
    steps.append(_with(middle, layout, residual, rides))
    if layout - home:
        steps.append(Step("all_gather", gather=layout - home))
    return tuple(steps), layout


def _to_mlp(
    boundary: Boundary, state: State, goal: Digits, residual: Digits | None, scattered: bool
) -> tuple[tuple[Step, ...], Digits]:
    """From attention's output, whose sum is owed over attn_tp."""
    home, owed = state
    if scattered:  # on 1/attn_tp of the rows
        layout = home | owed
        first = (Step("reduce_scatter", owed),) if owed else ()
        norm = _with("norm", layout, residual, bool(owed))
        rest = (Step("all_gather", gather=layout - goal),) if layout - goal else ()
        return (*first, norm, *rest), layout
    if home <= goal and owed <= boundary.stage.every - goal:  # nothing to gather
        first = (Step("all_reduce", owed),) if owed else ()
        norm = _with("norm", home, residual, bool(owed))
        rest = (Step("cut", cut=goal - home),) if goal - home else ()
        return (*first, norm, *rest), home
    if not owed:
        norm = _with("norm", home, residual)
        return (norm, *_regroup(home, goal)), home
    fold = _with("fold", home, residual)
    whole = Step("exchange", owed, gather=home - goal, cut=goal - home)
    return (fold, whole, Step("norm", keep=home - goal, rides=True)), home | goal


def _regroup(layout: Digits, goal: Digits) -> tuple[Step, ...]:
    gather = (Step("all_gather", gather=layout - goal),) if layout - goal else ()
    cut = (Step("cut", cut=goal - layout),) if goal - layout else ()
    return gather + cut
