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
from itertools import product, zip_longest
from typing import Literal

import torch

from spmd.boundary.layout import State, Step
from spmd.boundary.plan import Batch, LayerPlan, Options, Path, Plan, needs, plan
from spmd.collectives.costs import Costs
from spmd.collectives.epilogue import ResidualNorm
from spmd.collectives.moves import Junction, Move, Padding, RowMoves, alone, chained, norm, ridden
from spmd.collectives.overlap import made
from spmd.memory.workspace import Workspace
from spmd.topology.mapping import CpType, Mapping
from spmd.topology.stage import NONE

CLASSES = (1, 4, 16, 64, 256, 1024, 4096, 16384)  # rows of a stage: a plan for batches up to each


class Binder(RowMoves):
    """Turns paths into callables (x, residual) -> (x, residual) for one stage, whose rows it is told."""

    def bind(self, path: Path, tail: ResidualNorm | None, rows: tuple[int, ...]) -> Junction:
        """tail: of its norm; None: only the sum is made."""
        parts: list[Junction] = []
        for (step, state, where), after in zip_longest(found := list(path.walk()), found[1:]):
            if step.rides:
                continue  # it was done with the collective before it
            rides = after is not None and after[0].rides
            final = after[0] if rides else step
            bring = self.bring(rows, where, NONE if step.shifts and not rides else final.gather, final.cut)
            keep = self.kept(rows, step.after(state).layout, final.keep)
            if step.op == "fold":
                parts.append(self.fold(state.partial, bring, bool(step.gather)))
            elif not step.shifts:
                parts.append(norm(tail if step.op == "norm" else None, bring, keep))
            elif rides:
                parts.append(ridden(self._move(rows, step, state, tail, where is not None), bring, keep))
            else:
                parts.append(alone(self._move(rows, step, state, None, False)))
        return reduce(chained, parts) if parts else lambda x, residual: (x, residual)

    def _move(self, rows: tuple[int, ...], step: Step, state: State, tail: ResidualNorm | None, adds: bool) -> Move:
        """The activation's; tail: the norm that is part of it, of what a residual is added to or not."""
        if step.op == "cut":
            part = self.kept(rows, state.layout, step.cut)
            return lambda x, residual: part(made(x))
        if step.op == "all_reduce":
            return self.summed(rows, state.layout, step.over, tail, adds)
        cut = step.over if step.op == "reduce_scatter" else step.cut
        return self.moved(step.op, *self.route(rows, state.layout, step.over, step.gather, cut), bool(step.over), tail)


