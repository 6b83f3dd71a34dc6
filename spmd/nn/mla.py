"""Latent attention: keys and values of all heads are made from one short row per token, and only that is cached.

    latent = norm(kv_a(x)),  rotary key = rotate(kv_a'(x))      what the cache holds: [kv_lora_rank + rope]
    k_h = [W_UK_h latent, rotary key],  v_h = W_UV_h latent      of head h
    q_h . k_h = [W_UK_h^T q_h, rotated part of q_h] . [latent, rotary key]

The last line is the absorbed form: queries meet the cached rows as one key/value head that all heads share, whose value
is the latent itself, and W_UV comes after. It is used wherever there are rows in the cache; a whole new prompt on ranks
that hold all of it makes keys and values instead, which takes fewer operations.
Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from spmd import context
from spmd.collectives import gather
from spmd.collectives.overlap import Partial
from spmd.context.base import Chunk, SequenceCache
from spmd.context.softmax import attend
from spmd.nn.attention import Cache, KvCache
from spmd.nn.linear import Linear, Source, TensorParallelMode
from spmd.nn.norm import RMSNorm
from spmd.nn.rotary import interleave
from spmd.topology.mapping import CpType, Mapping

_EPS = 1e-6  # of the norms of the two latents, whatever the model's is


@dataclass(frozen=True)
class LatentConfig:
    """Sizes and options of one layer. q_lora_rank None: queries are projected at once; scale: of the scores, with what
    YaRN multiplies; window None: there is none."""

    hidden: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    bias: bool = False  # of the two down projections and of o_proj
    eps: float = 1e-6
    window: int | None = None
    rope_interleave: bool = True  # stored rotary pairs are adjacent

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class LatentHeads:
    """See `context.base.Heads`: absorbed queries [T, count, latent + rope], of which all read the same rows."""

    count: int
    value_width: int
    scale: float
    window: int | None = None

    def part(self, heads: range) -> LatentHeads:
        return replace(self, count=len(heads))

    def rows_of(self, rows: torch.Tensor, heads: range) -> torch.Tensor:
        return rows

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = rows.unsqueeze(1).expand(-1, self.count, -1)
        return keys, keys[..., : self.value_width]

    def attend_one(self, queries: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = rows.float()
        scores = torch.mm(queries[0].float(), seen.t()) * self.scale
        top = scores.amax(1, keepdim=True)
        weights = (scores - top).exp_()
        total = weights.sum(1, keepdim=True)
        o = torch.mm(weights, seen[:, : self.value_width]) / total
        return o.to(queries.dtype).unsqueeze(0), torch.cat([top, total], 1).unsqueeze(0)


class LatentCache(KvCache):
    """What one layer keeps of whole sequences: rows [slots, max_length, latent + rope], read like those of KvCache."""

    def __init__(self, slots: int, max_length: int, width: int, dtype: torch.dtype) -> None:
        self._slots = list(torch.empty(slots, max_length, width, dtype=dtype))


class LatentAttention:
    """forward(x [T, hidden], rotation [T, rope / 2] complex64, chunks, cache) -> Partial [T, hidden], as `Attention`'s.

    Heads are split over attn_tp, also unevenly; the two down projections are whole on every rank. Errors: InputError
    when heads do not cover the ranks, or a slot of the cache is full.
    """

    def __init__(self, config: LatentConfig, mapping: Mapping, dtype: torch.dtype) -> None:
        self.config, c = config, config
        self.context = context.of(mapping, c.num_heads)
        self.heads = self.output = mapping.q_heads(c.num_heads)
        if self.context is not None:
            self.heads, self.output = self.context.heads, self.context.output_heads
        axis = "tp" if mapping.has_cp_ulysses() else "attn_tp"
        column, row = TensorParallelMode.COLUMN, TensorParallelMode.ROW
        own = [range(self.heads.start * c.head_dim, self.heads.stop * c.head_dim)]
        narrow = c.q_lora_rank or c.hidden
        self.q_a_proj = Linear(c.hidden, c.q_lora_rank, c.bias, dtype, mapping) if c.q_lora_rank else None
        self.q_a_norm = RMSNorm(c.q_lora_rank, _EPS, dtype) if c.q_lora_rank else None
        self.q_b_proj = Linear(narrow, c.num_heads * c.head_dim, False, dtype, mapping, column, own=own, axis=axis)
        self.kv_a_proj = Linear(c.hidden, c.kv_lora_rank + c.qk_rope_head_dim, c.bias, dtype, mapping)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, _EPS, dtype)
        self.up_k = torch.empty(len(self.heads), c.qk_nope_head_dim, c.kv_lora_rank, dtype=dtype)
        self.up_v = torch.empty(len(self.output), c.v_head_dim, c.kv_lora_rank, dtype=dtype)
        columns = [range(self.output.start * c.v_head_dim, self.output.stop * c.v_head_dim)]
        width = c.num_heads * c.v_head_dim
        self.o_proj = Linear(width, c.hidden, c.bias, dtype, mapping, row, own=columns, axis=axis)
        if mapping.cp_type == CpType.HELIX and mapping.attn_cp_rank > 0:
            self.o_proj.leave_bias()  # the sum goes over attn_cp as well
        self._heads = LatentHeads(len(self.heads), c.kv_lora_rank, c.scale)

    def new_cache(self, slots: int, max_length: int, dtype: torch.dtype) -> Cache:
        """An empty cache for what this rank keeps of sequences of up to max_length tokens."""
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        if self.context is None:
            return LatentCache(slots, max_length, width, dtype)
        return SequenceCache(slots, self.context.capacity(max_length), (width,), dtype)

    def load_shard(self, weights: dict[str, Source], biases: dict[str, Source]) -> None:
        """Copy this rank's part of the stored tensors: q_a_proj, q_a_layernorm and q_b_proj, or q_proj alone;
        kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj; biases by the same names."""
        c = self.config
        if self.q_a_proj is not None and self.q_a_norm is not None:
            self.q_a_proj.load_shard(weights["q_a_proj"], biases.get("q_a_proj"))
            self.q_a_norm.weight.copy_(weights["q_a_layernorm"][(slice(0, c.q_lora_rank),)])
        self.q_b_proj.load_shard(weights["q_b_proj" if self.q_a_proj is not None else "q_proj"])
        self.kv_a_proj.load_shard(weights["kv_a_proj_with_mqa"], biases.get("kv_a_proj_with_mqa"))
        self.kv_a_norm.weight.copy_(weights["kv_a_layernorm"][(slice(0, c.kv_lora_rank),)])
        each = c.qk_nope_head_dim + c.v_head_dim
        for target, heads, part in (
            (self.up_k, self.heads, slice(0, c.qk_nope_head_dim)),
            (self.up_v, self.output, slice(c.qk_nope_head_dim, each)),
        ):
            rows = weights["kv_b_proj"][slice(heads.start * each, heads.stop * each), slice(0, c.kv_lora_rank)]
            target.copy_(rows.view(len(heads), each, c.kv_lora_rank)[:, part])
        self.o_proj.load_shard(weights["o_proj"], biases.get("o_proj"))
        if not c.rope_interleave:
            rope = c.qk_rope_head_dim
            queries = self.q_b_proj.weight.view(len(self.heads), c.head_dim, -1)
            for target in (*(head[-rope:] for head in queries), self.kv_a_proj.weight[-rope:]):
                target.copy_(interleave(target, rope))
            if self.kv_a_proj.bias is not None:
                self.kv_a_proj.bias[-rope:] = interleave(self.kv_a_proj.bias[-rope:], rope)

    def project(
        self, x: torch.Tensor, rotation: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, nope + rope] and cache rows [T, latent + rope], both rotated.

        sizes: x is cut over the ranks that attend together, each with so many of the T rows: what is narrow is made of
        them and gathered."""
        c, narrow = self.config, x
        if self.q_a_proj is not None and self.q_a_norm is not None:
            narrow = self.q_a_norm(self.q_a_proj(x))
        rows = self.kv_a_proj(x)
        if sizes is not None:
            both = gather.all_gather(torch.cat([narrow, rows], 1), self.q_b_proj.group, dim=0, sizes=sizes)
            narrow, rows = both.split([narrow.shape[1], rows.shape[1]], 1)
        queries = self.q_b_proj(narrow.contiguous()).view(-1, len(self.heads), c.head_dim)
        latent = self.kv_a_norm(rows[:, : c.kv_lora_rank].contiguous())
        key = rotate(rows[:, None, c.kv_lora_rank :], rotation)[:, 0]
        turned = rotate(queries[..., c.qk_nope_head_dim :], rotation)
        return torch.cat([queries[..., : c.qk_nope_head_dim], turned], -1), torch.cat([latent, key], -1)

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """[T, heads, nope + rope] -> [T, heads, latent + rope]: queries of cache rows."""
        flat = torch.bmm(queries[..., : self.config.qk_nope_head_dim].transpose(0, 1), self.up_k).transpose(0, 1)
        return torch.cat([flat, queries[..., self.config.qk_nope_head_dim :]], -1)

    def finish(self, o: torch.Tensor) -> torch.Tensor:
        """Of the output heads, latents [T, H, latent] -> values [T, H, v]."""
        return torch.bmm(o.transpose(0, 1), self.up_v.mT).transpose(0, 1)

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        chunks: Sequence[Chunk],
        cache: Cache,
        sizes: Sequence[int] | None = None,
    ) -> Partial:
        """Store the chunks' latents in the cache and attend over what it then holds; shapes: see the class; sizes: see
        `project`."""
        queries, rows = self.project(x, rotation, sizes)
        if isinstance(cache, SequenceCache):
            assert self.context is not None
            o = self.finish(self.context.attend(self.absorb(queries), rows, self._heads, chunks, cache))
        else:
            o = self._whole(queries, rows, chunks, cache)
        return self.o_proj.partial(o.flatten(1))

    __call__ = forward

    def _whole(
        self, queries: torch.Tensor, rows: torch.Tensor, chunks: Sequence[Chunk], cache: KvCache
    ) -> torch.Tensor:
        """Attention of the chunks where a rank holds all of their sequences: [T, heads, v]."""
        lengths = [chunk.length for chunk in chunks]
        for chunk, new in zip(chunks, rows.split(lengths), strict=True):
            cache[chunk.slot, chunk.start : chunk.start + chunk.length].copy_(new)
        fresh = [chunk.start == 0 and chunk.length > 1 for chunk in chunks]
        if not any(fresh):  # W_UK and W_UV are then read once for all sequences
            parts = zip(chunks, self.absorb(queries).split(lengths), strict=True)
            none = queries.new_empty(0, len(self.heads), self.config.kv_lora_rank)
            return self.finish(torch.cat([none, *(self.absorbed(part, chunk, cache) for chunk, part in parts)]))
        return torch.cat(
            [
                self.expanded(own, new) if alone else self.finish(self.absorbed(self.absorb(own), chunk, cache))
                for alone, chunk, own, new in zip(
                    fresh, chunks, queries.split(lengths), rows.split(lengths), strict=True
                )
            ]
        )

    def absorbed(self, queries: torch.Tensor, chunk: Chunk, cache: KvCache) -> torch.Tensor:
        """Absorbed queries [L, heads, latent + rope] of a chunk over the cached rows up to it: [L, heads, latent]."""
        seen = cache[chunk.slot, 0 : chunk.start + chunk.length]
        if chunk.length == 1:
            return self._heads.attend_one(queries, seen)[0]
        mask = torch.arange(len(seen)) <= torch.arange(chunk.start, len(seen)).unsqueeze(1)
        return attend(queries, *self._heads.keys_values(seen), self._heads.scale, mask)[0]

    def expanded(self, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Causal attention of a whole prompt over itself by keys and values: [L, heads, v]."""
        c = self.config
        latent, key = rows.split([c.kv_lora_rank, c.qk_rope_head_dim], 1)
        nope, values = (torch.matmul(latent, up.mT).transpose(0, 1) for up in (self.up_k, self.up_v))
        keys = torch.cat([nope, key[:, None].expand(-1, len(self.heads), -1)], -1)
        if c.v_head_dim > c.head_dim:  # `attend` takes no wider values; channels of zeros change no score
            queries, keys = (F.pad(part, (0, c.v_head_dim - c.head_dim)) for part in (queries, keys))
        return attend(queries, keys, values, c.scale, causal=True)[0]


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x [T, H, d], channels in adjacent pairs, by rotation complex64 [T, d / 2], in fp32."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * rotation.unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
