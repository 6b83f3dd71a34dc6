"""Is an all-reduce over several hosts right, and made of a sum inside each host, one between them and a gather inside?

SPMD_NODES=2x2 makes four ranks act as two hosts of two.
"""

import os
from itertools import product

import pytest
import torch

from spmd import AllReduceFusionOp, AllReduceParams, AllReduceStrategy, Distributed, Mapping, exchange
from spmd.collectives import fusion, gather
from spmd.collectives.allreduce import AllReduce
from spmd.collectives.strategy import Way
from spmd.control import mpi, objects
from spmd.control.record import recorder
from spmd.errors import InputError
from spmd.memory.workspace import Workspace
from spmd.topology.radix import Radix

TYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(6, 40), (1, 1), (1, 3), (0, 8), (3, 1, 1031), (200, 600)]


def nodes(*layouts):
    """Values of SPMD_NODES, each for a number of ranks."""
    params = [pytest.param(layout, id=layout, marks=pytest.mark.ranks(ranks)) for ranks, layout in layouts]
    return pytest.mark.parametrize("dist", params, indirect=True, scope="module")


EQUAL = ((2, "2x1"), (3, "3x1"), (4, "2x2"), (4, "4x1"), (8, "2x4"))
UNEQUAL = ((3, "2x2"), (4, "2x3"), (5, "2x3"), (5, "2x4"), (8, "3x3"))
equal, unequal, several_hosts = nodes(*EQUAL), nodes(*UNEQUAL), nodes(*EQUAL, *UNEQUAL)


@pytest.fixture(scope="module")
def dist(request):
    """tp is the whole world, on hosts that SPMD_NODES makes up."""
    world = mpi.world()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMD_NODES", request.param)
        mapping = Mapping(world.size, world.rank, tp_size=world.size)
        Distributed.get(mapping).close()  # whose groups are of the hosts that there are
        made = Distributed.get(mapping)
        yield made
        made.close()


def part(rank, *shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 5 + 3 * rank) % 11 - 4).reshape(shape).to(dtype)


def exact(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got, expected), f"got {got}, expected {expected}"


