"""The shared memory of one group's collectives: its plane, and buffers lent to those who produce what is summed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol
from weakref import WeakSet

import torch

from spmd._cpu import Plane, relax
from spmd.control.agree import default_timeout, difference
from spmd.control.mpi import Group
from spmd.control.record import OPS, recorder
from spmd.errors import DeadlineError, DesyncError, InputError, LostRankError, OutOfStepError
from spmd.memory.host import same_host
from spmd.memory.symmetric import SymmetricMemory, allocate, registry

MAILBOX_BYTES = 64 << 10  # the longest message whose words are their own flags
SLOT_BYTES = 1 << 20  # the longest row, and of larger messages what one pass moves at most
SLOTS_OF_BUDGET = 16  # a slot is at most one part in so many of the budget; there are four, and three mailboxes
FORCED = "FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE"
_BUDGET = 64 << 20  # bytes a rank: slots, mailboxes and lent buffers
DIFFERS, ENDED, GAVE_UP, CLOSED, TOO_LONG = 2, 3, 4, 6, 7  # statuses of a plane; 0 is done, 1 late
_MEETING = 6000  # turns of a wait, some 0.1 s
_DTYPES = ("fp32", "bf16", "fp16", "any type")
_LENT = -2  # ids of lent buffers count down from here; those of `symmetric_empty` count up


def budget() -> int:
    """Bytes of shared memory a rank may use for one group: FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE, default 64 MiB."""
    text = os.environ.get(FORCED, str(_BUDGET))
    if not text.isdigit() or int(text) == 0:
        raise InputError(f"{FORCED} must be a number of bytes, but is {text!r}")
    return int(text)


class Forgetful(Protocol):
    """Who can be told that what it remembers may not hold any more."""

    def forget(self) -> None: ...


class Workspace:
    """`Workspace.of(group)`: one per group, made at first use by all members together; None when they are on several
    hosts. `plane`: the native collectives, which return a status: 0, or what `fail` raises.

    Errors: as `allocate`, on all ranks.
    """

    @staticmethod
    def of(group: Group) -> Workspace | None:
        kept = group.kept.get("workspace")
        if isinstance(kept, Workspace):
            return kept
        if group.size == 1 or not same_host(group):
            return None
        made = group.kept["workspace"] = Workspace(group)
        return made

    def __init__(self, group: Group) -> None:
        self.group = group
        limit = budget()
        slot = max(limit // SLOTS_OF_BUDGET, 64)
        mailbox = min(MAILBOX_BYTES, slot)
        if FORCED not in os.environ:
            slot = min(slot, SLOT_BYTES)
        self._memory = allocate(group, Plane.region_bytes(mailbox, slot))
        self._processes = _Processes(group)
        self.plane = Plane(
            group.rank, self._memory.addresses, self._processes.descriptors, mailbox, slot, group.crowded
        )
        self.plane.timeout_s = default_timeout()
        self._end: Callable[[], None] = registry(group).subscribe(self._add, self.plane.remove_region)
        self.users: WeakSet[Forgetful] = WeakSet()  # those who remember decisions about this group
        self._lent: list[SymmetricMemory] = []
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], list[torch.Tensor]] = {}
        self._turn, self._first, self._left = 0, _LENT, limit - self._memory.nbytes
        self._unwatch = recorder.watch(group.name, self.plane)
        group.barrier()  # every mailbox is empty before anybody looks into one

    def _add(self, number: int, addresses: Sequence[int], nbytes: int) -> None:
        self.plane.add_region(number, addresses, nbytes, False)

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Symmetric memory for a result that the next all-reduce on this group sums: written at once, then reduced.

        All ranks ask alike. Two buffers take turns, so the one lent now is read by nobody any more, and an all-reduce
        of it need not wait for its readers. None when the budget is too small: use a tensor of your own.
        """
        views = self._views.get((dtype, shape)) or self._view(shape, dtype)
        if views is None:
            return None
        self._turn ^= 1
        if status := self.plane.ready(self._first - self._turn):
            self.fail(status)
        return views[self._turn]

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor] | None:
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._lent or nbytes > self._lent[0].nbytes:
            if nbytes > self._left // 2:
                return None
            self._grow(nbytes)
        if len(self._views) > 64:  # prompts of many lengths
            self._views.clear()
        views = self._views[dtype, shape] = [memory.tensor(shape, dtype) for memory in self._lent]
        return views

    def _grow(self, nbytes: int) -> None:
        """Buffers twice as large at least, while the budget lasts. The old ones live as long as their tensors."""
        size = min(max(nbytes, 2 * (self._lent[0].nbytes if self._lent else 0)), self._left // 2)
        self._views.clear()
        self._lent = [allocate(self.group, size) for _ in range(2)]
        self._left -= 2 * size
        self._first -= 2
        for turn, memory in enumerate(self._lent):
            number = self._first - turn
            memory.before_unmap(lambda number=number: self.plane.remove_region(number))  # type: ignore[misc]
            self.plane.add_region(number, memory.addresses, size, True)

    def fail(self, status: int) -> NoReturn:
        """Raise what a plane's status means: who differs, who is late, who has ended. The plane stays closed."""
        if status == CLOSED:
            raise InputError(f"the shared memory of {self.group.name} is closed: make new objects after close()")
        if status == TOO_LONG:
            raise InputError(f"a row does not fit the workspace's {self.plane.slot_bytes} bytes: raise {FORCED}")
        plane, group, odd, number = self.plane, self.group, self.plane.odd, self.plane.call
        why = status
        if status == GAVE_UP:  # which passes on what the first one found
            number, why, odd = plane.gave_up(odd)
        rank = group.ranks[odd]
        for turn in range(_MEETING if why == DIFFERS else 1):  # the others' calls are known when they have come
            calls = [plane.what(index, number) for index in range(group.size)]
            if all(call[0] >= 0 for call in calls):
                break
            relax(turn)
        mine = _call_text(*calls[group.rank])
        texts = [mine if call[0] < 0 else _call_text(*call) for call in calls]
        if len(set(texts)) == 1:  # the difference is in what has no name: sizes of parts, way, place of the tensor
            texts = [
                text if call[0] < 0 else f"{text} ({call[3]:08x})" for text, call in zip(texts, calls, strict=True)
            ]
        here = f"{mine.split(' ', 1)[0]} #{number} on {group.name}"
        error: OutOfStepError
        if why == DIFFERS:
            error = DesyncError(difference(texts, group.ranks, here))
        elif why == ENDED:
            error = LostRankError(f"{here}: the process of rank {rank} has ended: see what it said")
        else:
            limit = f"{plane.timeout_s:g} s (SPMD_TIMEOUT)"
            error = DeadlineError(f"{here}: rank {rank} has not arrived: gave up after {limit}")
        error.order = group.rank
        raise error

    def close(self) -> None:
        """Local: the others' mappings stay as they are."""
        self._end()
        self._unwatch()
        self.plane.close()
        self._processes.close()
        self._views.clear()
        self._lent.clear()
        self._memory.close()


def _call_text(op: int, dtype: int, nbytes: int, _: int) -> str:
    return f"{OPS[op]} {nbytes} bytes of {_DTYPES[dtype]}"


class _Processes:
    """A descriptor of every member's process, which tells a wait that it has ended."""

    def __init__(self, group: Group) -> None:
        pids = group.allgather_int64([os.getpid()])[:, 0].tolist()
        self.descriptors = [-1 if index == group.rank else _watch(pid) for index, pid in enumerate(pids)]

    def close(self) -> None:
        for descriptor in self.descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = []


def _watch(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a process id of another namespace: the deadline remains
        return -1
