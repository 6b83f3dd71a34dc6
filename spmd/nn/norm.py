"""Root-mean-square normalisation, with the residual added on the way."""

from __future__ import annotations

import torch

from spmd.collectives.epilogue import ResidualNorm
from spmd.nn import rows


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once to x's type.

    forward(x) -> y. add_(x, residual) -> (y, residual + x), in the memory of both: the sum is rounded first, y computed
    from the rounded sum.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        self.eps = eps
        self.weight = torch.ones(size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rows.rms_norm(x, self.weight, self.eps)

    __call__ = forward

    def tail(self) -> ResidualNorm:
        """The norm of a residual stream, as the last part of what moves it. It reads the weight where it is now."""
        return ResidualNorm(self.weight, self.eps)

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows.add_rms_norm_(x, residual, self.weight, self.eps)
        return x, residual
