"""A plan as a table: for every distinct layer its states, and for every junction its steps, groups and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from spmd.boundary.layout import ScatterMode, State, Step
from spmd.boundary.plan import Batch, Boundary, Costs, LayerPlan, Plan
from spmd.topology.stage import Digits, Stage


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
    layout, partial = state if isinstance(state, State) else (state, frozenset())
    mode = ScatterMode.of(stage, layout)
    name = mode.name if mode else f"by {stage.say(layout)}"
    return name + (f", sum over {stage.say(partial)}" if partial else "")


def describe(stage: Stage, step: Step) -> str:
    """all_reduce(tp), exchange(sum attn_tp, gather attn_dp), norm(residual cut attn_tp)."""
    if step.op in ("fold", "norm", "add"):
        of = {"gather": step.gather, "cut": step.cut, "then cut": step.keep}
        said = ", ".join(f"{how} {stage.say(digits)}" for how, digits in of.items() if digits)
        return f"{step.op}(residual {said})" if said else step.op
    if step.op == "exchange":
        of = {"sum": step.over, "gather": step.gather, "cut": step.cut}
        return f"exchange({', '.join(f'{how} {stage.say(digits)}' for how, digits in of.items() if digits)})"
    return f"{step.op}({stage.say(step.over | step.gather | step.cut)})"


def lines(stage: Stage, batch: Batch, steps: tuple[Step, ...], state: State) -> Iterator[Line]:
    """The steps of a junction that begins in a state."""
    for step, after in zip_longest(steps, steps[1:]):
        end = step.after(state)
        group = stage.say(step.over | step.gather) if step.moves else stage.say(step.gather)
        held = [batch.rows // stage.span(layout) for layout in (state.layout, end.layout)]
        fused = after.op if after is not None and after.rides else "previous" if step.rides else ""
        yield Line(describe(stage, step), group, f"{held[0]} -> {held[1]}", moved(stage, batch, step, state), fused)
        state = end


def moved(stage: Stage, batch: Batch, step: Step, state: State) -> float:
    """Bytes that a step brings to a rank, for every token of the batch."""
    if not (step.moves or step.gather):
        return 0.0
    price = Costs(latency=0, per_rank=0, host=0, byte=1, host_byte=1, norm_byte=0, copy_byte=0)
    return Boundary(stage, batch, price).price(step, state) / max(batch.rows, 1)


def parts(
    plan: Plan, first: int = 0
) -> Iterator[tuple[str, list[tuple[str, State, tuple[Step, ...]]], dict[str, State | Digits]]]:
    """For every distinct layer, and the end: its name, its junctions with their first states, its five states."""
    seen: dict[LayerPlan, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        seen.setdefault(layer, []).append(first + index)
    start = plan.start
    for layer, at in seen.items():
        before = plan.layers[at[0] - first - 1].layer_output if at[0] > first else start
        name = f"layer{'s' * (len(at) > 1)} {ranges(at)}, {layer.kind}"
        junctions = [
            ("prepare_attn", before, layer.prepare_attn),
            ("prepare_mlp", layer.attn, layer.prepare_mlp),
            ("postprocess_layer", layer.mlp, layer.postprocess),
        ]
        states: dict[str, State | Digits] = {
            "layer_input": layer.layer_input,
            "attn": layer.attn,
            "mlp": layer.mlp,
            "middle_residual": layer.middle_residual,
            "layer_output": layer.layer_output,
        }
        yield name, junctions, states
    last = plan.layers[-1].layer_output if plan.layers else start
    yield "end", [("finish", last, plan.finish)], {}


def ranges(numbers: list[int]) -> str:
    """0-3, 5, 7-9."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def text(plan: Plan, first: int = 0) -> str:
    """The whole plan. first: the number of its first layer in the model."""
    import io

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
    for name, junctions, states in parts(plan, first):
        console.print(f"\n{name}")
        for state_name, state in states.items():
            console.print(f"  {state_name:16} {layout_name(stage, state)}")
        table = Table("junction", "step", "group", "rows", "bytes per token", "fused with", box=None, padding=(0, 1))
        for junction, state, steps in junctions:
            found = list(lines(stage, batch, steps, state))
            for i, line in enumerate(found):
                head = junction if i == 0 else ""
                table.add_row(head, line.step, line.group, line.rows, f"{line.bytes_per_token:.0f}", line.fused)
            if not found:
                table.add_row(junction, "nothing", "", "", "", "")
        console.print(table)
    return out.getvalue()
