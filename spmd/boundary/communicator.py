"""Binds a plan to callables: per layer three junctions, per batch of given row counts, made once and then only called.

communicator = StageCommunicator(mapping, kinds, norms, hidden, dtype, ...)     collective: makes the groups
step = communicator.begin(counts)                                               rows of every attention group
x, residual = step.start(x)
for layer in step.layers:
    x, residual = layer.prepare_attn(x, residual)      -> attention(x), a Partial
    x, residual = layer.prepare_mlp(x, residual)       -> mlp(x), a Partial
    x, residual = layer.postprocess_layer(x, residual)
x, residual = step.finish(x, residual)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dict
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch

from spmd.boundary.layout import State, Step
from spmd.boundary.plan import Batch, Costs, LayerPlan, Options, Plan, plan
from spmd.collectives import overlap
from spmd.collectives.epilogue import ResidualNorm
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.moves import RowMoves
from spmd.control.distributed import Distributed
from spmd.memory.workspace import Workspace
from spmd.topology.mapping import Mapping
from spmd.topology.rows import rows_held
from spmd.topology.stage import NONE, Digits

Junction = Callable[[Any, Any], tuple[Any, Any]]
Bring = Callable[[Any], Any]  # the residual to where it is needed
CLASSES = (1, 4, 16, 64, 256, 1024, 4096, 16384)  # rows of a stage: a plan for batches up to each


class Partial:
    """This rank's part of a sum that is still owed, as a value: the product that makes it and its input.

    `into(out)` makes it, in memory that the sum is then read from. rows: of it; width: of a row.
    """

    __slots__ = ("input", "product", "width")

    def __init__(self, product: Callable[..., torch.Tensor], input: torch.Tensor, width: int) -> None:
        self.product, self.input, self.width = product, input, width

    def into(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.product(self.input, out=out)


def made(x: torch.Tensor | Partial) -> torch.Tensor:
    """The rows themselves, one after the other in memory: kernels take their address."""
    return (x.into() if isinstance(x, Partial) else x).contiguous()


def nothing(x: Any, residual: Any) -> tuple[Any, Any]:
    """A junction without steps."""
    return x, residual


def chained(parts: Sequence[Junction]) -> Junction:
    """One after the other."""

    def both(first: Junction, second: Junction) -> Junction:
        return lambda x, residual: second(*first(x, residual))

    return reduce(both, parts) if parts else nothing


class Binder(RowMoves):
    """Turns steps into callables for one stage, whose rows it is told."""

    def regroup(self, rows: tuple[int, ...], where: Digits, step: Step) -> Bring:
        """What a norm, a fold or the end of a stage does to the residual first."""
        if step.gather:
            group, route = self.route(rows, where, NONE, step.gather, step.cut)
            move = self.moved("all_gather", group, route, False, None)
            return lambda residual: move(residual, None)
        return self.kept(rows, where, step.cut) if step.cut else lambda residual: residual

    def bind(
        self,
        steps: Sequence[Step],
        state: State,
        where: Digits | None,
        tail: ResidualNorm | None,
        rows: tuple[int, ...],
    ) -> Junction:
        """The steps as one callable (x, residual) -> (x, residual). where: the residual's layout on entering."""
        parts: list[Junction] = []
        at = 0
        while at < len(steps):
            step = steps[at]
            after = steps[at + 1] if at + 1 < len(steps) else None
            rider = after if after is not None and after.rides else None
            if step.op == "fold":
                assert where is not None
                parts.append(self._fold(rows, where, step, state))
                where = None
            elif step.moves or step.op == "cut":
                parts.append(self._move(rows, state, step, rider, where, tail))
                state = step.after(state)
                if rider is not None:
                    where, at = state.layout | rider.keep, at + 1
            else:
                parts.append(self._norm(rows, state, step, where, tail if step.op == "norm" else None))
                where = state.layout | step.keep
            at += 1
        return chained(parts)

    def _fold(self, rows: tuple[int, ...], where: Digits, step: Step, state: State) -> Junction:
        bring = self.regroup(rows, where, step)
        if all(self.radix.coordinate(self.me, digit) == 0 for digit in state.partial):
            return lambda x, residual: (made(x) + bring(residual), None)
        if not step.gather:
            return lambda x, residual: (x, None)

        def joins(x: Any, residual: torch.Tensor) -> tuple[Any, Any]:
            bring(residual)  # the others read mine
            return x, None

        return joins

    def _norm(
        self, rows: tuple[int, ...], state: State, step: Step, where: Digits | None, tail: ResidualNorm | None
    ) -> Junction:
        """tail: the norm; None: the sum alone."""
        bring = nothing_to_bring if where is None else self.regroup(rows, where, step)
        keep = self.kept(rows, state.layout, step.keep) if step.keep else None

        def norm(x: Any, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x = made(x)
            residual = bring(residual)
            if tail is None:
                total = x if residual is None else x + residual
                return total, total
            normed, total = tail(x, residual)
            return normed, total if keep is None else keep(total)

        return norm

    def _move(
        self,
        rows: tuple[int, ...],
        state: State,
        step: Step,
        rider: Step | None,
        where: Digits | None,
        tail: ResidualNorm | None,
    ) -> Junction:
        if step.op == "cut":
            part = self.kept(rows, state.layout, step.cut)
            return lambda x, residual: (part(made(x)), residual)
        layout = step.after(state).layout
        bring = nothing_to_bring if rider is None or where is None else self.regroup(rows, where, rider)
        keep = self.kept(rows, layout, rider.keep) if rider is not None and rider.keep else None
        if step.op == "all_reduce":
            junction = self._all_reduce(
                rows, state, step, tail if rider is not None else None, where is not None, bring
            )
        else:
            cut = step.over if step.op == "reduce_scatter" else step.cut
            group, route = self.route(rows, state.layout, step.over, step.gather, cut)
            move = self.moved(step.op, group, route, bool(step.over), tail if rider is not None else None)
            if rider is None:
                junction = lambda x, residual: (move(made(x), None), residual)  # noqa: E731
            else:
                junction = lambda x, residual: move(made(x), bring(residual))  # noqa: E731
        if keep is None:
            return junction

        def kept(x: Any, residual: Any) -> tuple[Any, Any]:
            x, residual = junction(x, residual)
            return x, keep(residual)

        return kept

    def _all_reduce(
        self,
        rows: tuple[int, ...],
        state: State,
        step: Step,
        tail: ResidualNorm | None,
        adds: bool,
        bring: Bring,
    ) -> Junction:
        """The sum over whole groups: products go to memory that peers read, long ones while they are still made."""
        all_reduce, shape, dtype = (
            self.all_reduce(step.over),
            (self.rows_here(rows, state.layout), self.hidden),
            self.dtype,
        )
        params = tail.params() if tail is not None and adds else None
        parts = overlap.worth(shape[0])

        def summed(x: torch.Tensor | Partial) -> Any:
            if isinstance(x, Partial):
                if parts:
                    done = overlap.product_and_sum(x.product, x.input, x.width, all_reduce, params)
                    if done is not None:
                        return done
                x = x.into(all_reduce.lend(shape, dtype))
            return all_reduce(x, params)

        if tail is None:
            return lambda x, residual: (summed(x), residual)
        if params is None:
            return lambda x, residual: tail(summed(x))

        def fused(x: torch.Tensor | Partial, residual: torch.Tensor) -> Any:
            params.residual = bring(residual)
            return summed(x)

        return fused


def nothing_to_bring(residual: Any) -> Any:
    """There is no residual yet, or it was folded in, or it is where it is needed."""
    return residual


class LayerCommunicator:
    """What one layer calls: `prepare_attn`, `prepare_mlp`, `postprocess_layer`, each (x, residual) -> (x, residual).

    Bound from the layer's plan; the calls decide nothing. x: rows [held here, hidden], or a Partial where a sum is
    owed; residual: rows in the layout that the plan keeps them in. Every rank of a stage calls the same junctions in
    the same order, also with no rows. sizes: the rows that the MLP gets on the ranks that share its experts.
    `hidden(residual)`, after prepare_attn: the finished hidden state that entered the layer, a copy, on every rank the
    rows of its attention group; all ranks call it or none.
    """

    __slots__ = ("hidden", "postprocess_layer", "prepare_attn", "prepare_mlp", "sizes")

    def __init__(
        self,
        binder: Binder,
        layer: LayerPlan,
        arrives: State,
        residual: Digits | None,
        norms: tuple[ResidualNorm, ResidualNorm],
        rows: tuple[int, ...],
    ) -> None:
        """arrives, residual: the states on entering; norms: before attention, before the MLP."""
        between, home = after_steps(layer.prepare_attn, arrives, residual), layer.attn.layout
        assert between is not None
        whole = binder.regroup(rows, between, Step("norm", gather=between - home, cut=home - between))
        self.hidden: Callable[[torch.Tensor], torch.Tensor] = lambda residual: whole(residual).clone()
        self.prepare_attn = binder.bind(layer.prepare_attn, arrives, residual, norms[0], rows)
        self.prepare_mlp = binder.bind(layer.prepare_mlp, layer.attn, between, norms[1], rows)
        where = after_steps(layer.prepare_mlp, layer.attn, between)
        self.postprocess_layer = binder.bind(layer.postprocess, layer.mlp, where, None, rows)
        members = binder.radix.group(binder.me, *binder.stage.axes.get("moe_ep", NONE))
        takes = layer.mlp.layout  # blocks give their rows back where they got them
        self.sizes = [rows_held(binder.radix, member, rows, takes, binder.radix) for member in members]


def after_steps(steps: Sequence[Step], state: State, where: Digits | None) -> Digits | None:
    """Where the residual is after these steps."""
    for step in steps:
        state = step.after(state)
        if step.op == "fold":
            where = None
        elif step.op in ("norm", "add"):
            where = state.layout | step.keep
    return where


@dataclass
class Bound:
    """A plan for given row counts: the layers' junctions, and what follows the last one."""

    layers: list[LayerCommunicator]
    finish: Junction
    embedding_owed: bool  # whether the first junction makes the sum that the embedding is


class StageCommunicator:
    """The junctions of a stage's layers. Collective over the stage's ranks: all groups are made here.

    norms: two for every layer, in order, and the model's last one on the last stage. plans: by CLASSES, one for each
    size of batch; the forward picks by the rows of the step.
    """

    def __init__(
        self,
        mapping: Mapping,
        kinds: Sequence[str],
        norms: Sequence[ResidualNorm],
        hidden: int,
        dtype: torch.dtype,
        options: Options | None = None,
        policy: Literal["cost", "seed"] = "cost",
        costs: Costs | None = None,
    ) -> None:
        self.mapping, self.norms = mapping, list(norms)
        last = len(norms) % 2 == 1
        found: dict[tuple[object, ...], Plan] = {}
        self.plans: Dict[int, Plan] = {}
        for rows in CLASSES:
            batch = Batch(rows, hidden * dtype.itemsize)
            one = plan(mapping, kinds, batch, costs, options, policy, last=last)
            self.plans[rows] = found.setdefault((one.layers, one.finish), one)
        self.binder = Binder(mapping, self.plans[CLASSES[0]].stage, hidden, dtype)
        for digits in sorted({digits for one in found.values() for digits in used(one)}, key=sorted):
            Workspace.of(self.binder.group(digits))
        self._control = Distributed.get(mapping).group("attn_dp") if mapping.attn_dp_size > 1 else None
        self._bound: dict[tuple[int, ...], Bound] = {}

    def agree(self, *numbers: int) -> tuple[tuple[int, ...], ...]:
        """What every attention group has of each number, from this rank's; on the control plane, once a step."""
        if self._control is None:
            return tuple((number,) for number in numbers)
        return tuple(map(tuple, self._control.allgather_int64(numbers).T.tolist()))

    def plan_for(self, rows: int) -> Plan:
        """The plan of a batch of so many rows in all groups together."""
        return self.plans[next((size for size in CLASSES if rows <= size), CLASSES[-1])]

    def begin(self, counts: tuple[int, ...]) -> Bound:
        """The junctions for these rows of the attention groups; kept for the next step with the same."""
        bound = self._bound.get(counts)
        if bound is None:
            if len(self._bound) >= 64:  # prompts of many lengths
                self._bound.clear()
            bound = self._bound[counts] = self._bind(counts)
        return bound

    def tune(self, steps: Sequence[tuple[int, ...]]) -> float:
        """Time the ways in which the all-reduces of such steps, by the rows of the attention groups, can be done: in a
        warm-up, collective over the stage. Returns the seconds it took, 0 where all is known."""
        calls: dict[Digits, dict[tuple[tuple[int, int], torch.dtype, AllReduceFusionOp, bool], None]] = {}
        largest = max(steps, key=sum)
        for counts in steps:
            rows = self.binder.rows_of(counts)
            for digits, layout in all_reduces(self.plan_for(sum(counts))):
                shape = (self.binder.rows_here(rows, layout), self.binder.hidden)
                if counts == largest and self.binder.group(digits).size > 1:
                    self.binder.all_reduce(digits).lend(shape, self.binder.dtype)  # none grows in a forward
                if not overlap.worth(shape[0]):
                    call = (shape, self.binder.dtype, AllReduceFusionOp.RESIDUAL_RMS_NORM, True)
                    calls.setdefault(digits, {})[call] = None
        return sum(self.binder.all_reduce(digits).tune(of) for digits, of in sorted(calls.items(), key=_name))

    def _bind(self, counts: tuple[int, ...]) -> Bound:
        chosen, binder = self.plan_for(sum(counts)), self.binder
        rows = binder.rows_of(counts)
        state, where, layers = chosen.start, None, []
        for index, layer in enumerate(chosen.layers):
            norms = (self.norms[2 * index], self.norms[2 * index + 1])
            layers.append(LayerCommunicator(binder, layer, state, where, norms, rows))
            where = after_steps(layer.prepare_attn, state, where)
            where = after_steps(layer.prepare_mlp, layer.attn, where)
            where = after_steps(layer.postprocess, layer.mlp, where)
            state = layer.layer_output
        tail = self.norms[-1] if len(self.norms) % 2 else None
        finish = binder.bind(chosen.finish, state, where, tail, rows)
        return Bound(layers, finish, bool(chosen.start.partial))


def _name(item: tuple[Digits, object]) -> list[str]:
    return sorted(item[0])


def all_reduces(one: Plan) -> list[tuple[Digits, Digits]]:
    """(over, layout) of a plan's all-reduces, the distinct ones, in an order that all ranks share."""
    found = set()
    for layer in one.layers:
        for begin, path in ((layer.attn, layer.prepare_mlp), (layer.mlp, layer.postprocess + one.finish)):
            state = begin
            for step in path:
                if step.op == "all_reduce":
                    found.add((step.over, state.layout))
                state = step.after(state)
    return sorted(found, key=lambda pair: [sorted(part) for part in pair])


def used(one: Plan) -> set[Digits]:
    """The groups of ranks that a plan's steps take place in."""
    steps = [step for layer in one.layers for path in layer.junctions.values() for step in path]
    found = {step.over | step.gather for step in [*steps, *one.finish]}
    return found - {NONE}
