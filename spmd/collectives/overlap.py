"""Long products of a row-parallel layer and their sums in turns: while the ranks multiply one part, nobody waits for
the other's last one.

Rank:   multiply part 0, publish | multiply part 1, publish, sum part 0 | multiply part 2, publish, sum part 1 | ...

A part's sum begins after the next part's product, when every peer has long published it; its rows are still in cache.
Source: the GEMM + all-reduce fusion of TensorRT-LLM, with parts of rows in place of tiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from spmd.collectives.allreduce import AllReduce
from spmd.collectives.epilogue import AllReduceParams

ROWS = 64  # of a part
_MIN_PARTS = 2


class Partial:
    """This rank's part of a sum that is still owed, as a value: the product that makes it and its input.

    `into(out)` makes it, in memory that the sum is then read from. width: of a row.
    """

    __slots__ = ("input", "product", "width")

    def __init__(self, product: Callable[..., torch.Tensor], input: torch.Tensor, width: int) -> None:
        self.product, self.input, self.width = product, input, width

    def into(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.product(self.input, out=out)


def made(x: torch.Tensor | Partial) -> torch.Tensor:
    """The rows themselves, one after the other in memory: kernels take their address."""
    return (x.into() if isinstance(x, Partial) else x).contiguous()


def enabled() -> bool:
    """SPMD_GEMM_ALLREDUCE_OVERLAP=0 turns it off."""
    return os.environ.get("SPMD_GEMM_ALLREDUCE_OVERLAP", "1") == "1"


def worth(rows: int) -> bool:
    """Whether a product of so many rows has parts: every rank answers alike."""
    return rows >= _MIN_PARTS * ROWS and enabled()


def product_and_sum(
    product: Callable[..., torch.Tensor],
    x: torch.Tensor,
    width: int,
    all_reduce: AllReduce,
    params: AllReduceParams | None,
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """product(rows of x, out=rows) for all parts, each summed over the ranks and finished as `params` say.

    The same bits as one product of each part and one all-reduce. None where it cannot be done: the group has no shared
    memory, the product does not fit the workspace's budget, or another way than the one-shot was asked for.
    """
    stream = all_reduce.stream((len(x), width), x.dtype, params)
    if stream is None:
        return None
    for first in range(0, len(x), ROWS):
        rows = slice(first, min(first + ROWS, len(x)))
        product(x[rows], out=stream.input[rows])
        stream.publish(rows)
    return stream.finish()
