"""Tiny random checkpoints on disk, whole or broken on purpose, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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


# heads 9 over 3 and an ffn of 700: parts of ranks begin and end inside blocks of 128, and whole widths do as well
RAGGED = {"hidden_size": 320, "intermediate_size": 700, "num_attention_heads": 9, "num_key_value_heads": 3}
RAGGED |= {"head_dim": 40, "num_hidden_layers": 2}
WHOLE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
WHOLE |= {"head_dim": 32, "num_hidden_layers": 2}


def compressed(weights: dict[str, Any], ignore: list[str], **changes: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group of FP8 weights; `changes` replace its keys."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "symmetric": True} | weights}
    group["input_activations"] = {"type": "float", "num_bits": 8, "dynamic": False}
    whole = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return whole | {"ignore": ignore, "kv_cache_scheme": None} | changes


# name -> (scale's name, rows and columns under one scale (0: all), what begins so is plain, quantization_config)
FP8: dict[str, tuple[str, tuple[int, int], tuple[str, ...], dict[str, Any]]] = {
    "fp8": (
        "weight_scale_inv",
        (128, 128),
        ("lm_head", "model.layers.1.mlp."),
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"],
        },
    ),
    "tensor": ("weight_scale", (0, 0), ("lm_head",), compressed({"strategy": "tensor"}, ["lm_head"])),
    "channel": (  # the head is a linear layer like the others
        "weight_scale",
        (1, 0),
        ("model.layers.0.self_attn.q_proj",),
        compressed({"strategy": "channel"}, [r"re:.*layers\.0\.self_attn\.q_proj$"]),
    ),
    "block": (
        "weight_scale",
        (32, 128),
        ("lm_head",),
        compressed({"strategy": "block", "block_structure": [32, 128]}, ["lm_head"]),
    ),
}


def quantise(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """F8_E4M3 values, the scales of the blocks (all different, fp32), and the values times the scales in fp32."""
    height, width = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    grid = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scale = torch.arange(1.0, 1 + grid[0] * grid[1]).sqrt().reshape(grid) * 1e-3
    whole = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scale.reshape(1) if block == (0, 0) else scale, values.float() * whole


def save_fp8(path: Path, form: str, **changes: Any) -> dict[torch.dtype, Path]:
    """An FP8 checkpoint (a key of `FP8`) at `path`; returned are its twins, dequantised and stored in fp32 and bf16."""
    name, block, plain, section = FP8[form]
    stored, twin = {}, {}
    for key, weight in load_file(save(path, quantization_config=section, **changes) / "model.safetensors").items():
        stored[key] = twin[key] = weight
        if not key.startswith(plain) and key.endswith(("_proj.weight", "lm_head.weight")):
            stored[key], scale, twin[key] = quantise(weight, block)
            stored |= {key.replace("weight", name): scale, key.replace("weight", "input_scale"): torch.tensor(3.0)}
    save_file(stored, path / "model.safetensors")
    twins = {dtype: path.with_name(f"{path.name}-{dtype}") for dtype in (torch.float32, torch.bfloat16)}
    for dtype, directory in twins.items():
        rounded = {key: value.to(dtype) for key, value in twin.items()}
        save_file(rounded, save(directory, **changes) / "model.safetensors")
    return twins


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
