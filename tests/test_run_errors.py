"""Does every bad input end as one line, exit status 2, and nothing left behind?

What one rank finds alone runs in this process, through the same `job.run`; what ranks must agree on runs under mpirun.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd import run
from spmd.control import job
from spmd.errors import InputError
from spmd.models.weights import gguf_name
from tests import launch, tiny

SECONDS = 15


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A whole checkpoint that no test changes."""
    return tiny.save(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def model(tmp_path):
    """A whole checkpoint for the test to break."""
    return tiny.save(tmp_path / "model")


@pytest.fixture
def refused(monkeypatch, capfd):
    """Call the command in this process: it must end with status 2 and one line, which is returned."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["spmd.run", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            job.run(run.main)
        return one_line(ended.value.code, capfd.readouterr().err)

    return call


def one_line(status: int, err: str) -> str:
    assert "Traceback" not in err, err
    ours = [line for line in err.splitlines() if line.startswith("spmd: ")]
    assert status == 2, f"status {status}\n{err}"
    assert len(ours) == 1, err
    assert len(ours[0]) < 500
    return ours[0]


def says(line: str, *words: object) -> None:
    for word in words:
        assert str(word) in line, f"{word!r} is not in {line!r}"


# ---------------------------------------------------------------------- options, in this process


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3", ["tp 3", "3 ranks", "1 launched", "mpirun -np 3"]),
        ("--tp 2 --pp 2", ["tp 2 * pp 2", "4 ranks", "1 launched"]),
        ("--pp 2", ["pp 2", "1 launched", "mpirun -np 2"]),
        ("--tp 0", ["--tp must be at least 1", "got 0"]),
        ("--tp -1", ["--tp", "got -1"]),
        ("--pp 0", ["--pp", "got 0"]),
        ("--cp 0", ["--cp", "got 0"]),
        ("--cp 2", ["cp 2", "1 launched", "mpirun -np 2"]),
        ("--cp-type spiral", ["unknown cp_type 'spiral': it is one of ULYSSES, RING, HELIX"]),
        ("--kv-block 8", ["--kv-block 8", "--cp-type helix", "ulysses"]),
        ("--cp-type helix --kv-block 0", ["--kv-block", "at least 1", "0"]),
        ("--tp two", ["--tp", "two"]),
        ("--tp 1.5", ["--tp", "1.5"]),
        ("--pp-partition a,b", ["--pp-partition 'a,b'", "10,12,8"]),
        ("--pp-partition 1,,1", ["--pp-partition '1,,1'"]),
        ("--pp-partition 1,2", ["[1, 2]", "pp_size = 1"]),
        ("--pp-partition 7", ["[7]", "sums to 7", "3 layers"]),
        ("--pp-partition -3", ["pp_partition [-3]"]),
        ("--pp-partition=", ["--pp-partition"]),
        ("--max-tokens 0", ["--max-tokens must be at least 1", "got 0"]),
        ("--max-tokens -1", ["--max-tokens", "got -1"]),
        ("--max-tokens many", ["--max-tokens", "many"]),
        ("--max-tokens 1000000000000", ["1000000000000", "context of 64", "--max-tokens"]),
        ("--temperature -1", ["--temperature must be at least 0", "-1"]),
        ("--temperature nan", ["--temperature", "nan"]),
        ("--top-p 0", ["--top-p must be above 0 and at most 1", "got 0"]),
        ("--top-p 2", ["--top-p", "got 2"]),
        ("--top-p nan", ["--top-p", "nan"]),
        ("--microbatches 0", ["--microbatches must be at least 1", "got 0"]),
        ("--microbatches -3", ["--microbatches", "got -3"]),
        ("--seed x", ["--seed", "x"]),
        ("--dtype float8", ["--dtype", "float8", "float32", "bfloat16", "float16"]),
        ("--unknown", ["--unknown", "--help"]),
        ("stray", ["stray", "--help"]),
        ("--prompt", ["--prompt", "expected one argument"]),
        ("--prompt a --prompts-file b", ["--prompt", "--prompts-file", "not allowed with"]),
    ],
)
def test_option(refused, good, options, words):
    says(refused("--model", good, *options.split(" ")), *words)


@pytest.mark.parametrize("seed", [-1, 2**31, 10**13, -(10**13)])
def test_a_seed_that_fits_into_64_bits_is_used(monkeypatch, good, seed):
    monkeypatch.setattr(sys, "argv", ["spmd.run", "--model", str(good), "--temperature", "1", "--seed", str(seed)])
    with pytest.raises(SystemExit) as ended:
        job.run(run.main)
    assert ended.value.code == 0


@pytest.mark.parametrize("option", ["--json", "--trace"])
@pytest.mark.parametrize("kind", ["no folder", "a folder", "a file as folder"])
def test_output_that_cannot_be_written(refused, good, tmp_path, option, kind):
    (tmp_path / "file").write_text("")
    target = {
        "no folder": tmp_path / "none" / "out",
        "a folder": tmp_path,
        "a file as folder": tmp_path / "file" / "out",
    }
    says(refused("--model", good, "--max-tokens", 1, option, target[kind]), target[kind], "cannot write")


def test_output_is_refused_before_the_work(refused, monkeypatch, good, tmp_path):
    """An hour of generation is not lost to a missing folder."""
    monkeypatch.setattr(run.Job, "generate", lambda self: pytest.fail("generated before the output was checked"))
    says(refused("--model", good, "--json", tmp_path / "none" / "out.json"), "none/out.json")


# ---------------------------------------------------------------------- model paths and configurations


def test_missing_path(refused, tmp_path):
    says(refused("--model", tmp_path / "none"), tmp_path / "none", "does not exist", "Hugging Face directory or a GGUF")


def test_empty_directory(refused, tmp_path):
    says(refused("--model", tmp_path), tmp_path, "config.json")


def test_directory_without_safetensors(refused, model):
    (model / "model.safetensors").unlink()
    says(refused("--model", model), model, "needs a .safetensors file")


def test_directory_with_a_pickled_checkpoint_only(refused, model):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    says(refused("--model", model), model, "pytorch_model.bin", "pickled", "convert")


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickled_file(refused, tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    says(refused("--model", tmp_path / name), name, "pickled", "convert it to safetensors")


COUNTS = ["hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size"]
COUNTS += ["intermediate_size"]
BAD = [(key, value) for key in COUNTS for value in (0, -4, 40.5)] + [("rms_norm_eps", -1e-5)]
BAD += [(key, value) for key in (*COUNTS, "rms_norm_eps") for value in (None, "40", True, [4], {"a": 1}, float("nan"))]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_needed_key(refused, model, key, value):
    tiny.reconfigure(model, **{key: value})
    says(refused("--model", model), key, model / "config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architecture"]),
        ({"architectures": []}, ["architecture"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["architecture"]),
        ({"architectures": {"a": 1}}, ["architecture"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"num_key_value_heads": 3}, ["10 attention heads", "3 key/value heads"]),
        ({"num_key_value_heads": "5"}, ["num_key_value_heads"]),
        ({"num_key_value_heads": -5}, ["num_key_value_heads"]),
        ({"num_key_value_heads": [5]}, ["num_key_value_heads"]),
        ({"head_dim": "4"}, ["head_dim"]),
        ({"head_dim": -4}, ["head_dim"]),
        ({"head_dim": 4.5}, ["head_dim"]),
        ({"rope_theta": "far"}, ["rope_theta", "far"]),
        ({"rope_theta": -1}, ["rope_theta", "-1"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, ["dynamic", "default, linear, llama3, yarn"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope", "linear"]),
        ({"rope_scaling": {"rope_type": ["linear"]}}, ["rope"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "lacks factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["llama3", "low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
        ({"eos_token_id": "end"}, ["eos_token_id", "end"]),
        ({"eos_token_id": ["end"]}, ["eos_token_id", "end"]),
        ({"eos_token_id": {"a": 1}}, ["eos_token_id"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "wide"}, ["sliding_window", "wide"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -8}, ["sliding_window", "-8"]),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["sliding_attention"]},
            ["layer_types"],
        ),
        ({"num_hidden_layers": 4}, ["no tensor 'model.layers.3."]),
        ({"vocab_size": 300}, ["'model.embed_tokens.weight'", "[271, 40]", "[300, 40]"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config 'fp8' lacks 'weight_block_size'"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config: quant_method 'gptq'", "only 'fp8'"]),
    ],
)
def test_configuration(refused, model, changes, words):
    tiny.reconfigure(model, **changes)
    says(refused("--model", model), *words)


def test_odd_head_dim(refused, tmp_path):
    says(refused("--model", tiny.save(tmp_path / "model", head_dim=5)), "head_dim", "5")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"5", b"\xff\xfe\x00", b"[" * 100_000])
def test_json_file_that_is_no_object(refused, model, name, content):
    (model / name).write_bytes(content)
    says(refused("--model", model, "--prompt", "hi"), model / name, "cannot read")


def test_config_is_a_directory(refused, model):
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    says(refused("--model", model), model / "config.json")


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("size", [0, 4, 8, 200, -1])
def test_truncated_safetensors(refused, model, size):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    says(refused("--model", model), file, "cannot read")


def test_safetensors_that_is_something_else(refused, model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    says(refused("--model", model), model / "model.safetensors", "cannot read")


def test_safetensors_that_is_a_dangling_link(refused, model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "blob")
    says(refused("--model", model), model / "model.safetensors")


def shards(model, **changes):
    """Cut the checkpoint into two files with an index; `changes` replace keys of the index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, home = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file)
        home |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home} | changes))
    return home


