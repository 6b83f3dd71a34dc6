"""Attention in parts: over some of the keys, with what is needed to put the parts together.

A part is o, divided by its own sum, and lse = log(sum(exp(score))), natural. Parts of the same queries combine as
    lse = logaddexp(lse0, lse1, ...)        o = sum(o_i * exp(lse_i - lse))
in fp32; keys that nobody may see give lse = -inf and count for nothing.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_MASK = 1 << 22  # elements of a mask at a time


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """queries [L, H, d] over keys [n, H, d] and values [n, H, dv], dv <= d: o [L, H, dv], and lse fp32 [L, H].

    mask: bool [L, n], True where a query sees a key; causal: query i sees keys 0 ... i.
    """
    if not (len(queries) and len(keys)):
        return queries.new_zeros(*queries.shape[:2], values.shape[2]), _unseen(queries)
    q, k = queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]
    v = F.pad(values, (0, keys.shape[2] - values.shape[2])).transpose(0, 1)[None]
    seen = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=seen, scale=scale
    )
    o, lse = o[0].transpose(0, 1)[..., : values.shape[2]], lse[0].t().float()
    if mask is not None:
        blind = ~mask.any(1)
        o, lse = o.masked_fill(blind[:, None, None], 0.0), lse.masked_fill(blind[:, None], float("-inf"))
    return o, lse


def attend_at(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, queries at `positions` int64 [L] over keys at `seen` int64 [n]: what is not ahead, nor further back
    than the window. Masks are made for a few rows at a time."""
    step = max(_MASK // max(len(seen), 1), 1)
    parts = [
        attend(rows, keys, values, scale, visible(at, seen, window))
        for rows, at in zip(queries.split(step), positions.split(step), strict=True)
    ]
    return parts[0] if len(parts) == 1 else (torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts]))


def visible(positions: torch.Tensor, seen: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """bool [queries, keys]: whether a query sees a key, by their positions; None: all do."""
    if not (len(positions) and len(seen)):
        return None
    if seen.max() <= positions.min() and (not window or seen.min() > positions.max() - window):
        return None
    mask = seen <= positions[:, None]
    return mask & (positions[:, None] - seen < window) if window else mask


def _unseen(queries: torch.Tensor) -> torch.Tensor:
    return torch.full(queries.shape[:2], float("-inf"))


class Sum:
    """Parts put together as they come: of queries [L, H], o [L, H, dv] in fp32."""

    def __init__(self, rows: int, heads: int, width: int) -> None:
        self.o, self.lse = torch.zeros(rows, heads, width), torch.full((rows, heads), float("-inf"))

    def add(self, rows: slice, o: torch.Tensor, lse: torch.Tensor) -> None:
        """A part of these rows."""
        before = self.lse[rows]
        both = torch.logaddexp(before, lse)
        base = both.masked_fill(both.isneginf(), 0.0)
        kept, new = (before - base).exp_().unsqueeze(-1), (lse - base).exp_().unsqueeze(-1)
        self.o[rows].mul_(kept).add_(o.float().mul(new))
        self.lse[rows] = both


def combine(o: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """o [parts, ..., dv], stats fp32 [parts, ..., 2] (the largest score, and the sum of exp(score - largest)): all of
    it, [..., dv], in fp32 and rounded once to o's type. A part with sum 0 counts for nothing, whatever its o holds."""
    top, sums = stats.unbind(-1)
    best = top.masked_fill(sums == 0, float("-inf")).amax(0)
    best = best.masked_fill(best.isneginf(), 0.0)
    weights = torch.where(sums == 0, 0.0, sums * (top - best).exp())
    total = weights.sum(0).unsqueeze(-1)
    parts = torch.where((sums == 0).unsqueeze(-1), 0.0, o.float()) * weights.unsqueeze(-1)
    return (parts.sum(0) / total.masked_fill(total == 0, 1.0)).to(o.dtype)
