"""Symmetric memory of one host: each rank makes one file in /dev/shm, all ranks map all of them.

The files have no name (O_TMPFILE): peers reach them through /proc/<pid>/fd/<fd>, and nothing is left behind however a
process ends. Where that is not possible they have one, spmd-<pid>-<random>, until all ranks have mapped them. Pages
are taken from the filesystem by their owner before anybody maps them: a lack of space is an error here, not a signal
later. Every step is agreed: all ranks get the memory, or all of them give everything back and raise the same error.

SPMD_SHM_DIR: another directory than /dev/shm. SPMD_NODES=2x2 (nodes x ranks per node): act as if every two ranks had a
host of their own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.memory.symmetric import SymmetricMemory
from spmd.topology.node import host_number, text_number

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)  # another way to make the file would not help
_SPARE = 16  # one part in so many stays free: MPI's own segments in /dev/shm take their pages late, and die without
_LARGE = 2**62  # bytes; more than there is
_hosts: weakref.WeakKeyDictionary[Group, list[int]] = weakref.WeakKeyDictionary()


class HostMemory(SymmetricMemory):
    """A collective; see `spmd.memory.symmetric.allocate`. A group of one has ordinary memory."""

    def __init__(self, group: Group, nbytes: int) -> None:
        directory = os.environ.get("SPMD_SHM_DIR", "/dev/shm")
        free = _check(group, nbytes, directory)
        size = _pages(nbytes)
        window = _share(group, size, directory, free) if group.size > 1 else _alone(group, size)
        self.group, self.nbytes = group, nbytes
        self._window: _Window | None = window
        self.addresses = tuple(window.base + index * size for index in range(group.size))

    def peer(self, rank: int) -> torch.Tensor:
        if not 0 <= rank < self.group.size:
            raise _error(self.group, f"index {rank} is outside the group of {self.group.size} ranks")
        array: Any = (ctypes.c_ubyte * max(self.nbytes, 1)).from_address(self.addresses[rank])
        array.window = self._mapped()  # the tensor's storage holds the array, the array the window
        return torch.frombuffer(array, dtype=torch.uint8)[: self.nbytes]

    def before_unmap(self, callback: Callable[[], object]) -> None:
        self._mapped().farewells.append(callback)

    def close(self) -> None:
        self._window = None

    def _mapped(self) -> _Window:
        if self._window is None:
            raise _error(self.group, "it is closed: allocate it again")
        return self._window


# ---------------------------------------------------------------------- addresses


class _Window:
    """A range of addresses, unmapped when nobody refers to it any more. OSError when there is none."""

    def __init__(self, nbytes: int, protection: int = 0, flags: int = 0) -> None:
        self.base = _map(None, nbytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags, -1)
        self.farewells: list[Callable[[], object]] = []  # called before
        self.release = weakref.finalize(self, _unmap, self.base, nbytes, self.farewells)
        self.release.atexit = False  # tensors may outlive the interpreter's last word; the kernel unmaps then

    def place(self, offset: int, nbytes: int, descriptor: int) -> None:
        """Put a file there, its page table filled: no page fault in the first collective."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | 0x10  # MAP_FIXED, which Python does not name
        _map(self.base + offset, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """mmap itself: Python's module keeps a descriptor open for every mapping, and unmaps before it tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc().mmap(address, nbytes, protection, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapped


def _unmap(base: int, nbytes: int, farewells: list[Callable[[], object]]) -> None:
    try:
        for farewell in farewells:
            farewell()
    finally:
        _libc().munmap(base, nbytes)


def _pages(nbytes: int) -> int:
    return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def _alone(group: Group, size: int) -> _Window:
    try:
        return _Window(size, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise _error(group, f"cannot map {size} bytes: {error.strerror}: ask for less") from error


# ---------------------------------------------------------------------- steps, each agreed


class _StepError(Exception):
    """A step that failed on some rank, known to all of them. code: an errno."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def _error(group: Group, text: str) -> InputError:
    return InputError(f"symmetric memory on {group.name}: {text}")


def _who(group: Group, indices: Sequence[int] | np.ndarray) -> str:
    ranks = [group.ranks[index] for index in indices]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _check(group: Group, nbytes: int, directory: str) -> int:
    """One size, one host, one directory with room for all. Returns the free bytes there, the same on all ranks."""
    clamped = max(min(nbytes, _LARGE), -_LARGE)
    table = group.allgather_int64([clamped, text_number(directory), _free(directory)])
    sizes, directories, free = table.T.tolist()
    usual = Counter(sizes).most_common(1)[0][0]
    odd = [index for index, size in enumerate(sizes) if size != usual]
    if odd:
        asked = ", ".join(f"{_who(group, [index])} asked for {sizes[index]} bytes" for index in odd)
        raise _error(group, f"{asked}, the others for {usual}: all must ask for the same")
    if not 0 <= usual < _LARGE:
        raise _error(group, f"every rank asked for {usual} bytes: a size is 0 or more, and below {_LARGE}")
    if group.size == 1:
        return 0
    places = hosts(group)
    if away := [index for index, place in enumerate(places) if place]:
        raise _error(group, f"not on the host of rank {group.ranks[0]}: {_who(group, away)}: use the node group")
    if odd := [index for index, name in enumerate(directories) if name != directories[0]]:
        raise _error(group, f"SPMD_SHM_DIR of {_who(group, odd)} is not rank {group.ranks[0]}'s: give all the same")
    if wrong := [index for index, room in enumerate(free) if room < 0]:
        why = os.strerror(-free[wrong[0]])
        raise _error(group, f"{_who(group, wrong)} cannot use {directory}: {why}: set SPMD_SHM_DIR to another")
    needed = group.size * _pages(usual)
    if min(free) < needed + needed // _SPARE:
        raise _error(
            group,
            f"{group.size} ranks need {needed} bytes in {directory} and {needed // _SPARE} to spare, {min(free)} are "
            f"free: {_cure()}",
        )
    return min(free)


def _cure() -> str:
    return "make it larger (docker run --shm-size), set SPMD_SHM_DIR to another, or ask for less (a smaller workspace)"


def _free(directory: str) -> int:
    """Bytes that may be written there, or -errno."""
    try:
        room = os.statvfs(directory)
    except OSError as error:
        return -int(error.errno or errno.EIO)
    return min(room.f_bavail * room.f_frsize, _LARGE) if room.f_blocks else _LARGE  # 0 blocks: a tmpfs without limit


def _share(group: Group, size: int, directory: str, free: int) -> _Window:
    """All members' memory, mapped here in group order: by descriptor if every rank can, else by name."""
    try:
        return _attempt(group, size, directory, free, named=False)
    except _StepError as failed:
        if failed.code in _FULL:
            raise _error(group, str(failed)) from None
    try:
        return _attempt(group, size, directory, free, named=True)
    except _StepError as failed:
        raise _error(group, str(failed)) from None


def _attempt(group: Group, size: int, directory: str, free: int, named: bool) -> _Window:
    with ExitStack() as files, ExitStack() as undo:
        made = [0] * 6  # errno; then what peers need to find the file and to know it again
        try:
            made[1:] = _create(files, size, directory, named)
        except OSError as error:
            made[0] = error.errno or errno.EIO
        table = group.allgather_int64(made)
        _agree(
            group,
            table[:, 0],
            lambda who, index: f"{who} cannot take {size} bytes in {directory} ({free} were free)",
            _cure(),
        )
        mapped = [0, 0]  # errno, and whose memory
        try:
            window = _Window(group.size * size)
            undo.callback(window.release)
            for step in range(group.size):  # mine first: its owner clears a page
                mapped[1] = index = (group.rank + step) % group.size
                with ExitStack() as opened:
                    where = table[index, 1:].tolist()
                    window.place(index * size, size, _open(opened, size, directory, named, *where))
        except OSError as error:
            mapped[0] = error.errno or errno.EIO
        results = group.allgather_int64(mapped)
        _agree(
            group,
            results[:, 0],
            lambda who, index: f"{who} cannot map the {size} bytes of {_who(group, [results[index, 1]])}",
            f"all need the same user, the same {directory} and address space for {group.size} times that",
        )
        undo.pop_all()
        return window


def _agree(group: Group, codes: np.ndarray, what: Callable[[str, int], str], cure: str) -> None:
    """_StepError when a rank had an errno: the first one's, with all ranks that had the same."""
    failed = np.flatnonzero(codes)
    if failed.size:
        first, code = int(failed[0]), int(codes[failed[0]])
        text = what(_who(group, np.flatnonzero(codes == code)), first)
        raise _StepError(code, f"{text}: {os.strerror(code)}: {cure}")


# ---------------------------------------------------------------------- files


def _create(files: ExitStack, size: int, directory: str, named: bool) -> list[int]:
    """A file of my own with all its pages, open until `files` is closed: pid, descriptor, token, device, inode."""
    pid, token = os.getpid(), secrets.randbits(62)
    if named:
        path = _path(directory, pid, token)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        files.callback(_unlink, path)
    else:
        descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    files.callback(os.close, descriptor)
    os.posix_fallocate(descriptor, 0, size)  # taken by the owner: on its NUMA node
    return [pid, descriptor, token, *_identity(os.fstat(descriptor))]


def _open(
    opened: ExitStack, size: int, directory: str, named: bool, pid: int, number: int, token: int, *identity: int
) -> int:
    """The file of a peer. OSError when it cannot be reached or is another: process ids differ between namespaces."""
    path = _path(directory, pid, token) if named else f"/proc/{pid}/fd/{number}"
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
    opened.callback(os.close, descriptor)
    found = os.fstat(descriptor)
    if (*_identity(found), found.st_size, found.st_uid) != (*identity, size, os.geteuid()):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return descriptor


def _path(directory: str, pid: int, token: int) -> str:
    return os.path.join(directory, f"spmd-{pid}-{token:016x}")


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev & (2**63 - 1), info.st_ino & (2**63 - 1)


# ---------------------------------------------------------------------- hosts


def hosts(group: Group) -> list[int]:
    """The host of every member, numbered from 0 in the order in which they appear; a collective the first time.

    SPMD_NODES is honoured; InputError on every rank when one cannot read it.
    """
    if group not in _hosts:
        found = group.allgather_int64([host_number(group.ranks[group.rank])])[:, 0].tolist()
        if wrong := [index for index, host in enumerate(found) if host < 0]:
            raise InputError(
                f"SPMD_NODES on {_who(group, wrong)} must be nodes x ranks per node, such as 2x2, with room for them"
            )
        order = list(dict.fromkeys(found))
        _hosts[group] = [order.index(host) for host in found]
    return _hosts[group]


def same_host(group: Group) -> bool:
    """Whether all members are on one host; a collective the first time."""
    return not any(hosts(group))
