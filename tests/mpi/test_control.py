"""Do ranks meet in the right groups, exchange objects whole, and all hear the same thing when one of them differs?"""

import os
import re
from itertools import cycle, product
from math import prod

import numpy as np
import pytest
import torch
from mpi4py import MPI

from spmd import Distributed, Mapping
from spmd.collectives import library
from spmd.control import mpi, objects
from spmd.control.job import together
from spmd.errors import DeadlineError, DesyncError, InputError, SerializationError, VerifyError
from spmd.topology.mapping import AXES

several = pytest.mark.ranks(2, 3, 4, 5, 8)
OBJECTS = [None, "", [], {}, b"", "seven..", list(range(20)), {"text": "x" * 70}, np.arange(3)]


def here(**sizes):
    """The mapping of this process: tp, pp, cp sizes, context parallelism by Helix, experts over the whole block."""
    tp, pp, cp = (sizes.get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp"))
    world = tp * pp * cp
    rank = mpi.world().rank if mpi.world().rank < world else 0
    return Mapping(world, rank, cp_config={"cp_type": "helix"}, **sizes)


def layouts():
    """Every tp * pp * cp of the launched world."""
    size = mpi.world().size
    for sizes in product(range(1, size + 1), repeat=3):
        if prod(sizes) == size:
            tp, pp, cp = sizes
            experts = {"moe_ep_size": tp * cp, "enable_attention_dp": tp > 1}
            yield here(tp_size=tp, pp_size=pp, cp_size=cp, **experts)


@pytest.fixture
def dist():
    """All ranks are one tp group; closed afterwards."""
    dist = Distributed.get(here(tp_size=mpi.world().size))
    yield dist
    dist.close()


@pytest.fixture
def group(dist):
    return dist.group("tp")


def same(got, expected):
    return type(got) is type(expected) and np.array_equal(got, expected)


class Stubborn:
    """Cannot be pickled, and says so in two lines."""

    def __reduce__(self):
        raise ValueError("no\nnever")


class Counted(MPI.Intracomm):
    """A communicator that counts those made from it."""

    made = 0
    live = 0

    def Dup(self, info=MPI.INFO_NULL):
        return self._count(super().Dup(info))

    def Create_group(self, group, tag=0):
        return self._count(super().Create_group(group, tag))

    def _count(self, comm):
        Counted.made += 1
        Counted.live += 1
        return Counted(comm)

    def Free(self):
        Counted.live -= 1
        super().Free()


@pytest.fixture
def counted(monkeypatch):
    """Everything made from the world or from COMM_SELF during the test is counted."""
    world = Counted(mpi.world())
    monkeypatch.setattr(mpi, "world", lambda: world)
    monkeypatch.setattr(MPI, "COMM_SELF", Counted(MPI.COMM_SELF))
    monkeypatch.setattr(Counted, "made", 0)
    monkeypatch.setattr(Counted, "live", 0)
    return Counted


# ---------------------------------------------------------------------- one object per mapping


def test_one_object_per_mapping_until_it_is_closed():
    size = mpi.world().size
    first, second = Distributed.get(here(tp_size=size)), Distributed.get(here(cp_size=size))
    assert Distributed.get(here(tp_size=size)) is first
    assert (second is first) == (size == 1)
    assert first.group("tp") is first.group("tp")
    first.close()
    again = Distributed.get(here(tp_size=size))
    assert again is not first
    assert again.tp_allgather(again.rank) == list(range(size))
    again.close()
    if size > 1:
        assert Distributed.get(here(cp_size=size)) is second
        assert second.cp_allgather(second.rank) == list(range(size))
    second.close()


def test_every_axis_meets_its_group():
    for mapping in layouts():
        dist = Distributed.get(mapping)
        assert (dist.rank, dist.world_size) == (mpi.world().rank, mpi.world().size)
        for axis in AXES:
            group = dist.group(axis)
            expected = list(getattr(mapping, f"{axis}_group"))
            assert (group.name, list(group.ranks), group.size) == (axis, expected, len(expected))
            assert group.rank == getattr(mapping, f"{axis}_rank")
            assert dist.allgather(mapping.rank, axis=axis) == expected
            assert getattr(dist, f"{axis}_allgather")(mapping.rank) == expected
        dist.close()


def test_tp_cp_is_tp_major_and_one_host_is_one_node():
    for mapping in layouts():
        dist = Distributed.get(mapping)
        block = list(product(range(mapping.tp_size), range(mapping.cp_size)))
        assert dist.tp_cp_allgather((mapping.tp_rank, mapping.cp_rank)) == block
        assert dist.tp_cp_broadcast(mapping.rank, root=len(block) - 1) == dist.group("tp_cp").ranks[-1]
        assert dist.allgather(mapping.rank, axis="node") == list(range(mapping.world_size))
        assert (dist.local_rank, dist.local_size) == (mapping.rank, mapping.world_size)
        dist.close()


@pytest.mark.ranks(4, 8)
def test_roots_are_indices_inside_the_group():
    without_rank_0 = 0
    for mapping in layouts():
        dist = Distributed.get(mapping)
        for axis in ("tp", "pp", "cp", "tp_cp"):
            group = dist.group(axis)
            without_rank_0 += group.size > 1 and 0 not in group.ranks
            for root in range(group.size):
                assert dist.broadcast(("from", mapping.rank), root, axis=axis) == ("from", group.ranks[root])
                got = dist.gather(mapping.rank, root, axis=axis)
                assert got == (list(group.ranks) if group.rank == root else None)
                assert group.broadcast_int64([mapping.rank, 2**62], root).tolist() == [group.ranks[root], 2**62]
        dist.close()
    assert sum(mpi.world().allgather(without_rank_0)) > 0


@pytest.mark.parametrize("extra", [1, 7])
def test_a_mapping_larger_than_the_world_is_refused_by_all_before_anything_is_made(counted, extra):
    size = mpi.world().size
    with pytest.raises(InputError) as caught:
        Distributed.get(here(tp_size=size + extra))
    assert f"needs {size + extra} ranks" in str(caught.value)
    assert f"{size} were launched" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert counted.made == 0


@pytest.mark.ranks(3, 4, 5, 8)
def test_ranks_beyond_a_smaller_world_stay_outside_by_name():
    size, rank = mpi.world().size, mpi.world().rank
    dist = Distributed.get(here(tp_size=size - 1))
    if rank < size - 1:
        assert dist.tp_allgather(rank) == list(range(size - 1))
        assert library.all_reduce(torch.ones(2), dist.group("tp")).tolist() == [size - 1.0] * 2
    else:
        for call in (lambda: dist.group("tp"), lambda: dist.tp_allgather(0), lambda: dist.barrier()):
            with pytest.raises(InputError, match=rf"^MPI rank {rank} is outside .* world of {size - 1}: .* over \w+$"):
                call()
    dist.close()
    assert mpi.world().allgather(rank) == list(range(size))


@several
def test_the_mapping_of_another_rank_is_refused():
    size, rank = mpi.world().size, mpi.world().rank
    with pytest.raises(InputError, match=rf"^MPI rank {rank} has the mapping of rank {(rank + 1) % size}: .*{rank}\)$"):
        Distributed.get(here(tp_size=size).with_rank((rank + 1) % size))


def test_an_unknown_axis_is_refused(dist):
    with pytest.raises(InputError, match=r"^unknown axis 'row': the axes are world, "):
        dist.group("row")


def test_many_layouts_one_after_another_leave_nothing_behind(counted):
    open_files = []
    turns = list(layouts())
    for turn in range(40):
        dist = Distributed.get(turns[turn % len(turns)])
        for axis in ("world", "tp", "pp", "cp", "tp_cp", "moe_ep"):
            group = dist.group(axis)
            assert dist.allgather(turn, axis=axis) == [turn] * group.size
            assert library.all_reduce(torch.ones(1), group).item() == group.size
        assert counted.live > 0 or dist.world_size == 1
        dist.close()
        assert counted.live == 0
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert counted.made >= 40 * (mpi.world().size > 1)
    assert max(open_files[20:]) <= max(open_files[:20])


# ---------------------------------------------------------------------- objects


@pytest.mark.parametrize("chunk", [7, 50, objects.CHUNK])
def test_objects_arrive_whole_in_any_chunk(group, chunk):
    comm, size, rank = group.comm, group.size, group.rank
    for root, obj in zip(cycle({0, size - 1}), OBJECTS, strict=False):
        got = objects.broadcast(comm, obj if rank == root else "not mine", root, chunk=chunk)
        assert same(got, obj)
        everyone = [OBJECTS[(other + root) % len(OBJECTS)] if other != root else obj for other in range(size)]
        got = objects.allgather(comm, everyone[rank], chunk=chunk)
        assert all(map(same, got, everyone))
        got = objects.gather(comm, everyone[rank], root, chunk=chunk)
        assert all(map(same, got, everyone)) if rank == root else got is None


@several
def test_the_root_gets_a_copy_too(dist):
    mine = [1, 2]
    for got in (dist.broadcast(mine), dist.allgather(mine)[dist.rank]):
        assert got == mine
        assert got is not mine


@several
@pytest.mark.parametrize("bad", [Stubborn(), lambda: 0], ids=["raises", "lambda"])
def test_what_one_rank_cannot_pickle_fails_on_all(dist, bad):
    size, rank = dist.world_size, dist.rank
    for odd in {0, size - 1}:
        obj = bad if rank == odd else "fine"
        calls = (
            lambda o=odd, x=obj: dist.broadcast(x, o),
            lambda x=obj: dist.allgather(x),
            lambda x=obj: dist.gather(x),
        )
        for call in calls:
            with pytest.raises(
                SerializationError, match=rf"^the object of group rank {odd} cannot be pickled"
            ) as caught:
                call()
            assert "\n" not in str(caught.value)
        assert dist.allgather(rank) == list(range(size))
    with pytest.raises(SerializationError, match="group rank " + ", ".join(map(str, range(size)))):
        dist.allgather(bad)


@several
@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_outside_the_group_is_refused(dist, root):
    for call in (dist.broadcast, dist.gather, lambda obj, root: dist.group("tp").broadcast_int64(obj, root)):
        with pytest.raises(InputError, match=f"{root}"):
            call([1], root)
    assert dist.allgather(dist.rank) == list(range(dist.world_size))


def test_int64_paths_keep_every_bit(dist):
    size, rank = dist.world_size, dist.rank
    for axis in ("world", "tp", "pp"):
        group = dist.group(axis)
        got = dist.allgather_int64([2**62 + rank, -1, -(2**63)], axis=axis)
        assert got.dtype == np.int64
        assert got.tolist() == [[2**62 + other, -1, -(2**63)] for other in group.ranks]
        assert dist.allgather_int64([], axis=axis).shape == (group.size, 0)
        for root in range(group.size):
            assert group.broadcast_int64([2**62 + rank], root).tolist() == [2**62 + group.ranks[root]]
    mine = np.array([rank])
    assert dist.tp_allgather_int64(mine).tolist() == [[other] for other in range(size)]
    group.broadcast_int64(mine, 0)
    assert mine.tolist() == [rank]


# ---------------------------------------------------------------------- one to one


@several
@pytest.mark.parametrize("chunk", [7, objects.CHUNK])
def test_objects_in_a_ring(group, chunk):
    size, rank, comm = group.size, group.rank, group.comm
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [objects.isend(comm, (rank, obj), after, chunk=chunk) for obj in OBJECTS]
    for obj in OBJECTS:
        source, got = objects.recv(comm, before, chunk=chunk)
        assert source == before
        assert same(got, obj)
    for handle in sent:
        handle.wait()
    if rank == 0:
        objects.send(comm, "around", after, 5, chunk=chunk)
        assert objects.recv(comm, before, 5, chunk=chunk) == "around"
    else:
        objects.send(comm, objects.recv(comm, before, 5, chunk=chunk), after, 5, chunk=chunk)


@several
def test_an_object_may_be_changed_right_after_isend(dist):
    size, rank = dist.world_size, dist.rank
    for length in (3, 1 << 20):
        mine = [rank] * length
        first, second = dist.isend_object(mine, (rank + 1) % size, tag=1), None
        mine[:] = [-1]
        second = dist.isend_object("second", (rank + 1) % size, tag=2)
        assert dist.recv_object((rank - 1) % size, tag=2) == "second"
        assert dist.recv_object((rank - 1) % size, tag=1) == [(rank - 1) % size] * length
        first.wait()
        second.wait()


@several
@pytest.mark.parametrize("length", [0, 5, 1 << 18])
def test_buffers(dist, length):
    size, rank = dist.world_size, dist.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    handle = dist.isend(np.full(length, rank, np.float64), after, tag=3)
    got = np.full(length, np.nan)
    assert dist.recv(got, before, tag=3) is got
    handle.wait()
    assert np.array_equal(got, np.full(length, before))
    if rank == 0:
        mine = np.arange(length)
        dist.send(mine, 1)
        mine[:] = -1
        dist.send_object("done", 1)
    elif rank == 1:
        assert np.array_equal(dist.recv(np.full(length, -2), 0), np.arange(length))
        assert dist.recv_object(0) == "done"


@several
@pytest.mark.parametrize("array", [np.ones((4, 6)).T, np.ones((4, 6))[:, ::2]], ids=["fortran", "strided"])
def test_arrays_that_are_not_contiguous_are_refused(dist, array):
    other = (dist.rank + 1) % dist.world_size
    for call in (dist.isend, dist.send, dist.recv):
        with pytest.raises(InputError, match="contiguous"):
            call(array, other, 7)


@several
def test_a_receive_that_timed_out_takes_no_later_message(dist):
    if dist.rank == 1:
        with pytest.raises(DeadlineError, match=r"gave up after 0\.1 s"):
            dist.recv_object(0, tag=4, timeout=0.1)
    dist.barrier()
    if dist.rank == 0:
        dist.send_object("late", 1, tag=4)
    elif dist.rank == 1:
        assert dist.recv_object(0, tag=4, timeout=10) == "late"


# ---------------------------------------------------------------------- ranks that differ

X = torch.ones(2, 3)
DIFFERENT = {  # what one rank calls, what the others call, and both as the error shows them
    "op": (
        lambda d, g: library.reduce_scatter(torch.ones(4, 6).bfloat16(), g, sizes=[4] + [0] * (g.size - 1)),
        lambda d, g: library.all_reduce(X, g),
        ("reduce_scatter", "bf16[4,6]", "all_reduce", "fp32[2,3]"),
    ),
    "shape": (
        lambda d, g: library.all_reduce(X.t(), g),
        lambda d, g: library.all_reduce(X, g),
        ("all_reduce", "fp32[3,2]", "all_reduce", "fp32[2,3]"),
    ),
    "dtype": (
        lambda d, g: library.broadcast(X.half(), g),
        lambda d, g: library.broadcast(X, g),
        ("broadcast", "fp16[2,3]", "broadcast", "fp32[2,3]"),
    ),
    "rows without sizes": (
        lambda d, g: library.all_gather(torch.ones(7, 3), g),
        lambda d, g: library.all_gather(X, g),
        ("all_gather", "7", "all_gather", "2"),
    ),
    "sizes": (
        lambda d, g: library.reduce_scatter(X, g, sizes=[0, 2] + [0] * (g.size - 2)),
        lambda d, g: library.reduce_scatter(X, g, sizes=[2, 0] + [0] * (g.size - 2)),
        ("reduce_scatter", "[0, 2", "reduce_scatter", "[2, 0"),
    ),
    "other dimensions": (
        lambda d, g: library.all_gather(torch.ones(2, 5), g),
        lambda d, g: library.all_gather(X, g),
        ("all_gather", ",5]", "all_gather", ",3]"),
    ),
    "asked or equal sizes": (
        lambda d, g: library.all_to_all(torch.ones(g.size, 2), g, send_sizes=[1] * g.size),
        lambda d, g: library.all_to_all(torch.ones(g.size, 2), g),
        ("all_to_all", "fp32", "all_to_all", "fp32"),
    ),
    "dim": (
        lambda d, g: library.all_to_all(torch.ones(g.size, g.size), g, dim=1),
        lambda d, g: library.all_to_all(torch.ones(g.size, g.size), g),
        ("all_to_all", "dim 1", "all_to_all", "dim 0"),
    ),
    "reduction": (
        lambda d, g: library.all_reduce(X, g, op="max"),
        lambda d, g: library.all_reduce(X, g),
        ("all_reduce", "max", "all_reduce", "sum"),
    ),
    "root": (
        lambda d, g: d.tp_broadcast("x", 1),
        lambda d, g: d.tp_broadcast("x", 0),
        ("broadcast", "root 1", "broadcast", "root 0"),
    ),
    "object or tensor": (
        lambda d, g: d.tp_allgather(X),
        lambda d, g: library.all_gather(X, g),
        ("allgather", "object", "all_gather", "fp32"),
    ),
    "barrier": (
        lambda d, g: d.tp_barrier(),
        lambda d, g: d.tp_gather(1),
        ("barrier", "barrier", "gather", "object"),
    ),
    "int64 length": (
        lambda d, g: g.allgather_int64([1, 2]),
        lambda d, g: g.allgather_int64([1, 2, 3]),
        ("allgather_int64", "[2]", "allgather_int64", "[3]"),
    ),
}


@several
@pytest.mark.parametrize("name", DIFFERENT)
def test_one_rank_differs_and_all_hear_the_same(dist, group, name):
    theirs, ours, (odd_op, odd_detail, op, detail) = DIFFERENT[name]
    assert library.all_reduce(X, group).tolist() == (X * group.size).tolist()
    for odd in {group.size - 1, 0 if group.size > 2 else 1}:  # of two, the first rank is right
        with pytest.raises(DesyncError) as caught:
            (theirs if group.rank == odd else ours)(dist, group)
        text = str(caught.value)
        assert mpi.world().allgather(text) == [text] * group.size
        match = re.fullmatch(rf"(\w+) #\d+ on tp: rank {odd} called (\w+) ?(.*), the others (\w+) ?(.*)", text)
        assert match is not None, text
        assert match.group(1, 2, 4) == (op, odd_op, op)
        assert odd_detail in f"{odd_op} {match[3]}"
        assert detail in f"{op} {match[5]}"
        assert library.all_reduce(X, group).tolist() == (X * group.size).tolist()
        assert dist.tp_allgather(group.rank) == list(range(group.size))


@several
def test_calls_are_counted_from_the_first(dist, group):
    for _ in range(3):
        library.all_reduce(X, group)
    with pytest.raises(DesyncError, match=r"^all_reduce #3 on tp: "):
        library.all_reduce(torch.ones(group.rank + 1), group)


@pytest.mark.ranks(8)
def test_global_ranks_are_named():
    mapping = here(tp_size=4, pp_size=2)
    dist = Distributed.get(mapping)
    group = dist.group("tp")
    odd = group.ranks[2]
    with pytest.raises(DesyncError, match=rf"^all_reduce #0 on tp: rank {odd} called all_reduce .*, the others all_re"):
        library.all_reduce(X if mapping.rank != odd else X.int(), group)
    dist.close()


@several
def test_a_long_message_is_the_same_on_all_ranks(group):
    with pytest.raises(DesyncError) as caught:
        library.all_reduce(torch.ones(*[1] * 60, group.rank + 1), group)
    assert mpi.world().allgather(str(caught.value)) == [str(caught.value)] * group.size


@several
def test_long_calls_that_differ_at_their_end_differ(group):
    sizes = ["1000"] * 200 + [str(group.rank)]
    with pytest.raises(DesyncError):
        group.agree(f"all_gather sizes {', '.join(sizes)}")


# ---------------------------------------------------------------------- errors of some ranks become errors of all


@several
def test_together_raises_the_same_error_everywhere():
    world = mpi.world()
    last, everyone = world.size - 1, ", ".join(map(str, range(world.size)))

    def outcome(error):
        with pytest.raises(Exception) as caught, together(world):
            if error is not None:
                raise error
        return caught.type, str(caught.value)

    got = outcome(InputError("no such file") if world.rank == last else None)
    assert got == (InputError, f"rank {last} of {world.size}: no such file")
    assert outcome(VerifyError("alike")) == (VerifyError, "alike")
    got = outcome(InputError("first") if world.rank == 0 else DesyncError("other"))
    assert got == (InputError, f"rank 0 of {world.size}: first")
    got = outcome(SerializationError("no") if world.rank == last else None)
    assert got[1] == f"rank {last} of {world.size}: no"
    assert issubclass(SerializationError, got[0])
    with together(world):
        pass
    assert world.allgather(world.rank) == list(map(int, everyone.split(", ")))
