"""Memory of the same size on every rank of a group, each rank's part mapped into the processes of all of them.

Allocation is a collective, release is not: memory leaves this process when nothing here refers to it any more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from spmd.control.mpi import Group
from spmd.errors import InputError


class SymmetricMemory(ABC):
    """`nbytes` bytes on every rank of `group`.

    Attributes: group; nbytes; addresses (where each member's bytes are in this process, in group order:
    addresses[group.rank] is where mine are). Tensors made here keep all of it mapped: `close` only lets go of it.
    """

    group: Group
    nbytes: int
    addresses: tuple[int, ...]

    @abstractmethod
    def peer(self, rank: int) -> torch.Tensor:
        """The bytes of the member with this index in the group: uint8 [nbytes]. InputError: no such rank, or closed."""

    @abstractmethod
    def before_unmap(self, callback: Callable[[], object]) -> None:
        """Call it once, when the last reference is gone and before the memory goes; at the process's end not at all."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory, here only, as often as one likes: it is unmapped when no tensor refers to it."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A contiguous tensor over my own bytes from `offset` on. Its values are what the memory holds: at first 0.

        InputError when it does not fit, or when the offset is not a multiple of the element size.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or not 0 <= offset <= self.nbytes - nbytes or offset % dtype.itemsize:
            raise InputError(
                f"symmetric memory on {self.group.name}: {dtype} {list(shape)} takes {nbytes} bytes from byte {offset} "
                f"on: it needs a multiple of {dtype.itemsize}, and room in the {self.nbytes} there are"
            )
        return self.peer(self.group.rank)[offset : offset + nbytes].view(dtype).view(tuple(shape))


class Region(NamedTuple):
    """A live allocation of `symmetric_empty`. id: counts up in the group, the same on every rank."""

    id: int
    addresses: tuple[int, ...]
    nbytes: int


Add = Callable[[int, tuple[int, ...], int], object]
Remove = Callable[[int], object]


class Registry:
    """The live regions of one group, and who wants to hear of them.

    Ids are the same on all ranks; how long a region lives is each rank's own affair.
    """

    def __init__(self) -> None:
        self._count = 0
        self._live: dict[int, Region] = {}
        self._subscribers: list[tuple[Add, Remove]] = []

    def subscribe(self, add: Add, remove: Remove) -> Callable[[], None]:
        """Call add(id, addresses, nbytes) for every region, those that live already at once, and remove(id) before one
        is unmapped, from whichever thread drops the last tensor. Returns what ends the subscription."""
        subscriber = (add, remove)
        self._subscribers.append(subscriber)
        for region in self.live():
            add(*region)
        return lambda: self._subscribers.remove(subscriber)

    def live(self) -> tuple[Region, ...]:
        return tuple(self._live.values())

    def enter(self, memory: SymmetricMemory) -> None:
        """Make an allocation known until it is unmapped."""
        region = Region(self._count, memory.addresses, memory.nbytes)
        self._count += 1
        self._live[region.id] = region
        memory.before_unmap(partial(self._leave, region.id))
        for add, _ in tuple(self._subscribers):
            add(*region)

    def _leave(self, number: int) -> None:
        del self._live[number]
        for _, remove in tuple(self._subscribers):
            remove(number)


_registries: WeakKeyDictionary[Group, Registry] = WeakKeyDictionary()


def registry(group: Group) -> Registry:
    """The registry of a group, made at first use; local."""
    return _registries.setdefault(group, Registry())


def regions(group: Group) -> tuple[Region, ...]:
    """What `symmetric_empty` made for this group and this process still maps."""
    return registry(group).live()


def allocate(group: Group, nbytes: int) -> SymmetricMemory:
    """Memory of `nbytes` zeroed bytes on every rank; a collective. 0 bytes are legal.

    Errors, the same on every rank: InputError when the ranks ask for different sizes, are on several hosts, or have no
    room (see `spmd.memory.host`); under SPMD_CHECK=1 DesyncError and DeadlineError as in any collective.
    """
    from spmd.memory.host import HostMemory

    return HostMemory(group, nbytes)


def symmetric_empty(shape: Sequence[int], dtype: torch.dtype, group: Group) -> torch.Tensor:
    """A contiguous CPU tensor in symmetric memory, page-aligned: every rank calls it with the same shape and dtype.

    The memory stays mapped as long as the tensor or a view of it lives. Errors: as `allocate`.
    """
    group.agree(f"symmetric_empty {str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]")
    nbytes = -1 if min(shape, default=0) < 0 else math.prod(shape) * dtype.itemsize
    memory = allocate(group, nbytes)
    registry(group).enter(memory)
    return memory.tensor(shape, dtype)
