"""What a checkpoint's configuration says, from config.json or GGUF metadata, in one form for all architectures."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from typing import Any

from spmd.errors import InputError
from spmd.models.kinds import EXPERTS, layer_kinds, num_experts
from spmd.nn.attention import AttentionConfig
from spmd.nn.experts import MoeConfig
from spmd.nn.mla import LatentConfig
from spmd.nn.rotary import PARAMETERS, RopeConfig, grown

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: sizes, and what distinguishes the architectures. eos: tokens that end a text; moe:
    the sparse layers, if there are any; kinds: "dense" or "moe" for every layer."""

    family: str
    vocab_size: int
    num_layers: int
    intermediate: int
    attention: AttentionConfig | LatentConfig
    rope: RopeConfig
    mlp_bias: bool
    tied: bool
    max_positions: int
    windows: tuple[int | None, ...]
    eos: tuple[int, ...]
    kinds: tuple[str, ...] = ()  # empty: all dense
    moe: MoeConfig | None = None

    @property
    def hidden(self) -> int:
        return self.attention.hidden

    @property
    def eps(self) -> float:
        return self.attention.eps

    def kind(self, layer: int) -> str:
        return self.kinds[layer] if self.kinds else "dense"

    def layer_attention(self, layer: int) -> AttentionConfig | LatentConfig:
        """The attention of one layer: its window may be its own."""
        return replace(self.attention, window=self.windows[layer])


