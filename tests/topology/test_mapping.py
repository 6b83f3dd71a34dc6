"""Is every rank where SEMANTICS section 1 says, in all three views, and is every illegal layout refused in one line?"""

import json
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from enum import StrEnum
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd import CpType, Mapping

CASES = json.loads(Path(__file__).with_name("mapping.json").read_text())
MOE_AXES = ("moe_tp", "moe_cluster", "moe_ep")
ATTN_AXES = ("attn_dp", "attn_tp", "attn_cp")
AXES = ("pp", "tp", "cp", *ATTN_AXES, *MOE_AXES)
SIZES = ("world_size", "gpus_per_node", *(f"{axis}_size" for axis in AXES))
FLAGS = ("enable_attention_dp", "enable_lm_head_tp_in_adp")
ARGUMENTS = (*SIZES, *FLAGS, "rank", "cp_config", "pp_partition", "dwdp_size", "dwdp_rank")


def layout(tp=1, pp=1, cp=1, cp_type="ULYSSES", **others):
    """The mapping with these sizes; its world is their product."""
    sizes = {"world_size": tp * pp * cp, "tp_size": tp, "pp_size": pp, "cp_size": cp}
    return Mapping(**sizes, cp_config={"cp_type": cp_type}, **others)


def everyone(mapping):
    return [mapping.with_rank(rank) for rank in range(mapping.world_size)]


def of(mapping, name, *axes):
    """This attribute of these axes: of(m, "rank", "pp", "tp") = (m.pp_rank, m.tp_rank); of one axis, not in a tuple."""
    values = tuple(getattr(mapping, f"{axis}_{name}") for axis in axes)
    return values if len(axes) > 1 else values[0]


def attention(mapping):
    return of(mapping, "size", *ATTN_AXES)


