"""The communication plan of a stack of layers: a shortest path through the states that its blocks need.

Pure: neither torch nor MPI. A layer's blocks say in which layout they take rows and which sums they leave owed
(`needs`); a residual is to be added, and the sum normalised, somewhere on the way from one block to the next. `plan`
finds the cheapest way for a kind of batch, with the residual's own layout carried from junction to junction. Megatron's
two all-reduces, sequence parallelism, the gathers and scatters of attention DP and the reduce-scatter before experts by
all-to-all are what comes out. policy="seed" takes SGLang's fixed choices instead (seed.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, NamedTuple

from spmd.boundary.layout import State, Step, moves
from spmd.errors import InputError
from spmd.topology.mapping import Mapping
from spmd.topology.stage import NONE, Digits, Stage

KINDS = ("dense", "moe")


@dataclass(frozen=True)
class Costs:
    """Microseconds of what a step does. The built-in numbers are those of ranks that share a host's memory.

    latency: of a collective of two ranks; per_rank: of every further one; host: of one that crosses hosts, once more.
    byte: moved to a rank; host_byte: the same between hosts; norm_byte: normalised; fused: the part of a norm that
    costs nothing when it rides on a collective (fused * norm_byte stays below byte: else paths would take collectives
    only to ride on them); copy_byte: of a copy or an addition on the spot.
    """

    latency: float = 5.0
    per_rank: float = 2.5
    host: float = 20.0
    byte: float = 1e-4
    host_byte: float = 1e-3
    norm_byte: float = 2e-4
    fused: float = 0.3
    copy_byte: float = 2e-5


@dataclass(frozen=True)
class Batch:
    """A kind of forward: how many rows all ranks of a stage hold together, and the bytes of a row."""

    rows: int
    row_bytes: int


@dataclass(frozen=True)
class Options:
    """What is fixed beforehand. a2a: experts get their rows by dispatch and combine; dense_dp: dense MLPs are whole on
    every rank, which feeds it its own rows; defer_mlp_sum: the sum that an MLP leaves may be finished together with the
    next norm; input_scattered: the embedding's sum too is still owed; attention gathers its own input then."""

    a2a: bool = False
    dense_dp: bool = False
    defer_mlp_sum: bool = True
    input_scattered: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """States and junctions of one layer. layer_input and layer_output: where the norm before attention, and the block
    after it, find the activation; partial sums are named where they are owed."""

    kind: str
    layer_input: State
    attn: State
    mlp: State
    middle_residual: Digits
    layer_output: State
    prepare_attn: tuple[Step, ...]
    prepare_mlp: tuple[Step, ...]
    postprocess: tuple[Step, ...]

    @property
    def junctions(self) -> dict[str, tuple[Step, ...]]:
        return {name: getattr(self, name) for name in ("prepare_attn", "prepare_mlp", "postprocess")}


@dataclass(frozen=True)
class Plan:
    """layers: one for each; finish: from the last one's output to the model's last norm, or to what the next stage
    gets; cost: microseconds of all steps in one forward."""

    stage: Stage
    mapping: Mapping
    batch: Batch
    policy: str
    layers: tuple[LayerPlan, ...]
    finish: tuple[Step, ...]
    start: State
    cost: float


@dataclass(frozen=True)
class Block:
    """A block of a layer: the layout it takes rows in, and the state of what it makes."""

    takes: Digits
    leaves: State


def needs(stage: Stage, mapping: Mapping, kind: str, options: Options) -> Block:
    """What a block asks for: kind "attention", "dense" or "moe". InputError for one that no path can serve."""
    if kind == "attention":
        layout = stage.of_axes("attn_dp")
        return Block(layout, State(layout, stage.of_axes("attn_tp")))
    if kind == "dense":
        return Block(stage.every, State(stage.every)) if options.dense_dp else Block(NONE, State(NONE, stage.every))
    if kind != "moe":
        raise InputError(f"unknown kind of layer {kind!r}: it is one of {', '.join(KINDS)}")
    if mapping.dwdp_size > 1:
        if stage.of_axes("attn_dp") != stage.every:
            sizes = f"attn_dp_size {mapping.attn_dp_size} of {stage.digits.size} ranks"
            raise InputError(f"dwdp_size {mapping.dwdp_size} needs ranks that attend alone, but got {sizes}")
        return Block(stage.every, State(stage.every))
    if "moe_tp" not in stage.axes:
        if options.a2a or mapping.moe_cluster_size > 1:
            Stage.of(mapping)  # says why the views do not fit
        return Block(NONE, State(NONE, stage.every))
    if options.a2a:
        layout = stage.every - stage.axes["moe_tp"]
        return Block(layout, State(layout, stage.axes["moe_tp"]))
    layout = stage.axes["moe_cluster"]
    return Block(layout, State(layout, stage.of_axes("moe_tp", "moe_ep")))


