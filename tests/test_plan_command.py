"""Does python -m spmd.plan show what a model's layers communicate, from config.json alone, and refuse in one line?"""

import json

import pytest

from spmd.models.kinds import layer_kinds
from tests.launch import python

QWEN = {"num_hidden_layers": 6, "hidden_size": 64, "num_experts": 8, "mlp_only_layers": [0]}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def test_the_plan_of_every_distinct_layer(model):
    sizes = ("--tp", "4", "--attn-dp", "2", "--moe-ep", "4", "--a2a", "--policy", "seed")
    shown = python("-m", "spmd.plan", "--model", model, *sizes, "--world", "4", "--rows", "8").stdout
    for part in ("layer 0, dense", "layer 1, moe", "layers 2-5, moe", "exchange(sum attn_tp, gather attn_dp)",
                 "reduce_scatter(attn_tp)", "SCATTERED", "TP_ATTN_FULL, sum over attn_tp", "finish"):  # fmt: skip
        assert part in shown, shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--tp", "4", "--world", "8"), "--world 8 is not tp 4 * pp 1 * cp 1"),
        (("--tp", "6", "--attn-dp", "2", "--moe-tp", "3", "--moe-ep", "2", "--a2a"), "no common refinement"),
        (("--costs", "nothing.json"), "nothing.json is no table of costs"),
    ],
)
def test_what_cannot_be_is_one_line(model, given, message):
    done = python("-m", "spmd.plan", "--model", model, *given)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_kinds_of_layers():
    assert layer_kinds(QWEN) == ["dense"] + ["moe"] * 5
    assert layer_kinds(QWEN | {"mlp_only_layers": [], "decoder_sparse_step": 3}) == ["dense", "dense", "moe"] * 2
    deep = {"num_hidden_layers": 5, "n_routed_experts": 4, "first_k_dense_replace": 2, "moe_layer_freq": 1}
    assert layer_kinds(deep) == ["dense"] * 2 + ["moe"] * 3
    assert layer_kinds({"num_hidden_layers": 2}) == ["dense"] * 2