def test_shard_of_the_index_is_missing(refused, model):
    shards(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    says(refused("--model", model), model / "model-00002-of-00002.safetensors", "does not exist", "index")


def test_shard_lacks_a_tensor_of_the_index(refused, model):
    home = shards(model)
    home["model.norm.weight"] = next(file for file in sorted(set(home.values())) if file != home["model.norm.weight"])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    says(refused("--model", model), "model.norm.weight", home["model.norm.weight"])


def test_truncated_shard(refused, model):
    shards(model)
    file = model / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    says(refused("--model", model), file, "cannot read")


@pytest.mark.parametrize("weight_map", [None, [], "x", {"model.norm.weight": 5}, {"model.norm.weight": None}, {}])
def test_index_without_a_map(refused, model, weight_map):
    shards(model, weight_map=weight_map)
    words = ["no tensor"] if weight_map == {} else [model / "model.safetensors.index.json", "weight_map"]
    says(refused("--model", model), *words)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_missing_tensor(refused, model, name):
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    save_file(tensors, model / "model.safetensors")
    says(refused("--model", model), model, f"no tensor {name!r}")


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("model.layers.2.self_attn.k_proj.weight", [20, 39], [20, 40]),
        ("model.layers.0.self_attn.o_proj.weight", [1600], [40, 40]),
        ("model.layers.1.input_layernorm.weight", [40, 1], [40]),
        ("lm_head.weight", [], [271, 40]),
        ("model.embed_tokens.weight", [0, 40], [271, 40]),
    ],
)
def test_tensor_of_the_wrong_shape(refused, model, name, found, expected):
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {name: torch.zeros(found)}, model / "model.safetensors")
    says(refused("--model", model), f"tensor {name!r} has shape {found}, expected {expected}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensor_that_holds_no_plain_floats(refused, model, dtype):
    """Integers and 8-bit floats are quantised values whose scales are elsewhere: copying them makes nonsense."""
    name, tensors = "model.layers.0.mlp.up_proj.weight", load_file(model / "model.safetensors")
    save_file(tensors | {name: torch.zeros(52, 40).to(dtype)}, model / "model.safetensors")
    says(refused("--model", model), name)


# ---------------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    return tiny.save_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


@pytest.mark.parametrize("part", [0, 1, 3, 4, 8, 20, 24, 30, 100, 0.01, 0.03, 0.05, 0.1, 0.3, 0.7, 0.999])
def test_truncated_gguf(refused, tmp_path, gguf_bytes, part):
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes[: part if type(part) is int else int(len(gguf_bytes) * part)])
    says(refused("--model", file), file, "cannot read")


