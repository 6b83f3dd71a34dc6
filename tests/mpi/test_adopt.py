"""Do an mpi4py communicator and a torch process group serve as a group, with the same bits, and stay their owner's?"""

import tempfile
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from spmd import (
    AllReduce,
    AllReduceFusionOp,
    AllReduceParams,
    AllReduceStrategy,
    Distributed,
    Mapping,
    MoEAllReduce,
    MoEAllReduceParams,
)
from spmd.collectives.fusion import reference
from spmd.control import mpi, objects
from spmd.control.adopt import adopt
from spmd.errors import InputError
from spmd.memory.workspace import Workspace

S, Op = AllReduceStrategy, AllReduceFusionOp
several = pytest.mark.ranks(2, 3, 4, 5, 6, 7, 8, 9)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "1")
    monkeypatch.setenv("SPMD_TIMEOUT", "20")


@pytest.fixture(scope="module")
def process_group():
    """torch's world: gloo over the ranks of the job."""
    world = mpi.world()
    folder = tempfile.TemporaryDirectory() if world.rank == 0 else None
    place = objects.allgather(world, folder.name if folder else None)[0]
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=world.rank, world_size=world.size)
    yield dist.group.WORLD
    dist.destroy_process_group()
    objects.allgather(world, None)
    if folder:
        folder.cleanup()


@lru_cache(maxsize=64)
def parts(n, shape, dtype):
    generator = torch.Generator().manual_seed(n)
    return tuple((torch.randn(shape, generator=generator) * 8.0 ** (rank % 3 - 1)).to(dtype) for rank in range(n))


def summed(tensors):
    total = torch.zeros(tensors[0].shape)
    for x in tensors:
        total = total + x.float()
    return total


def check(group):
    """Sums and fusions of a group, in its own order of ranks, bit for bit."""
    n, op = group.size, Op.RESIDUAL_RMS_NORM
    for strategy, dtype, shape in product((S.AUTO, S.TWOSHOT), DTYPES, [(1,), (5, 33), (0, 8), (150, 520)]):
        ar, tensors = AllReduce(group=group, strategy=strategy), parts(n, shape, dtype)
        for _ in range(2):
            x = tensors[group.rank].clone()
            got = ar(x)
            assert n == 1 or got.data_ptr() != x.data_ptr() or not x.numel()
            x.fill_(float("nan")) if n > 1 else None
            wanted = summed(tensors).to(dtype) if n > 1 else x
            assert torch.equal(got, wanted), (strategy, dtype, shape)
        given = {"residual": tensors[0], "norm_weight": tensors[0].reshape(-1, shape[-1]).sum(0)}
        params = AllReduceParams(fusion_op=op, **given)
        for _ in range(2):
            fused = ar(tensors[group.rank].clone(), params)
            wanted = reference(summed(tensors), dtype, op, **given)
            assert all(torch.equal(a, b) for a, b in zip(fused, wanted, strict=True)), (strategy, dtype, shape)
    for strategy, dtype in product((S.NCCL, S.AUTO), (torch.int32, torch.int64, *DTYPES)):
        x = [(torch.arange(12) % 5 + rank).to(dtype) for rank in range(n)]
        assert torch.equal(AllReduce(group=group, strategy=strategy)(x[group.rank]), sum(x))


def split(kind):
    """A communicator of this process, to be freed by who asked for it."""
    world = MPI.COMM_WORLD
    return {
        "world": world.Dup,
        "reversed": lambda: world.Split(0, -world.rank),
        "halves": lambda: world.Split(world.rank % 2, world.rank),
        "alone": MPI.COMM_SELF.Dup,
    }[kind]()


@pytest.mark.parametrize("kind,check_calls", [("world", "1"), ("reversed", "0"), ("halves", "0"), ("alone", "1")])
def test_communicators(monkeypatch, kind, check_calls):
    monkeypatch.setenv("SPMD_CHECK", check_calls)
    comm = split(kind)
    group = adopt(comm)
    assert (group.rank, group.size, list(group.ranks)) == (comm.rank, comm.size, list(range(comm.size)))
    assert group.checked == (check_calls == "1" and comm.size > 1)
    check(group)
    group.close()
    assert comm.allreduce(1) == comm.size  # it is as it was
    comm.Free()


