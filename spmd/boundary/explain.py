"""A plan as a table: for every distinct layer its states, and for every junction its steps, groups and bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import groupby, zip_longest
from typing import NamedTuple

from spmd.boundary.layout import ScatterMode, State, Step
from spmd.boundary.plan import Batch, Boundary, LayerPlan, Path, Plan
from spmd.collectives.costs import Costs
from spmd.topology.stage import NONE, Digits, Stage

BYTES = Costs(latency=0, per_rank=0, host=0, byte=1, host_byte=1, norm_byte=0, copy_byte=0)


class Line(NamedTuple):
    """One step: what it is, the axes whose ranks take part, the rows before and after on a rank if all hold as many,
    the bytes that reach a rank for every token of the batch, and what else is done in the same call."""

    step: str
    group: str
    rows: str
    bytes_per_token: float
    fused: str


def layout_name(stage: Stage, state: State | Digits) -> str:
    """ "attn_dp: TP_ATTN_FULL, sum over attn_tp"."""
    layout, partial = state if isinstance(state, State) else (state, NONE)
    mode = ScatterMode.of(stage, layout)
    name = mode.name if mode else f"by {stage.say(layout)}"
    return name + (f", sum over {stage.say(partial)}" if partial else "")


def describe(stage: Stage, step: Step) -> str:
    """all_reduce(tp), exchange(sum attn_tp, gather attn_dp), norm(residual cut attn_tp)."""
    if step.shifts and step.op != "exchange":
        return f"{step.op}({stage.say(step.over | step.gather | step.cut)})"
    parts = {"sum": step.over, "gather": step.gather, "cut": step.cut, "then cut": step.keep}
    said = ", ".join(f"{how} {stage.say(digits)}" for how, digits in parts.items() if digits)
    return f"{step.op}({'residual ' * (not step.shifts)}{said})" if said else step.op


def lines(stage: Stage, batch: Batch, path: Path) -> Iterator[Line]:
    """The steps of a junction."""
    price = Boundary(stage, batch, BYTES).price
    for (step, state, _), after in zip_longest(path.walk(), path.steps[1:]):
        held = [batch.rows // stage.span(of.layout) for of in (state, step.after(state))]
        fused = after.op if after is not None and after.rides else "previous" if step.rides else ""
        moved = price(step, state) / max(batch.rows, 1) if step.moves or step.gather else 0.0
        group = stage.say(step.over | step.gather)
        yield Line(describe(stage, step), group, f"{held[0]} -> {held[1]}", moved, fused)


def ranges(numbers: list[int]) -> str:
    """0-3, 5, 7-9."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def text(plan: Plan, first: int = 0) -> str:
    """The whole plan. first: the number of its first layer in the model."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=160, no_color=True)
    stage, batch = plan.stage, plan.batch
    digits = ", ".join(f"{axis} {stage.span(of)}" for axis, of in stage.axes.items() if of)
    console.print(
        f"policy {plan.policy}, {batch.rows} rows of {batch.row_bytes} bytes, cost {plan.cost:.0f} us a forward"
    )
    console.print(f"ranks of a stage {stage.digits.size}: {digits or 'one'}")
    seen: dict[LayerPlan, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        seen.setdefault(layer, []).append(first + index)
    parts = [(f"layer{'s' * (len(at) > 1)} {ranges(at)}, {of.kind}", of, of.junctions) for of, at in seen.items()]
    for name, of, junctions in [*parts, ("end", None, {"finish": plan.finish})]:
        console.print(f"\n{name}")
        for state, found in of.states._asdict().items() if of else ():
            console.print(f"  {state:16} {layout_name(stage, found)}")
        table = Table("junction", "step", "group", "rows", "bytes per token", "fused with", box=None, padding=(0, 1))
        for junction, path in junctions.items():
            head = "postprocess_layer" if junction == "postprocess" else junction
            for line in list(lines(stage, batch, path)) or [Line("nothing", "", "", 0.0, "")]:
                moved = f"{line.bytes_per_token:.0f}" if line.rows else ""
                table.add_row(head, line.step, line.group, line.rows, moved, line.fused)
                head = ""
        console.print(table)
    return out.getvalue()
