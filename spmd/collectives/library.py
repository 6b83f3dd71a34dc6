"""The library path: collectives on CPU tensors over MPI, for any group size, uneven sizes included.

Every function has the same shape: check the arguments, return the input for a group of one, agree (SPMD_CHECK=1), call
MPI on contiguous memory, record. The output never aliases the input unless `out=` says so, and the input may be changed
right after the call. Sums of fp16 and bf16 are made in fp32 and rounded once. The algorithms are the MPI library's.

Errors of every function: InputError for arguments that cannot be; under SPMD_CHECK=1 DesyncError on all ranks when they
differ and DeadlineError when a rank does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd._cpu import monotonic_ns
from spmd.collectives.arguments import (
    back,
    check,
    check_root,
    check_sizes,
    describe,
    dimension,
    even,
    front,
    own_size,
    refuse,
    row_size,
)
from spmd.control.agree import wait
from spmd.control.mpi import Group
from spmd.control.record import recorder

if TYPE_CHECKING:
    from mpi4py import MPI

_HALF = (torch.float16, torch.bfloat16)
_LIMIT = 2**31 - 1  # elements of one MPI call


@cache
def _mpi() -> tuple[Any, dict[torch.dtype, MPI.Datatype], dict[str, MPI.Op], Any]:
    """What calls need of mpi4py, looked up once and not by an import statement in every call."""
    from mpi4py import MPI

    word = MPI.INT16_T  # half types are moved as 16-bit words, never summed by MPI
    types = {torch.float32: MPI.FLOAT, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T}
    types |= {torch.float16: word, torch.bfloat16: word}
    return MPI.buffer.fromaddress, types, {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}, MPI.IN_PLACE


class _Message(list[Any]):
    """What MPI is told of a tensor, which it keeps alive."""

    tensor: torch.Tensor


def _memory(x: torch.Tensor, counts: int | list[int] | None = None) -> list[Any]:
    """A contiguous tensor as an MPI message of `counts` elements (default: all). Cheaper than a NumPy view."""
    from_address, types, _, _ = _mpi()
    message = _Message((from_address(x.data_ptr(), x.nbytes), x.numel() if counts is None else counts, types[x.dtype]))
    message.tensor = x
    return message


def _call(op: str, group: Group, nbytes: int, blocking: Callable, non_blocking: Callable, *args: Any) -> None:
    """One MPI collective. With more ranks than cores the wait gives the core away instead of spinning."""
    start = monotonic_ns()
    if group.crowded:
        wait([non_blocking(*args)], memory=args)
    else:
        blocking(*args)
    recorder.add(op, group.name, nbytes, start)


def _counts(op: str, group: Group, sizes: Sequence[int], rest: int) -> list[int]:
    """Rows to elements."""
    _check_count(op, group, sum(sizes) * rest)
    return [size * rest for size in sizes]


def _check_count(op: str, group: Group, count: int) -> None:
    if count > _LIMIT:
        refuse(op, group, f"{count} elements exceed the {_LIMIT} of one MPI call: cut the tensor")


def all_reduce(x: torch.Tensor, group: Group, *, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum (or "max", "min") of everybody's `x`, on every rank.

    x: any shape, equal on all ranks; fp32, fp16, bf16 (summed in fp32), int32, int64. `out=x` works in place.
    """
    check("all_reduce", group, x, out)
    if op not in ("sum", "max", "min"):
        refuse("all_reduce", group, f"op {op!r} is none of sum, max, min")
    if group.size == 1:
        return x if out is None or out is x else out.copy_(x)
    if group.checked:
        group.agree(f"all_reduce {op} {describe(x)}")
    work = x.float() if x.dtype in _HALF else x
    if not (work.is_contiguous() and (out is x or work is not x)):
        work = work.clone(memory_format=torch.contiguous_format)
    _check_count("all_reduce", group, work.numel())
    _, _, reductions, in_place = _mpi()
    args = (in_place, _memory(work), reductions[op])
    _call("all_reduce", group, x.nbytes, group.data.Allreduce, group.data.Iallreduce, *args)
    if work is out:
        return out
    return work.to(x.dtype) if out is None else out.copy_(work)


