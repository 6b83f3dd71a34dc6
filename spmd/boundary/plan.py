"""The communication plan of a stack of layers: a shortest path through the states that its blocks need.

Pure: neither torch nor MPI. A layer's blocks say in which layout they take rows and which sums they leave owed
(`needs`); a residual is to be added, and the sum normalised, somewhere on the way from one block to the next. `plan`
finds the cheapest way for a kind of batch, with the residual's own layout carried from junction to junction. Megatron's
two all-reduces, sequence parallelism, the gathers and scatters of attention DP and the reduce-scatter before experts by
all-to-all are what comes out. policy="seed" takes SGLang's fixed choices instead (seed.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, count
from typing import Literal, NamedTuple

from spmd.boundary.layout import State, Step, moves
from spmd.collectives.costs import Costs
from spmd.errors import InputError
from spmd.topology.mapping import CpType, Mapping
from spmd.topology.stage import NONE, Digits, Stage

KINDS = ("dense", "moe")
Middle = Literal["norm", "add"]


@dataclass(frozen=True)
class Batch:
    """A kind of forward: how many rows all ranks of a stage hold together, the bytes of a row, and whether sequences
    come cut over cp, as new ones do under RING and ULYSSES."""

    rows: int
    row_bytes: int
    cut: bool = False


@dataclass(frozen=True)
class Options:
    """What is fixed beforehand. a2a: experts get their rows by dispatch and combine; dense_dp: dense MLPs are whole on
    every rank, which feeds it its own rows; defer_mlp_sum: the sum that an MLP leaves may be finished together with the
    next norm; input_scattered: the embedding's sum too is still owed, and latent attention (latent) takes rows cut over
    attn_tp and gathers their latents itself; padding: of rows that move (`collectives.moves.Padding`)."""

    a2a: bool = False
    dense_dp: bool = False
    defer_mlp_sum: bool = True
    input_scattered: bool = False
    padding: str = "none"
    latent: bool = False


@dataclass(frozen=True)
class Path:
    """Steps from one state to another. state, where: the activation's, and the residual's layout (None: there is none,
    or it was folded), before them."""

    state: State
    where: Digits | None
    steps: tuple[Step, ...] = ()

    def states(self) -> list[tuple[State, Digits | None]]:
        """Both, before every step and after the last."""
        return list(accumulate(self.steps, lambda at, step: step.apply(*at), initial=(self.state, self.where)))

    def walk(self) -> Iterator[tuple[Step, State, Digits | None]]:
        """Every step and what it finds."""
        return ((step, *at) for step, at in zip(self.steps, self.states(), strict=False))

    def split(self, count: int) -> tuple[Path, Path]:
        """Its first steps, and the others."""
        return Path(self.state, self.where, self.steps[:count]), Path(*self.states()[count], self.steps[count:])


class States(NamedTuple):
    """Where the blocks of a layer, the norm before attention and the block after the layer find the activation, and
    where the residual waits for the MLP. Partial sums are named where they are owed."""

    layer_input: State
    attn: State
    mlp: State
    middle_residual: Digits | None
    layer_output: State


@dataclass(frozen=True)
class LayerPlan:
    """The junctions of one layer, each from where the activation and the residual are."""

    kind: str
    prepare_attn: Path
    prepare_mlp: Path
    postprocess: Path

    @property
    def junctions(self) -> dict[str, Path]:
        return {name: getattr(self, name) for name in ("prepare_attn", "prepare_mlp", "postprocess")}

    @property
    def states(self) -> States:
        last = self.postprocess
        return States(self.prepare_attn.state, self.prepare_mlp.state, last.state, last.where, last.states()[-1][0])


@dataclass(frozen=True)
class Plan:
    """layers: one for each; finish: from the last one's output to the model's last norm, or to what the next stage
    gets; cost: microseconds of all steps in one forward."""

    stage: Stage
    mapping: Mapping
    batch: Batch
    policy: str
    layers: tuple[LayerPlan, ...]
    finish: Path
    cost: float

    @property
    def start(self) -> State:
        return (self.layers[0].prepare_attn if self.layers else self.finish).state

    def walk(self) -> Iterator[tuple[Step, State, Digits | None]]:
        """All steps of a forward."""
        for path in (*(path for layer in self.layers for path in layer.junctions.values()), self.finish):
            yield from path.walk()


@dataclass(frozen=True)
class Block:
    """A block of a layer: the layout it takes rows in, the state of what it makes, and whether it wants rows that no
    two ranks share, as far as sums allow."""

    takes: Digits
    leaves: State
    scattered: bool = False


def needs(stage: Stage, mapping: Mapping, kind: str, options: Options, cut: bool = False) -> Block:
    """What a block asks for: kind "attention", "dense" or "moe". InputError for one that no path can serve."""
    ring, ulysses = mapping.cp_type == CpType.RING, mapping.cp_type == CpType.ULYSSES
    apart = stage.of_axes("cp") if ring or ulysses else NONE  # FFN weights are the same along it
    rows = apart if cut else NONE
    if kind == "attention":
        sequence = stage.of_axes("attn_cp") if ring else apart
        layout, owed = stage.of_axes("attn_dp") | (sequence if cut else NONE), stage.of_axes("attn_tp", "attn_cp")
        inner = stage.of_axes("attn_tp") - sequence if options.latent and options.input_scattered else NONE
        return Block(layout | inner, State(layout, owed - sequence))
    if kind == "dense":
        alone = Block(stage.every, State(stage.every), True)
        return alone if options.dense_dp else Block(rows, State(rows, stage.every - apart))
    if kind != "moe":
        raise InputError(f"unknown kind of layer {kind!r}: it is one of {', '.join(KINDS)}")
    if mapping.dwdp_size > 1:
        if stage.of_axes("attn_dp") == stage.every:
            return Block(stage.every, State(stage.every), True)
        sizes = f"attn_dp_size {mapping.attn_dp_size} of {stage.digits.size} ranks"
        raise InputError(f"dwdp_size {mapping.dwdp_size} needs ranks that attend alone, but got {sizes}")
    if "moe_tp" not in stage.axes:
        if options.a2a or mapping.moe_cluster_size > 1:
            Stage.of(mapping)  # says why the views do not fit
        return Block(rows, State(rows, stage.every - apart))
    owed = stage.of_axes("moe_tp") if options.a2a else stage.of_axes("moe_tp", "moe_ep")
    layout = stage.every - owed - (NONE if cut else apart)
    return Block(layout, State(layout, owed), options.a2a)


class Boundary:
    """The algebra with prices: what a step costs in a state, and the cheapest paths."""

    def __init__(self, stage: Stage, batch: Batch, costs: Costs, hosted: int = 1 << 30) -> None:
        """hosted: ranks of a host."""
        self.stage, self.batch, self.costs = stage, batch, costs
        self.routes = cache(self._routes)
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
        own, c = self.held(state.layout), self.costs
        if not step.shifts:
            bring = self.collective(step.gather, own * (1 - 1 / self.stage.span(step.gather))) if step.gather else 0.0
            per_byte = c.norm_byte * (1 - c.fused * step.rides) if step.op == "norm" else c.copy_byte
            return bring + own * per_byte
        after = self.held(step.after(state).layout)
        if step.op == "cut":
            return after * c.copy_byte
        k = self.stage.span(step.over | step.gather)
        moved = {
            "all_reduce": 2 * (k - 1) / k * own,
            "reduce_scatter": (k - 1) / k * own,
            "all_gather": (k - 1) / k * after,
            "exchange": max(after * self.stage.span(step.over) - self.held(state.layout | step.cut), 0.0),
        }
        return self.collective(step.over | step.gather, moved[step.op])

    def total(self, path: Path) -> float:
        return sum(self.price(step, state) for step, state, _ in path.walk())

    def _routes(
        self, start: State, goal: Digits, residual: Digits | None, middle: Middle, ride: bool
    ) -> dict[Digits, tuple[float, tuple[Step, ...]]]:
        """The cheapest paths to `goal` with no sum owed: {layout the residual is left in: (cost, steps)}.

        residual: its layout; None: the activation itself becomes it. ride: a norm may be part of the collective before.
        Left out are residuals that cost more than to bring the cheapest path's where they are."""
        # a node: the activation's state; where the residual is (None: nowhere yet, or folded in); whether the norm is
        # done; whether the last step was a collective, on which a norm can ride
        stage, tie = self.stage, count()
        Node = tuple[State, Digits | None, bool, bool]
        heap: list[tuple[float, int, Node, tuple[Step, ...]]] = [(0.0, next(tie), (start, residual, False, False), ())]
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
                assert where is not None
                found.setdefault(where, (cost, path))
                enough = min(enough, cost + self.collective(stage.every, self.held(NONE)))
            steps = list(moves(stage, state, goal, useful))
            if not normed:
                apart = state.layout if where is None else where
                gather, cut = apart - state.layout, state.layout - apart
                if state.partial and where is not None:
                    steps.append(Step("fold", NONE, gather, cut))
                if not state.partial:
                    steps.append(Step(middle, NONE, gather, cut, rides=ride and fresh and middle == "norm"))
                    keep = (residual or NONE) - state.layout
                    if keep and middle == "norm":  # cutting it back is local
                        steps.append(replace(steps[-1], keep=keep))
            for step in steps:
                new = (*step.apply(state, where), normed or step.op == middle, step.moves)
                if new not in done:
                    heapq.heappush(heap, (cost + self.price(step, state), next(tie), new, (*path, step)))
        return found


