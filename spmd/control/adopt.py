"""Groups that somebody else made: an mpi4py communicator or a torch process group as a Group."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Union
from zlib import crc32

import numpy as np

from spmd.control.mpi import Group
from spmd.errors import InputError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

Adoptable = Union[Group, "MPI.Intracomm", "ProcessGroup"]
_CORES = 16  # words of 64 cores


def adopt(given: Adoptable) -> Group:
    """A Group over the same ranks, numbered as there; collective over them the first time, then the same Group again.

    A Group is returned as it is. InputError for anything else, and for a torch group this process is not in.
    """
    if isinstance(given, Group):
        return given
    kind = type(given).__module__.split(".")[0]
    if kind == "mpi4py":
        from mpi4py import MPI

        if isinstance(given, MPI.Intracomm) and given != MPI.COMM_NULL:
            return _of_comm(given)
    if kind == "torch":
        from torch.distributed import ProcessGroup

        if isinstance(given, ProcessGroup):
            if id(given) not in _torch:  # which keeps it: its number is nobody else's
                _torch[id(given)] = TorchGroup(given)
            return _torch[id(given)]
    raise InputError(f"{given!r:.80} is no group: give an mpi4py communicator or a torch process group")


_torch: dict[int, TorchGroup] = {}


@lru_cache(maxsize=1)
def _keyval() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def _of_comm(comm: MPI.Intracomm) -> Group:
    """The Group kept in a communicator's attributes: it goes with it."""
    group = comm.Get_attr(_keyval())
    if not isinstance(group, Group):
        group = _CommGroup(comm)
        comm.Set_attr(_keyval(), group)
    return group


def _crowded(group: Group) -> bool:
    """Whether some host has more of the ranks than cores they may use."""
    mask = np.zeros(64 * _CORES, np.uint8)
    mask[[core % len(mask) for core in os.sched_getaffinity(0)]] = 1
    words = np.packbits(mask).view(np.int64)
    table = group.allgather_int64([crc32(socket.gethostname().encode()), *words.tolist()])
    for host in set(table[:, 0].tolist()):
        here = table[table[:, 0] == host]
        used = np.bitwise_or.reduce(here[:, 1:], axis=0)
        if len(here) > int(np.unpackbits(used.view(np.uint8)).sum()):
            return True
    return False


class _CommGroup(Group):
    """The ranks of a communicator; ours are duplicates of it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm, "comm", range(comm.size), comm.rank, crowded=False, tag=0)
        self.__dict__["comm"], self.__dict__["data"] = comm.Dup(), comm.Dup()
        self._parent = self.comm  # ours, so that no message meets the caller's
        self.crowded = _crowded(self)


class TorchGroup(Group):
    """The ranks of a torch process group, with its collectives for numbers and for what shared memory does not do."""

    def __init__(self, process_group: ProcessGroup) -> None:
        import torch.distributed as dist

        rank = dist.get_rank(process_group)
        if rank < 0:
            raise InputError("this process is outside the torch process group")
        super().__init__(None, "torch", dist.get_process_group_ranks(process_group), rank, crowded=False, tag=0)
        self.process_group, self.checked = process_group, False
        self.crowded = _crowded(self)

    def _create(self, tag: int) -> MPI.Intracomm:
        raise InputError("a torch process group has no MPI communicator: only all-reduces work on it")

    def allgather_int64(self, values: Sequence[int] | np.ndarray) -> np.ndarray:
        import torch
        import torch.distributed as dist

        mine = torch.tensor(np.asarray(values, np.int64))
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.process_group)
        return torch.stack(every).numpy()

    def barrier(self, timeout: float | None = None) -> None:
        self.allgather_int64([0])

    def all_reduce(self, x: Any) -> Any:
        """The sum of everybody's tensor, by torch."""
        import torch
        import torch.distributed as dist

        work = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.clone()
        dist.all_reduce(work, group=self.process_group)
        return work.to(x.dtype)

    def part(self, name: str, members: Sequence[int], tag: int) -> Group:
        raise InputError("a torch process group over several hosts: use one for each host")
