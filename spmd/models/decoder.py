"""One pipeline stage of a decoder-only transformer: embedding, its layers, and on the last stage norm and LM head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch

from spmd.boundary.communicator import StageCommunicator
from spmd.boundary.plan import Options
from spmd.collectives import gather
from spmd.collectives.costs import Costs
from spmd.collectives.overlap import Partial
from spmd.context import base as context
from spmd.context import of as context_of
from spmd.control.distributed import Distributed
from spmd.memory.workspace import Workspace
from spmd.models.config import ModelConfig
from spmd.models.weights import Checkpoint
from spmd.nn.attention import Attention, Cache, Chunk
from spmd.nn.embedding import VocabParallelEmbedding
from spmd.nn.experts import Experts
from spmd.nn.linear import Linear, Source, TensorParallelMode
from spmd.nn.mla import LatentAttention, LatentConfig
from spmd.nn.norm import RMSNorm
from spmd.nn.rotary import Rotary
from spmd.nn.rows import swiglu
from spmd.topology.mapping import Mapping
from spmd.topology.split import split


class Mlp:
    """down(silu(gate(x)) * up(x)): x [T, hidden], equal on all ranks -> Partial [T, hidden], a sum owed over tp."""

    def __init__(self, config: ModelConfig, mapping: Mapping, dtype: torch.dtype) -> None:
        column, row = TensorParallelMode.COLUMN, TensorParallelMode.ROW
        own = split(config.intermediate, mapping.tp_size, mapping.tp_rank)
        self.gate_up_proj = Linear(
            config.hidden, 2 * config.intermediate, config.mlp_bias, dtype, mapping, column, own=[own, own]
        )
        self.down_proj = Linear(config.intermediate, config.hidden, config.mlp_bias, dtype, mapping, row)

    def __call__(self, x: torch.Tensor, sizes: Sequence[int] = ()) -> Partial:
        return self.down_proj.partial(swiglu(self.gate_up_proj(x)))


class Layer:
    """The blocks of a layer and the norms before them. What moves between them is the communicator's."""

    def __init__(self, config: ModelConfig, index: int, mapping: Mapping, dtype: torch.dtype, options: Options) -> None:
        self.index, self.kind = index, config.kind(index)
        self.attn_norm = RMSNorm(config.hidden, config.eps, dtype)
        a = config.layer_attention(index)
        self.attention: Attention | LatentAttention
        if isinstance(a, LatentConfig):
            self.attention = LatentAttention(a, mapping, dtype)
        else:
            self.attention = Attention(a, mapping, dtype)
        self.mlp_norm = RMSNorm(config.hidden, config.eps, dtype)
        self.mlp: Mlp | Experts
        if self.kind == "moe":
            assert config.moe is not None
            self.mlp = Experts(config.hidden, config.moe, mapping, dtype, options.a2a)
        else:
            helix = mapping.has_cp_helix()  # whose cp ranks are tp ranks here
            shared = mapping.repurpose_helix_cp_to_tp() if helix else mapping
            self.mlp = Mlp(config, Mapping() if options.dense_dp else shared, dtype)


