"""A mixed-radix numbering of ranks: ordered axes with sizes -> coordinates, rank, my group, all groups.

The one place where group arithmetic is written. Nothing here is proportional to the number of ranks: a group is a
`range` wherever its ranks form one, and `groups` is a lazy sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from spmd.errors import InputError

Group = range | tuple[int, ...]


class Radix:
    """Axes from slowest to fastest. `Radix({"pp": 2, "tp": 4})` numbers 8 ranks, rank = pp * 4 + tp.

    Errors: InputError (a ValueError) for a size below 1, an unknown axis or a rank outside 0 ... size - 1.
    """

    __slots__ = ("size", "sizes", "strides")

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.strides: dict[str, int] = {}
        stride = 1
        for axis, size in reversed(self.sizes.items()):
            if size < 1:
                raise InputError(f"axis {axis} has size {size}: a size is at least 1")
            self.strides[axis] = stride
            stride *= size
        self.size = stride

    def __repr__(self) -> str:
        return f"Radix({self.sizes})"

    def _check(self, rank: int, axes: Sequence[str] = ()) -> None:
        if not 0 <= rank < self.size:
            raise InputError(f"rank {rank} is outside 0 ... {self.size - 1}")
        for axis in axes:
            if axis not in self.sizes:
                raise InputError(f"unknown axis {axis!r}: the axes are {', '.join(self.sizes)}")

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` along one axis."""
        self._check(rank, (axis,))
        return rank // self.strides[axis] % self.sizes[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis, slowest first."""
        self._check(rank)
        return {axis: rank // self.strides[axis] % size for axis, size in self.sizes.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The inverse of `coordinates`."""
        self._check(0, tuple(coordinates))
        if len(coordinates) != len(self.sizes):
            raise InputError(f"coordinates of {', '.join(coordinates)} given, needed: {', '.join(self.sizes)}")
        for axis, at in coordinates.items():
            if not 0 <= at < self.sizes[axis]:
                raise InputError(f"coordinate {axis}={at} is outside 0 ... {self.sizes[axis] - 1}")
        return sum(at * self.strides[axis] for axis, at in coordinates.items())

    def group(self, rank: int, *axes: str) -> Group:
        """The ranks that differ from `rank` along `axes` only, ascending."""
        self._check(rank, axes)
        sizes, strides = self.sizes, self.strides
        wide = [axis for axis in sizes if axis in axes and sizes[axis] > 1]
        if not wide:
            return range(rank, rank + 1)
        base, count = rank, 1
        for axis in wide:
            base -= rank // strides[axis] % sizes[axis] * strides[axis]
            count *= sizes[axis]
        step = strides[wide[-1]]
        if strides[wide[0]] * sizes[wide[0]] == count * step:  # nothing else varies between the slowest and the fastest
            return range(base, base + count * step, step)
        steps = [range(0, self.sizes[axis] * self.strides[axis], self.strides[axis]) for axis in wide]
        return tuple(base + sum(at) for at in product(*steps))

    def groups(self, *axes: str) -> Groups:
        """All groups along `axes`, ordered by the other axes, slowest first; computed when asked for."""
        self._check(0, axes)
        return Groups(self, axes)


class Groups(Sequence[Group]):
    """The groups of a Radix along some axes: a lazy sequence."""

    def __init__(self, radix: Radix, axes: Sequence[str]) -> None:
        self._radix, self._axes = radix, tuple(axes)
        self._others = [axis for axis in radix.sizes if axis not in axes]

    def __len__(self) -> int:
        return prod(self._radix.sizes[axis] for axis in self._others)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at, base = range(len(self))[index], 0
        for axis in reversed(self._others):
            at, digit = divmod(at, self._radix.sizes[axis])
            base += digit * self._radix.strides[axis]
        return self._radix.group(base, *self._axes)

    def __iter__(self) -> Iterator[Group]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        shown = ", ".join(str(list(self[i])) for i in range(min(len(self), 8)))
        return f"[{shown}{', ...' if len(self) > 8 else ''}]"
