"""Collectives by mapping: all-gather, reduce-scatter and all-to-all over one axis, uneven sizes, any dimension.

Errors, types and what a tensor may be: as in `library`, which does the work on the mapping's group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from spmd.collectives import library
from spmd.control.distributed import Distributed
from spmd.topology.mapping import Mapping

Tensors = TypeVar("Tensors", torch.Tensor, "list[torch.Tensor | None]")


def _each(x: Tensors, call: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    if isinstance(x, torch.Tensor):
        return call(x)
    return [None if item is None else call(item) for item in x]


def _axis_size(mapping: Mapping, axis: str) -> int:
    return len(mapping.group(axis))


def allgather(
    x: Tensors, mapping: Mapping, dim: int = -1, sizes: Sequence[int] | None = None, *, axis: str = "tp"
) -> Tensors:
    """Concatenate every rank's tensor along `dim`, in group order. A list is gathered item by item, None stays None.

    sizes: x.shape[dim] of every rank (None: equal), 0 allowed. A group of one returns its input.
    """
    if _axis_size(mapping, axis) == 1:
        return x
    group = Distributed.get(mapping).group(axis)
    return _each(x, lambda item: library.all_gather(item, group, dim=dim, sizes=sizes))


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
    return _each(x, lambda item: library.reduce_scatter(item, group, dim=dim, sizes=sizes))


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
    return _each(x, lambda item: library.all_to_all(item, group, dim=dim, send_sizes=send_sizes, recv_sizes=recv_sizes))
