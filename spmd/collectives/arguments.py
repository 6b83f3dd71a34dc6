"""What every collective checks before it moves anything; bad arguments are one line, on all ranks with SPMD_CHECK=1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch

from spmd.control.mpi import Group
from spmd.errors import DesyncError, InputError

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}


def describe(x: torch.Tensor, but: int | None = None) -> str:
    """Type and shape as signatures show them: bf16[16,576], the size of dimension `but` as *."""
    shape = ",".join("*" if dim == but else str(size) for dim, size in enumerate(x.shape))
    return f"{NAMES.get(x.dtype, x.dtype)}[{shape}]"


def refuse(op: str, group: Group, why: str) -> NoReturn:
    """Arguments that cannot be. Under SPMD_CHECK=1 the others learn of it: they may have passed good ones."""
    error = InputError(f"{op} on {group.name}: {why}")
    if group.checked:
        try:
            group.agree(f"{op} with arguments that it refuses")
        except DesyncError as desync:
            raise desync from error
    raise error


def check(op: str, group: Group, x: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """A CPU tensor of a known type, and an output of the same type and shape."""
    if x.dtype not in NAMES or not x.is_cpu:
        names = ", ".join(NAMES.values())
        refuse(op, group, f"{describe(x)} on {x.device} is not supported: use a CPU tensor of {names}")
    if out is not None and out is not x and (out.dtype != x.dtype or out.shape != x.shape):
        refuse(op, group, f"out is {describe(out)}, but the result {describe(x)}")


def dimension(op: str, group: Group, x: torch.Tensor, dim: int) -> int:
    """dim as a number from 0."""
    if not -x.dim() <= dim < x.dim():
        refuse(op, group, f"dim {dim} of {describe(x)} does not exist")
    return dim % x.dim()


def check_sizes(op: str, group: Group, sizes: Sequence[int], total: int | None = None, name: str = "sizes") -> None:
    """One number per rank, none negative, summing to `total`."""
    if len(sizes) != group.size or min(sizes) < 0:
        refuse(op, group, f"{name} {list(sizes)} must be {group.size} numbers, none below 0")
    if total is not None and sum(sizes) != total:
        refuse(op, group, f"{name} {list(sizes)} do not sum to {total}")


def own_size(op: str, group: Group, sizes: Sequence[int] | None, x: torch.Tensor, dim: int) -> Sequence[int]:
    """Every rank's rows along dim: `sizes`, which must hold what x has here; None: as many everywhere."""
    if sizes is None:
        return [x.shape[dim]] * group.size
    check_sizes(op, group, sizes)
    if sizes[group.rank] != x.shape[dim]:
        rank = group.ranks[group.rank]
        why = f"rank {rank} has {x.shape[dim]} rows along dim {dim}, but sizes {list(sizes)} (index {group.rank})"
        refuse(op, group, why)
    return sizes


def even(op: str, group: Group, total: int, name: str) -> list[int]:
    """Equal parts for all ranks."""
    if total % group.size:
        refuse(op, group, f"{total} rows do not divide by {group.size} ranks: give {name}")
    return [total // group.size] * group.size


def check_root(op: str, group: Group, root: int) -> None:
    """An index inside the group."""
    if not 0 <= root < group.size:
        refuse(op, group, f"root {root} is outside 0 ... {group.size - 1}")


def front(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows of dimension dim first, contiguous."""
    return (x.movedim(dim, 0) if dim else x).contiguous()


def back(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `front`."""
    return x.movedim(0, dim).contiguous() if dim else x


def row_size(x: torch.Tensor) -> int:
    """Elements of one row of a tensor whose rows come first."""
    return math.prod(x.shape[1:])