class Boundary:
    """The algebra with prices: what a step costs in a state, and the cheapest paths."""

    def __init__(self, stage: Stage, batch: Batch, costs: Costs, hosted: int = 1 << 30) -> None:
        """hosted: ranks of a host."""
        self.stage, self.batch, self.costs = stage, batch, costs
        self._routes: dict[object, dict[Digits, tuple[float, tuple[Step, ...]]]] = {}
        self._inside = frozenset(d for d, n in stage.digits.sizes.items() if stage.digits.strides[d] * n <= hosted)

    def held(self, layout: Digits) -> float:
        """Bytes that a rank holds."""
        return self.batch.rows * self.batch.row_bytes / self.stage.span(layout)

    def collective(self, digits: Digits, nbytes: float) -> float:
        """Of one among the ranks that differ along these digits, which brings nbytes to each."""
        c, away = self.costs, not digits <= self._inside
        latency = c.latency + c.per_rank * (self.stage.span(digits) - 2) + (c.host if away else 0.0)
        return latency + nbytes * (c.host_byte if away else c.byte)

    def price(self, step: Step, state: State) -> float:
        """What a step costs in a state."""
        layout, _ = state
        if step.op in ("fold", "norm", "add"):
            own, c = self.held(layout), self.costs
            bring = self.collective(step.gather, own * (1 - 1 / self.stage.span(step.gather))) if step.gather else 0.0
            per_byte = c.norm_byte * (1 - c.fused * step.rides) if step.op == "norm" else c.copy_byte
            return bring + own * per_byte
        after = self.held(step.after(state).layout)
        if step.op == "cut":
            return after * self.costs.copy_byte
        n, k = self.held(layout), self.stage.span(step.over | step.gather)
        moved = {
            "all_reduce": 2 * (k - 1) / k * n,
            "reduce_scatter": (k - 1) / k * n,
            "all_gather": (k - 1) / k * after,
            "exchange": max(after * self.stage.span(step.over) - self.held(layout | step.cut), 0.0),
        }
        return self.collective(step.over | step.gather, moved[step.op])

    def total(self, steps: Iterable[Step], state: State) -> float:
        cost = 0.0
        for step in steps:
            cost += self.price(step, state)
            state = step.after(state)
        return cost

    def routes(
        self, start: State, goal: Digits, residual: Digits | None, middle: Literal["norm", "add"], ride: bool
    ) -> dict[Digits, tuple[float, tuple[Step, ...]]]:
        """The cheapest paths to `goal` with no sum owed: {layout the residual is left in: (cost, steps)}.

        residual: its layout; None: the activation itself becomes it. ride: a norm may be part of the collective before.
        Left out are residuals that cost more than to bring the cheapest path's where they are."""
        key = (start, goal, residual, middle, ride)
        if key not in self._routes:
            self._routes[key] = self._search(start, goal, residual, middle, ride)
        return self._routes[key]

    def _search(
        self, start: State, goal: Digits, residual: Digits | None, middle: Literal["norm", "add"], ride: bool
    ) -> dict[Digits, tuple[float, tuple[Step, ...]]]:
        # a node: the activation's state; where the residual is (None: nowhere yet, "folded"); whether the norm is done;
        # whether the last step was a collective, on which a norm can ride
        stage, tie = self.stage, count()
        Node = tuple[State, Digits | str | None, bool, bool]
        begin: Node = (start, residual, False, False)
        heap: list[tuple[float, int, Node, tuple[Step, ...]]] = [(0.0, next(tie), begin, ())]
        done: set[Node] = set()
        found: dict[Digits, tuple[float, tuple[Step, ...]]] = {}
        enough = float("inf")
        useful = goal | (residual or NONE)
        while heap:
            cost, _, node, path = heapq.heappop(heap)
            if cost > enough:
                break
            if node in done:
                continue
            done.add(node)
            state, where, normed, fresh = node
            if normed and state == (goal, NONE):
                assert isinstance(where, frozenset)
                found.setdefault(where, (cost, path))
                enough = min(enough, cost + self.collective(stage.every, self.held(NONE)))
            nexts: list[tuple[Step, Node]] = [
                (step, (step.after(state), where, normed, step.op != "cut"))
                for step in moves(stage, state, goal, useful)
            ]
            if not normed:
                layout = state.layout
                apart = where if isinstance(where, frozenset) else layout
                gather, cut = apart - layout, layout - apart
                if state.partial and isinstance(where, frozenset):
                    nexts.append((Step("fold", gather=gather, cut=cut), (state, "folded", False, False)))
                if not state.partial:
                    step = Step(middle, gather=gather, cut=cut, rides=ride and fresh and middle == "norm")
                    nexts.append((step, (state, layout, True, False)))
                    keep = (residual or NONE) - layout
                    if keep and middle == "norm":  # cutting it back is local
                        nexts.append((replace(step, keep=keep), (state, layout | keep, True, False)))
            for step, new in nexts:
                if new not in done:
                    heapq.heappush(heap, (cost + self.price(step, state), next(tie), new, (*path, step)))
        return found


class _Link(NamedTuple):
    """The last leg of a way through a stack: the legs before, where the residual was before it, its steps."""

    back: _Link | None
    residual: Digits | None
    steps: tuple[Step, ...]