@pytest.mark.parametrize("content", [b"hello" * 100, b"\0" * 4096, b"GGUF" + b"\xff" * 400, b"GGML" + b"\0" * 400])
def test_file_that_is_not_gguf(refused, tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    says(refused("--model", tmp_path / "m.gguf"), tmp_path / "m.gguf", "cannot read")


@pytest.mark.parametrize("offset", [8, 16])
@pytest.mark.parametrize("count", [2**62, 2**31, 100])
def test_gguf_that_counts_wrong(refused, tmp_path, gguf_bytes, offset, count):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes[:offset] + struct.pack("<Q", count) + gguf_bytes[offset + 8 :])
    says(refused("--model", tmp_path / "m.gguf"), tmp_path / "m.gguf", "cannot read")


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_gguf_without_a_key(refused, tmp_path, key):
    says(refused("--model", tiny.save_gguf(tmp_path / "m.gguf", without=key)), tmp_path / "m.gguf", f"lacks {key!r}")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.2.mlp.up_proj.weight"]
)
def test_gguf_without_a_tensor(refused, tmp_path, name):
    line = refused("--model", tiny.save_gguf(tmp_path / "m.gguf", without=name))
    says(line.replace(gguf_name(name), name), tmp_path / "m.gguf", f"no tensor {name!r}")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "mamba", ["mamba", "LlamaForCausalLM"]),
        ("llama.attention.head_count", [10, 10, 10], ["head_count"]),
        ("llama.attention.head_count_kv", [5, 5, 5], ["head_count_kv"]),
        ("llama.attention.head_count_kv", "five", ["head_count_kv", "five"]),
        ("llama.attention.key_length", "four", ["key_length", "four"]),
        ("llama.attention.sliding_window", "wide", ["sliding_window", "wide"]),
        ("llama.rope.freq_base", "far", ["freq_base", "far"]),
        ("llama.rope.scaling.type", "longrope", ["longrope"]),
        ("llama.rope.scaling.type", "linear", ["linear", "factor"]),
        ("tokenizer.ggml.eos_token_id", "end", ["eos_token_id", "end"]),
        ("tokenizer.ggml.model", "t5", ["t5", "gpt2", "llama"]),
        ("tokenizer.ggml.model", "llama", ["scores"]),
        ("tokenizer.ggml.pre", "gemma", ["gemma", "qwen2"]),
        ("tokenizer.ggml.bos_token_id", 100_000, ["bos_token_id", "100000"]),
        ("tokenizer.ggml.merges", ["hell"], ["merges"]),
        ("tokenizer.ggml.merges", ["h absent"], ["merges"]),
        ("tokenizer.ggml.merges", "h e", ["merges"]),
        ("tokenizer.ggml.tokens", [1, 2], ["tokens"]),
    ],
)
def test_gguf_metadata(refused, tmp_path, key, value, words):
    file = tiny.save_gguf(tmp_path / "m.gguf", **{key: value})
    says(refused("--model", file, "--prompt", "hello"), *words)


