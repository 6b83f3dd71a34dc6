"""Is every plan right, whatever the layout, and the cheapest one never dearer than the fixed one? By running them."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.boundary.layout import ScatterMode, State, Step, moves, subsets
from spmd.boundary.plan import Batch, Boundary, Options, Path, needs, plan, stack
from spmd.collectives.costs import Costs
from spmd.errors import InputError
from spmd.topology.mapping import Mapping
from spmd.topology.stage import NONE, Stage
from tests.boundary.simulation import Simulation


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def layouts(draw):
    """A legal mapping of up to 12 ranks, with kinds of layers, options and rows for every attention group."""
    world = draw(st.integers(1, 12))
    pp = draw(st.sampled_from(divisors(world)))
    tp = world // pp
    attn_dp = draw(st.sampled_from(divisors(tp)))
    moe_tp = draw(st.sampled_from(divisors(tp)))
    cluster = draw(st.sampled_from(divisors(tp // moe_tp)))
    sizes = {"moe_tp_size": moe_tp, "moe_cluster_size": cluster, "moe_ep_size": tp // moe_tp // cluster}
    mapping = Mapping(world, 0, tp_size=tp, pp_size=pp, attn_dp_size=attn_dp, **sizes)
    kinds = draw(st.lists(st.sampled_from(["dense", "moe"]), min_size=0, max_size=4))
    flags = {name: draw(st.booleans()) for name in ("a2a", "dense_dp", "defer_mlp_sum", "input_scattered")}
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 5, 7, 12]), min_size=attn_dp, max_size=attn_dp))
    return mapping, kinds, Options(**flags), counts


@settings(max_examples=300, deadline=None)
@given(layouts(), st.integers(0, 3), st.booleans(), st.sampled_from(["cost", "seed"]))
def test_every_plan_gives_the_truth(given_layout, size, last, policy):
    mapping, kinds, options, counts = given_layout
    batch = Batch(10 ** (2 * size), 1000)
    try:
        made = plan(mapping, kinds, batch, options=options, policy=policy, last=last)
    except InputError as error:
        assert "refinement" in str(error)
        assert options.a2a or mapping.moe_cluster_size > 1
        return
    Simulation(made, counts, options).run()


@settings(max_examples=300, deadline=None)
@given(layouts(), st.integers(0, 6), st.booleans())
def test_the_cheapest_is_never_dearer_than_the_fixed_one(given_layout, size, last):
    mapping, kinds, options, _ = given_layout
    batch = Batch(10**size, 1000)
    try:
        cheap, fixed = (plan(mapping, kinds, batch, None, options, policy, last=last) for policy in ("cost", "seed"))
    except InputError:
        return
    assert cheap.cost <= fixed.cost * (1 + 1e-9)


def all_layouts(largest):
    """Every legal mapping of up to so many ranks of one stage; more stages are the same plan."""
    for tp in range(1, largest + 1):
        for attn_dp in divisors(tp):
            for moe_tp in divisors(tp):
                for cluster in divisors(tp // moe_tp):
                    sizes = {"moe_tp_size": moe_tp, "moe_cluster_size": cluster, "moe_ep_size": tp // moe_tp // cluster}
                    yield Mapping(tp, 0, tp_size=tp, attn_dp_size=attn_dp, **sizes)


@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("a2a", [False, True])
def test_every_layout_of_up_to_twelve_ranks(policy, a2a):
    """One mixed stack on each, with uneven groups and empty ones."""
    planned, options = 0, Options(a2a=a2a)
    for mapping in all_layouts(12):
        counts = [(7 * group) % 5 for group in range(mapping.attn_dp_size)]
        batch = Batch((4, 4096)[planned % 2], 4096)
        try:
            made = plan(mapping, ["dense", "moe", "moe", "dense"], batch, None, options, policy)
        except InputError as error:
            assert "refinement" in str(error)
            continue
        Simulation(made, counts, options, seed=planned).run()
        planned += 1
    assert planned > 150


def ops(path):
    return [step.op for step in path.steps]


def test_tensor_parallelism_alone_has_the_two_sums():
    for policy in ("seed", "cost"):
        made = plan(Mapping(4, 0, tp_size=4), ["dense"] * 3, Batch(4, 8192), policy=policy)
        for index, layer in enumerate(made.layers):
            assert ops(layer.prepare_attn) == (["all_reduce", "norm"] if index else ["norm"])
            assert ops(layer.prepare_mlp) == ["all_reduce", "norm"]
            assert layer.postprocess.steps == ()
        assert ops(made.finish) == ["all_reduce", "norm"]


def test_attention_dp_of_two_on_four_by_the_fixed_choices():
    made = plan(Mapping(4, 0, tp_size=4, attn_dp_size=2), ["dense"] * 2, Batch(8, 8192), policy="seed")
    attn_tp, attn_dp = made.stage.axes["attn_tp"], made.stage.axes["attn_dp"]
    for layer in made.layers:
        assert ops(layer.prepare_attn) == ["norm"]
        fold, exchange, norm = layer.prepare_mlp.steps
        assert (fold.op, exchange, norm.op) == ("fold", Step("exchange", attn_tp, gather=attn_dp), "norm")
        assert layer.postprocess.steps == (Step("all_reduce", attn_tp | attn_dp), Step("cut", cut=attn_dp))


def test_a_rank_that_owns_its_rows_alone_norms_before_it_gathers():
    for policy in ("seed", "cost"):
        made = plan(Mapping(4, 0, tp_size=4, attn_dp_size=4), ["dense"] * 2, Batch(8, 8192), policy=policy)
        for layer in made.layers:
            assert ops(layer.prepare_mlp) == ["norm", "all_gather"]
        assert ops(made.layers[1].prepare_attn) == ["reduce_scatter", "norm"]


def test_before_scattered_experts_half_the_bytes_move():
    """The reduce-scatter before experts by all-to-all against the all-reduce in its place."""
    mapping = Mapping(2, 0, tp_size=2, moe_ep_size=2)
    batch, stage = Batch(512, 8192), Stage.of(mapping)
    bytes_alone = Boundary(stage, batch, Costs(latency=0, per_rank=0, byte=1, norm_byte=0, copy_byte=0))
    for policy in ("seed", "cost"):
        made = plan(mapping, ["dense", "moe", "dense"], batch, options=Options(a2a=True), policy=policy)
        first = made.layers[1].prepare_mlp.steps[0]
        owed = made.layers[1].states.attn
        assert first == Step("reduce_scatter", stage.axes["attn_tp"])
        assert bytes_alone.price(first, owed) * 2 == bytes_alone.price(Step("all_reduce", owed.partial), owed)
        after = [step for step in made.layers[2].prepare_attn.steps if step.op != "norm"]
        assert after == [Step("all_gather", gather=stage.every)]


def test_long_prefills_keep_the_residual_cut_and_decodes_do_not():
    mapping = Mapping(4, 0, tp_size=4)
    for rows, cut in ((1, False), (8, False), (8192, True)):
        made = plan(mapping, ["dense"] * 4, Batch(rows, 4096))
        assert {layer.states.middle_residual == made.stage.every for layer in made.layers} == {cut}


def test_decode_takes_one_exchange_where_latency_rules():
    mapping = Mapping(4, 0, tp_size=4, attn_dp_size=2)
    made = plan(mapping, ["dense"] * 2, Batch(4, 1152), Costs(latency=100.0))
    for layer in made.layers:
        assert ops(layer.prepare_mlp) == ["fold", "exchange", "norm"]
    assert ops(made.layers[1].prepare_attn) == ["exchange", "norm"]


def test_an_eager_sum_is_finished_before_the_layer_ends():
    mapping = Mapping(4, 0, tp_size=4, moe_tp_size=2, moe_ep_size=2)
    for defer in (True, False):
        made = plan(mapping, ["moe"] * 3, Batch(4, 8192), options=Options(defer_mlp_sum=defer))
        for layer in made.layers:
            assert (layer.states.layer_output.partial == NONE) == (not defer)
            assert ops(layer.postprocess) == ([] if defer else ["all_reduce"])


def test_one_rank_communicates_nothing():
    for policy in ("seed", "cost"):
        made = plan(Mapping(), ["dense", "moe"], Batch(8, 8192), policy=policy)
        for layer in made.layers:
            assert [ops(path) for path in layer.junctions.values()] == [["norm"], ["norm"], []]


def test_views_without_a_refinement():
    mapping = Mapping(6, 0, tp_size=6, attn_dp_size=2, moe_tp_size=3, moe_ep_size=2)
    made = plan(mapping, ["moe"], Batch(8, 8192))
    assert made.layers[0].states.mlp == State(NONE, made.stage.every)
    with pytest.raises(InputError, match=r"no common refinement: 2 and 3"):
        plan(mapping, ["moe"], Batch(8, 8192), options=Options(a2a=True))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"layers": ["sparse"]}, "unknown kind of layer 'sparse'"),
        ({"mapping": Mapping(2, 0, cp_size=2)}, r"cp_size 2 \(ULYSSES\) has no plan"),
        ({"mapping": Mapping(2, 0, tp_size=2, dwdp_size=2), "layers": ["moe"]}, "dwdp_size 2 needs ranks that attend"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kwargs, message):
    given_kwargs = {"mapping": Mapping(2, 0, tp_size=2), "layers": ["dense"], "batch": Batch(8, 8192)} | kwargs
    with pytest.raises(InputError, match=message):
        plan(**given_kwargs)


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_search_is_exhaustive(rows):
    """Against all paths of up to two moves on either side of the norm, for every place the residual can be left in."""
    mapping = Mapping(4, 0, tp_size=4, attn_dp_size=2)
    stage = Stage.of(mapping)
    boundary = Boundary(stage, Batch(rows, 8192), Costs())
    start, goal, residual = State(stage.axes["attn_dp"], stage.axes["attn_tp"]), NONE, stage.axes["attn_dp"]

    def paths(state, depth):
        yield (), state
        if depth:
            for step in moves(stage, state, NONE, stage.every):
                for rest, end in paths(step.after(state), depth - 1):
                    yield (step, *rest), end

    best = {}
    for before, at in paths(start, 2):
        if at.partial:
            continue
        rides = bool(before) and before[-1].moves
        norm = Step("norm", gather=residual - at.layout, cut=at.layout - residual, rides=rides)
        for after, end in paths(at, 2):
            for keep in (NONE, residual - at.layout):
                path = Path(start, residual, (*before, replace(norm, keep=keep), *after))
                if end == (goal, NONE):
                    left = at.layout | keep
                    best[left] = min(best.get(left, float("inf")), boundary.total(path))
    found = boundary.routes(start, goal, residual, "norm", True)
    limit = min(best.values()) + boundary.collective(stage.every, boundary.held(NONE))
    assert len(found) > 1
    for left, cost in best.items():
        if cost < limit and left <= residual:  # what else could be left is not looked for
            assert found[left][0] <= cost * (1 + 1e-9)


def test_named_layouts():
    mapping = Mapping(4, 0, tp_size=4, attn_dp_size=2)
    stage = Stage.of(mapping)
    names = [(mode.name, stage.span(mode.layout(stage)), mode.group_size(mapping)) for mode in ScatterMode]
    assert names == [("SCATTERED", 4, 1), ("TP_ATTN_FULL", 2, 2), ("FULL", 1, 4)]
    assert ScatterMode.of(stage, stage.every) == ScatterMode.SCATTERED
    assert ScatterMode.of(stage, stage.axes["attn_tp"]) is None
    alone = Stage.of(Mapping(4, 0, tp_size=4))
    assert ScatterMode.of(alone, NONE) == ScatterMode.FULL  # and TP_ATTN_FULL: the same rows


def test_large_worlds_are_planned_in_under_a_second():
    sizes = {"moe_tp_size": 5, "moe_cluster_size": 10, "moe_ep_size": 20}
    mapping = Mapping(100_000, 7, tp_size=1000, pp_size=100, attn_dp_size=50, **sizes)
    for policy in ("cost", "seed"):
        begin = time.perf_counter()
        plan(mapping, ["dense", "moe"] * 50, Batch(4096, 8192), policy=policy)
        assert time.perf_counter() - begin < 1


def test_subsets():
    assert list(subsets(frozenset("ab"))) == [frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")]


def test_planning_needs_neither_torch_nor_mpi():
    code = "import sys; from spmd.boundary import plan, seed, explain; print({'torch', 'mpi4py'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_needs_of_experts():
    mapping = Mapping(8, 0, tp_size=8, moe_tp_size=2, moe_cluster_size=2, moe_ep_size=2)
    stage = Stage.of(mapping)
    cluster = needs(stage, mapping, "moe", Options())
    assert (stage.say(cluster.takes), stage.say(cluster.leaves.partial)) == ("moe_cluster", "moe_ep x moe_tp")
    alltoall = needs(stage, mapping, "moe", Options(a2a=True))
    assert alltoall.leaves == (stage.every - stage.axes["moe_tp"], stage.axes["moe_tp"])
    assert len(stack(Boundary(stage, Batch(1, 1), Costs()), [], State(NONE), NONE, Options(), "add")) == 1
