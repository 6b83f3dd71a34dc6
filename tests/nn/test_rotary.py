"""Are the rotary frequencies those of the checkpoint's scaling, and are products free of the channels' order?"""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmd.errors import InputError
from spmd.nn.rotary import RopeConfig, Rotary, frequencies, interleave
from spmd.nn.rows import rotate_store

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, no truncation": {"factor": 16.0, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, attention factor": {"factor": 4.0, "attention_factor": 0.75},
    "yarn, mscale": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_transformers(name, theta):
    kind, parameters = name.split(",")[0], SCALINGS[name]
    rope = {"rope_type": kind, "rope_theta": theta} | parameters
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    ours, ours_factor = frequencies(RopeConfig(64, theta, kind, parameters, 256))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert ours_factor == pytest.approx(factor, rel=1e-9)


def test_unknown_or_incomplete_scaling_is_refused():
    with pytest.raises(InputError, match="'longrope' is not supported"):
        RopeConfig(64, 1e4, "longrope")
    with pytest.raises(InputError, match="'llama3' lacks low_freq_factor"):
        RopeConfig(64, 1e4, "llama3", {"factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})


def test_interleaved_heads_give_the_products_of_half_split_heads():
    torch.manual_seed(0)
    d, positions = 8, torch.arange(5)
    query, key = torch.randn(5, d), torch.randn(5, d)
    angles = torch.outer(positions.float(), frequencies(RopeConfig(d, 10000.0))[0])
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    def half_split(x):
        return x * cos + torch.cat([-x[:, d // 2 :], x[:, : d // 2]], -1) * sin

    expected = half_split(query) @ half_split(key).T
    qkv = torch.stack([interleave(query.T, d).T, interleave(key.T, d).T, key], 1).contiguous()
    cache = torch.empty(5, 2, 1, d)
    rotate_store(qkv, Rotary(RopeConfig(d, 10000.0)).at(positions), cache)
    torch.testing.assert_close(qkv[:, 0] @ cache[:, 0, 0].T, expected)
