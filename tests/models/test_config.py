"""Does a DeepSeek configuration say what transformers takes it to say, and is a contradiction one line?"""

import math

import pytest

from spmd.errors import InputError
from spmd.models.config import from_hf

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 4,
    "num_attention_heads": 9, "vocab_size": 331, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True,
}  # fmt: skip
V2 = V3 | {"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax", "topk_method": "group_limited_greedy"}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.5, "mscale_all_dim": 0.707}


def test_the_sizes_of_latent_attention():
    c = from_hf(V3, "config.json")
    a = c.attention
    assert (a.q_lora_rank, a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim) == (24, 20, 12, 8, 10)
    assert (a.hidden, a.num_heads, a.head_dim, a.eps, a.scale) == (72, 9, 20, 1e-5, 20**-0.5)
    assert c.rope.head_dim == 8 and c.hidden == 72 and c.windows == (None,) * 4 and c.layer_attention(3) == a
    assert from_hf(V2 | {"q_lora_rank": None}, "c").attention.q_lora_rank is None


def test_yarn_grows_the_scores_by_mscale_all_dim_twice():
    scale = from_hf(V2 | {"rope_scaling": YARN}, "c").attention.scale
    assert scale == pytest.approx(20**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    without = {key: value for key, value in YARN.items() if key != "mscale_all_dim"}
    assert from_hf(V2 | {"rope_scaling": without}, "c").attention.scale == 20**-0.5


def test_the_first_layers_are_dense():
    assert from_hf(V3, "c").kinds == ("dense", "moe", "moe", "moe")
    assert from_hf(V3 | {"moe_layer_freq": 2}, "c").kinds == ("dense", "dense", "moe", "dense")


def test_the_routers():
    third, second, greedy = (from_hf(values, "c").moe for values in (V3, V2, V2 | {"topk_method": "greedy"}))
    assert (third.scoring, third.normalise, third.group_score) == ("sigmoid", True, 2)
    assert (second.scoring, second.normalise, second.group_score) == (
        "softmax",
        False,
        1,
    )  # whatever norm_topk_prob says
    assert (third.groups, third.kept_groups) == (second.groups, second.kept_groups) == (4, 2)
    assert (greedy.groups, greedy.kept_groups) == (1, 1)
    assert all((moe.shared, moe.shared_gate, moe.scale, moe.top_k) == (44, False, 1.5, 3) for moe in (third, second))
    assert not from_hf(V3 | {"norm_topk_prob": False}, "c").moe.normalise


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (V3, {"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank must be a whole number above 0"),
        (V3, {"qk_rope_head_dim": 7}, "must be even to be rotated, but is 7"),
        (V3, {"n_group": None}, "lacks 'n_group'"),
        (V3, {"n_group": 3}, "from topk_group 2 of n_group 3 groups of 8 experts"),
        (V3, {"topk_group": 5}, "from topk_group 5 of n_group 4"),
        (V3, {"topk_group": 1}, "num_experts_per_tok 3 cannot be chosen from topk_group 1"),
        (V3, {"n_group": 8, "topk_group": 4}, "n_group 8 groups of 8 experts"),
        (V3, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy' of deepseek_v3 is not supported: noaux_tc"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' of deepseek_v3 is not supported: sigmoid"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' of deepseek_v2 .*: greedy or group_limited_greedy"),
        (V2, {"mlp_bias": True}, "mlp_bias is not supported in a model with experts"),
    ],
)
def test_what_cannot_be_is_one_line(base, changes, words):
    with pytest.raises(InputError, match=words) as error:
        from_hf(base | changes, "config.json")
    assert "\n" not in str(error.value) and str(error.value).startswith("config.json")