Chain = tuple["Chain | None", Path]  # the last leg of a way through a stack, and the legs before it


def stack(
    boundary: Boundary, blocks: Sequence[tuple[Block, Block]], start: State, goal: Digits, options: Options, end: Middle
) -> list[Path]:
    """The cheapest paths between all blocks of a stack, attention and MLP of every layer, and to the end."""
    legs: list[tuple[Digits, Middle]] = [(block.takes, "norm") for pair in blocks for block in pair]
    leaves = [start, *(block.leaves for pair in blocks for block in pair)]
    ways: dict[Digits | None, tuple[float, Chain | None]] = {None: (0.0, None)}
    for i, (state, (takes, middle)) in enumerate(zip(leaves, [*legs, (goal, end)], strict=True)):
        new: dict[Digits | None, tuple[float, Chain | None]] = {}
        ride = options.defer_mlp_sum or i % 2 == 1 or i == 0
        for residual, (cost, back) in ways.items():
            for left, (more, steps) in boundary.routes(state, takes, residual, middle, ride).items():
                if left not in new or cost + more < new[left][0]:
                    new[left] = (cost + more, (back, Path(state, residual, steps)))
        ways = new
    _, chain = min(ways.values(), key=lambda way: way[0])
    paths: list[Path] = []
    while chain is not None:
        chain, path = chain
        paths.append(path)
    return paths[::-1]


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
    try:
        stage = Stage.of(mapping, experts=mapping.dwdp_size <= 1)
    except InputError:
        stage = Stage.of(mapping, experts=False)
    boundary = Boundary(stage, batch, costs, mapping.gpus_per_node)
    attention = needs(stage, mapping, "attention", options, batch.cut)
    blocks = [(attention, needs(stage, mapping, kind, options, batch.cut)) for kind in layers]
    owed = attention.leaves.partial & stage.of_axes("attn_tp")  # the embedding is cut over it
    home = attention.leaves.layout
    start = State(home, owed if options.input_scattered else NONE)
    end: Middle = "norm" if last else "add"
    if policy == "seed":
        from spmd.boundary.seed import stack as paths_of
    else:
        paths_of = stack
    paths = paths_of(boundary, blocks, start, home, options, end)
    # what comes before a norm finishes the block before it, but for a collective that the norm rides on
    ends = [path.split(_finished(path.steps) if i else 0) for i, path in enumerate(paths[::2])]
    made = [
        LayerPlan(kind, before, middle, after)
        for kind, (_, before), middle, (after, _) in zip(layers, ends, paths[1::2], ends[1:], strict=False)
    ]
    return Plan(stage, mapping, batch, policy, tuple(made), ends[-1][1], sum(map(boundary.total, paths)))


def _finished(steps: Sequence[Step]) -> int:
    """How many of the steps towards attention only finish the block before it."""
    at = next(i for i, step in enumerate(steps) if not step.shifts)
    return max(at - 1, 0) if steps[at].rides else at
