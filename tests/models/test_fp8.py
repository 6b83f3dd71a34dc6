"""Is a slice of an FP8 checkpoint the slice of the same one dequantised, and is anything else refused by name?"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd.errors import InputError
from spmd.models import quantised
from spmd.models.weights import open_checkpoint
from tests import tiny

GATE, DOWN = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
SIZES = {"ragged": tiny.RAGGED, "whole": tiny.WHOLE}
SLICES = [(0, 256), (0, 128), (128, 200), (100, 130), (127, 128), (130, 250), (256, 256), (3, 3), (255, 256)]


@pytest.fixture(scope="module", params=SIZES)
def sizes(request):
    return SIZES[request.param]


@pytest.mark.parametrize("form", tiny.FP8)
def test_slices_equal_slices_of_the_checkpoint_dequantised(tmp_path, form, sizes):
    twin = load_file(tiny.save_fp8(tmp_path / "model", form, **sizes)[torch.float32] / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model")
    for name, whole in twin.items():
        source = checkpoint.read(name, tuple(whole.shape))
        if whole.dim() == 1:
            assert torch.equal(source[(slice(0, len(whole)),)], whole)
            continue
        assert torch.equal(source[slice(0, whole.shape[0]), slice(0, whole.shape[1])], whole)
        for index in [(slice(*rows), slice(*cols)) for rows, cols in zip(SLICES, SLICES[4:] + SLICES[:4], strict=True)]:
            rows, cols = (slice(*at.indices(size)[:2]) for at, size in zip(index, whole.shape, strict=True))
            part = source[rows, cols]
            assert part.dtype == torch.float32 and torch.equal(part, whole[rows, cols])


class Recorded:
    """A stored tensor that remembers what was read of it."""

    def __init__(self, tensor):
        self.tensor, self.read = tensor, []

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, index):
        self.read.append(index)
        return self.tensor[index]


def test_only_the_slice_and_the_scales_it_touches_are_read():
    values, scale, whole = tiny.quantise(torch.randn(700, 320), (128, 64))
    weight, scales = Recorded(values), Recorded(scale)
    rows, cols = slice(233, 466), slice(100, 128)
    assert torch.equal(quantised.ScaledSource(weight, scales, (128, 64))[rows, cols], whole[rows, cols])
    assert weight.read == [(rows, cols)]
    assert scales.read == [(slice(1, 4), slice(1, 2))]


@pytest.mark.parametrize("shape", [[], [1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_scale_is_a_vector_or_a_scalar_of_any_plain_type(tmp_path, shape, dtype):
    tiny.save_fp8(tmp_path / "model", "tensor")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    scale = torch.full(shape, 0.0123, dtype=dtype)
    save_file(tensors | {GATE.replace("weight", "weight_scale"): scale}, tmp_path / "model" / "model.safetensors")
    part = open_checkpoint(tmp_path / "model").read(GATE, (52, 40))[slice(3, 9), slice(5, 7)]
    assert torch.equal(part, tensors[GATE][3:9, 5:7].float() * scale.float())


# ---------------------------------------------------------------------- which tensors are plain

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
Q, HEAD = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("section", "plain", "scaled"),
    [
        (BLOCKS, [HEAD, "model.embed_tokens.weight", "model.norm.weight"], [Q, GATE]),
        (BLOCKS | {"modules_to_not_convert": []}, ["model.embed_tokens.weight"], [HEAD, Q, GATE]),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.1"]}, [Q], [HEAD, GATE, Q.replace("1", "11")]),
        (BLOCKS | {"modules_to_not_convert": ["q_proj"]}, [Q], [HEAD, GATE]),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.1.self_attn.q"]}, [], [Q]),
        (BLOCKS | {"modules_to_not_convert": [r"model\.layers\.\d+\.mlp"]}, [GATE, DOWN], [Q]),
        (tiny.compressed({"strategy": "tensor"}, []), ["model.embed_tokens.weight", "model.norm.weight"], [HEAD, Q]),
        (tiny.compressed({"strategy": "tensor"}, ["lm_head", Q[:-7]]), [HEAD, Q], [GATE, Q.replace("1", "11")]),
        (tiny.compressed({"strategy": "tensor"}, ["q_proj", "model.layers.1"]), [], [Q]),
        (tiny.compressed({"strategy": "tensor"}, ["re:.*self_attn"]), [Q], [HEAD, GATE]),
        (tiny.compressed({"strategy": "tensor"}, ["re:self_attn"]), [], [Q]),
        (tiny.compressed({"strategy": "tensor"}, ["Linear"]), [HEAD, Q, GATE], []),
    ],
)
def test_lists_of_plain_modules(section, plain, scaled):
    rules = quantised.parse({"quantization_config": section}, "config.json")
    assert [rules.scheme(name) for name in plain] == [None] * len(plain)
    assert all(rules.scheme(name) is not None for name in scaled)
    assert rules.scheme(Q.replace("weight", "bias")) is None


def test_a_target_by_name_goes_before_the_class():
    section = tiny.compressed({"strategy": "tensor"}, [])
    group = section["config_groups"]["group_0"]
    named = group | {"targets": ["re:.*down_proj"], "weights": group["weights"] | {"strategy": "channel"}}
    section["config_groups"] |= {"group_1": named}
    rules = quantised.parse({"quantization_config": section}, "config.json")
    assert rules.scheme(DOWN).scale_shapes((40, 52)) == [(40, 1)]
    assert rules.scheme(GATE).scale_shapes((52, 40)) == [(1,), ()]


# ---------------------------------------------------------------------- what is refused


TENSOR = {"strategy": "tensor"}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"bits": 4}, "quantization_config: quant_method None is not supported, only 'fp8' or 'compressed-tensors'"),
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported"),
        ("fp8", "quantization_config must be an object"),
        ({"quant_method": "fp8"}, "quantization_config 'fp8' lacks 'weight_block_size'"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size must be two whole numbers above 0"),
        (BLOCKS | {"weight_block_size": [128, 0]}, "weight_block_size must be two whole numbers above 0"),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be texts"),
        (BLOCKS | {"modules_to_not_convert": ["model.(layers"]}, "'model.(layers' is no regular expression"),
        (tiny.compressed(TENSOR, [], format="pack-quantized"), "'compressed-tensors': format 'pack-quantized'"),
        (tiny.compressed(TENSOR, [], transform_config={"R1": {}}), "transform_config"),
        (tiny.compressed(TENSOR, ["re:*"]), "'re:*' is no regular expression"),
        (tiny.compressed(TENSOR | {"num_bits": 4}, []), "config_groups: group_0: weights: num_bits 4"),
        (tiny.compressed(TENSOR | {"type": "int"}, []), "type 'int' is not supported, only 'float'"),
        (tiny.compressed(TENSOR | {"symmetric": False}, []), "symmetric False"),
        (tiny.compressed({"strategy": "group", "group_size": 32}, []), "strategy 'group'"),
        (tiny.compressed({"strategy": "block"}, []), "lacks 'block_structure'"),
        (tiny.compressed(TENSOR, [], config_groups={"group_0": {"targets": ["Linear"]}}), "weights: type None"),
        (tiny.compressed(TENSOR, [], config_groups={"group_0": 5}), "group_0 must be an object"),
    ],
)
def test_unsupported_quantisation_is_named_in_one_line(section, said):
    with pytest.raises(InputError) as refused:
        quantised.parse({"quantization_config": section}, "config.json")
    assert said in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 250


SCALE = GATE.replace("weight", "weight_scale_inv")
HALF = torch.zeros(700, 320, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({SCALE: None}, f"has no tensor '{SCALE}'"),
        ({SCALE: torch.ones(3, 6)}, f"tensor '{SCALE}' has shape [3, 6], expected [6, 3]"),
        ({SCALE: torch.ones(5, 3)}, f"tensor '{SCALE}' has shape [5, 3], expected [6, 3]"),
        ({SCALE: torch.ones(1)}, f"tensor '{SCALE}' has shape [1], expected [6, 3]"),
        ({SCALE: torch.ones(6, 3).to(torch.int8)}, f"tensor '{SCALE}' is stored as I8, expected F64 or F32"),
        ({GATE: HALF}, f"tensor '{GATE}' is stored as BF16, expected F8_E4M3"),
        ({GATE: HALF.to(torch.float8_e5m2)}, f"tensor '{GATE}' is stored as F8_E5M2, expected F8_E4M3"),
        ({GATE: HALF[:, :300].to(torch.float8_e4m3fn)}, f"tensor '{GATE}' has shape [700, 300], expected [700, 320]"),
    ],
)
def test_a_broken_weight_or_scale_is_named_in_one_line(tmp_path, changes, said):
    file = tmp_path / "model" / "model.safetensors"
    tiny.save_fp8(tmp_path / "model", "fp8", **tiny.RAGGED)
    tensors = load_file(file) | changes
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(InputError) as refused:
        open_checkpoint(tmp_path / "model").read(GATE, (700, 320))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_plain_module_that_is_stored_in_fp8_is_refused(tmp_path):
    tiny.save_fp8(tmp_path / "model", "fp8")
    tiny.reconfigure(tmp_path / "model", quantization_config=BLOCKS | {"modules_to_not_convert": ["gate_proj"]})
    with pytest.raises(InputError, match=f"tensor '{GATE}' is stored as F8_E4M3, expected F64 or F32"):
        open_checkpoint(tmp_path / "model").read(GATE, (52, 40))
