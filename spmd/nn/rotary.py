"""Rotary position embedding as one complex product, with the checkpoint's frequency scaling.

A head's channels are kept in pairs (2i, 2i + 1), so that rotating by position is multiplying by exp(i * angle).
Checkpoints that pair (i, i + D/2) have the rows of their query and key projections reordered once, when they are
loaded (`interleave`): dot products of queries with keys do not change. Source: Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd.errors import InputError

# kinds of frequency scaling, and the parameters each cannot do without
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "factors": ("factors",),
}
# every number a scaling may use
PARAMETERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
)


@dataclass(frozen=True)
class RopeConfig:
    """theta and, for other types than "default", the scaling parameters under their Hugging Face names.

    "factors" divides the frequency of every channel pair by its own factor: what GGUF files store of llama3's scaling.
    """

    head_dim: int
    theta: float
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.kind not in NEEDED:
            raise InputError(f"rope scaling {self.kind!r} is not supported: it is one of {', '.join(NEEDED)}")
        missing = [name for name in NEEDED[self.kind] if self.parameters.get(name) is None]
        if missing:
            raise InputError(f"rope scaling {self.kind!r} lacks {', '.join(missing)}")
        if self.kind == "yarn" and not self.theta > 1:
            raise InputError(f"rope scaling 'yarn' needs theta above 1, but it is {self.theta:g}")
        factors = self.parameters.get("factors") if self.kind == "factors" else None
        if factors is not None and len(factors) != self.head_dim // 2:
            raise InputError(f"{len(factors)} rope factors for {self.head_dim // 2} pairs of channels")


def frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Radians per position of each channel pair [D/2] fp32, and the factor that scales both rotated vectors."""
    dim, p = config.head_dim, config.parameters
    base = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / base
    if config.kind == "linear":
        return plain / p["factor"], 1.0
    if config.kind == "factors":
        return plain / torch.tensor(p["factors"]), 1.0
    if config.kind == "llama3":
        return _llama3(plain, p), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config), _yarn_attention_factor(p)
    return plain, 1.0


def _llama3(plain: torch.Tensor, p: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed down by `factor`, short ones kept, those between interpolated."""
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wave = 2 * math.pi / plain
    smooth = ((context / wave - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / p["factor"] + smooth * plain


def _yarn(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Peng et al., YaRN, 2023: a ramp over channel pairs between interpolated and plain frequencies."""
    p, dim = config.parameters, config.head_dim
    context = p.get("original_max_position_embeddings") or config.max_positions

    def pair(turns: float) -> float:
        """Index of the channel pair that makes `turns` full turns over the original context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / p["factor"] * ramp + plain * (1 - ramp)


def grown(mscale: float, factor: float) -> float:
    """What YaRN makes vectors longer by in a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(p: dict[str, Any]) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return grown(p["mscale"], p["factor"]) / grown(p["mscale_all_dim"], p["factor"])
    return grown(1.0, p["factor"])


class Rotary:
    """Rotations of all positions up to the largest one asked for."""

    def __init__(self, config: RopeConfig) -> None:
        self._frequencies, self._factor = frequencies(config)
        self._table = torch.empty(0, config.head_dim // 2, dtype=torch.complex64)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations of the given positions [T] int64: complex64 [T, D/2]."""
        needed = int(positions.max()) + 1 if positions.numel() else 0
        if needed > len(self._table):
            steps = torch.arange(max(needed, 2 * len(self._table), 256), dtype=torch.float32)
            angles = torch.outer(steps, self._frequencies)
            self._table = torch.polar(torch.full_like(angles, self._factor), angles)
        return self._table[positions]


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the first dimension, head by head, from pairs (i, i + D/2) to pairs (2i, 2i + 1)."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows.shape)