class Decoder:
    """This rank's part of the model: the layers of its pipeline stage, cut over tp.

    Between stages travels the finished hidden state [T, hidden]. forward(x, chunks, caches) takes token ids [T] int64
    on the first stage and hidden states elsewhere; the last stage returns logits [len(chunks), vocab] of each chunk's
    last token (fp32, on every rank of the attention group), the others hidden states [T, hidden]. Under attention DP
    the tokens are those of this rank's group, also none, and all groups call together. Under RING and ULYSSES the first
    stage still takes all tokens of new sequences, and a rank's hidden states are those of its part of them (`rows`).

    options, policy, costs: of the boundary plan. The groups are made at first use of `communicator`, by all together.
    """

    def __init__(
        self,
        config: ModelConfig,
        mapping: Mapping,
        dtype: torch.dtype,
        options: Options | None = None,
        policy: Literal["cost", "seed"] = "cost",
        costs: Costs | None = None,
    ) -> None:
        self.config, self.mapping, self.dtype = config, mapping, dtype
        self.first, self.last = mapping.is_first_pp_rank(), mapping.is_last_pp_rank()
        self.context = context_of(mapping, config.attention.num_heads)
        self.options, self.policy, self.costs = options or Options(), policy, costs
        stage = mapping.pp_layers(config.num_layers)
        self.layers = [Layer(config, index, mapping, dtype, self.options) for index in stage]
        self.rotary = Rotary(config.rope)
        self.embed: VocabParallelEmbedding | None = None
        self.head: VocabParallelEmbedding | None = None
        table = (config.vocab_size, config.hidden, dtype, mapping)
        whole = mapping.enable_lm_head_tp_in_adp
        axis = "tp" if mapping.has_cp_ulysses() else "attn_tp"  # ranks that have the same rows, cut or not
        if self.first or (self.last and config.tied and not whole):
            self.embed = VocabParallelEmbedding(*table, axis)
        if self.last:
            self.norm = RMSNorm(config.hidden, config.eps, dtype)
            self.head = self.embed
            if not config.tied or whole:
                self.head = VocabParallelEmbedding(*table, "tp" if whole else axis)

    @cached_property
    def communicator(self) -> StageCommunicator:
        """What moves between the blocks; collective over the stage the first time."""
        norms = [norm.tail() for layer in self.layers for norm in (layer.attn_norm, layer.mlp_norm)]
        if self.last:
            norms.append(self.norm.tail())
        options = self.options if self.first else replace(self.options, input_scattered=False)
        options = replace(options, latent=isinstance(self.config.attention, LatentConfig))
        kinds = [layer.kind for layer in self.layers]
        hidden = self.config.hidden
        return StageCommunicator(self.mapping, kinds, norms, hidden, self.dtype, options, self.policy, self.costs)

    def tune(self, rows: Sequence[int]) -> float:
        """Time the ways in which the all-reduces of forwards with so many rows can be done: a warm-up step, collective
        over the stage. Returns the seconds it took, 0 where all is known."""
        if self.mapping.tp_size == 1 or not self.layers:
            return 0.0
        for layer in self.layers:
            if isinstance(layer.mlp, Experts) and layer.mlp.alltoall:
                Workspace.of(layer.mlp.group)  # nothing is made for the first time in a forward
        return self.communicator.tune([(count,) * self.mapping.attn_dp_size for count in dict.fromkeys(rows)])

    def new_caches(self, slots: int, max_length: int) -> list[Cache]:
        """An empty KV cache for each layer of this stage."""
        return [layer.attention.new_cache(slots, max_length, self.dtype) for layer in self.layers]

    def forward(
        self,
        x: torch.Tensor,
        chunks: list[Chunk],
        caches: Sequence[Cache],
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """hidden: is given, for every layer of this stage, a copy of the hidden states that entered it."""
        communicator = self.communicator
        places = [torch.arange(of.start + part.start, of.start + part.stop) for of, part in self._held(chunks)]
        here = sum(map(len, places))
        counts, sequences, cut = communicator.agree(here, len(chunks), context.cut(self.context, chunks))
        step = communicator.begin(counts, decode=counts == sequences, cut=cut)
        rotation = self.rotary.at(places[0] if len(places) == 1 else torch.cat([torch.arange(0), *places]))
        if self.first:
            x = x[self._own_tokens(chunks)] if cut and len(chunks) else x
            assert self.embed is not None
            x = self.embed.partial(x) if step.embedding_owed else self.embed(x)
        residual = None
        for layer, cache, between in zip(self.layers, caches, step.layers, strict=True):
            x, residual = between.prepare_attn(x, residual)
            if hidden is not None:
                hidden.append(between.hidden(residual))
            latents = () if between.latents is None else (between.latents,)
            x, residual = between.prepare_mlp(layer.attention(x, rotation, chunks, cache, *latents), residual)
            x, residual = between.postprocess_layer(layer.mlp(x, between.sizes), residual)
        x, residual = step.finish(x, residual)
        if not self.last:
            return x
        return self._logits(self._last_tokens(x, chunks, cut), chunks, sequences)

    def _held(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, range]]:
        """The chunks, piece by piece of those whose tokens are on this rank."""
        return [(chunk, part) for chunk, parts in context.held(self.context, chunks) for part in parts]

    def rows(self, chunks: Sequence[Chunk]) -> int:
        """How many of these chunks' rows this rank has, and a pipeline stage hands on to the next."""
        return sum(len(part) for _, part in self._held(chunks))

    def _own_tokens(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Where they are among all tokens of the chunks."""
        starts = dict(zip(map(id, chunks), accumulate((chunk.length for chunk in chunks), initial=0), strict=False))
        return torch.cat(
            [torch.arange(starts[id(of)] + part.start, starts[id(of)] + part.stop) for of, part in self._held(chunks)]
        )

    def _last_tokens(self, x: torch.Tensor, chunks: list[Chunk], cut: bool) -> torch.Tensor:
        """The row of each chunk's last token, on all ranks that share the chunks."""
        if not cut or self.context is None:
            return x if len(x) == len(chunks) else x[torch.tensor([chunk.length for chunk in chunks]).cumsum(0) - 1]
        found: list[list[int]] = []  # of every rank the chunks whose last token it has
        for rank in range(self.context.size):
            pieces = [self.context.pieces(chunk.length, rank) or [] for chunk in chunks]
            found.append([i for i, of in enumerate(pieces) if any(chunks[i].length - 1 in part for part in of)])
        at, ends = 0, {}
        for chunk, part in self._held(chunks):
            at += len(part)
            if chunk.length - 1 in part:
                ends[id(chunk)] = at - 1
        mine = x[torch.tensor([ends[id(chunks[i])] for i in found[self.context.rank]], dtype=torch.int64)]
        rows = gather.all_gather(mine, self.context.group, dim=0, sizes=list(map(len, found)))
        order = torch.tensor([i for of in found for i in of], dtype=torch.int64)
        return rows[order.argsort()]

    def _logits(self, x: torch.Tensor, chunks: list[Chunk], sequences: tuple[int, ...]) -> torch.Tensor:
        """x: of each chunk's last token. sequences: the chunks of every attention group."""
        assert self.head is not None
        if not self.mapping.enable_lm_head_tp_in_adp:
            return self.head.logits(x).float()
        group = Distributed.get(self.mapping).along("attn_dp")  # all tokens by all ranks, and then one's own again
        scores = self.head.logits(gather.all_gather(x, group, dim=0, sizes=sequences))
        first = sum(sequences[: group.rank])
        return scores[first : first + len(chunks)].float()

    __call__ = forward

    # ------------------------------------------------------------------ weights

    def load(self, checkpoint: Checkpoint) -> None:
        """Read this rank's slices. Errors: InputError naming a tensor that is missing, misshapen or unreadable."""
        c = self.config
        if self.embed is not None:
            self.embed.load_shard(checkpoint.read("model.embed_tokens.weight", (c.vocab_size, c.hidden)))
        if self.last:
            self._load_norm(checkpoint, self.norm, "model.norm.weight")
        if self.head is not None and self.head is not self.embed:
            name = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
            self.head.load_shard(checkpoint.read(name, (c.vocab_size, c.hidden)))
        ffn = {"gate_proj": (c.intermediate, c.hidden), "up_proj": (c.intermediate, c.hidden)}
        for layer in self.layers:
            name = f"model.layers.{layer.index}."
            for norm, stored in ((layer.attn_norm, "input_layernorm"), (layer.mlp_norm, "post_attention_layernorm")):
                self._load_norm(checkpoint, norm, f"{name}{stored}.weight")
            if isinstance(layer.attention, LatentAttention):
                self._load_latent(checkpoint, layer.attention, f"{name}self_attn.")
            else:
                self._load_attention(checkpoint, layer.attention, f"{name}self_attn.")
            if isinstance(layer.mlp, Experts):
                self._load_experts(checkpoint, layer.mlp, name)
                continue
            weights = [checkpoint.read(f"{name}mlp.{part}.weight", shape) for part, shape in ffn.items()]
            biases = [checkpoint.read(f"{name}mlp.{part}.bias", shape[:1]) for part, shape in ffn.items() if c.mlp_bias]
            layer.mlp.gate_up_proj.load_shard(weights, biases or None)
            down = checkpoint.read(f"{name}mlp.down_proj.weight", (c.hidden, c.intermediate))
            bias = checkpoint.read(f"{name}mlp.down_proj.bias", (c.hidden,)) if c.mlp_bias else None
            layer.mlp.down_proj.load_shard(down, bias)

    def _load_attention(self, checkpoint: Checkpoint, attention: Attention, name: str) -> None:
        a, hidden = attention.config, self.config.hidden
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        for head_norm, stored in ((attention.q_norm, "q_norm"), (attention.k_norm, "k_norm")):
            if head_norm is not None:
                self._load_norm(checkpoint, head_norm, f"{name}{stored}.weight")
        weights = [checkpoint.read(f"{name}{part}.weight", shape) for part, shape in shapes.items()]
        biased = [part for part in shapes if (a.output_bias if part == "o_proj" else a.qkv_bias)]
        biases = [checkpoint.read(f"{name}{part}.bias", shapes[part][:1]) for part in biased]
        attention.load_shard(weights, biases, checkpoint.interleaved)

    def _load_latent(self, checkpoint: Checkpoint, attention: LatentAttention, name: str) -> None:
        a, hidden = attention.config, self.config.hidden
        down, up = a.kv_lora_rank + a.qk_rope_head_dim, a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
        shapes: dict[str, tuple[int, ...]] = {"kv_a_proj_with_mqa": (down, hidden), "kv_a_layernorm": (a.kv_lora_rank,)}
        shapes |= {"kv_b_proj": (up, a.kv_lora_rank), "o_proj": (hidden, a.num_heads * a.v_head_dim)}
        if a.q_lora_rank is None:
            shapes["q_proj"] = (a.num_heads * a.head_dim, hidden)
        else:
            shapes |= {"q_a_proj": (a.q_lora_rank, hidden), "q_a_layernorm": (a.q_lora_rank,)}
            shapes["q_b_proj"] = (a.num_heads * a.head_dim, a.q_lora_rank)
        weights = {part: checkpoint.read(f"{name}{part}.weight", shape) for part, shape in shapes.items()}
        biased = [part for part in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if a.bias and part in shapes]
        attention.load_shard(
            weights, {part: checkpoint.read(f"{name}{part}.bias", shapes[part][:1]) for part in biased}
        )

    def _load_experts(self, checkpoint: Checkpoint, experts: Experts, name: str) -> None:
        moe, hidden = experts.config, self.config.hidden
        mixtral = self.config.family == "mixtral"
        block = f"{name}block_sparse_moe." if mixtral else f"{name}mlp."
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

        def three(where: str, width: int) -> list[Source]:
            shapes = ((width, hidden), (width, hidden), (hidden, width))
            return [checkpoint.read(f"{where}{part}.weight", s) for part, s in zip(parts, shapes, strict=True)]

        gate = checkpoint.read(f"{block}gate.weight", (moe.num_experts, hidden))
        experts.gate.copy_(gate[slice(0, moe.num_experts), slice(0, hidden)])
        for number in experts.own:
            experts.load_expert(number, *three(f"{block}experts.{number}.", moe.intermediate))
        if experts.bias is not None:
            stored = checkpoint.read(f"{block}gate.e_score_correction_bias", (moe.num_experts,))
            experts.bias.copy_(stored[(slice(0, moe.num_experts),)])
        if moe.shared:
            plural = "s" if self.config.family.startswith("deepseek") else ""
            experts.load_shared(*three(f"{block}shared_expert{plural}.", moe.shared))
        if experts.shared_gate is not None:
            stored = checkpoint.read(f"{block}shared_expert_gate.weight", (1, hidden))
            experts.shared_gate.copy_(stored[slice(0, 1), slice(0, hidden)])
        experts.loaded()

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
