"""Which part of a dimension belongs to which rank."""

from __future__ import annotations

from spmd.errors import InputError


def _check(total: int, parts: int, index: int) -> None:
    if total < 0 or parts < 1 or not 0 <= index < parts:
        raise InputError(f"part {index} of {parts} of {total} does not exist: need total >= 0 and 0 <= index < parts")


def split(total: int, parts: int, index: int, block: int = 1) -> range:
    """The slice [floor(i*n/parts), floor((i+1)*n/parts)) of `total` elements, cut between whole blocks only.

    n counts blocks; the last block may be short. Heads, vocabulary and ffn widths are split this way: sizes of any two
    parts differ by at most one block, and the parts of a finer split nest in those of a coarser one.
    """
    _check(total, parts, index)
    blocks = -(-total // block)
    start, stop = (min(i * blocks // parts * block, total) for i in (index, index + 1))
    return range(start, stop)


def split_first(total: int, parts: int, index: int) -> range:
    """Consecutive parts where the first total % parts get one element more: pipeline layers and experts."""
    _check(total, parts, index)
    size, more = divmod(total, parts)
    start = index * size + min(index, more)
    return range(start, start + size + (index < more))
