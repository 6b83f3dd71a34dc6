"""One pipeline stage of a decoder-only transformer: embedding, its layers, and on the last stage norm and LM head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from spmd.collectives.epilogue import AllReduceParams
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.models.config import ModelConfig
from spmd.models.weights import Checkpoint
from spmd.nn import overlap
from spmd.nn.attention import Attention, Chunk, KvCache
from spmd.nn.embedding import VocabParallelEmbedding
from spmd.nn.linear import Linear, TensorParallelMode
from spmd.nn.norm import RMSNorm
from spmd.nn.rotary import Rotary
from spmd.nn.rows import swiglu
from spmd.topology.mapping import Mapping
from spmd.topology.split import split


class Mlp:
    """down(silu(gate(x)) * up(x)): [T, hidden] -> [T, hidden], the finished sum on every rank, or what follows it."""

    def __init__(self, config: ModelConfig, mapping: Mapping, dtype: torch.dtype) -> None:
        column, row = TensorParallelMode.COLUMN, TensorParallelMode.ROW
        own = split(config.intermediate, mapping.tp_size, mapping.tp_rank)
        self.gate_up_proj = Linear(
            config.hidden, 2 * config.intermediate, config.mlp_bias, dtype, mapping, column, own=[own, own]
        )
        self.down_proj = Linear(config.intermediate, config.hidden, config.mlp_bias, dtype, mapping, row)

    def forward(self, x: torch.Tensor, all_reduce_params: AllReduceParams | None = None) -> Any:
        return self.down_proj(swiglu(self.gate_up_proj(x)), all_reduce_params=all_reduce_params)

    __call__ = forward


class Layer:
    """forward(x, residual) -> (x, residual): x is the residual normalised for this layer; what comes back is normalised
    for the next one. What `finish` is for a stage's last layer: see there."""

    def __init__(self, config: ModelConfig, index: int, mapping: Mapping, dtype: torch.dtype) -> None:
        self.index = index
        self.attn_norm = RMSNorm(config.hidden, config.eps, dtype)
        self.attention = Attention(config.layer_attention(index), mapping, dtype)
        self.mlp_norm = RMSNorm(config.hidden, config.eps, dtype)
        self.mlp = Mlp(config, mapping, dtype)
        self._after_attention = self.mlp_norm.after_all_reduce()
        self._after_mlp: AllReduceParams | None = None

    def finish(self, norm: RMSNorm | None) -> None:
        """The norm that follows: the next layer's or the model's; None at the end of a stage that is not the last: then
        x is what is still to be added to the residual."""
        self._after_mlp = None if norm is None else norm.after_all_reduce()

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: torch.Tensor,
        chunks: list[Chunk],
        cache: KvCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._after_attention.residual = residual
        x, residual = self.attention(x, rotation, chunks, cache, self._after_attention)
        if self._after_mlp is None:
            return self.mlp(x), residual
        self._after_mlp.residual = residual
        return self.mlp(x, self._after_mlp)

    __call__ = forward


