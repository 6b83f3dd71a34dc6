"""What a checkpoint's configuration says, from config.json or GGUF metadata, in one form for all architectures."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from typing import Any

from spmd.errors import InputError
from spmd.nn.attention import AttentionConfig
from spmd.nn.rotary import RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: sizes, and what distinguishes the architectures. eos: tokens that end a text."""

    family: str
    vocab_size: int
    num_layers: int
    intermediate: int
    attention: AttentionConfig
    rope: RopeConfig
    mlp_bias: bool
    tied: bool
    max_positions: int
    windows: tuple[int | None, ...]
    eos: tuple[int, ...]
    dtype: str

    @property
    def hidden(self) -> int:
        return self.attention.hidden

    @property
    def eps(self) -> float:
        return self.attention.eps

    def layer_attention(self, layer: int) -> AttentionConfig:
        """The attention of one layer: its window may be its own."""
        return replace(self.attention, window=self.windows[layer])


def _architecture(name: str) -> str:
    if name not in ARCHITECTURES:
        raise InputError(f"unknown architecture {name!r}: it is one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


class _Reader:
    """A dict whose missing keys are errors that name the key and the file."""

    def __init__(self, values: Dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __getitem__(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise InputError(f"{self.where} lacks {key!r}")
        return value

    def number(self, key: str, kind: type = int) -> Any:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value < 1):
            raise InputError(f"{self.where}: {key} must be a positive number, but is {value!r}")
        return kind(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)


def from_hf(values: Dict[str, Any], where: str, generation: Dict[str, Any] | None = None) -> ModelConfig:
    """From a Hugging Face config.json (and generation_config.json, which knows best what ends a text).

    Errors: InputError for an unknown architecture, a missing or absurd value, an activation other than SiLU.
    """
    read, get = _Reader(values, where), values.get
    family = _architecture((get("architectures") or ["none"])[0])
    if get("hidden_act", "silu") != "silu":
        raise InputError(f"{where}: hidden_act {get('hidden_act')!r} is not supported, only 'silu'")
    heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
    head_dim = get("head_dim") or hidden // heads
    layers, positions = read.number("num_hidden_layers"), read.number("max_position_embeddings")
    rope = dict(get("rope_parameters") or get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or get("rope_theta") or 10000.0
    return ModelConfig(
        family=family,
        vocab_size=read.number("vocab_size"),
        num_layers=layers,
        intermediate=read.number("intermediate_size"),
        attention=AttentionConfig(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=get("num_key_value_heads") or heads,
            head_dim=head_dim,
            qkv_bias=family == "qwen2" or bool(get("attention_bias", False)),
            output_bias=family != "qwen2" and bool(get("attention_bias", False)),
            qk_norm=family == "qwen3",
            eps=read.number("rms_norm_eps", float),
        ),
        rope=RopeConfig(head_dim, float(theta), kind, rope, positions),
        mlp_bias=bool(get("mlp_bias", False)),
        tied=bool(get("tie_word_embeddings", False)),
        max_positions=positions,
        windows=_windows(family, values, layers),
        eos=_token_ids((generation or {}).get("eos_token_id", get("eos_token_id"))),
        dtype=str(get("dtype") or get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _windows(family: str, values: Dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: Mistral's on all, Qwen's only when switched on, on the layers the file names."""
    get = values.get
    size = get("sliding_window")
    if not size or family == "llama" or (family.startswith("qwen") and not get("use_sliding_window", False)):
        return (None,) * layers
    kinds = get("layer_types")
    if kinds is None:
        first = get("max_window_layers", 28) if family.startswith("qwen") else 0
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)


_GGUF = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GGUF |= {"qwen3": "Qwen3ForCausalLM"}
_GGUF_ROPE = {"none": "default", "linear": "linear", "yarn": "yarn"}


def from_gguf(
    values: Dict[str, Any], where: str, tensors: set[str], vocab_size: int, rope_factors: list[float] | None
) -> ModelConfig:
    """From GGUF metadata; `tensors` are the names in the file, which say what the metadata leaves out.

    rope_factors: the file's rope_freqs tensor, which divides the frequency of every channel pair.
    """
    arch = _Reader(values, where)["general.architecture"]
    family = _architecture(_GGUF.get(arch, f"{arch} (GGUF)"))
    keyed = {key.removeprefix(f"{arch}."): value for key, value in values.items()}
    read = _Reader(keyed, where)
    heads, hidden = read.number("attention.head_count"), read.number("embedding_length")
    head_dim = int(keyed.get("attention.key_length") or hidden // heads)
    positions = read.number("context_length")
    scaling = keyed.get("rope.scaling.type") or "none"
    rope: dict[str, Any] = {
        "factor": keyed.get("rope.scaling.factor"),
        "original_max_position_embeddings": keyed.get("rope.scaling.original_context_length"),
    }
    kind = _GGUF_ROPE.get(scaling, scaling)
    if rope_factors is not None:
        kind, rope = "factors", {"factors": rope_factors}
    layers = read.number("block_count")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        num_layers=layers,
        intermediate=read.number("feed_forward_length"),
        attention=AttentionConfig(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(keyed.get("attention.head_count_kv") or heads),
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            eps=read.number("attention.layer_norm_rms_epsilon", float),
        ),
        rope=RopeConfig(head_dim, float(keyed.get("rope.freq_base") or 10000.0), kind, rope, positions),
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tied="output.weight" not in tensors,
        max_positions=positions,
        windows=(keyed.get("attention.sliding_window") or None,) * layers,
        eos=_token_ids(values.get("tokenizer.ggml.eos_token_id")),
        dtype="float32",
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
        dtype="float32",
    )
