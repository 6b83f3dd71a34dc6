"""The control plane of one mapping: objects and small numbers between the ranks that meet along an axis."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd._cpu import monotonic_ns
from spmd.control import mpi, objects
from spmd.control.agree import AGREE_TAG
from spmd.control.record import recorder
from spmd.errors import InputError
from spmd.topology.mapping import AXES, Mapping
from spmd.topology.node import host_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

_GROUPS = ("world", "tp_cp", "node", "dwdp", *AXES)  # the order numbers the tags of communicator creation
_open: dict[Mapping, Distributed] = {}


class Distributed:
    """`Distributed.get(mapping)`: one object per mapping; the ranks of the mapping call it together the first time.

    Roots are indices inside the group. Every operation exists for every axis: `broadcast(obj, axis="tp")`, or by the
    names `tp_broadcast`, `cp_allgather`, `pp_gather`, `moe_ep_barrier`, ...; "tp_cp" is the tp·cp block of a stage,
    tp-major. Object collectives pickle, so exchange them between ranks of one job only.

    Errors: InputError when the mapping is larger than the MPI world, when its rank is not this process's, or when a
    rank outside the mapping's world asks for a group; SerializationError on all ranks when an object cannot be pickled.
    """

    tp_broadcast: Callable[..., Any]
    tp_allgather: Callable[..., list[Any]]
    cp_broadcast: Callable[..., Any]
    cp_allgather: Callable[..., list[Any]]
    tp_cp_broadcast: Callable[..., Any]
    tp_cp_allgather: Callable[..., list[Any]]

    @staticmethod
    def get(mapping: Mapping) -> Distributed:
        if mapping not in _open:
            _open[mapping] = Distributed(mapping)
        return _open[mapping]

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._groups: dict[str, mpi.Group] = {}
        self._along: dict[tuple[int, ...], mpi.Group] = {}
        self._parent = None
        self.local_rank, self.local_size, self._crowded, self.member = 0, 1, False, True
        self.cores_per_rank = len(os.sched_getaffinity(0))
        self._node_ranks: Sequence[int] = range(mapping.rank, mapping.rank + 1)
        if mapping.world_size == 1:
            return
        self._parent = mpi.world()
        size, rank = self._parent.size, self._parent.rank
        if mapping.world_size > size:
            sizes = f"tp {mapping.tp_size} * pp {mapping.pp_size} * cp {mapping.cp_size}"
            raise InputError(
                f"the layout needs {mapping.world_size} ranks ({sizes}), but {size} were launched: "
                f"start it with mpirun -np {mapping.world_size}"
            )
        self.member = rank < mapping.world_size
        if not self.member:
            return
        if mapping.rank != rank:
            raise InputError(f"MPI rank {rank} has the mapping of rank {mapping.rank}: use mapping.with_rank({rank})")
        self._find_hosts()

    def _find_hosts(self) -> None:
        """Who shares my host, how many cores each of us has there, and whether some host has more ranks than cores.

        Collective over the mapping's world.
        """
        host, machine = host_number(self.mapping.rank), socket.gethostname()
        places = self.allgather((host, machine, sorted(os.sched_getaffinity(0))))
        self._node_ranks = [rank for rank, (number, _, _) in enumerate(places) if number == host]
        self.local_rank, self.local_size = self._node_ranks.index(self.mapping.rank), len(self._node_ranks)
        used: dict[str, set[int]] = {}  # cores are the machine's, whatever SPMD_NODES makes of it
        for _, name, affinity in places:
            used.setdefault(name, set()).update(affinity)
        names = [name for _, name, _ in places]
        own = len(os.sched_getaffinity(0))
        self.cores_per_rank = max(1, min(own, len(used[machine]) // names.count(machine)))
        self._crowded = any(names.count(name) > len(used[name]) for name in used)
        for group in self._groups.values():
            group.crowded = self._crowded

    def group(self, axis: str = "world") -> mpi.Group:
        """The group this rank meets along `axis`: an axis of the mapping, or "world", "node", "tp_cp", "dwdp"."""
        if axis not in self._groups:
            if not self.member:
                raise InputError(
                    f"MPI rank {mpi.world().rank} is outside the mapping's world of {self.mapping.world_size}: "
                    f"it takes no part in collectives over {axis}"
                )
            if axis not in _GROUPS:
                raise InputError(f"unknown axis {axis!r}: the axes are {', '.join(_GROUPS)}")
            self._groups[axis] = self._make(axis)
        return self._groups[axis]

    def along(self, name: str, ranks: Sequence[int] | None = None) -> mpi.Group:
        """The group of these ranks (None: of the axis of that name): the first axis's that has the same ranks, so that
        all who move tensors between them share one memory; else one of that name.

        Ranks that share a group ask for all theirs in the same order."""
        members = tuple(self.mapping.group(name) if ranks is None else ranks)
        if members not in self._along:
            known = [axis for axis in AXES if getattr(self.mapping, f"{axis}_size") == len(members)]
            same = [axis for axis in known if tuple(self.mapping.group(axis)) == members]
            if same:
                self._along[members] = self.group(same[0])
            else:
                number = len(_GROUPS) + len(self._along)
                index = members.index(self.mapping.rank)
                made = mpi.Group(self._parent, name, members, index, self._crowded, number)
                self._along[members] = self._groups[name] = made
        return self._along[members]

    def _make(self, axis: str) -> mpi.Group:
        mapping = self.mapping
        if axis == "tp_cp":
            ranks = mapping.model.group(mapping.rank, "tp", "cp")
        elif axis == "node":
            ranks = tuple(self._node_ranks)
        else:
            ranks = mapping.group(axis)
        return mpi.Group(self._parent, axis, ranks, ranks.index(mapping.rank), self._crowded, _GROUPS.index(axis))

    @property
    def rank(self) -> int:
        return self.mapping.rank

    @property
    def world_size(self) -> int:
        return self.mapping.world_size

    # ------------------------------------------------------------------ collectives on objects

    def broadcast(self, obj: Any, root: int = 0, *, axis: str = "world", timeout: float | None = None) -> Any:
        """Root's object on every rank: a copy, on the root too (in a group of one: the object itself)."""
        group = self.group(axis)
        if group.size == 1:
            return obj
        group.agree(f"broadcast root {root}", timeout)
        return self._recorded("broadcast", group, objects.broadcast, obj, root, timeout=timeout)

    def allgather(self, obj: Any, *, axis: str = "world", timeout: float | None = None) -> list[Any]:
        """All objects on every rank, in group order."""
        group = self.group(axis)
        if group.size == 1:
            return [obj]
        group.agree("allgather object", timeout)
        return self._recorded("allgather", group, objects.allgather, obj, timeout=timeout)

    def gather(self, obj: Any, root: int = 0, *, axis: str = "world", timeout: float | None = None) -> list[Any] | None:
        """All objects on the root, in group order; None elsewhere."""
        group = self.group(axis)
        if group.size == 1:
            return [obj]
        group.agree(f"gather object root {root}", timeout)
        return self._recorded("gather", group, objects.gather, obj, root, timeout=timeout)

    def allgather_int64(self, values: Sequence[int], *, axis: str = "world") -> np.ndarray:
        """Fixed-length integers of every rank in one message, for token counts: [group size, len(values)] int64."""
        return self.group(axis).allgather_int64(values)

    def barrier(self, *, axis: str = "world", timeout: float | None = None) -> None:
        """Nobody leaves before all have come."""
        group = self.group(axis)
        group.agree("barrier", timeout)
        group.barrier(timeout)

    @staticmethod
    def _recorded(op: str, group: mpi.Group, call: Callable[..., Any], *args: Any, timeout: float | None) -> Any:
        start = monotonic_ns()
        result = call(group.comm, *args, timeout=timeout)
        recorder.add(f"{op}_object", group.name, 0, start)
        return result

    # ------------------------------------------------------------------ one to one, by global rank
    # Errors of all of them: InputError for a rank or a tag that does not exist, DeadlineError when nothing comes.

    def send_object(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of an object. SerializationError here and at the receiver when it cannot be pickled."""
        self.isend_object(obj, dest, tag).wait()

    def isend_object(self, obj: Any, dest: int, tag: int = 0) -> objects.Sending:
        """Returns a handle with `wait()`; the object may be changed right away."""
        return objects.isend(self._peers(dest, tag), obj, dest, tag)

    def recv_object(self, src: int, tag: int = 0, timeout: float | None = None) -> Any:
        """The next object that rank `src` sends with this tag."""
        return objects.recv(self._peers(src, tag), src, tag, timeout=timeout)

    def send(self, buffer: np.ndarray, dest: int, tag: int = 0) -> None:
        """Send a contiguous array; it may be overwritten when this returns."""
        self.isend(buffer, dest, tag).wait()

    def isend(self, buffer: np.ndarray, dest: int, tag: int = 0) -> objects.Sending:
        """Start sending a contiguous array, which must stay as it is until the handle's `wait()` returns."""
        return objects.Sending([self._peers(dest, tag).Isend(_contiguous(buffer), dest, tag)], [buffer])

    def recv(self, buffer: np.ndarray, src: int, tag: int = 0, timeout: float | None = None) -> np.ndarray:
        """Fill a contiguous array of the sender's size and type."""
        objects.receive(self._peers(src, tag), _contiguous(buffer), src, tag, timeout)
        return buffer

    def _peers(self, peer: int, tag: int) -> MPI.Comm:
        if not (0 <= peer < self.world_size and 0 <= tag < AGREE_TAG):
            raise InputError(
                f"peer {peer} with tag {tag}: need a rank in 0 ... {self.world_size - 1}, a tag below {AGREE_TAG}"
            )
        return self.group("world").comm

    def close(self) -> None:
        """Free this mapping's communicators: its ranks call it together. The next `get` makes new ones."""
        order = [axis for axis in _GROUPS if axis in self._groups]
        for axis in order + [name for name in self._groups if name not in order]:
            self._groups.pop(axis).close()
        self._along.clear()
        _open.pop(self.mapping, None)


def _contiguous(buffer: np.ndarray) -> np.ndarray:
    if not buffer.flags.c_contiguous:  # MPI would take a Fortran-ordered array and deliver it scrambled
        raise InputError(
            f"an array of shape {buffer.shape} and strides {buffer.strides} is not contiguous: send a copy"
        )
    return buffer


def _by_axis(axis: str, method: str) -> property:
    return property(lambda self: partial(getattr(self, method), axis=axis))


for _axis in (*AXES, "tp_cp"):
    for _method in ("broadcast", "allgather", "gather", "barrier", "allgather_int64"):
        setattr(Distributed, f"{_axis}_{_method}", _by_axis(_axis, _method))
