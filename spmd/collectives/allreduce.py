"""What a caller may say about one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AllReduceParams:
    """enable_allreduce=False leaves the sum unfinished: somebody else completes it, a reduce-scatter for example."""

    enable_allreduce: bool = True
