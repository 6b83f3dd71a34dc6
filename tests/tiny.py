"""Tiny random checkpoints on disk, whole or broken on purpose, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spmd.models.weights import gguf_name

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 4,
    "vocab_size": 271,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20}
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[answer]"


def weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors a Llama of this configuration has, random, under their Hugging Face names."""
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
    shapes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    whole = {f"model.layers.{i}.{name}": s for i in range(config["num_hidden_layers"]) for name, s in shapes.items()}
    whole |= dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], hidden))
    whole["model.norm"] = (hidden,)
    generator = torch.Generator().manual_seed(1)
    return {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in whole.items()}


def tokenizer() -> Tokenizer:
    """Bytes, a few merges, and an end token."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


def save(path: Path, *, template: str | None = None, **changes: Any) -> Path:
    """A whole checkpoint directory; `changes` replace keys of config.json, and None removes one."""
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(weights(CONFIG | {k: v for k, v in changes.items() if type(v) is int}), path / "model.safetensors")
    tokenizer().save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


def reconfigure(path: Path, **changes: Any) -> None:
    """Replace keys of config.json in place; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def lines(path: Path, *values: Any) -> str:
    """A prompts file of these values as JSON, one per line."""
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return str(path)


def save_gguf(path: Path, *, without: str = "", tensors: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """The same model as one GGUF file (fp32); `metadata` and `tensors` replace entries, `without` leaves one out."""
    import gguf

    c, vocabulary = CONFIG, tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    arch = "llama."
    values: dict[str, Any] = {
        f"{arch}block_count": c["num_hidden_layers"],
        f"{arch}context_length": c["max_position_embeddings"],
        f"{arch}embedding_length": c["hidden_size"],
        f"{arch}feed_forward_length": c["intermediate_size"],
        f"{arch}attention.head_count": c["num_attention_heads"],
        f"{arch}attention.head_count_kv": c["num_key_value_heads"],
        f"{arch}attention.key_length": c["head_dim"],
        f"{arch}attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens + [f"<unused{index}>" for index in range(c["vocab_size"] - len(tokens))],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
    }
    values |= metadata
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if key.removeprefix(arch).removeprefix("tokenizer.ggml.") != without:
            add[type(value)](key, value)
    whole = {name: tensor.numpy() for name, tensor in weights(CONFIG).items()} | (tensors or {})
    for name, tensor in whole.items():
        if name != without:
            writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