def assert_one_line(call, *words):
    """`call` raises ValueError whose message is one line and contains every word (a number as a whole number)."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in map(str, words):
        assert re.search(rf"(?<!\d){re.escape(word)}(?!\d)", message), (word, message)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case["kwargs"].values()))
def test_table(case):
    for rank in range(case["kwargs"]["world_size"]):
        mapping = Mapping(rank=rank, **case["kwargs"])
        for axis, groups in case["groups"].items():
            assert [list(group) for group in mapping.groups(axis)] == groups
            assert [list(group) for group in of(mapping, "groups", axis)] == groups
            assert list(of(mapping, "group", axis)) == next(group for group in groups if rank in group)
            assert of(mapping, "rank", axis) == case["ranks"][axis][rank]
            assert of(mapping, "size", axis) == len(groups[0])


# ---- properties of every legal layout


@st.composite
def legal(draw):
    """Constructor arguments of a random legal layout."""

    def divisor(number):
        return draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))

    pp, cp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    cp_type = draw(st.sampled_from(["ULYSSES", "RING", "HELIX"]))
    world, block = pp * tp * cp, tp * cp
    kwargs = {"world_size": world, "tp_size": tp, "pp_size": pp, "cp_size": cp, "cp_config": {"cp_type": cp_type}}
    kwargs["rank"] = rank = draw(st.integers(0, world - 1))
    kwargs["gpus_per_node"] = draw(st.integers(1, 9))
    kwargs["pp_partition"] = draw(st.none() | st.lists(st.integers(1, 5), min_size=pp, max_size=pp))
    moe_world = block if cp_type == "HELIX" else tp
    kwargs["moe_cluster_size"] = cluster = divisor(moe_world)
    kwargs["moe_ep_size"] = ep = divisor(moe_world // cluster)
    kwargs["moe_tp_size"] = draw(st.sampled_from([-1, moe_world // cluster // ep]))
    kwargs["attn_dp_size"] = attn_dp = divisor(tp)
    kwargs["enable_lm_head_tp_in_adp"] = attn_dp > 1 and draw(st.booleans())
    if draw(st.booleans()):
        attn_cp = 1 if cp_type == "ULYSSES" else cp
        if cp_type == "HELIX" and cp == 1:
            attn_cp = divisor(tp // attn_dp)
        kwargs |= {"attn_tp_size": block // attn_dp // attn_cp, "attn_cp_size": attn_cp}
    dwdp = divisor(world)
    if dwdp > 1 and draw(st.booleans()):
        kwargs |= {"dwdp_size": dwdp, "dwdp_rank": rank % dwdp}
    return kwargs


def for_every_layout(test):
    return settings(max_examples=60, deadline=None)(given(legal())(test))


@for_every_layout
def test_three_views_count_the_same_ranks(kwargs):
    mapping = Mapping(**kwargs)
    expert_view = ("pp", *MOE_AXES) if mapping.cp_type is CpType.HELIX else ("pp", *MOE_AXES, "cp")
    for view in (("pp", "tp", "cp"), ("pp", *ATTN_AXES), expert_view):
        coordinates = [of(each, "rank", *view) for each in everyone(mapping)]
        assert coordinates == list(product(*map(range, of(mapping, "size", *view))))


@for_every_layout
def test_groups_of_an_axis_partition_the_world_and_hold_a_rank_at_its_coordinate(kwargs):
    mapping = Mapping(**kwargs)
    for axis in AXES:
        groups = list(of(mapping, "groups", axis))
        assert groups == list(mapping.groups(axis)) == sorted(groups, key=min)
        assert {len(group) for group in groups} == {of(mapping, "size", axis)}
        assert sorted(rank for group in groups for rank in group) == list(range(mapping.world_size))
        for each in everyone(mapping):
            group = of(each, "group", axis)
            assert isinstance(group, range) and group in groups
            assert group[of(each, "rank", axis)] == each.rank
            assert group == each.group(axis) == mapping.group(axis, each.rank)


@for_every_layout
def test_neighbours_predicates_and_node(kwargs):
    mapping = Mapping(**kwargs)
    for axis in ("pp", "cp"):
        group, at = of(mapping, "group", axis), of(mapping, "rank", axis)
        following = getattr(mapping, f"next_{axis}_rank")
        assert following == group[(at + 1) % len(group)]
        assert getattr(mapping.with_rank(following), f"prev_{axis}_rank") == mapping.rank
        assert getattr(mapping, f"is_first_{axis}_rank")() == (at == 0)
        assert getattr(mapping, f"is_last_{axis}_rank")() == (at == len(group) - 1)


@for_every_layout
def test_round_trips_and_resolved_arguments(kwargs):
    mapping = Mapping(**kwargs)
    direct, through_json = mapping.to_dict(), json.loads(json.dumps(mapping.to_dict()))
    for copy in (Mapping.from_dict(direct), Mapping.from_dict(through_json)):
        assert copy == mapping and hash(copy) == hash(mapping)
        assert copy.to_dict() == direct
    for each in everyone(mapping):
        assert each == Mapping(**{**kwargs, "rank": each.rank, "dwdp_rank": each.dwdp_rank})
        assert each.with_rank(mapping.rank) == mapping == Mapping(**kwargs)
    for name in ARGUMENTS:
        assert name in direct and getattr(mapping, name) != -1
    given_numbers = {name: value for name, value in kwargs.items() if isinstance(value, int) and value != -1}
    assert given_numbers == {name: getattr(mapping, name) for name in given_numbers}
    for axis in ("tp", "pp", "cp", *MOE_AXES):
        assert getattr(mapping, f"has_{axis}")() == (of(mapping, "size", axis) > 1)
    for kind in CpType:
        assert getattr(mapping, f"has_cp_{kind.name.lower()}")() == (mapping.has_cp() and mapping.cp_type is kind)
    assert (mapping.node_rank, mapping.local_rank) == divmod(mapping.rank, mapping.gpus_per_node)
    assert mapping.is_multi_node() == (mapping.world_size > mapping.gpus_per_node)
    assert mapping.dp_size == mapping.attn_dp_size


BASE = {"world_size": 32, "tp_size": 16, "pp_size": 2, "cp_config": {"cp_type": "HELIX"}, "attn_dp_size": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 1},
        {"gpus_per_node": 4},
        {"tp_size": 8, "cp_size": 2},
        {"cp_config": {"cp_type": "RING"}},
        {"cp_config": {"cp_type": "HELIX", "kv_block": 64}},
        {"pp_partition": [3, 4]},
        {"moe_cluster_size": 2, "moe_tp_size": 4},
        {"attn_dp_size": 4},
        {"attn_tp_size": 4, "attn_cp_size": 2},
        {"enable_lm_head_tp_in_adp": True},
        {"dwdp_size": 4},
    ],
    ids=str,
)
def test_equality_and_hash_cover_every_field(change):
    first, other = Mapping(**BASE), Mapping(**{**BASE, **change})
    assert first != other and hash(first) != hash(other)
    assert len({first, other, Mapping(**BASE)}) == 2


def test_how_a_size_was_given_is_not_part_of_equality():
    assert layout(8) == layout(8, moe_cluster_size=1, moe_tp_size=8, moe_ep_size=1, attn_tp_size=8, attn_cp_size=1)
    assert layout(4, enable_attention_dp=True) == layout(4, attn_dp_size=4)
    assert layout(4, cp_type="helix") == layout(4, cp_type="HELIX") == layout(4, cp_type=CpType.HELIX)


# ---- illegal layouts

TP8 = {"world_size": 8, "tp_size": 8}
TP4_CP2 = {"world_size": 8, "tp_size": 4, "cp_size": 2}
ULYSSES, RING, HELIX = ({"cp_config": {"cp_type": name}} for name in ("ULYSSES", "RING", "HELIX"))
ILLEGAL = [
    ({"world_size": 8, "tp_size": 3, "pp_size": 2}, [3, 2, 8]),
    ({**TP8, "moe_tp_size": 3, "moe_ep_size": 2}, [3, 2, 8]),
    ({**TP8, "moe_tp_size": 3}, [3, 8]),
    ({**TP8, "moe_cluster_size": 3}, [3, 8]),
    ({**TP4_CP2, **ULYSSES, "moe_tp_size": 8, "moe_ep_size": 1}, [8, 4]),
    ({**TP4_CP2, **RING, "moe_tp_size": 8, "moe_ep_size": 1}, [8, 4]),
    ({**TP4_CP2, **HELIX, "moe_tp_size": 4, "moe_ep_size": 1}, [4, 8]),
    ({**TP8, "attn_tp_size": 3, "attn_cp_size": 1}, [3, 8]),
    ({**TP8, "attn_dp_size": 2, "attn_tp_size": 3, "attn_cp_size": 1}, [2, 3, 8]),
    ({**TP8, "attn_tp_size": 4, "attn_cp_size": 2}, [2]),
    ({"world_size": 4, "tp_size": 4, "attn_dp_size": 3}, [3, 4]),
    ({**TP8, "attn_dp_size": 1, "enable_attention_dp": True}, [1]),
    ({**TP8, "enable_lm_head_tp_in_adp": True}, ["enable_lm_head_tp_in_adp"]),
    ({**TP8, "rank": 9}, [9]),
    ({**TP8, "rank": -1}, [-1]),
    ({**TP8, "rank": 8, "dwdp_size": 8}, [8]),
    *(({**TP8, name: size}, [name, size]) for name in SIZES for size in (0, -2)),
    ({"world_size": 4, "tp_size": -2, "pp_size": -2}, [-2]),
    ({"world_size": 2, "pp_size": 2, "pp_partition": [1, 2, 4]}, [3, 2]),
    ({**TP8, "dwdp_size": 3}, [3, 8]),
    ({**TP8, "rank": 5, "dwdp_size": 4, "dwdp_rank": 2}, [5, 4, 2]),
    ({**TP8, "cp_config": {"cp_type": "SPIRAL"}}, ["SPIRAL"]),
]


@pytest.mark.parametrize("kwargs, words", ILLEGAL, ids=str)
def test_illegal_layout_is_refused_in_one_line(kwargs, words):
    assert_one_line(lambda: Mapping(**kwargs), *words)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: layout(pp=2, pp_partition=[4, 5]).pp_layers(10), [9, 10]),
        (lambda: layout(pp=2).pp_rank_of_layer(12, 10), [12, 10]),
        (lambda: layout(8).with_rank(9), [9]),
        (lambda: layout(8).group("xp"), ["xp"]),
        (lambda: Mapping.from_dict({**layout(8).to_dict(), "colour": 3}), ["colour"]),
        (lambda: layout(8, cp=2).repurpose_helix_cp_to_tp(), []),
        (lambda: layout(2, cp=4).q_heads(7), [7, 8]),
        (lambda: layout(2, cp=4, cp_type="HELIX").kv_heads(7, 7), [7, 8]),
    ],
)
def test_illegal_call_is_refused_in_one_line(call, words):
    assert_one_line(call, *words)


@pytest.mark.parametrize("name", ["rank", "tp_size", "tp_rank", "tp_group", "cp_type", "cp_config", "colour"])
def test_immutable(name):
    mapping = layout(8)
    with pytest.raises(AttributeError):
        setattr(mapping, name, 1)
    assert mapping == layout(8)


# ---- particular rules


def test_cp_type():
    assert issubclass(CpType, StrEnum) and set(CpType.__members__) == {"ULYSSES", "RING", "HELIX"}
    for kind, case in product(CpType, (str.lower, str.upper, str.title)):
        assert layout(2, cp=2, cp_type=case(kind.name)).cp_type is kind
    assert Mapping(2, cp_size=2).has_cp_ulysses()


def test_the_callers_objects_are_neither_changed_nor_kept():
    config, partition = {"cp_type": "helix", "kv_block": 64}, [3, 4]
    mapping = Mapping(4, pp_size=2, cp_size=2, cp_config=config, pp_partition=partition)
    assert config == {"cp_type": "helix", "kv_block": 64} and partition == [3, 4]
    before = mapping.to_dict()
    config["kv_block"], partition[0] = 1, 1
    mapping.cp_config["kv_block"] = 2
    mapping.to_dict()["cp_config"]["kv_block"] = 3
    assert mapping.cp_config["kv_block"] == 64 and list(mapping.pp_partition) == [3, 4]
    assert mapping.to_dict() == before


def test_defaults():
    alone = Mapping()
    assert (alone.world_size, alone.rank, alone.gpus_per_node) == (1, 0, 8)
    assert all(of(alone, "size", axis) == 1 for axis in AXES)
    assert not any((alone.enable_attention_dp, alone.enable_lm_head_tp_in_adp, alone.dwdp_size, alone.pp_partition))
    assert (Mapping(16, 7, 4, tp_size=16).node_rank, Mapping(16, 7, 4, tp_size=16).local_rank) == (1, 3)


@pytest.mark.parametrize(
    "kwargs, sizes",
    [
        ({}, (8, 1, 1)),
        ({"moe_cluster_size": 2}, (4, 2, 1)),
        ({"moe_ep_size": 2}, (4, 1, 2)),
        ({"moe_cluster_size": 2, "moe_tp_size": 2}, (2, 2, 2)),
        ({"cp": 2}, (8, 1, 1)),
        ({"cp": 2, "cp_type": "RING"}, (8, 1, 1)),
        ({"cp": 2, "cp_type": "HELIX", "moe_ep_size": 4}, (4, 1, 4)),
    ],
    ids=str,
)
def test_forms_of_the_expert_view(kwargs, sizes):
    assert of(layout(8, **kwargs), "size", *MOE_AXES) == sizes


@pytest.mark.parametrize(
    "kwargs, sizes",
    [
        ({"cp": 2}, (1, 16, 1)),
        ({"cp": 2, "cp_type": "RING"}, (1, 8, 2)),
        ({"enable_attention_dp": True}, (8, 1, 1)),
        ({"attn_dp_size": 2, "enable_attention_dp": True}, (2, 4, 1)),
        ({"attn_dp_size": 2, "attn_tp_size": 4, "attn_cp_size": 1}, (2, 4, 1)),
        ({"attn_dp_size": 2, "attn_tp_size": 8, "attn_cp_size": 1}, (2, 4, 1)),
        ({"cp_type": "HELIX", "attn_dp_size": 2, "attn_tp_size": 4, "attn_cp_size": 2}, (2, 2, 2)),
        ({"cp": 2, "enable_attention_dp": True}, (8, 2, 1)),
        ({"cp": 2, "cp_type": "RING", "enable_attention_dp": True}, (8, 1, 2)),
        ({"cp": 2, "cp_type": "HELIX", "attn_dp_size": 4}, (4, 2, 2)),
    ],
    ids=str,
)
def test_forms_of_the_attention_view(kwargs, sizes):
    mapping = layout(8, **kwargs)
    assert attention(mapping) == sizes
    assert (mapping.dp_size, mapping.enable_attention_dp) == (sizes[0], sizes[0] > 1)


def test_decode_context_parallelism_inside_tp():
    mapping = layout(8, cp_type="HELIX", attn_dp_size=2, attn_tp_size=2, attn_cp_size=2, rank=5)
    assert of(mapping, "group", *ATTN_AXES) == (range(1, 6, 4), range(5, 8, 2), range(4, 6))


@pytest.mark.parametrize("attn_dp", [1, 2, 4])
def test_repurpose_helix_cp_to_tp(attn_dp):
    given_sizes = {"moe_tp_size": 2, "moe_ep_size": 4, "attn_dp_size": attn_dp}
    mapping = layout(4, pp=2, cp=2, cp_type="HELIX", **given_sizes)
    for each in everyone(mapping):
        flat = each.repurpose_helix_cp_to_tp()
        assert (flat.world_size, flat.rank, flat.pp_size, flat.tp_size, flat.cp_size) == (16, each.rank, 2, 8, 1)
        assert flat.tp_rank == each.tp_rank * 2 + each.cp_rank
        assert attention(flat) == (attn_dp, 8 // attn_dp, 1)
        assert of(flat, "group", "pp", *MOE_AXES) == of(each, "group", "pp", *MOE_AXES)


def test_layers_and_experts():
    stages = everyone(layout(pp=4))
    assert [stage.pp_layers(10) for stage in stages] == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert [stages[2].pp_rank_of_layer(layer, 10) for layer in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    chosen = everyone(layout(pp=3, tp=2, pp_partition=[1, 5, 2]))
    assert [each.pp_layers(8) for each in chosen[::2]] == [range(1), range(1, 6), range(6, 8)]
    assert [chosen[0].pp_rank_of_layer(layer, 8) for layer in range(8)] == [0, 1, 1, 1, 1, 1, 2, 2]
    ranks = everyone(layout(8, moe_tp_size=2, moe_ep_size=4))
    assert [each.ep_experts(10) for each in ranks] == [range(3), range(3, 6), range(6, 8), range(8, 10)] * 2


@pytest.mark.parametrize(
    "kwargs, heads, kv, queries, keys",
    [
        ({"tp": 4}, 6, 3, [(0, 1), (1, 3), (3, 4), (4, 6)], [(0, 1), (0, 2), (1, 2), (2, 3)]),
        ({"tp": 3}, 7, 7, [(0, 2), (2, 4), (4, 7)], [(0, 2), (2, 4), (4, 7)]),
        ({"tp": 3}, 4, 1, [(0, 1), (1, 2), (2, 4)], [(0, 1)] * 3),
        ({"tp": 2, "cp": 2}, 6, 2, [(0, 1), (1, 3), (3, 4), (4, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ({"tp": 2, "cp": 2, "cp_type": "HELIX"}, 8, 4, [(0, 4)] * 2 + [(4, 8)] * 2, [(0, 2)] * 2 + [(2, 4)] * 2),
        ({"tp": 4, "attn_dp_size": 2}, 4, 2, [(0, 2), (2, 4)] * 2, [(0, 1), (1, 2)] * 2),
    ],
    ids=str,
)
def test_heads(kwargs, heads, kv, queries, keys):
    ranks = everyone(layout(**kwargs))
    assert [each.q_heads(heads) for each in ranks] == [range(*bounds) for bounds in queries]
    assert [each.kv_heads(heads, kv) for each in ranks] == [range(*bounds) for bounds in keys]


def test_dwdp():
    for rank in range(8):
        mapping = layout(8, rank=rank, dwdp_size=4, dwdp_rank=rank % 4, moe_tp_size=1, moe_ep_size=1)
        assert list(mapping.dwdp_group) == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
        assert (mapping.moe_tp_size, mapping.moe_ep_size) == (1, 1)
    assert mapping.with_rank(2).dwdp_rank == 2
    assert Mapping.from_dict(mapping.to_dict()) == mapping


def test_neither_memory_nor_time_grows_with_the_world():
    def touch(rank):
        mapping = layout(1000, pp=10, cp=100, rank=rank, moe_ep_size=20, attn_dp_size=5)
        for axis in AXES:
            assert mapping.group(axis)[of(mapping, "rank", axis)] == rank
            assert len(mapping.groups(axis)[-1]) == of(mapping, "size", axis)
        return mapping.groups("tp")

    groups = touch(1)
    assert isinstance(groups, Sequence) and len(groups) == 1000
    assert next(iter(groups)) == groups[0] == range(0, 100_000, 100)
    assert groups[-1] == range(900_099, 1_000_000, 100)
    tracemalloc.start()
    touch(999_999)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    start = time.perf_counter()
    for rank in range(100):
        touch(rank)
    assert time.perf_counter() - start < 1.0


def test_the_import_needs_neither_torch_nor_mpi():
    code = "import spmd; from spmd import Mapping; import sys; print({'torch', 'mpi4py'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
