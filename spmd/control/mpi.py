"""MPI under the control plane: a private world, a launcher that fits, groups with communicators made at first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from spmd._cpu import monotonic_ns
from spmd.control.agree import AGREE_TAG, Agreement, checking, wait
from spmd.control.record import recorder
from spmd.errors import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

# what launchers tell each process they start: rank, size and whose it is (srun with PMIx: no size)
LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE", "MPICH"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMIX_RANK", "", "a PMIx launcher"),
)
_PARTS = 1024  # from here on the tags of the communicators of parts


@lru_cache(maxsize=1)
def world() -> MPI.Intracomm:
    """A private duplicate of MPI_COMM_WORLD, made at the first call (collective over the job).

    InputError when the launcher and the MPI library do not belong together: N processes that each see a world of one.
    """
    from mpi4py import MPI

    check_launcher(dict(os.environ), MPI.COMM_WORLD.size, MPI.Get_library_version())
    return MPI.COMM_WORLD.Dup()


def check_launcher(environment: dict[str, str], size: int, library: str) -> None:
    """Compare what the launcher said with what the library sees; pure, so that it can be tested."""
    for _, variable, launcher in LAUNCHERS:
        launched = environment.get(variable, "")
        if size == 1 and launched.isdigit() and int(launched) > 1:
            loaded = library.replace("\0", "").strip().splitlines()[0].split(",")[0].strip()
            raise InputError(
                f"{launched} ranks were launched by {launcher}'s mpirun, but mpi4py loaded {loaded} and sees 1: "
                f"use {Path(sys.executable).parent}/mpirun, and keep one of mpich and openmpi in an environment"
            )


def abort(code: int) -> NoReturn:
    """End every rank of the job now."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # Abort does not return; this says so to readers and type checkers


class Closing(Protocol):
    """Something to be closed."""

    def close(self) -> None: ...


class Group:
    """The ranks that meet along one axis. Two communicators, each made at first use by the members alone:
    `comm` for objects and agreement, `data` for tensors, so that neither plane can match the other's messages.

    Attributes: name (the axis), ranks (global numbers, ascending), rank (my index in it), size, crowded (more ranks
    than cores on some host: waits give the core away), checked (SPMD_CHECK=1 when the group was made), kept (what rooms
    above have made for this group, by name; closed with it).
    """

    def __init__(
        self, parent: MPI.Intracomm | None, name: str, ranks: Sequence[int], rank: int, crowded: bool, tag: int
    ) -> None:
        self._parent, self._tag = parent, tag
        self.name, self.ranks, self.rank, self.size, self.crowded = name, ranks, rank, len(ranks), crowded
        self.checked = self.size > 1 and checking()
        self.kept: dict[str, Closing] = {}

    def __repr__(self) -> str:
        return f"Group({self.name}, ranks={list(self.ranks)}, rank={self.rank})"

    def part(self, name: str, members: Sequence[int], number: int) -> Group:
        """Some of the ranks (indices here), this one among them, as a group of their own. number: tells apart the parts
        that have a rank in common."""
        ranks = [self.ranks[index] for index in members]
        tag = _PARTS + 64 * number + self._tag
        return Group(self._parent, f"{self.name}.{name}", ranks, members.index(self.rank), self.crowded, tag)

    def _create(self, tag: int) -> MPI.Intracomm:
        from mpi4py import MPI

        if self.size == 1:
            return MPI.COMM_SELF.Dup()
        assert self._parent is not None, "a group of several ranks has a parent"
        # MPI's call would wait for ever for a member that does not come: meet first, with a deadline
        Agreement(self._parent, self.name, self.ranks, self.ranks, tag=2 * tag).check("create_communicator")
        members = self._parent.Get_group().Incl(list(self.ranks))
        comm = self._parent.Create_group(members, tag)
        members.Free()
        return comm

    @cached_property
    def comm(self) -> MPI.Intracomm:
        return self._create(2 * self._tag)

    @cached_property
    def data(self) -> MPI.Intracomm:
        return self._create(2 * self._tag + 1)

    @cached_property
    def _agreement(self) -> Agreement:
        return Agreement(self.comm, self.name, self.ranks, tag=AGREE_TAG)

    def agree(self, signature: str, timeout: float | None = None) -> None:
        """Under SPMD_CHECK=1: the same call with the same arguments on every rank, or one error on all of them."""
        if self.checked:
            self._agreement.check(signature, timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Nobody leaves before all have come."""
        if self.size > 1:
            start = monotonic_ns()
            wait([self.comm.Ibarrier()], timeout)
            recorder.add("barrier", self.name, 0, start)

    def allgather_int64(self, values: Sequence[int] | np.ndarray) -> np.ndarray:
        """Fixed-length integers of every rank, in one message: [size, len(values)] int64."""
        mine = np.ascontiguousarray(values, np.int64)
        everyone = np.empty((self.size, *mine.shape), np.int64)
        if self.size == 1:
            everyone[0] = mine
            return everyone
        self.agree(f"allgather_int64 int64[{mine.size}]")
        start = monotonic_ns()
        wait([self.comm.Iallgather(mine, everyone)])
        recorder.add("allgather_int64", self.name, mine.nbytes, start)
        return everyone

    def broadcast_int64(self, values: Sequence[int] | np.ndarray, root: int = 0) -> np.ndarray:
        """Root's integers on every rank, in one message; `values` gives the length everywhere."""
        values = np.array(values, np.int64)
        if not 0 <= root < self.size:
            raise InputError(f"broadcast_int64 on {self.name}: root {root} is outside the group of {self.size} ranks")
        if self.size > 1:
            self.agree(f"broadcast_int64 int64[{values.size}] root {root}")
            start = monotonic_ns()
            wait([self.comm.Ibcast(values, root)])
            recorder.add("broadcast_int64", self.name, values.nbytes, start)
        return values

    def close(self) -> None:
        """Free both communicators and all that is kept (collective over the members)."""
        while self.kept:
            self.kept.popitem()[1].close()
        for name in ("comm", "data"):
            comm = self.__dict__.pop(name, None)
            if comm is not None:
                comm.Free()
        self.__dict__.pop("_agreement", None)