def same_everywhere(group, x):
    everyone = objects.allgather(group.comm, x.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert everyone == everyone[:1] * group.size


def counts(group, *parts):
    """Calls and bytes of every collective that moved tensors on the group and on its parts."""
    names = [group.name, *(f"{group.name}.{name}" for name in parts)]
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange")
    return {
        (op, name): (total.calls, total.bytes)
        for (op, name), total in recorder.totals.items()
        if name in names and op in ops
    }


# ---------------------------------------------------------------------- the sum


@equal
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_are_right_on_every_rank(dist, dtype):
    group = dist.group("tp")
    layer = AllReduce(group=group)
    for _ in range(2):
        for shape in SHAPES:
            parts = [part(rank, *shape, dtype=dtype) for rank in range(group.size)]
            x, expected = parts[group.rank].clone(), torch.stack(parts).double().sum(0).to(dtype)
            assert layer.decide(x.shape, dtype).way == Way.TWO_LEVEL
            got = layer(x)
            x.fill_(float("nan"))
            exact(got, expected)
            out = torch.full_like(got, float("nan"))
            assert layer(parts[group.rank], out=out) is out
            exact(out, expected)
            kept = parts[group.rank].clone()
            assert layer(kept, out=kept) is kept
            exact(kept, expected)


@equal
def test_every_rank_has_the_same_bits(dist):
    """Of values whose sum depends on the order and on where it is rounded."""
    group = dist.group("tp")
    x = torch.rand(37, 29, generator=torch.Generator().manual_seed(group.rank)) * 10.0 ** (group.rank % 3)
    for dtype in TYPES:
        got = AllReduce(group=group)(x.to(dtype))
        same_everywhere(group, got)
        total = torch.zeros(x.shape)
        for rank in range(group.size):
            values = torch.rand(37, 29, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)
            total += values.to(dtype).float()
        assert torch.allclose(got.float(), total, rtol=4 * torch.finfo(dtype).eps, atol=0)


@equal
def test_each_host_sums_then_hosts_sum_shards_then_each_host_gathers(dist):
    group = dist.group("tp")
    inside = int(os.environ["SPMD_NODES"].split("x")[1])
    layer, x = AllReduce(group=group), part(group.rank, 24, 40)
    layer(x)
    recorder.reset()
    layer(x)
    shard = x.nbytes // inside
    expected = {("all_reduce", "tp.hosts"): (1, shard)}
    if inside > 1:
        expected |= {("reduce_scatter", "tp.node"): (1, x.nbytes), ("all_gather", "tp.node"): (1, shard)}
    assert counts(group, "node", "hosts") == expected
    rank = mpi.world().rank
    node, hosts = group.kept["two-level"]._inside, group.kept["two-level"]._between
    assert list(node.ranks) == [rank // inside * inside + index for index in range(inside)]
    assert list(hosts.ranks) == list(range(rank % inside, group.size, inside))


@equal
@pytest.mark.parametrize("op", [op for op in AllReduceFusionOp if op != AllReduceFusionOp.NONE], ids=lambda op: op.name)
def test_what_follows_the_sum(dist, op):
    group, column = dist.group("tp"), torch.arange(32)
    for rows, dtype in product((5, 1, 0), TYPES):
        parts = [part(rank, rows, 32, dtype=dtype) for rank in range(group.size)]
        given = {
            "residual": part(3, rows, 32, dtype=dtype),
            "norm_weight": (column % 4 + 1).to(dtype),
            "norm_pre_residual_weight": (column % 3 + 1).to(dtype),
            "bias": (column % 5).to(dtype),
            "scale": torch.tensor([2.0]),
        }
        got = AllReduce(group=group)(parts[group.rank], AllReduceParams(fusion_op=op, **given))
        expected = fusion.reference(torch.stack(parts).float().sum(0), dtype, op, **given)
        for one, other in zip((got,) if isinstance(got, torch.Tensor) else got, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@nodes((4, "2x2"), (8, "2x4"))
def test_integers_are_summed_by_the_library(dist):
    group = dist.group("tp")
    parts = [part(rank, 3, 5, dtype=torch.int64) for rank in range(group.size)]
    exact(AllReduce(group=group)(parts[group.rank]), sum(parts))


# ---------------------------------------------------------------------- unequal hosts, and one


@unequal
@pytest.mark.parametrize("dtype", TYPES)
def test_hosts_with_different_numbers_of_ranks_take_the_library(dist, dtype):
    group = dist.group("tp")
    layer = AllReduce(group=group)
    for shape in SHAPES:
        parts = [part(rank, *shape, dtype=dtype) for rank in range(group.size)]
        assert layer.decide(shape, dtype).way == Way.LIBRARY
        exact(layer(parts[group.rank]), torch.stack(parts).double().sum(0).to(dtype))
    assert "several hosts with different numbers of ranks" in layer.explain((4, 8), dtype)
    x = part(group.rank, 24, 40)
    recorder.reset()
    layer(x)
    assert counts(group, "node", "hosts") == {("all_reduce", "tp"): (1, x.nbytes)}


@nodes((2, "1x2"), (3, "1x4"), (4, "1x4"), (4, "2x4"), (5, "1x5"), (8, "1x8"))
def test_ranks_that_fit_one_host_share_memory(dist):
    group = dist.group("tp")
    assert Workspace.of(group) is not None
    x = part(group.rank, 24, 40)
    assert AllReduce(group=group).decide(x.shape, x.dtype).way not in (Way.LIBRARY, Way.TWO_LEVEL)
    exact(AllReduce(group=group)(x), sum(part(rank, 24, 40) for rank in range(group.size)))


@several_hosts
def test_no_strategy_needs_shared_memory_that_is_not_there(dist):
    group = dist.group("tp")
    parts = [part(rank, 9, 7) for rank in range(group.size)]
    for strategy in AllReduceStrategy:
        layer = AllReduce(group=group, strategy=strategy)
        assert layer.decide((9, 7), torch.float32).way in (Way.LIBRARY, Way.TWO_LEVEL)
        exact(layer(parts[group.rank]), sum(parts))
    assert AllReduce(group=group).lend((4, 4), torch.float32) is None
    assert AllReduce(group=group).stream((4, 4), torch.float32) is None


# ---------------------------------------------------------------------- the other collectives


@several_hosts
def test_rows_are_moved_by_the_library(dist):
    group, size = dist.group("tp"), mpi.world().size
    sizes = [(3 * rank + 1) % 4 for rank in range(size)]
    cuts, fulls = [part(i, sizes[i], 3) for i in range(size)], [part(i, sum(sizes), 3) for i in range(size)]
    mine = fulls[group.rank]
    assert gather.route("allgather", mine, group) == (None, "library: the ranks are on several hosts")
    exact(gather.all_gather(cuts[group.rank], group, sizes=sizes), torch.cat(cuts))
    exact(gather.reduce_scatter(mine, group, sizes=sizes), sum(fulls).split(sizes)[group.rank])
    got = gather.all_to_all(mine, group, send_sizes=sizes)
    exact(got, torch.cat([full.split(sizes)[group.rank] for full in fulls]))
    exact(gather.broadcast(mine, group, root=size - 1), fulls[-1])
    exact(gather.all_gather(mine[:0], group), mine[:0])


@several_hosts
def test_an_exchange_asks_for_the_node_group(dist):
    group = dist.group("tp")
    with pytest.raises(InputError, match="several hosts: exchange inside the node group"):
        exchange(torch.ones(1, 4), group, Radix({"a": group.size}), [1] * group.size, held=["a"], gather=["a"])
    exact(AllReduce(group=group)(torch.ones(3)), torch.full((3,), float(group.size)))


@pytest.mark.ranks(4)
def test_groups_of_one_host_and_groups_across(monkeypatch):
    """cp inside a host, tp across: one has shared memory, the other is one rank a host."""
    monkeypatch.setenv("SPMD_NODES", "2x2")
    world = mpi.world()
    dist = Distributed.get(Mapping(4, world.rank, tp_size=2, cp_size=2))
    inside, across, all_four = dist.group("cp"), dist.group("tp"), dist.group("tp_cp")
    assert Workspace.of(inside) is not None
    assert Workspace.of(across) is Workspace.of(all_four) is None
    for _ in range(3):
        for group in (inside, across, all_four):
            parts = [part(rank, 5, 7) for rank in group.ranks]
            exact(AllReduce(group=group)(parts[group.rank]), sum(parts))
            exact(gather.all_gather(parts[group.rank], group), torch.cat(parts))
    assert AllReduce(group=inside).decide((5, 7), torch.float32).way not in (Way.LIBRARY, Way.TWO_LEVEL)
    assert AllReduce(group=across).decide((5, 7), torch.float32).way == Way.TWO_LEVEL
    dist.close()
