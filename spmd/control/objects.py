"""Object collectives over any communicator: pickled once, sent in chunks, and a failure to pickle fails on every rank.

Sizes travel as 64-bit numbers and no MPI call moves more than `chunk` bytes, so 2**31 - 1 is no limit.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.control.agree import wait
from spmd.errors import DeadlineError, InputError, SerializationError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK = 1 << 28  # bytes per MPI call and rank


def _dump(obj: Any) -> tuple[np.ndarray, str]:
    try:
        data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises whatever the object's own code raises
        return np.empty(0, np.uint8), f"{type(error).__name__}: {error}".splitlines()[0]
    return np.frombuffer(data, np.uint8), ""


def _failed(ranks: list[int], why: str) -> SerializationError:
    own = f": {why}" if why else ""
    return SerializationError(f"the object of group rank {', '.join(map(str, ranks))} cannot be pickled{own}")


def broadcast(comm: MPI.Comm, obj: Any, root: int = 0, *, chunk: int = CHUNK, timeout: float | None = None) -> Any:
    """Every rank gets root's object; the root itself a copy, as the others do."""
    _check_root("broadcast", comm, root)
    data, why = _dump(obj) if comm.rank == root else (np.empty(0, np.uint8), "")
    size = np.array([-1 if why else data.size], np.int64)
    wait([comm.Ibcast(size, root)], timeout)
    if size[0] < 0:
        raise _failed([root], why)
    if comm.rank != root:
        data = np.empty(size[0], np.uint8)
    for at in range(0, data.size, chunk):
        wait([comm.Ibcast(data[at : at + chunk], root)], timeout)
    return pickle.loads(data.data)


def allgather(comm: MPI.Comm, obj: Any, *, chunk: int = CHUNK, timeout: float | None = None) -> list[Any]:
    """Every rank gets the list of all objects, in group order."""
    data, why = _dump(obj)
    sizes = _sizes(comm, data, why, timeout)
    parts = [np.empty(size, np.uint8) for size in sizes]
    step = max(chunk // comm.size, 1)
    for at in range(0, max(sizes), step):
        counts = [min(max(size - at, 0), step) for size in sizes]
        received = np.empty(sum(counts), np.uint8)
        wait([comm.Iallgatherv(data[at : at + step], [received, counts])], timeout)
        _deal(received, counts, parts, at)
    return [pickle.loads(part.data) for part in parts]


def gather(
    comm: MPI.Comm, obj: Any, root: int = 0, *, chunk: int = CHUNK, timeout: float | None = None
) -> list[Any] | None:
    """Root gets the list of all objects, in group order; the others None."""
    _check_root("gather", comm, root)
    data, why = _dump(obj)
    sizes = _sizes(comm, data, why, timeout)
    here = comm.rank == root
    parts = [np.empty(size if here else 0, np.uint8) for size in sizes]
    step = max(chunk // comm.size, 1)
    for at in range(0, max(sizes), step):
        counts = [min(max(size - at, 0), step) for size in sizes]
        received = np.empty(sum(counts) if here else 0, np.uint8)
        wait([comm.Igatherv(data[at : at + step], [received, counts] if here else None, root)], timeout)
        if here:
            _deal(received, counts, parts, at)
    return [pickle.loads(part.data) for part in parts] if here else None


def _check_root(op: str, comm: MPI.Comm, root: int) -> None:
    if not 0 <= root < comm.size:
        raise InputError(f"{op}: root {root} is outside the group of {comm.size} ranks")


def _sizes(comm: MPI.Comm, data: np.ndarray, why: str, timeout: float | None) -> list[int]:
    mine, sizes = np.array([-1 if why else data.size], np.int64), np.empty(comm.size, np.int64)
    wait([comm.Iallgather(mine, sizes)], timeout)
    failed = [rank for rank, size in enumerate(sizes) if size < 0]
    if failed:
        raise _failed(failed, why)
    return [int(size) for size in sizes]


def _deal(received: np.ndarray, counts: list[int], parts: list[np.ndarray], at: int) -> None:
    """Copy one round's bytes to their places in the parts."""
    start = 0
    for part, count in zip(parts, counts, strict=True):
        part[at : at + count] = received[start : start + count]
        start += count


class Sending:
    """An object on its way: keeps the bytes alive until `wait` returns."""

    def __init__(self, requests: list[MPI.Request], data: list[np.ndarray]) -> None:
        self._requests, self._data = requests, data

    def wait(self, timeout: float | None = None) -> None:
        wait(self._requests, timeout)
        self._data.clear()


def isend(comm: MPI.Comm, obj: Any, dest: int, tag: int = 0, *, chunk: int = CHUNK) -> Sending:
    """Start sending an object; it may be changed right away. SerializationError here and where it is received."""
    data, why = _dump(obj)
    if why:
        wait([comm.Isend(np.array([-1], np.int64), dest, tag)])
        raise _failed([comm.rank], why)
    pieces = [np.array([data.size], np.int64)] + [data[at : at + chunk] for at in range(0, data.size, chunk)]
    return Sending([comm.Isend(piece, dest, tag) for piece in pieces], pieces)


def send(comm: MPI.Comm, obj: Any, dest: int, tag: int = 0, *, chunk: int = CHUNK) -> None:
    """Send an object; returns when the receiver has it or MPI holds it."""
    isend(comm, obj, dest, tag, chunk=chunk).wait()


def recv(comm: MPI.Comm, source: int, tag: int = 0, *, chunk: int = CHUNK, timeout: float | None = None) -> Any:
    """Receive the next object of `source`."""
    size = np.empty(1, np.int64)
    receive(comm, size, source, tag, timeout)
    if size[0] < 0:
        raise _failed([source], "")
    data = np.empty(size[0], np.uint8)
    for at in range(0, data.size, chunk):
        receive(comm, data[at : at + chunk], source, tag, timeout)
    return pickle.loads(data.data)


def receive(comm: MPI.Comm, buffer: np.ndarray, source: int, tag: int, timeout: float | None) -> None:
    """Fill a contiguous array. After a DeadlineError nothing stays posted: the next receive gets the next message."""
    request = comm.Irecv(buffer, source, tag)
    try:
        wait([request], timeout, lambda: f"receive with tag {tag}: rank {source} has not sent")
    except DeadlineError:
        request.Cancel()
        request.Wait()
        raise
