"""Do all ranks see each other's bytes, agree on every error, and give everything back?"""

import ctypes
import errno
import gc
import os
import re
import stat
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.control import mpi, objects
from spmd.errors import DesyncError, InputError, SpmdError
from spmd.memory import host
from spmd.memory.symmetric import SymmetricMemory, allocate, regions, registry, symmetric_empty

several = pytest.mark.ranks(2, 3, 4, 5, 8)
SIZES = [0, 1, 4096, 10_000, 1 << 20]


@pytest.fixture
def dist():
    """tp is the whole world, pp a group of one."""
    world = mpi.world()
    dist = Distributed.get(Mapping(world.size, world.rank, tp_size=world.size))
    yield dist
    dist.close()


@pytest.fixture
def group(dist):
    return dist.group("tp")


@pytest.fixture
def unchecked(group):
    """Without signatures: the memory's own agreement has to find what differs."""
    group.checked = False
    return group


@pytest.fixture(params=["unnamed", "no O_TMPFILE", "no /proc"])
def named(request, group, monkeypatch):
    """Whether the files have names. What one rank cannot do, none does: the last rank alone meets an obstacle."""
    obstacle, tried, create = request.param, [], host._create
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if obstacle == "no O_TMPFILE" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if obstacle == "no /proc" and str(path).startswith("/proc/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **kwargs)

    def noting(files, size, directory, named):
        tried.append(named)
        return create(files, size, directory, named)

    if group.rank == group.size - 1:
        monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(host, "_create", noting)
    expected = obstacle != "unnamed"
    yield expected
    assert group.size == 1 or tried == [False, True][: 1 + expected]


def maps_of_me():
    return Path("/proc/self/maps").read_text().splitlines()


def shared_maps():
    return [line for line in maps_of_me() if "/dev/shm/#" in line or "/dev/shm/spmd" in line]


def mapped(address):
    """Whether this address is mapped in this process, as the kernel says."""
    spans = ([int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in maps_of_me())
    return any(first <= address < last for first, last in spans)


def files():
    """The names of my own that are in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"spmd-{os.getpid()}-")]


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def pattern(rank, nbytes):
    return ((torch.arange(nbytes) * 7 + 31 * (rank + 1)) % 251).to(torch.uint8)


def same_error(group, kind, call):
    """The text of the error that every rank raised, the same and in one line."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert objects.allgather(group.comm, text) == [text] * group.size
    assert "\n" not in text
    return text


def whole(group):
    """The group can still allocate, and what it gets is right."""
    memory = allocate(group, 100)
    memory.tensor((100,), torch.uint8).copy_(pattern(group.rank, 100))
    group.barrier()
    assert all(torch.equal(memory.peer(rank), pattern(rank, 100)) for rank in range(group.size))
    group.barrier()


# ---------------------------------------------------------------------- every rank's bytes


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_rank_sees_what_the_others_write(group, named, nbytes):
    before = descriptors()
    memory = allocate(group, nbytes)
    assert isinstance(memory, SymmetricMemory)
    assert (memory.group, memory.nbytes, len(memory.addresses)) == (group, nbytes, group.size)
    mine = memory.tensor((nbytes,), torch.uint8)
    assert mine.data_ptr() == memory.addresses[group.rank] or not nbytes
    assert not mine.any()
    group.barrier()
    mine.copy_(pattern(group.rank, nbytes))
    group.barrier()
    for rank in range(group.size):
        assert torch.equal(memory.peer(rank), pattern(rank, nbytes))
        there = ctypes.string_at(memory.addresses[rank], nbytes)
        assert there == pattern(rank, nbytes).numpy().tobytes()
    group.barrier()
    following = (group.rank + 1) % group.size
    memory.peer(following).fill_(group.rank)  # I write to the next
    group.barrier()
    assert (mine == (group.rank - 1) % group.size).all()
    assert (descriptors(), files()) == (before, [])


def test_memory_is_zeroed_page_aligned_and_apart(group):
    memories = [allocate(group, nbytes) for nbytes in SIZES]
    spans = sorted((start, max(memory.nbytes, 1)) for memory in memories for start in memory.addresses)
    for (start, nbytes), (following, _) in pairwise(spans):
        assert start % 4096 == 0
        assert start + nbytes <= following
    for memory in memories:
        assert not memory.tensor((memory.nbytes,), torch.uint8).any()


@several
def test_only_the_owner_may_open_the_files(group, named, monkeypatch):
    seen, place = [], host._Window.place

    def watching(self, offset, nbytes, descriptor):
        seen.append((os.fstat(descriptor), len(files())))
        place(self, offset, nbytes, descriptor)

    monkeypatch.setattr(host._Window, "place", watching)
    allocate(group, 4096)
    assert files() == []
    assert len(seen) >= group.size
    for info, count in seen[-group.size :]:
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_uid == os.geteuid()
        assert (info.st_nlink, count) == (named, named)
        assert info.st_blocks * 512 >= 4096  # its pages are there


def test_symmetric_empty_is_an_ordinary_tensor(group):
    for shape, dtype in [((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float64), ((7,), torch.bool)]:
        x = symmetric_empty(shape, dtype, group)
        assert (tuple(x.shape), x.dtype, x.device.type, x.is_contiguous()) == (shape, dtype, "cpu", True)
        assert x.untyped_storage().nbytes() == max(x.nbytes, 1)  # resizing it in place cannot reach a peer's bytes
        assert x.data_ptr() % 4096 == 0
        assert torch.equal(x.fill_(1) + x, torch.ones(shape, dtype=dtype) + torch.ones(shape, dtype=dtype))


# ---------------------------------------------------------------------- how long it lives


def test_views_keep_all_of_it_mapped_and_the_last_one_unmaps_it(group):
    memory = allocate(group, 10_000)
    addresses = memory.addresses
    view, other = memory.tensor((4, 5), torch.float32, offset=64)[1:, 2], memory.peer(group.size - 1)[5:7]
    memory.close()
    memory.close()
    with pytest.raises(InputError, match="closed"):
        memory.peer(0)
    with pytest.raises(InputError, match="closed"):
        memory.tensor((1,), torch.uint8)
    del memory
    gc.collect()
    assert all(map(mapped, addresses))
    view.fill_(2)
    del view
    assert all(map(mapped, addresses))
    assert other.sum() >= 0
    del other
    assert not any(map(mapped, addresses))


def test_memory_outlives_that_of_its_peers(group):
    """Release is local: bytes of a peer that has let go are still there."""
    x = symmetric_empty((1000,), torch.int32, group)
    (addresses,) = [region.addresses for region in regions(group)]
    x.fill_(group.rank + 1)
    group.barrier()
    if group.rank != 0:
        del x
    group.barrier()
    if group.rank == 0:
        for rank, address in enumerate(addresses):
            assert ctypes.c_int32.from_address(address).value == rank + 1
        del x
    assert not any(map(mapped, addresses))


def test_nothing_piles_up(group):
    allocate(group, 4096)
    before, maps = descriptors(), len(maps_of_me())
    for step in range(50):
        x = symmetric_empty((1000,), torch.float32, group)
        x.fill_(step)
        assert len(regions(group)) <= 2  # the last one's and this
        assert descriptors() == before
    del x
    assert regions(group) == ()
    assert files() == []
    assert len(maps_of_me()) <= maps + 10


# ---------------------------------------------------------------------- regions


def test_subscribers_hear_of_every_region_before_it_goes(group):
    heard = []

    def remove(number):
        addresses = next(addresses for verb, known, addresses, _ in heard if (verb, known) == ("add", number))
        heard.append(("remove", number, addresses, all(map(mapped, addresses))))

    first = symmetric_empty((3,), torch.float32, group)
    allocate(group, 64)  # no tensor of symmetric_empty: nobody hears of it
    end = registry(group).subscribe(lambda *region: heard.append(("add", *region)), remove)
    second = symmetric_empty((2, 2), torch.int64, group)
    assert [(verb, number, nbytes) for verb, number, _, nbytes in heard] == [("add", 0, 12), ("add", 1, 32)]
    assert [addresses[group.rank] for _, _, addresses, _ in heard] == [first.data_ptr(), second.data_ptr()]
    assert [region.id for region in regions(group)] == [0, 1]
    view = first[1:]
    del first
    assert len(heard) == 2
    del view
    assert heard[2] == ("remove", 0, heard[0][2], True)
    assert not any(map(mapped, heard[0][2]))
    end()
    del second
    assert len(heard) == 3
    third = symmetric_empty((1,), torch.float32, group)
    assert [region.id for region in regions(group)] == [2]  # ids are not used again
    assert third.data_ptr() == regions(group)[0].addresses[group.rank]


def test_ids_are_the_same_on_all_ranks_whoever_lets_go_first(group):
    kept = []
    for step in range(6):
        x = symmetric_empty((step,), torch.float32, group)
        if (step + group.rank) % 2:
            kept.append(x)
    del x
    table = objects.allgather(group.comm, [region.id for region in regions(group)])
    assert all(ids == [step for step in range(6) if (step + rank) % 2] for rank, ids in enumerate(table))
    kept.append(symmetric_empty((9,), torch.float32, group))
    assert objects.allgather(group.comm, regions(group)[-1].id) == [6] * group.size


def test_a_group_of_one_has_the_same_interface(dist):
    alone = dist.group("pp")
    assert alone.size == 1
    memory = allocate(alone, 5000)
    assert (host.hosts(alone), host.same_host(alone)) == ([0], True)
    memory.peer(0).fill_(3)
    assert memory.tensor((5000,), torch.uint8).sum() == 15_000
    x = symmetric_empty((2, 3), torch.float32, alone)
    assert [region.addresses for region in regions(alone)] == [(x.data_ptr(),)]
    addresses = (*memory.addresses, x.data_ptr())
    assert files() == []
    del memory, x
    assert regions(alone) == ()
    assert not any(map(mapped, addresses))


# ---------------------------------------------------------------------- errors


@several
def test_different_sizes_are_one_error(unchecked):
    last = unchecked.size - 1
    usual = 4096 if unchecked.rank != last else 8192
    text = same_error(unchecked, InputError, lambda: allocate(unchecked, usual))
    assert f"rank {last} asked for 8192 bytes, the others for 4096" in text
    same_error(unchecked, InputError, lambda: symmetric_empty((usual,), torch.int8, unchecked))
    assert regions(unchecked) == ()
    whole(unchecked)


@several
def test_different_calls_are_one_error(group):
    assert group.checked
    rows = 2 if group.rank else 3
    text = same_error(group, DesyncError, lambda: symmetric_empty((rows, 4), torch.float16, group))
    assert "float16[3,4]" in text
    assert "float16[2,4]" in text
    whole(group)


@pytest.mark.parametrize("nbytes", [-1, 1 << 50, 1 << 62, 1 << 70])
def test_sizes_that_cannot_be_are_one_error(group, nbytes):
    text = same_error(group, InputError, lambda: allocate(group, nbytes))
    assert re.search(r"asked for -?\d+ bytes|need \d+ bytes in /dev/shm|cannot map \d+ bytes", text)
    whole(group)


def test_a_shape_below_zero_is_one_error(group):
    same_error(group, InputError, lambda: symmetric_empty((-2, -2), torch.float32, group))
    whole(group)


TOO_MUCH = [
    ((5,), torch.float32, 84),
    ((1,), torch.int16, 3),
    ((101,), torch.int8, 0),
    ((-1,), torch.int8, 0),
    ((1,), torch.int8, -1),
]


@pytest.mark.parametrize("shape,dtype,offset", TOO_MUCH)
def test_tensors_that_do_not_fit_are_refused(group, shape, dtype, offset):
    memory = allocate(group, 100)
    with pytest.raises(InputError, match=str(offset)):
        memory.tensor(shape, dtype, offset)
    for rank in (-1, group.size):
        with pytest.raises(InputError, match=f"{group.size} ranks"):
            memory.peer(rank)


def failing(monkeypatch, group, module, name, code):
    """Rank 1 fails in a call, once or always; the others do not."""
    if group.rank == 1:

        def refuse(*args, **kwargs):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(module, name, refuse)


STEPS = [
    (os, "statvfs", errno.ENOENT, "cannot use /dev/shm: No such file"),
    (os, "posix_fallocate", errno.ENOSPC, r"cannot take 12288 bytes in /dev/shm \(\d+ were free\): No space left"),
    (os, "posix_fallocate", errno.EFBIG, "cannot take 12288 bytes in .*: File too large: .*shm-size"),
    (os, "open", errno.EMFILE, "cannot take 12288 bytes in /dev/shm .*: Too many open files"),
    (host, "_open", errno.EACCES, "cannot map the 12288 bytes of rank 1: Permission denied"),
    (host, "_map", errno.ENOMEM, "cannot map the 12288 bytes of rank 0: Cannot allocate memory"),
]


@several
@pytest.mark.parametrize("module,name,code,text", STEPS, ids=[f"{name}-{code}" for _, name, code, _ in STEPS])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(group, module, name, code, text):
    group.barrier()
    before, maps, shared = descriptors(), len(maps_of_me()), shared_maps()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, group, module, name, code)
        said = same_error(group, InputError, lambda: allocate(group, 10_000))
    assert re.search(f"symmetric memory on tp: rank 1 {text}", said), said
    assert (files(), descriptors()) == ([], before)
    assert shared_maps() == shared  # other groups may have theirs
    assert len(maps_of_me()) <= maps + 4
    whole(group)


@several
def test_files_of_others_are_not_taken_for_a_peers(group, monkeypatch):
    """What is found under a peer's process id may be another process's."""
    real = host._identity
    monkeypatch.setattr(host, "_identity", lambda info: (real(info)[0], real(info)[1] + group.rank))
    text = same_error(group, InputError, lambda: allocate(group, 4096))
    assert "cannot map the 4096 bytes of" in text
    monkeypatch.setattr(host, "_identity", real)
    whole(group)


@several
def test_directories_must_be_the_same(group, monkeypatch):
    if group.rank == 1:
        monkeypatch.setenv("SPMD_SHM_DIR", "/tmp")
    assert "SPMD_SHM_DIR of rank 1 is not rank 0's" in same_error(group, InputError, lambda: allocate(group, 4096))
    monkeypatch.delenv("SPMD_SHM_DIR", raising=False)
    whole(group)


def test_another_directory(group, monkeypatch):
    folder = objects.broadcast(group.comm, tempfile.mkdtemp() if group.rank == 0 else None)
    monkeypatch.setenv("SPMD_SHM_DIR", folder)
    seen, create = [], host._create
    monkeypatch.setattr(host, "_create", lambda *args: seen.append(args[2]) or create(*args))
    whole(group)
    assert seen == [folder] * (group.size > 1)
    group.barrier()
    if group.rank == 0:
        os.rmdir(folder)  # empty


# ---------------------------------------------------------------------- hosts


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "nodes,places", [("2x2", [0, 0, 1, 1]), ("4x1", [0, 1, 2, 3]), ("1x4", [0] * 4), ("", [0] * 4)]
)
def test_nodes_that_are_set_count_as_hosts(group, monkeypatch, nodes, places):
    monkeypatch.setenv("SPMD_NODES", nodes)
    assert host.hosts(group) == places
    assert host.same_host(group) == (not any(places))
    if any(places):
        away = ", ".join(str(rank) for rank in range(4) if places[rank])
        text = same_error(group, InputError, lambda: symmetric_empty((4,), torch.float32, group))
        assert f"not on the host of rank 0: rank{'s' * (',' in away)} {away}: use the node group" in text
    else:
        whole(group)


@pytest.mark.ranks(4)
def test_groups_inside_a_node_of_set_nodes_have_memory(monkeypatch):
    """Ranks are those of the world: the second pipeline stage is on the second node."""
    monkeypatch.setenv("SPMD_NODES", "2x2")
    dist = Distributed.get(Mapping(4, mpi.world().rank, tp_size=2, pp_size=2))
    assert host.hosts(dist.group("tp")) == [0, 0]
    assert host.hosts(dist.group("pp")) == [0, 1]
    assert host.hosts(dist.group("world")) == [0, 0, 1, 1]
    whole(dist.group("tp"))
    with pytest.raises(InputError, match="use the node group"):
        allocate(dist.group("pp"), 4096)
    dist.close()


@several
@pytest.mark.parametrize("nodes", ["2", "0x4", "ax2", "2x", "1x1", "-1x8"])
def test_nodes_that_make_no_sense_are_one_error(group, monkeypatch, nodes):
    if group.rank == 1:
        monkeypatch.setenv("SPMD_NODES", nodes)
    text = same_error(group, SpmdError, lambda: host.hosts(group))
    assert "SPMD_NODES on rank 1 must be nodes x ranks per node" in text
    monkeypatch.delenv("SPMD_NODES", raising=False)
    whole(group)