def test_gguf_with_tokens_that_are_not_utf8(refused, tmp_path, gguf_bytes):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.replace(b"<unused0>", b"\xff" * 9))
    says(refused("--model", tmp_path / "m.gguf", "--prompt", "hello"), tmp_path / "m.gguf")


def test_gguf_with_a_vector_as_embedding(refused, tmp_path):
    file = tiny.save_gguf(tmp_path / "m.gguf", tensors={"model.embed_tokens.weight": np.zeros(8, np.float32)})
    says(refused("--model", file), file, "model.embed_tokens.weight")


def test_gguf_with_a_tensor_of_the_wrong_shape(refused, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    file = tiny.save_gguf(tmp_path / "m.gguf", tensors={name: np.zeros((40, 53), np.float32)})
    says(refused("--model", file), file, f"tensor {name!r} has shape [40, 53], expected [40, 52]")


def test_gguf_with_integers_as_weights(refused, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    file = tiny.save_gguf(tmp_path / "m.gguf", tensors={name: np.zeros((40, 52), np.int32)})
    says(refused("--model", file), file)


def test_gguf_without_tokenizer_needs_token_ids(refused, tmp_path):
    file = tiny.save_gguf(tmp_path / "m.gguf", without="tokens")
    says(refused("--model", file, "--prompt", "hello"), file, "token_ids", "--prompts-file")


# ---------------------------------------------------------------------- tokenizer and templates


def test_text_without_tokenizer(refused, model):
    (model / "tokenizer.json").unlink()
    says(refused("--model", model, "--prompt", "hi"), model, "tokenizer.json", "token_ids", "--prompts-file")


@pytest.mark.parametrize(
    "content", [b"{", b"", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000]
)
def test_broken_tokenizer(refused, model, content):
    (model / "tokenizer.json").write_bytes(content)
    says(refused("--model", model, "--prompt", "hi"), model / "tokenizer.json", "cannot read")


def test_chat_without_template(refused, model):
    says(refused("--model", model, "--chat", "--prompt", "hi"), "no chat template", "--chat")


def test_chat_without_model(refused):
    says(refused("--chat", "--prompt", "hi"), "chat template", "--chat")


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ raise_exception('no system role') }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[0].content.nothing.at.all }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include 'other' %}",
        5,
        [{"template": "x"}],
        [{"name": "default", "template": 5}],
        ["x"],
    ],
)
def test_broken_template(refused, tmp_path, template):
    says(refused("--model", tiny.save(tmp_path / "model", template=template), "--chat", "--prompt", "hi"), "template")


