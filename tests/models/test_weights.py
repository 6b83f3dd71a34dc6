"""Are slices of a checkpoint the slices of its tensors, in safetensors and in GGUF, quantised or not?"""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from spmd.errors import InputError
from spmd.models.weights import SafetensorsCheckpoint, gguf_name, open_checkpoint
from spmd.nn.rotary import RopeConfig, frequencies
from tests import tiny

QUANTS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0")]


def write_gguf(path, tensors):
    """A GGUF file of a one-layer Llama with the given tensors only: name -> (fp32 array, stored type)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, (array, kind) in tensors.items():
        data = gguf.quants.quantize(array, kind) if kind != gguf.GGMLQuantizationType.F32 else array
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", QUANTS, ids=lambda kind: kind.name)
def test_gguf_slices_equal_slices_of_the_whole(tmp_path, kind):
    array = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    f32 = gguf.GGMLQuantizationType.F32
    tensors = {
        "token_embd.weight": (array, f32),
        "blk.0.ffn_up.weight": (array, kind),
        "blk.0.attn_norm.weight": (array[0].copy(), f32),
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors))
    source = checkpoint.read("model.layers.0.mlp.up_proj.weight", (96, 64))
    stored = array if kind == f32 else gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    expected = torch.from_numpy(np.array(stored, np.float32))
    for rows, cols in ((slice(0, 96), slice(0, 64)), (slice(3, 50), slice(7, 41)), (slice(5, 5), slice(0, 64))):
        assert torch.equal(source[rows, cols], expected[rows, cols])
    norm = checkpoint.read("model.layers.0.input_layernorm.weight", (64,))
    assert torch.equal(norm[(slice(3, 9),)], torch.from_numpy(array[0, 3:9]))


def test_gguf_names_cover_every_tensor_of_a_layer():
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.12.self_attn.q_proj.bias") == "blk.12.attn_q.bias"
    assert gguf_name("model.layers.3.post_attention_layernorm.weight") == "blk.3.ffn_norm.weight"


def test_gguf_of_another_architecture_or_shape_is_refused(tmp_path):
    f32 = gguf.GGMLQuantizationType.F32
    tensors = {"token_embd.weight": (np.zeros((8, 64), np.float32), f32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors))
    with pytest.raises(InputError, match=r"'model.embed_tokens.weight' has shape \[8, 64\], expected \[9, 64\]"):
        checkpoint.read("model.embed_tokens.weight", (9, 64))
    with pytest.raises(InputError, match=r"has no tensor 'model.norm.weight'"):
        checkpoint.read("model.norm.weight", (64,))


def test_rope_factors_of_a_gguf_file_divide_the_frequencies(tmp_path):
    f32, factors = gguf.GGMLQuantizationType.F32, np.linspace(1, 8, 8, dtype=np.float32)
    tensors = {"token_embd.weight": (np.zeros((8, 64), np.float32), f32), "rope_freqs.weight": (factors, f32)}
    rope = open_checkpoint(write_gguf(tmp_path / "model.gguf", tensors)).config.rope
    plain = frequencies(RopeConfig(16, 10000.0))[0]
    torch.testing.assert_close(frequencies(rope)[0], plain / torch.from_numpy(factors))


def test_sharded_safetensors_are_read_by_their_index(tmp_path):
    checkpoint = SafetensorsCheckpoint(tiny.save(tmp_path / "one"))
    hidden = checkpoint.config.hidden
    whole = checkpoint.read("model.norm.weight", (hidden,))[(slice(0, hidden),)]
    save_file({"model.norm.weight": whole + 1}, tmp_path / "one" / "extra.safetensors")
    index = '{"weight_map": {"model.norm.weight": "extra.safetensors"}}'
    (tmp_path / "one" / "model.safetensors.index.json").write_text(index)
    again = SafetensorsCheckpoint(tmp_path / "one").read("model.norm.weight", (hidden,))
    assert torch.equal(again[(slice(0, hidden),)], whole + 1)