class Decoder:
    """This rank's part of the model: the layers of its pipeline stage, cut over tp.

    Between stages travels the finished hidden state [T, hidden]. forward(x, chunks, caches) takes token ids [T] int64
    on the first stage and hidden states elsewhere; the last stage returns logits [len(chunks), vocab] of each chunk's
    last token (fp32, on every tp rank), the others hidden states [T, hidden].
    """

    def __init__(self, config: ModelConfig, mapping: Mapping, dtype: torch.dtype) -> None:
        self.config, self.mapping, self.dtype = config, mapping, dtype
        self.first, self.last = mapping.is_first_pp_rank(), mapping.is_last_pp_rank()
        stage = mapping.pp_layers(config.num_layers)
        self.layers = [Layer(config, index, mapping, dtype) for index in stage]
        self.rotary = Rotary(config.rope)
        self.embed: VocabParallelEmbedding | None = None
        self.head: VocabParallelEmbedding | None = None
        if self.first or (self.last and config.tied):
            self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden, dtype, mapping)
        norms = [layer.attn_norm for layer in self.layers[1:]]
        if self.last:
            self.norm = RMSNorm(config.hidden, config.eps, dtype)
            norms.append(self.norm)
            self.head = self.embed
            if not config.tied:
                self.head = VocabParallelEmbedding(config.vocab_size, config.hidden, dtype, mapping)
        for layer, norm in zip_longest(self.layers, norms):
            layer.finish(norm)

    def tune(self, rows: Sequence[int]) -> float:
        """Time the ways in which the all-reduces of forwards with so many rows can be done: a warm-up step, collective
        over the stage's tp group. Returns the seconds it took, 0 where all is known."""
        if self.mapping.tp_size == 1 or not self.layers:
            return 0.0
        all_reduce = self.layers[0].attention.o_proj.all_reduce
        all_reduce.lend((max(rows), self.config.hidden), self.dtype)  # the largest first: none grows in a forward
        shapes = [(count, self.config.hidden) for count in dict.fromkeys(rows) if not overlap.worth(count)]
        fused = [(shape, self.dtype, AllReduceFusionOp.RESIDUAL_RMS_NORM, True) for shape in shapes]
        return all_reduce.tune(fused)

    def new_caches(self, slots: int, max_length: int) -> list[KvCache]:
        """An empty KV cache for each layer of this stage."""
        d = self.config.attention.head_dim
        return [KvCache(slots, max_length, layer.attention.num_kv_heads, d, self.dtype) for layer in self.layers]

    def forward(self, x: torch.Tensor, chunks: list[Chunk], caches: Sequence[KvCache]) -> torch.Tensor:
        positions = [torch.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks]
        rotation = self.rotary.at(torch.cat(positions) if len(positions) != 1 else positions[0])
        if self.first:
            assert self.embed is not None
            x = self.embed(x)
        if not self.layers and not self.last:
            return x
        x, residual = (self.layers[0].attn_norm if self.layers else self.norm)(x), x
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, rotation, chunks, cache)
        if not self.last:
            return residual + x
        assert self.head is not None
        if len(x) != len(chunks):
            ends = torch.tensor([chunk.length for chunk in chunks]).cumsum(0) - 1
            x = x[ends]
        return self.head.logits(x).float()

    __call__ = forward

    # ------------------------------------------------------------------ weights

    def load(self, checkpoint: Checkpoint) -> None:
        """Read this rank's slices. Errors: InputError naming a tensor that is missing, misshapen or unreadable."""
        c, a = self.config, self.config.attention
        if self.embed is not None:
            self.embed.load_shard(checkpoint.read("model.embed_tokens.weight", (c.vocab_size, c.hidden)))
        if self.last:
            self._load_norm(checkpoint, self.norm, "model.norm.weight")
        if self.head is not None and not c.tied:
            self.head.load_shard(checkpoint.read("lm_head.weight", (c.vocab_size, c.hidden)))
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        shapes = {"q_proj": (q, c.hidden), "k_proj": (kv, c.hidden), "v_proj": (kv, c.hidden), "o_proj": (c.hidden, q)}
        ffn = {"gate_proj": (c.intermediate, c.hidden), "up_proj": (c.intermediate, c.hidden)}
        for layer in self.layers:
            name = f"model.layers.{layer.index}."
            for norm, stored in ((layer.attn_norm, "input_layernorm"), (layer.mlp_norm, "post_attention_layernorm")):
                self._load_norm(checkpoint, norm, f"{name}{stored}.weight")
            for head_norm, stored in ((layer.attention.q_norm, "q_norm"), (layer.attention.k_norm, "k_norm")):
                if head_norm is not None:
                    self._load_norm(checkpoint, head_norm, f"{name}self_attn.{stored}.weight")
            weights = [checkpoint.read(f"{name}self_attn.{part}.weight", shape) for part, shape in shapes.items()]
            biased = [part for part in shapes if (a.output_bias if part == "o_proj" else a.qkv_bias)]
            biases = [checkpoint.read(f"{name}self_attn.{part}.bias", shapes[part][:1]) for part in biased]
            layer.attention.load_shard(weights, biases, checkpoint.interleaved)
            weights = [checkpoint.read(f"{name}mlp.{part}.weight", shape) for part, shape in ffn.items()]
            biases = [checkpoint.read(f"{name}mlp.{part}.bias", shape[:1]) for part, shape in ffn.items() if c.mlp_bias]
            layer.mlp.gate_up_proj.load_shard(weights, biases or None)
            down = checkpoint.read(f"{name}mlp.down_proj.weight", (c.hidden, c.intermediate))
            bias = checkpoint.read(f"{name}mlp.down_proj.bias", (c.hidden,)) if c.mlp_bias else None
            layer.mlp.down_proj.load_shard(down, bias)

    @staticmethod
    def _load_norm(checkpoint: Checkpoint, norm: RMSNorm, name: str) -> None:
        size = len(norm.weight)
        norm.weight.copy_(checkpoint.read(name, (size,))[(slice(0, size),)])

    def randomise(self, seed: int = 0) -> None:
        """Fill a model without a checkpoint: the same whole weights on every layout, each rank keeping its part."""
        self.load(_RandomCheckpoint(self.config, seed))


class _RandomCheckpoint(Checkpoint):
    """Weights that follow from their name and the seed."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self._seed = config, seed

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape)
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