def test_template_that_is_not_utf8(refused, model):
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    says(refused("--model", model, "--chat", "--prompt", "hi"), model / "chat_template.jinja")


def test_template_that_writes_nothing(refused, tmp_path):
    says(refused("--model", tiny.save(tmp_path / "model", template="{% if 0 %}x{% endif %}"), "--chat"), "empty")


@pytest.mark.parametrize("token", [{"no": "content"}, 5, ["<end>"]])
def test_special_token_of_another_form(refused, tmp_path, token):
    model = tiny.save(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": tiny.TEMPLATE, "bos_token": token}))
    says(refused("--model", model, "--chat", "--prompt", "hi"), "tokenizer_config.json", "bos_token")


# ---------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty", "at least one token"]),
        ("x" * 80, ["80 tokens", "context of 64", "shorten"]),
        ("\udcff", ["prompt"]),
    ],
)
def test_prompt(refused, good, text, words):
    says(refused("--model", good, "--prompt", text), "prompt 0", *words)


def test_prompt_that_fits_but_for_the_new_tokens(refused, good):
    says(refused("--model", good, "--prompt", "x" * 60, "--max-tokens", 5), "60 tokens", "5", "64", "--max-tokens")


@pytest.mark.parametrize("name", ["none.jsonl", ".", "none/none.jsonl"])
def test_prompts_file_that_cannot_be_read(refused, good, tmp_path, name):
    says(refused("--model", good, "--prompts-file", tmp_path / name), tmp_path / name, "cannot read")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n\t\n"])
def test_prompts_file_without_a_prompt(refused, good, tmp_path, content):
    (tmp_path / "p.jsonl").write_bytes(content)
    says(refused("--model", good, "--prompts-file", tmp_path / "p.jsonl"), "no prompt", tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"{",
        b'{"prompt": "a"} {"prompt": "b"}',
        b"5",
        b"null",
        b"[1, 2]",
        b'"text"',
        b"{}",
        b'{"text": "a"}',
        b'{"prompt": 5}',
        b'{"prompt": null}',
        b'{"prompt": ["a"]}',
        b'{"token_ids": "1 2"}',
        b'{"token_ids": 5}',
        b'{"token_ids": {"a": 1}}',
        b'{"token_ids": [1.0]}',
        b'{"token_ids": [true]}',
        b'{"token_ids": ["1"]}',
        b'{"token_ids": [null]}',
        b'{"token_ids": [[1]]}',
        b'{"token_ids": [NaN]}',
        b'{"token_ids": [' + b"1" * 5000 + b"]}",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_prompts_file_with_a_bad_line(refused, good, tmp_path, line):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    message = refused("--model", good, "--prompts-file", tmp_path / "p.jsonl")
    says(message, tmp_path / "p.jsonl", *([] if line == b"\xff\xfe" else ["line 2"]))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], ["empty", "at least one token"]),
        ([271], ["outside 0 ... 270"]),
        ([5, -1], ["outside 0 ... 270"]),
        ([10**30], ["outside 0 ... 270"]),
        ([1] * 100, ["100 tokens", "context of 64"]),
    ],
)
def test_token_ids(refused, good, tmp_path, ids, words):
    file = tiny.lines(tmp_path / "p.jsonl", {"token_ids": [1]}, {"token_ids": ids})
    says(refused("--model", good, "--prompts-file", file), "prompt 1", *words)


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_text_in_a_prompts_file(refused, good, tmp_path, text):
    file = tiny.lines(tmp_path / "p.jsonl", {"token_ids": [1]}, {"prompt": text})
    says(refused("--model", good, "--prompts-file", file), "prompt 1")


# ---------------------------------------------------------------------- the same of several ranks