class LayerCommunicator:
    """What one layer calls: `prepare_attn`, `prepare_mlp`, `postprocess_layer`, each (x, residual) -> (x, residual).

    Bound from the layer's plan; the calls decide nothing. x: rows [held here, hidden], or a Partial where a sum is
    owed; residual: rows in the layout that the plan keeps them in. Every rank of a stage calls the same junctions in
    the same order, also with no rows. sizes: the rows that the MLP gets on the ranks that share its experts; latents:
    those that attention gets on the ranks that attend together, None where they are the same.
    `hidden(residual)`, after prepare_attn: the finished hidden state that entered the layer, a copy, on every rank the
    rows of its attention group; all ranks call it or none.
    """

    __slots__ = ("hidden", "latents", "postprocess_layer", "prepare_attn", "prepare_mlp", "sizes")

    def __init__(
        self, binder: Binder, layer: LayerPlan, norms: tuple[ResidualNorm, ResidualNorm], rows: tuple[int, ...]
    ) -> None:
        """norms: before attention, before the MLP."""
        between, home = layer.prepare_mlp.where or NONE, layer.states.attn.layout
        whole = binder.bring(rows, between, between - home, home - between)
        self.hidden: Callable[[torch.Tensor], torch.Tensor] = lambda residual: whole(residual).clone()
        self.prepare_attn = binder.bind(layer.prepare_attn, norms[0], rows)
        self.prepare_mlp = binder.bind(layer.prepare_mlp, norms[1], rows)
        self.postprocess_layer = binder.bind(layer.postprocess, None, rows)
        self.sizes = binder.sizes(rows, layer.states.mlp.layout, binder.stage.axes.get("moe_ep", NONE))
        takes = layer.prepare_attn.states()[-1][0].layout
        self.latents = None if takes == home else binder.sizes(rows, takes, takes - home)


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
        self.mapping, self.norms, self.padding = mapping, list(norms), Padding((options or Options()).padding)
        last = len(norms) % 2 == 1
        found: dict[tuple[object, ...], Plan] = {}
        self.plans: Dict[tuple[int, bool], Plan] = {}
        cuts = mapping.cp_type != CpType.HELIX and max(mapping.cp_size, mapping.attn_cp_size) > 1
        for rows, cut in product(CLASSES, (False, True) if cuts else (False,)):
            batch = Batch(rows, hidden * dtype.itemsize, cut)
            one = plan(mapping, kinds, batch, costs, options, policy, last=last)
            self.plans[rows, cut] = found.setdefault((one.layers, one.finish), one)
        self.binder = Binder(mapping, one.stage, hidden, dtype)
        # the ranks that attend to other rows than others do, in a step that is cut and in one that is not
        self.cells = {cut: needs(one.stage, mapping, "attention", Options(), cut).takes for cut in (False, True)}
        groups = {step.over | step.gather for one in found.values() for step, _, _ in one.walk()} - {NONE}
        for digits in sorted(groups, key=sorted):
            Workspace.of(self.binder.group(digits))
        self._control = self.binder.group(self.cells[True]) if self.cells[True] else None
        self._bound: dict[tuple[tuple[int, ...], Padding, bool], Bound] = {}

    def agree(self, rows: int, sequences: int, cut: bool = False) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """On the control plane, once a step: the rows and the sequences of every attention group, of a step that is
        `cut` for anybody the rows of every rank of it. All from what this rank has of them."""
        if self._control is None:
            return (rows,), (sequences,), cut
        everyone = self._control.allgather_int64((rows, sequences, cut))
        cut = bool(everyone[:, 2].any())
        alike = self.binder.stage.span(self.cells[True] - self.cells[False])
        return tuple(everyone[:: 1 if cut else alike, 0].tolist()), tuple(everyone[::alike, 1].tolist()), cut

    def plan_for(self, rows: int, cut: bool = False) -> Plan:
        """The plan of a batch of so many rows in all groups together."""
        return self.plans[next((size for size in CLASSES if rows <= size), CLASSES[-1]), cut]

    def begin(self, counts: tuple[int, ...], decode: bool = False, cut: bool = False) -> Bound:
        """The junctions for these rows, as `agree` gives them; kept for the next step with the same."""
        key = counts, self.padding.of(counts, decode), cut
        if key not in self._bound:
            if len(self._bound) >= 64:  # prompts of many lengths
                self._bound.clear()
            self._bound[key] = self._bind(*key)
        return self._bound[key]

    def tune(self, steps: Sequence[tuple[int, ...]]) -> float:
        """Time the ways in which the all-reduces of such steps, by the rows of the attention groups, can be done: in a
        warm-up, collective over the stage. Returns the seconds it took, 0 where all is known."""
        sums = {
            (step.over, self.binder.rows_here(self.binder.rows_of(counts, self.cells[False]), state.layout)): None
            for counts in steps
            for step, state, _ in self.plan_for(sum(counts)).walk()
            if step.op == "all_reduce"
        }
        return self.binder.tune(list(sums))

    def _bind(self, counts: tuple[int, ...], padding: Padding, cut: bool) -> Bound:
        chosen, binder = self.plan_for(sum(counts), cut), self.binder.padded(padding)
        rows, pairs = binder.rows_of(counts, self.cells[cut]), zip(self.norms[::2], self.norms[1::2], strict=False)
        layers = [LayerCommunicator(binder, *layer, rows) for layer in zip(chosen.layers, pairs, strict=True)]
        tail = self.norms[-1] if len(self.norms) % 2 else None
        return Bound(layers, binder.bind(chosen.finish, tail, rows), bool(chosen.start.partial))