@several
def test_the_owners_messages_and_ours_do_not_meet():
    comm = split("world")
    inbox, tensor = torch.zeros(1, dtype=torch.int64), torch.ones(4, 4)
    waiting = comm.Irecv([inbox.numpy(), MPI.INT64_T], MPI.ANY_SOURCE, MPI.ANY_TAG)
    group = adopt(comm)
    for strategy in (S.AUTO, S.NCCL):
        assert torch.equal(AllReduce(group=group, strategy=strategy)(tensor), tensor * comm.size)
    objects.allgather(mpi.world(), None)  # all have reduced, nobody has sent
    assert not waiting.Test()
    objects.allgather(mpi.world(), None)
    sent = torch.tensor([comm.rank])
    comm.Isend([sent.numpy(), MPI.INT64_T], (comm.rank + 1) % comm.size, 7).Wait()
    waiting.Wait()
    assert inbox.item() == (comm.rank - 1) % comm.size
    comm.Free()  # the owner may free it: ours are duplicates
    for strategy in (S.AUTO, S.NCCL):
        assert torch.equal(AllReduce(group=group, strategy=strategy)(tensor), tensor * group.size)
    group.close()


@several
def test_all_layers_on_one_communicator_share_a_workspace():
    comm = split("world")
    layers = [AllReduce(group=comm) for _ in range(3)]
    assert all(torch.equal(layer(torch.ones(8)), torch.full((8,), float(comm.size))) for layer in layers)
    assert len({id(Workspace.of(layer.group)) for layer in layers}) == 1
    for layer in layers:
        layer.group.close()
    comm.Free()


@several
def test_several_hosts_of_a_communicator(monkeypatch):
    comm = split("world")
    monkeypatch.setenv("SPMD_NODES", f"{comm.size}x1")
    group = adopt(comm)
    ar = AllReduce(group=group)
    assert "two-level" in ar.explain((4, 4), torch.float32)
    assert torch.equal(ar(torch.ones(4, 4)), torch.full((4, 4), float(comm.size)))
    group.close()
    comm.Free()


def test_a_group_of_ours_is_itself():
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)
    group = Distributed.get(mapping).group("tp")
    assert adopt(group) is group
    assert AllReduce(group=group).group is AllReduce(mapping).group is group
    Distributed.get(mapping).close()


@pytest.mark.parametrize("part", ["world", "halves", "reversed"])
def test_process_groups(process_group, part):
    world = mpi.world()
    halves = [list(range(start, world.size, 2)) for start in range(min(2, world.size))]
    wanted = {"world": [None], "halves": halves, "reversed": [list(range(world.size))[::-1]]}[part]
    made = [process_group if ranks is None else dist.new_group(ranks) for ranks in wanted]  # all ranks make all groups
    mine = made[world.rank % len(made)]
    group = adopt(mine)
    assert (group.rank, group.size) == (dist.get_rank(mine), dist.get_world_size(mine))
    assert list(group.ranks) == dist.get_process_group_ranks(mine)
    check(group)
    group.close()
    one = torch.ones(1)
    dist.all_reduce(one, group=mine)
    assert one.item() == group.size


@several
def test_several_hosts_of_a_process_group(process_group, monkeypatch):
    monkeypatch.setenv("SPMD_NODES", f"{mpi.world().size}x1")
    group = adopt(process_group)
    for dtype in (*DTYPES, torch.int64):
        x = [(torch.arange(12) % 5 + rank).to(dtype) for rank in range(group.size)]
        assert torch.equal(AllReduce(group=group)(x[group.rank]), sum(x))
    group.close()


def test_experts_on_both(process_group):
    comm = split("world")
    for given in (comm, process_group):
        group = adopt(given)
        params = MoEAllReduceParams(
            device_num_experts=2,
            expert_scale_factor=torch.full((2, 4), 0.5),
            shared_expert_output=torch.ones(4, 8),
            residual=torch.full((4, 8), 3.0),
            is_cutlass_min_latency=True,
        )
        _, residual = MoEAllReduce(group=group)(torch.full((2, 4, 8), 2.0), params)
        assert torch.equal(residual, torch.full((4, 8), 3.0 * group.size + 3.0))
        group.close()
    comm.Free()


def test_what_is_no_group_is_refused():
    wrong = [
        None,
        "tp",
        3,
        object(),
        torch.ones(2),
        torch.nn.Identity(),
        MPI.COMM_NULL,
        MPI.INT,
        MPI.COMM_WORLD.Get_group(),
    ]
    for given in wrong:
        with pytest.raises(InputError) as caught:
            adopt(given)
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError):
            AllReduce(group=given)


@several
def test_communicators_between_two_groups_are_refused():
    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, world.rank)
    between = half.Create_intercomm(0, world, 1 - world.rank % 2, 3)
    with pytest.raises(InputError):
        adopt(between)
    between.Free()
    half.Free()


@several
def test_a_process_outside_a_process_group_is_refused(process_group):
    outside = dist.new_group([0])
    if mpi.world().rank:
        with pytest.raises(InputError):
            adopt(outside)
    else:
        assert adopt(outside).size == 1