def all_gather(x: torch.Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Everybody's `x` concatenated along `dim`, in group order, on every rank.

    sizes: x.shape[dim] of every rank, 0 allowed (None: all equal); the other dimensions are equal on all ranks.
    """
    check("all_gather", group, x)
    dim = dimension("all_gather", group, x, dim)
    if group.size == 1:
        return x
    sizes = own_size("all_gather", group, sizes, x, dim)
    if group.checked:
        group.agree(f"all_gather {describe(x, dim)} dim {dim} sizes {list(sizes)}")
    mine = front(x, dim)
    counts = _counts("all_gather", group, sizes, row_size(mine))
    whole = mine.new_empty((sum(sizes), *mine.shape[1:]))
    if sum(counts):
        comm = group.data
        _call("all_gather", group, x.nbytes, comm.Allgatherv, comm.Iallgatherv, _memory(mine), _memory(whole, counts))
    return back(whole, dim)


def reduce_scatter(x: torch.Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Sum everybody's `x` and cut it along `dim`: rank i gets its i-th part.

    x: equal shape on all ranks. sizes: rows of every rank's part, 0 allowed, summing to x.shape[dim] (None: equal).
    """
    check("reduce_scatter", group, x)
    dim = dimension("reduce_scatter", group, x, dim)
    if group.size == 1:
        return x
    rows = x.shape[dim]
    sizes = even("reduce_scatter", group, rows, "sizes") if sizes is None else sizes
    check_sizes("reduce_scatter", group, sizes, rows)
    if group.checked:
        group.agree(f"reduce_scatter {describe(x)} dim {dim} sizes {list(sizes)}")
    work = front(x.float() if x.dtype in _HALF else x, dim)
    counts = _counts("reduce_scatter", group, sizes, row_size(work))
    mine = work.new_empty((sizes[group.rank], *work.shape[1:]))
    if sum(counts):
        comm = group.data
        args = (_memory(work), _memory(mine), counts, _mpi()[2]["sum"])
        _call("reduce_scatter", group, x.nbytes, comm.Reduce_scatter, comm.Ireduce_scatter, *args)
    return back(mine.to(x.dtype), dim)


def all_to_all(
    x: torch.Tensor,
    group: Group,
    *,
    dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cut `x` along `dim`, send the i-th part to rank i, and concatenate what arrives, in group order.

    send_sizes: parts of x, 0 allowed, summing to x.shape[dim] (None: equal). recv_sizes: what the others send here
    (None: equal to send_sizes when those are None too, else asked of the others). All ranks give them or none does.
    """
    check("all_to_all", group, x)
    dim = dimension("all_to_all", group, x, dim)
    if group.size == 1:
        return x
    rows, equal = x.shape[dim], send_sizes is None
    send_sizes = even("all_to_all", group, rows, "send_sizes") if send_sizes is None else send_sizes
    check_sizes("all_to_all", group, send_sizes, rows, "send_sizes")
    if recv_sizes is not None:
        check_sizes("all_to_all", group, recv_sizes, name="recv_sizes")
    if group.checked:
        how = f"{'equal' if equal else 'given'}, {'asked' if recv_sizes is None else 'given'}"
        group.agree(f"all_to_all {describe(x, None if equal else dim)} dim {dim} sizes {how}")
    comm = group.data
    if recv_sizes is None:
        recv_sizes = list(send_sizes) if equal else _exchange_sizes(comm, send_sizes)
    elif group.checked:
        sent_here = _exchange_sizes(comm, send_sizes)
        right = list(recv_sizes) == sent_here
        group.agree(
            "all_to_all sizes" + ("" if right else f" {list(recv_sizes)} to receive where {sent_here} are sent")
        )
    mine = front(x, dim)
    sent, received = (_counts("all_to_all", group, s, row_size(mine)) for s in (send_sizes, recv_sizes))
    whole = mine.new_empty((sum(recv_sizes), *mine.shape[1:]))
    args = (_memory(mine, sent), _memory(whole, received))
    _call("all_to_all", group, x.nbytes, comm.Alltoallv, comm.Ialltoallv, *args)
    return back(whole, dim)


def _exchange_sizes(comm: MPI.Comm, sizes: Sequence[int]) -> list[int]:
    mine, theirs = np.array(sizes, np.int64), np.empty(len(sizes), np.int64)
    wait([comm.Ialltoall(mine, theirs)])
    return theirs.tolist()


def broadcast(x: torch.Tensor, group: Group, *, root: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """The `x` of group rank `root` on every rank; elsewhere x gives shape and dtype only. `out=x` works in place."""
    check("broadcast", group, x, out)
    check_root("broadcast", group, root)
    if group.size == 1:
        return x if out is None or out is x else out.copy_(x)
    if group.checked:
        group.agree(f"broadcast {describe(x)} root {root}")
    work = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    _check_count("broadcast", group, work.numel())
    _call("broadcast", group, x.nbytes, group.data.Bcast, group.data.Ibcast, _memory(work), root)
    return work if out is None or work is out else out.copy_(work)