def _architecture(name: str) -> str:
    if name not in ARCHITECTURES:
        raise InputError(f"unknown architecture {name!r}: it is one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


_REQUIRED: Any = object()


class Reader:
    """Values of a configuration by name and kind: a missing or absurd one is an InputError that names key and file."""

    def __init__(self, values: Dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def _get(self, key: str, default: Any, right: Callable[[Any], bool], kind: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise InputError(f"{self.where} lacks {key!r}")
            return default
        if not right(value):
            raise InputError(f"{self.where}: {key} must be {kind}, but is {str(value)[:60]!r}")
        return value

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """An integer above 0."""
        return self._get(key, default, lambda v: type(v) is int and v > 0, "a whole number above 0")

    def index(self, key: str, default: int) -> int:
        """An integer from 0."""
        return self._get(key, default, lambda v: type(v) is int and v >= 0, "a whole number from 0")

    def real(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number above 0."""
        value = self._get(key, default, lambda v: type(v) in (int, float) and 0 < v < math.inf, "a number above 0")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._get(key, default, lambda v: isinstance(v, bool), "true or false")

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: isinstance(v, str), "a text")

    def mapping(self, key: str) -> dict[str, Any] | None:
        return self._get(key, None, lambda v: isinstance(v, dict), "an object")

    def texts(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v), "texts")

    def pair(self, key: str) -> tuple[int, int]:
        """A list of two integers above 0."""

        def right(value: Any) -> bool:
            return isinstance(value, list) and len(value) == 2 and all(type(i) is int and i > 0 for i in value)

        first, second = self._get(key, _REQUIRED, right, "two whole numbers above 0")
        return first, second

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, several, or none."""

        def right(value: Any) -> bool:
            ids = value if isinstance(value, list) else [value]
            return all(type(i) is int and i >= 0 for i in ids)

        value = self._get(key, (), right, "a token id or a list of them")
        return (value,) if isinstance(value, int) else tuple(value)


def from_hf(values: Dict[str, Any], where: str, generation: Dict[str, Any] | None = None) -> ModelConfig:
    """From a Hugging Face config.json (and generation_config.json, which knows best what ends a text).

    How the weights are stored (quantization_config) is no part of the model: `quantised.parse` reads it.
    Errors: InputError for an unknown architecture, a missing or absurd value, and an activation other than SiLU.
    """
    read = Reader(values, where)
    family = _architecture((read.texts("architectures", None) or ["none"])[0])
    if read.text("hidden_act", "silu") != "silu":
        raise InputError(f"{where}: hidden_act {values['hidden_act']!r} is not supported, only 'silu'")
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    layers, positions = read.count("num_hidden_layers"), read.count("max_position_embeddings")
    rope = dict(read.mapping("rope_parameters") or read.mapping("rope_scaling") or {})
    latent = family.startswith("deepseek")
    head_dim = read.count("qk_rope_head_dim") if latent else read.count("head_dim", hidden // heads)
    stored, bias = Reader(rope, f"{where}: rope"), read.flag("attention_bias")
    ends = Reader(generation, "generation_config.json") if generation and "eos_token_id" in generation else read
    return ModelConfig(
        family=family,
        vocab_size=read.count("vocab_size"),
        num_layers=layers,
        intermediate=read.count("intermediate_size"),
        attention=_latent(read, rope, hidden, heads)
        if latent
        else AttentionConfig(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=read.count("num_key_value_heads", heads),
            head_dim=head_dim,
            qkv_bias=read.flag("qkv_bias", True) if family.startswith("qwen2") else bias,
            output_bias=not family.startswith("qwen2") and bias,
            qk_norm=family.startswith("qwen3"),
            eps=read.real("rms_norm_eps"),
        ),
        rope=_rope(
            head_dim,
            stored.real("rope_theta", None) or read.real("rope_theta", 10000.0),
            stored.text("rope_type", None) or stored.text("type", "default"),
            rope,
            positions,
            where,
        ),
        mlp_bias=read.flag("mlp_bias"),
        tied=read.flag("tie_word_embeddings"),
        max_positions=positions,
        windows=_windows(family, read, layers),
        eos=ends.token_ids("eos_token_id"),
        kinds=tuple(layer_kinds(values)),
        moe=_moe(family, read),
    )


def _latent(read: Reader, rope: dict[str, Any], hidden: int, heads: int) -> LatentConfig:
    """DeepSeek's attention. What YaRN's mscale_all_dim grows queries and keys by is in the scale of the scores."""
    nope, turned = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
    stored, scale = Reader(rope, f"{read.where}: rope"), (nope + turned) ** -0.5
    everywhere = stored.real("mscale_all_dim", None)
    if everywhere and (stored.text("rope_type", None) or stored.text("type", "default")) != "default":
        scale *= grown(everywhere, stored.real("factor")) ** 2
    return LatentConfig(
        hidden=hidden,
        num_heads=heads,
        q_lora_rank=read.count("q_lora_rank", None),
        kv_lora_rank=read.count("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=turned,
        v_head_dim=read.count("v_head_dim"),
        scale=scale,
        bias=read.flag("attention_bias"),
        eps=read.real("rms_norm_eps"),
        rope_interleave=read.flag("rope_interleave", True),
    )


def _moe(family: str, read: Reader) -> MoeConfig | None:
    """The sparse layers of the families that have them."""
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
        return None
    if family.startswith("deepseek") and not num_experts(read.values):
        return None
    mixtral = family == "mixtral"
    stored = next((key for key in EXPERTS if key in read.values), EXPERTS[0])  # the name depends on who wrote the file
    experts, k = read.count(stored), read.count("num_experts_per_tok")
    if k > experts:
        raise InputError(f"{read.where}: num_experts_per_tok is {k}, but there are {experts} experts")
    if family.startswith("deepseek"):
        return _deepseek_moe(family, read, experts, k)
    shared = read.count("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    return MoeConfig(
        num_experts=experts,
        top_k=k,
        intermediate=read.count("intermediate_size" if mixtral else "moe_intermediate_size"),
        normalise=mixtral or read.flag("norm_topk_prob"),
        shared=shared,
        shared_gate=shared > 0,
    )


def _deepseek_moe(family: str, read: Reader, experts: int, k: int) -> MoeConfig:
    """V2: softmax, weights as they are; a group is as good as its best expert. V3: sigmoid, a bias that only chooses;
    a group is as good as its two best, and weights may be normalised."""
    third, width = family == "deepseek_v3", read.count("moe_intermediate_size")
    known = {"topk_method": ("noaux_tc",) if third else ("greedy", "group_limited_greedy")}
    known["scoring_func"] = ("sigmoid",) if third else ("softmax",)
    for key, values in known.items():
        if read.text(key, values[0]) not in values:
            raise InputError(
                f"{read.where}: {key} {read.values[key]!r} of {family} is not supported: {' or '.join(values)}"
            )
    if read.flag("mlp_bias"):
        raise InputError(f"{read.where}: mlp_bias is not supported in a model with experts, only false")
    limited, score = third or read.text("topk_method", "greedy") == "group_limited_greedy", 2 if third else 1
    groups, kept = (read.count("n_group"), read.count("topk_group")) if limited else (1, 1)
    if experts % groups or kept > groups or k > kept * (experts // groups) or score > experts // groups:
        raise InputError(
            f"{read.where}: num_experts_per_tok {k} cannot be chosen from topk_group {kept} of n_group {groups} groups "
            f"of {experts} experts"
        )
    return MoeConfig(
        num_experts=experts,
        top_k=k,
        intermediate=width,
        normalise=third and read.flag("norm_topk_prob", True),
        scoring="sigmoid" if third else "softmax",
        groups=groups,
        kept_groups=kept,
        group_score=score,
        scale=read.real("routed_scaling_factor", 2.5 if third else 1.0),
        shared=width * read.index("n_shared_experts", 0),
    )


def _rope(head_dim: int, theta: float, kind: str, parameters: dict[str, Any], positions: int, where: str) -> RopeConfig:
    """The numbers among the scaling's parameters are checked here, which ones there must be in RopeConfig."""
    if head_dim % 2:
        raise InputError(f"{where}: head_dim must be even to be rotated, but is {head_dim}")
    stored = Reader(parameters, f"{where}: rope")
    for name in PARAMETERS:
        stored.real(name, None)
    return RopeConfig(head_dim, theta, kind, parameters, positions)


def _windows(family: str, read: Reader, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: Mistral's on all, Qwen's only when switched on, on the layers the file names."""
    size = read.index("sliding_window", 0) or None
    never = family in ("llama", "deepseek_v2", "deepseek_v3")
    if size is None or never or (family.startswith("qwen") and not read.flag("use_sliding_window")):
        return (None,) * layers
    kinds = read.texts("layer_types", None)
    if kinds is None:
        first = read.index("max_window_layers", 28) if family.startswith("qwen") else 0
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if len(kinds) != layers:
        raise InputError(f"{read.where}: layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


_GGUF = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GGUF |= {"qwen3": "Qwen3ForCausalLM"}
_GGUF_ROPE = {"none": "default", "linear": "linear", "yarn": "yarn"}


def from_gguf(
    values: Dict[str, Any], where: str, tensors: set[str], vocab_size: int, rope_factors: list[float] | None
) -> ModelConfig:
    """From GGUF metadata; `tensors` are the names in the file, which say what the metadata leaves out.

    rope_factors: the file's rope_freqs tensor, which divides the frequency of every channel pair.
    """
    arch = Reader(values, where).text("general.architecture")
    family = _architecture(_GGUF.get(arch, f"{arch} (GGUF)"))
    read = Reader({key.removeprefix(f"{arch}."): value for key, value in values.items()}, where)
    heads, hidden, positions = (
        read.count("attention.head_count"),
        read.count("embedding_length"),
        read.count("context_length"),
    )
    head_dim, layers = read.count("attention.key_length", hidden // heads), read.count("block_count")
    scaling = read.text("rope.scaling.type", "none")
    kind = _GGUF_ROPE.get(scaling, scaling)
    rope: dict[str, Any] = {
        "factor": read.real("rope.scaling.factor", None),
        "original_max_position_embeddings": read.count("rope.scaling.original_context_length", None),
    }
    if rope_factors is not None:
        kind, rope = "factors", {"factors": rope_factors}
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        num_layers=layers,
        intermediate=read.count("feed_forward_length"),
        attention=AttentionConfig(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=read.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            eps=read.real("attention.layer_norm_rms_epsilon"),
        ),
        rope=_rope(head_dim, read.real("rope.freq_base", 10000.0), kind, rope, positions, where),
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tied="output.weight" not in tensors,
        max_positions=positions,
        windows=(read.count("attention.sliding_window", None),) * layers,
        eos=read.token_ids("tokenizer.ggml.eos_token_id"),
    )


def tiny(num_heads: int) -> ModelConfig:
    """A small random decoder for runs without a checkpoint: byte vocabulary, 4 layers, as many heads as asked."""
    return ModelConfig(
        family="llama",
        vocab_size=259,
        num_layers=4,
        intermediate=32 * num_heads,
        attention=AttentionConfig(16 * num_heads, num_heads, num_heads, 16),
        rope=RopeConfig(16, 10000.0),
        mlp_bias=False,
        tied=True,
        max_positions=2048,
        windows=(None,) * 4,
        eos=(),
    )