def stack(
    boundary: Boundary,
    mapping: Mapping,
    kinds: Sequence[str],
    options: Options,
    start: State,
    end: Literal["norm", "add"],
) -> tuple[list[tuple[Step, ...]], list[Digits | None]]:
    """The cheapest paths between all blocks of a stack, and where the residual is before each."""
    stage = boundary.stage
    attention = needs(stage, mapping, "attention", options)
    legs: list[tuple[State, Digits, Literal["norm", "add"]]] = []
    state = start
    for kind in kinds:
        block = needs(stage, mapping, kind, options)
        legs += [(state, attention.takes, "norm"), (attention.leaves, block.takes, "norm")]
        state = block.leaves
    legs.append((state, attention.takes, end))
    ways: dict[Digits | None, tuple[float, _Link | None]] = {None: (0.0, None)}
    for i, (state, goal, middle) in enumerate(legs):
        new: dict[Digits | None, tuple[float, _Link | None]] = {}
        ride = options.defer_mlp_sum or i % 2 == 1 or i == 0
        for residual, (cost, back) in ways.items():
            for left, (more, steps) in boundary.routes(state, goal, residual, middle, ride).items():
                if left not in new or cost + more < new[left][0]:
                    new[left] = (cost + more, _Link(back, residual, steps))
        if not new:
            raise InputError(f"no path from {stage.say(state.layout) or 'whole rows'} to {stage.say(goal)}")
        ways = new
    _, link = min(ways.values(), key=lambda way: way[0])
    links: list[_Link] = []
    while link is not None:
        links.append(link)
        link = link.back
    return [link.steps for link in reversed(links)], [link.residual for link in reversed(links)]


def plan(
    mapping: Mapping,
    layers: Sequence[str],
    batch: Batch,
    costs: Costs | None = None,
    options: Options | None = None,
    policy: Literal["cost", "seed"] = "cost",
    *,
    last: bool = True,
) -> Plan:
    """The plan of one stage's layers, by their kinds ("dense", "moe"), for a kind of batch.

    last: whether the model's last norm follows; else the finished hidden state goes on to the next stage. Errors:
    InputError, by name, for a layout or a combination that cannot be.
    """
    costs, options = costs or Costs(), options or Options()
    if policy not in ("cost", "seed"):
        raise InputError(f"unknown policy {policy!r}: it is cost or seed")
    if mapping.cp_size > 1:
        raise InputError(f"cp_size {mapping.cp_size} ({mapping.cp_type}) has no plan: use cp_size 1")
    try:
        stage = Stage.of(mapping, experts=mapping.dwdp_size <= 1)
    except InputError:
        stage = Stage.of(mapping, experts=False)
    boundary = Boundary(stage, batch, costs, mapping.gpus_per_node)
    attention = needs(stage, mapping, "attention", options)
    start = State(attention.takes, attention.leaves.partial if options.input_scattered else NONE)
    end: Literal["norm", "add"] = "norm" if last else "add"
    if policy == "seed":
        from spmd.boundary import seed

        paths, residuals = seed.stack(boundary, mapping, layers, options, start, end)
    else:
        paths, residuals = stack(boundary, mapping, layers, options, start, end)
    return _cut(boundary, mapping, layers, options, policy, start, paths, residuals)


def _cut(
    boundary: Boundary,
    mapping: Mapping,
    kinds: Sequence[str],
    options: Options,
    policy: str,
    start: State,
    paths: Sequence[tuple[Step, ...]],
    residuals: Sequence[Digits | None],
) -> Plan:
    """Paths between blocks as junctions of layers: what comes before a norm finishes the block before it, but for a
    collective that the norm rides on."""
    stage = boundary.stage
    attention, cost = needs(stage, mapping, "attention", options), 0.0
    halves = []
    state = start
    for j, path in enumerate(paths[::2]):
        cost += boundary.total(path, state)
        at = next(i for i, step in enumerate(path) if step.op in ("norm", "add", "fold"))
        at = max(at - 1, 0) if path[at].rides else at
        halves.append((path[:at], path[at:], state))
        if j < len(kinds):
            state = needs(stage, mapping, kinds[j], options).leaves
    layers = []
    for i, kind in enumerate(kinds):
        middle = paths[2 * i + 1]
        cost += boundary.total(middle, attention.leaves)
        block = needs(stage, mapping, kind, options)
        prefix, rest, state = halves[i]
        after, _, _ = halves[i + 1]
        if i == 0:
            prefix, rest = (), prefix + rest
        arrives = state
        for step in prefix:
            arrives = step.after(arrives)
        output = block.leaves
        for step in after:
            output = step.after(output)
        residual = residuals[2 * (i + 1)]
        assert residual is not None
        layers.append(LayerPlan(kind, arrives, attention.leaves, block.leaves, residual, output, rest, middle, after))
    finish = halves[-1][1] if kinds else halves[-1][0] + halves[-1][1]
    return Plan(stage, mapping, boundary.batch, policy, tuple(layers), finish, start, cost)
