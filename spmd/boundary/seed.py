"""policy="seed": the choices that SGLang's LayerCommunicator makes, junction by junction, as paths of the same steps.

What is pinned: the residual is kept in attention layout, or scattered around MLPs that take scattered rows; the norm
before attention is done where the block before left the rows; before an MLP of whole rows it is done on the small side
if a rank owns its rows alone, else after the residual has been folded into the sum in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.boundary.layout import State, Step
from spmd.boundary.plan import Block, Boundary, Middle, Options, Path
from spmd.topology.stage import Digits


def stack(
    boundary: Boundary, blocks: Sequence[tuple[Block, Block]], start: State, goal: Digits, options: Options, end: Middle
) -> list[Path]:
    """As `plan.stack`."""
    paths: list[Path] = []
    state, residual = start, None
    for attention, block in blocks:
        to_attention = _to_attention(boundary, state, attention.takes, residual, "norm", options.defer_mlp_sum)
        paths.append(Path(state, residual, to_attention))
        _, residual = paths[-1].states()[-1]
        paths.append(Path(attention.leaves, residual, _to_mlp(boundary, attention.leaves, block, residual)))
        state, (_, residual) = block.leaves, paths[-1].states()[-1]
    return [*paths, Path(state, residual, _to_attention(boundary, state, goal, residual, end, options.defer_mlp_sum))]


def _with(op: str, layout: Digits, residual: Digits | None, rides: bool = False) -> Step:
    """A norm, fold or add in this layout, the residual brought there first."""
    where = layout if residual is None else residual
    return Step(op, gather=where - layout, cut=layout - where, rides=rides)


def _to_attention(
    boundary: Boundary, state: State, home: Digits, residual: Digits | None, middle: Middle, ride: bool
) -> tuple[Step, ...]:
    """From a block's output: finish its sum, cut what is whole, norm, gather what is scattered."""
    steps: list[Step] = []
    layout, owed = state
    alone = owed == home == boundary.stage.every  # a rank owns its rows alone
    if owed and (layout or alone):  # layout: what experts by all-to-all leave
        steps.append(Step("reduce_scatter", owed))
        layout = layout | owed
    elif owed:
        steps.append(Step("all_reduce", owed))
    if home - layout:
        steps.append(Step("cut", cut=home - layout))
        layout = layout | home
    rides = ride and middle == "norm" and bool(steps) and steps[-1].moves
    return (*steps, _with(middle, layout, residual, rides), *_regroup(layout, home))


def _to_mlp(boundary: Boundary, state: State, block: Block, residual: Digits | None) -> tuple[Step, ...]:
    """From attention's output, whose sum is owed over attn_tp."""
    (home, owed), goal = state, block.takes
    if block.scattered:  # on 1/attn_tp of the rows
        first = (Step("reduce_scatter", owed),) if owed else ()
        return (*first, _with("norm", home | owed, residual, bool(owed)), *_regroup(home | owed, goal))
    if home <= goal and owed <= boundary.stage.every - goal:  # nothing to gather
        first = (Step("all_reduce", owed),) if owed else ()
        return (*first, _with("norm", home, residual, bool(owed)), *_regroup(home, goal))
    if not owed:
        return (_with("norm", home, residual), *_regroup(home, goal))
    fold = _with("fold", home, residual)
    whole = Step("exchange", owed, gather=home - goal, cut=goal - home)
    return (fold, whole, Step("norm", keep=home - goal, rides=True))


def _regroup(layout: Digits, goal: Digits) -> tuple[Step, ...]:
    gather = (Step("all_gather", gather=layout - goal),) if layout - goal else ()
    cut = (Step("cut", cut=goal - layout),) if goal - layout else ()
    return gather + cut
