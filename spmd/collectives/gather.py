"""Collectives by mapping: all-gather, reduce-scatter and all-to-all over one axis, uneven sizes, any dimension.

Errors, types and what a tensor may be: as in `library`. The work is done by `cpu` where the group's ranks share a host
and by the library elsewhere, and for what shared memory does not do; `explain` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from spmd.collectives import cpu, library
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.memory.workspace import Workspace
from spmd.topology.mapping import Mapping

Tensors = TypeVar("Tensors", torch.Tensor, "list[torch.Tensor | None]")


def _each(x: Tensors, call: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    if isinstance(x, torch.Tensor):
        return call(x)
    return [None if item is None else call(item) for item in x]


def _axis_size(mapping: Mapping, axis: str) -> int:
    return len(mapping.group(axis))


def route(op: str, x: torch.Tensor, group: Group) -> tuple[Workspace | None, str]:
    """Who does it: the workspace of the native path, or None for the library; and why. Collective the first time."""
    if op == "reducescatter" and x.dtype not in cpu.DTYPES:
        return None, "library: integers are summed by MPI"
    workspace = Workspace.of(group)
    if workspace is None:
        return None, "library: the ranks are on several hosts"
    return workspace, "native: shared memory of one host"


def all_gather(x: torch.Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """`library.all_gather` or `cpu.all_gather`, by the route."""
    workspace, _ = route("allgather", x, group)
    if workspace is None:
        return library.all_gather(x, group, dim=dim, sizes=sizes)
    return cpu.all_gather(x, group, workspace, dim=dim, sizes=sizes)


def reduce_scatter(x: torch.Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """`library.reduce_scatter` or `cpu.reduce_scatter`, by the route."""
    workspace, _ = route("reducescatter", x, group)
    if workspace is None:
        return library.reduce_scatter(x, group, dim=dim, sizes=sizes)
    return cpu.reduce_scatter(x, group, workspace, dim=dim, sizes=sizes)


def all_to_all(
    x: torch.Tensor,
    group: Group,
    *,
    dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """`library.all_to_all` or `cpu.all_to_all`, by the route."""
    workspace, _ = route("alltoall", x, group)
    if workspace is None:
        return library.all_to_all(x, group, dim=dim, send_sizes=send_sizes, recv_sizes=recv_sizes)
    return cpu.all_to_all(x, group, workspace, dim=dim, send_sizes=send_sizes, recv_sizes=recv_sizes)


def broadcast(x: torch.Tensor, group: Group, *, root: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """`library.broadcast` or `cpu.broadcast`, by the route."""
    workspace, _ = route("broadcast", x, group)
    if workspace is None:
        return library.broadcast(x, group, root=root, out=out)
    return cpu.broadcast(x, group, workspace, root=root, out=out)


def explain(op: str, x: torch.Tensor, mapping: Mapping, axis: str = "tp") -> str:
    """Which backend `op` ("allgather", "reducescatter", "alltoall") takes for such a tensor, and why."""
    if _axis_size(mapping, axis) == 1:
        return "nothing: a group of one"
    return route(op, x, Distributed.get(mapping).group(axis))[1]


def allgather(
    x: Tensors, mapping: Mapping, dim: int = -1, sizes: Sequence[int] | None = None, *, axis: str = "tp"
) -> Tensors:
    """Concatenate every rank's tensor along `dim`, in group order. A list is gathered item by item, None stays None.

    sizes: x.shape[dim] of every rank (None: equal), 0 allowed. A group of one returns its input.
    """
    if _axis_size(mapping, axis) == 1:
        return x
    group = Distributed.get(mapping).group(axis)
    return _each(x, lambda item: all_gather(item, group, dim=dim, sizes=sizes))


def cp_allgather(x: Tensors, mapping: Mapping, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensors:
    """`allgather` over the context-parallel axis."""
    return allgather(x, mapping, dim, sizes, axis="cp")


def reducescatter(
    x: Tensors, mapping: Mapping, dim: int = -1, sizes: Sequence[int] | None = None, *, axis: str = "tp"
) -> Tensors:
    """Sum over the ranks and keep this rank's part along `dim`. A list is done item by item, None stays None.

    sizes: every rank's part, summing to x.shape[dim] (None: equal), 0 allowed. A group of one returns its input.
    """
    if _axis_size(mapping, axis) == 1:
        return x
    group = Distributed.get(mapping).group(axis)
    return _each(x, lambda item: reduce_scatter(item, group, dim=dim, sizes=sizes))


def alltoall(
    x: Tensors,
    mapping: Mapping,
    dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    *,
    axis: str = "tp",
) -> Tensors:
    """Send part i of `x` along `dim` to rank i; concatenate what arrives, in group order, along `dim`.

    Every rank gets sum(recv_sizes) along `dim` and its own other dimensions. Sizes as in `library.all_to_all`. A group
    of one returns its input.
    """
    if _axis_size(mapping, axis) == 1:
        return x
    group = Distributed.get(mapping).group(axis)
    return _each(x, lambda item: all_to_all(item, group, dim=dim, send_sizes=send_sizes, recv_sizes=recv_sizes))
