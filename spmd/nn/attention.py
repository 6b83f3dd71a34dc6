"""Grouped-query attention over a KV cache, each rank with its query heads and the key/value heads those need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from spmd import context
from spmd.collectives.overlap import Partial
from spmd.context.base import Chunk, SequenceCache
from spmd.errors import InputError
from spmd.nn.linear import Linear, Source, TensorParallelMode
from spmd.nn.norm import RMSNorm
from spmd.nn.rotary import interleave
from spmd.nn.rows import attend, rotate_store
from spmd.topology.mapping import CpType, Mapping


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes and options of one attention layer; window: positions a token sees, itself included (None: all)."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    window: int | None = None


@dataclass(frozen=True)
class GroupedHeads:
    """See `context.base.Heads`: query head h reads key/value head (lead + h) // share of cache rows [n, 2, kv, d]."""

    count: int
    value_width: int
    lead: int
    share: int
    window: int | None

    @property
    def scale(self) -> float:
        return self.value_width**-0.5

    def _read(self, heads: range) -> range:
        return range((self.lead + heads.start) // self.share, (self.lead + heads.stop - 1) // self.share + 1)

    def part(self, heads: range) -> GroupedHeads:
        lead = self.lead + heads.start - self._read(heads).start * self.share
        return replace(self, count=len(heads), lead=lead)

    def rows_of(self, rows: torch.Tensor, heads: range) -> torch.Tensor:
        return rows[:, :, self._read(heads).start : self._read(heads).stop]

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = rows[:, :, [(self.lead + head) // self.share for head in range(self.count)]].unbind(1)
        return keys, values

    def attend_one(self, queries: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stats = torch.empty(1, self.count, 2)
        o = attend(queries.contiguous(), rows.contiguous(), self.count, self.lead, self.share, stats[0])
        return o.view(queries.shape), stats


class KvCache:
    """Keys and values of one layer on this rank: [slots, max_length, 2 (k, v), kv_heads, head_dim]."""

    def __init__(self, slots: int, max_length: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._slots = list(torch.empty(slots, max_length, 2, kv_heads, head_dim, dtype=dtype))

    def __getitem__(self, place: tuple[int, slice]) -> torch.Tensor:
        """Positions of one slot: [length, 2, kv_heads, head_dim]. InputError when the slot is too short."""
        slot, positions = self._slots[place[0]], place[1]
        if positions.stop > len(slot):
            raise InputError(f"sequence of {positions.stop} tokens in a KV cache of {len(slot)}: raise max_length")
        return slot[positions]


Cache = KvCache | SequenceCache


class Attention:
    """forward(x [T, hidden], rotation [T, head_dim / 2] complex64, chunks, cache) -> Partial [T, hidden], a sum that is
    owed over the ranks that attend together (attn_tp), whose rows of x are the same.

    The rows of x are the chunks' tokens one after the other. Query head h reads key/value head h // (heads / kv_heads);
    a rank's heads are `Mapping.q_heads` / `kv_heads`, which may be uneven, so the query heads of a rank need not fill
    the groups of its key/value heads. Under context parallelism the rows are those that the plan of cp_config says
    (`context.base.Context`), and so is the sum. Errors: InputError when heads do not cover the ranks, or a slot is
    full. Source: Ainslie et al., GQA, 2023.
    """

    def __init__(self, config: AttentionConfig, mapping: Mapping, dtype: torch.dtype) -> None:
        self.config, d = config, config.head_dim
        self.context = context.of(mapping, config.num_heads)
        heads, kept = mapping.q_heads(config.num_heads), mapping.kv_heads(config.num_heads, config.num_kv_heads)
        self.num_kept, kv_heads, output = len(kept), kept, heads
        if self.context is not None:
            heads, output, share = (
                self.context.heads,
                self.context.output_heads,
                config.num_heads // config.num_kv_heads,
            )
            kv_heads = range(heads.start // share, (heads.stop - 1) // share + 1)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        q_rows, kv_rows, o_columns = (range(part.start * d, part.stop * d) for part in (heads, kv_heads, output))
        q_width, kv_width = config.num_heads * d, config.num_kv_heads * d
        column, row = TensorParallelMode.COLUMN, TensorParallelMode.ROW
        own = [q_rows, kv_rows, kv_rows]
        width, axis = q_width + 2 * kv_width, "tp" if mapping.has_cp_ulysses() else "attn_tp"
        self.qkv_proj = Linear(config.hidden, width, config.qkv_bias, dtype, mapping, column, own=own, axis=axis)
        self.o_proj = Linear(
            q_width, config.hidden, config.output_bias, dtype, mapping, row, own=[o_columns], axis=axis
        )
        if mapping.cp_type == CpType.HELIX and mapping.attn_cp_rank > 0:
            self.o_proj.leave_bias()  # the sum goes over attn_cp as well
        self.q_norm = RMSNorm(d, config.eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.eps, dtype) if config.qk_norm else None
        self._share = config.num_heads // config.num_kv_heads
        self._kv_of_head = torch.tensor([head // self._share - kv_heads.start for head in heads])
        # place of the first query head in the group of its key/value head: heads cut inside a group leave it off zero
        self._lead = heads.start - kv_heads.start * self._share
        self._heads = GroupedHeads(len(heads), d, self._lead, self._share, config.window)

    def new_cache(self, slots: int, max_length: int, dtype: torch.dtype) -> Cache:
        """An empty cache for what this rank keeps of sequences of up to max_length tokens."""
        if self.context is None:
            return KvCache(slots, max_length, self.num_kv_heads, self.config.head_dim, dtype)
        row = (2, self.num_kept, self.config.head_dim)
        return SequenceCache(slots, self.context.capacity(max_length), row, dtype)

    def load_shard(self, weights: Sequence[Source], biases: Sequence[Source] | None, interleaved: bool) -> None:
        """weights: q, k, v, o; biases: q, k, v (and o when there is one). interleaved: pairs are adjacent already."""
        self.qkv_proj.load_shard(weights[:3], biases and biases[:3])
        self.o_proj.load_shard(weights[3], biases[3] if biases and len(biases) > 3 else None)
        if interleaved:
            return
        rows = (self.num_heads + self.num_kv_heads) * self.config.head_dim
        for part in (self.qkv_proj.weight[:rows], None if self.qkv_proj.bias is None else self.qkv_proj.bias[:rows]):
            if part is not None:
                part.copy_(interleave(part, self.config.head_dim))
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.weight.copy_(interleave(norm.weight, self.config.head_dim))

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        chunks: Sequence[Chunk],
        cache: Cache,
    ) -> Partial:
        """Store the chunks' keys and values in the cache and attend over what it then holds; shapes: see the class."""
        h, kv, d = self.num_heads, self.num_kv_heads, self.config.head_dim
        qkv = self.qkv_proj(x).view(-1, h + 2 * kv, d)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :h] = self.q_norm(qkv[:, :h].contiguous())
            qkv[:, h : h + kv] = self.k_norm(qkv[:, h : h + kv].contiguous())
        if isinstance(cache, SequenceCache):
            assert self.context is not None
            rows = qkv.new_empty(len(qkv), 2, kv, d)
            rotate_store(qkv, rotation, rows)
            heads = self.context.attend(qkv[:, :h], rows, self._heads, chunks, cache).flatten(1)
        elif not chunks:
            heads = x.new_empty(0, h * d)
        elif len(chunks) == 1:
            heads = self._one(qkv, rotation, chunks[0], cache)
        else:
            ends = accumulate(chunk.length for chunk in chunks)
            parts = [(chunk, slice(end - chunk.length, end)) for chunk, end in zip(chunks, ends, strict=True)]
            heads = torch.cat([self._one(qkv[at], rotation[at], chunk, cache) for chunk, at in parts])
        return self.o_proj.partial(heads)

    __call__ = forward

    def _one(self, qkv: torch.Tensor, rotation: torch.Tensor, chunk: Chunk, cache: KvCache) -> torch.Tensor:
        """Attention of one chunk: its rows [length, heads + 2 * kv_heads, d] -> [length, heads * d]."""
        end, window = chunk.start + chunk.length, self.config.window
        rotate_store(qkv, rotation, cache[chunk.slot, chunk.start : end])
        first = max(0, chunk.start + 1 - window) if window else 0
        seen = cache[chunk.slot, first:end]
        if chunk.length == 1:
            return attend(qkv, seen, self.num_heads, self._lead, self._share)
        keys, values = seen[:, :, self._kv_of_head].permute(1, 2, 0, 3).unsqueeze(1)
        simple = chunk.start == 0 and not (window and chunk.length > window)
        mask = None if simple else self._mask(chunk, first)
        queries = qkv[:, : self.num_heads].transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=simple)
        return out[0].transpose(0, 1).reshape(chunk.length, -1)

    def _mask(self, chunk: Chunk, first: int) -> torch.Tensor:
        """True where a new token may look: not ahead, not further back than the window."""
        new = torch.arange(chunk.start, chunk.start + chunk.length).unsqueeze(1)
        seen = torch.arange(first, chunk.start + chunk.length)
        mask = seen <= new
        return mask & (new - seen < self.config.window) if self.config.window else mask