def launched(*parts: tuple[int, list[object]], **env: str) -> str:
    """A job of (ranks, options) parts, refused: its line. Nothing may be left of it."""
    before, begin = launch.shared_memory(), time.monotonic()
    process, mark = launch.started(*((n, ["-m", "spmd.run", *options]) for n, options in parts), **env)
    ended = launch.finish(process, mark, SECONDS)
    assert time.monotonic() - begin < SECONDS
    assert launch.shared_memory() <= before
    assert ended.stdout == ""
    return one_line(ended.returncode, ended.stderr)


@pytest.mark.parametrize(
    ("options", "world", "words"),
    [
        ("--tp 3", 2, ["tp 3", "3 ranks", "2 launched", "mpirun -np 3"]),
        ("--tp 2 --pp 2", 2, ["tp 2 * pp 2", "4 ranks", "2 launched", "mpirun -np 4"]),
        ("--tp 2", 4, ["tp 2", "2 ranks", "4 launched", "mpirun -np 2"]),
        ("--pp 3", 4, ["pp 3", "4 launched"]),
        ("--pp 3", 2, ["pp 3", "3 ranks", "2 launched"]),
        ("--tp 2 --cp 2", 2, ["cp 2", "4 ranks", "mpirun -np 4"]),
        ("--pp 2 --pp-partition 1,1,1", 2, ["[1, 1, 1]", "pp_size = 2"]),
        ("--pp 2 --pp-partition 4,-1", 2, ["[4, -1]"]),
    ],
)
def test_layout(options, world, words):
    for rank in range(world):
        with pytest.raises(InputError) as error:
            run.layout(run.options().parse_args(options.split()), world, rank)
        says(str(error.value), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3", ["tp 3", "3 ranks", "2 launched", "mpirun -np 3"]),
        ("--pp 2 --pp-partition 1,1", ["[1, 1]", "sums to 2", "3 layers"]),
        ("--unknown", ["--unknown", "--help"]),
        ("--prompts-file none.jsonl", ["rank 0 of 2", "none.jsonl"]),
    ],
)
def test_two_ranks(good, options, words):
    says(launched((2, ["--model", good, *options.split()])), *words)


def test_more_ranks_than_heads(tmp_path):
    model = tiny.save(tmp_path / "model", **tiny.TWO_HEADS)
    says(launched((3, ["--model", model])), "2 attention heads", "3 ranks", "smaller tp")


def test_token_id_beyond_the_vocabulary(good, tmp_path):
    file = tiny.lines(tmp_path / "p.jsonl", {"token_ids": [5, 271]})
    says(launched((2, ["--model", good, "--prompts-file", file])), "prompt 0", "outside 0 ... 270")


def test_tensor_that_one_stage_needs(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    says(launched((2, ["--model", model, "--pp", 2])), "rank 1 of 2", "no tensor 'model.norm.weight'")


def test_output_folder_of_rank_0(good, tmp_path):
    target = tmp_path / "none" / "out.json"
    process, mark = launch.started((2, ["-m", "spmd.run", "--model", good, "--max-tokens", 1, "--json", target]))
    ended = launch.finish(process, mark, SECONDS)
    says(one_line(ended.returncode, ended.stderr), "cannot write", target)


def test_model_that_one_rank_cannot_read(good, tmp_path):
    line = launched((1, ["--model", good, "--prompt", "hi"]), (1, ["--model", tmp_path / "none", "--prompt", "hi"]))
    says(line, "rank 1 of 2", tmp_path / "none", "does not exist")


def test_option_that_one_rank_does_not_know(good):
    line = launched((1, ["--model", good]), (1, ["--model", good, "--unknown"]))
    says(line, "rank 1", "--unknown")


def test_timeout_that_is_no_number(good):
    says(launched((2, ["--model", good, "--prompt", "hi"]), SPMD_TIMEOUT="soon"), "SPMD_TIMEOUT", "soon")


def test_launcher_of_another_library(good):
    """What a rank sees whose launcher belongs to the other MPI library: a world of one."""
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    mpich = "MPICH" in launch.python("-c", program).stdout
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK") if mpich else ("PMI_SIZE", "PMI_RANK")
    ended = launch.python(
        "-m", "spmd.run", "--model", str(good), timeout=SECONDS, **dict(zip(names, "20", strict=True))
    )
    own, other = ("MPICH", "Open MPI") if mpich else ("Open MPI", "MPICH")
    line = one_line(ended.returncode, ended.stderr)
    says(line, f"2 ranks were launched by {other}'s mpirun", f"loaded {own}", Path(sys.executable).parent / "mpirun")
    assert ended.stdout == ""
