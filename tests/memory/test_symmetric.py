"""Does memory of one process live exactly as long as somebody refers to it?"""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from spmd.control.mpi import Group
from spmd.memory.symmetric import allocate, regions, registry, symmetric_empty
from tests import launch


@pytest.fixture
def alone():
    return Group(None, "tp", range(1), 0, False, 0)


def test_importing_starts_nothing():
    done = launch.python("-c", "import sys, spmd.memory.symmetric, spmd.memory.host; print('mpi4py' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_tensors_may_outlive_the_interpreter():
    """At the end of the process nothing is unmapped under a tensor that is still used, and nobody is called."""
    program = """
import atexit, torch
from spmd.control.mpi import Group
from spmd.memory.symmetric import registry, symmetric_empty
group = Group(None, "tp", range(1), 0, False, 0)
atexit.register(lambda: print(int(x.sum())))  # after whatever the memory may have registered
x = symmetric_empty((1000,), torch.int32, group).fill_(2)
registry(group).subscribe(lambda *region: None, lambda number: print("removed", number))
"""
    done = launch.python("-c", program)
    assert (done.returncode, done.stdout) == (0, "2000\n")


def test_the_group_is_not_kept_alive_by_its_tensors():
    alone = Group(None, "tp", range(1), 0, False, 0)
    x = symmetric_empty((4,), torch.float32, alone)
    known, ref = registry(alone), weakref.ref(alone)
    del alone
    gc.collect()
    assert ref() is None
    assert len(known.live()) == 1
    del x
    assert known.live() == ()


def test_the_last_tensor_may_be_dropped_by_another_thread(alone):
    heard = []
    registry(alone).subscribe(lambda *region: None, lambda number: heard.append((number, threading.current_thread())))
    held = [symmetric_empty((4,), torch.float32, alone)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert heard == [(0, thread)]


def test_every_kind_of_reference_holds_the_memory(alone):
    x = symmetric_empty((4, 4), torch.float32, alone).fill_(1)
    holders = [x.numpy(), x.detach(), x.view(torch.int32), x.untyped_storage(), torch.nn.Parameter(x), x.unbind()]
    del x
    gc.collect()
    while holders:
        assert len(regions(alone)) == 1
        holders.pop()
    assert regions(alone) == ()


def test_two_groups_have_two_registries(alone):
    other = Group(None, "tp", range(1), 0, False, 0)
    x, y = symmetric_empty((4,), torch.float32, alone), symmetric_empty((4,), torch.float32, other)
    assert [region.id for region in regions(alone)] == [region.id for region in regions(other)] == [0]
    assert x.data_ptr() != y.data_ptr()


def test_callbacks_come_once_and_before_the_memory_goes(alone):
    memory, seen = allocate(alone, 4096), []
    address = memory.addresses[0]
    memory.peer(0).fill_(9)
    memory.before_unmap(lambda: seen.append(f"{address:x}-" in Path("/proc/self/maps").read_text()))
    memory.close()
    memory.close()
    assert seen == [True]
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
