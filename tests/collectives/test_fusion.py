"""Do the native epilogues give the bits of the torch reference, on every instruction set?"""

import itertools

import pytest
import torch

from spmd import _cpu
from spmd.collectives.fusion import NEED_RESIDUAL, NEED_SCALE, OUTPUTS, AllReduceFusionOp, empty_outputs, reference
from spmd.errors import InputError
from tests.launch import python

ISAS = ["baseline", "avx2", "avx512", "avx512bf16"]
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FP8, NVFP4 = AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8, AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_NVFP4
OUT_NVFP4 = AllReduceFusionOp.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

types = pytest.mark.parametrize("dtype", CODES, ids=lambda dtype: str(dtype).removeprefix("torch."))
ops = pytest.mark.parametrize("op", AllReduceFusionOp, ids=lambda op: op.name)


def native(total, dtype, op, in_place=False, **given):
    """What `reference` returns, from the kernel; in_place: residual_out is residual, out lies over the sum."""
    made = dict(zip(OUTPUTS[op], empty_outputs(op, total.to(dtype)), strict=True))
    sums = total.clone()
    if in_place:
        made["residual"] = given["residual"] = given["residual"].clone()
    for name in ("norm", "residual", "quant"):  # the kernel writes everything
        if name in made and not in_place:
            made[name].view(WORDS[made[name].itemsize]).fill_(-1 if made[name].itemsize > 1 else 255)
    names = ("bias", "residual", "norm_weight", "norm_pre_residual_weight", "scale")
    inputs = [given[name].data_ptr() if given.get(name) is not None else 0 for name in names]
    outputs = [made[name].data_ptr() if name in made else 0 for name in ("norm", "residual", "quant", "scale")]
    _cpu.epilogue(
        sums.data_ptr(),
        total.shape[:-1].numel(),
        total.shape[-1],
        op,
        CODES[dtype],
        *inputs,
        given.get("eps", 1e-6),
        given.get("weight_offset", 0.0),
        *outputs,
    )
    return tuple(made[name] for name in OUTPUTS[op])


def same(ours, theirs):
    """Equal in every bit; one NaN is as good as another in the float types, but in e4m3 it is 0x7f."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        words = [x.view(WORDS[x.itemsize]) for x in (a, b)]
        if a.dtype in CODES:
            assert torch.equal(a.isnan(), b.isnan())
            words = [x.masked_fill(a.isnan(), 0) for x in words]
        assert torch.equal(*words), f"{(words[0] != words[1]).sum()} of {a.numel()} differ"


def check(total, dtype, op, **given):
    theirs = reference(total, dtype, op, **given)
    same(native(total, dtype, op, **given), theirs)
    return theirs


def tensors(rows, n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return normal(rows, n) * 3, {
        "residual": (normal(rows, n) * 20).to(dtype),
        "bias": normal(n).to(dtype),
        "norm_weight": normal(n).to(dtype),
        "norm_pre_residual_weight": normal(n).to(dtype),
        "scale": torch.tensor([0.37]),
    }


def some(given, op, *absent):
    return {name: x for name, x in given.items() if name not in absent or (name == "residual" and op in NEED_RESIDUAL)}


@types
@ops
@pytest.mark.parametrize("rows", [0, 1, 3, 130])
def test_native_is_the_reference(dtype, op, rows):
    for n in (16, 32, 48, 400, 576, 4096) if "scale" in OUTPUTS[op] else (1, 15, 16, 17, 31, 32, 33, 100, 576, 4096):
        if rows * n > 100_000:
            continue
        total, given = tensors(rows, n, dtype, n)
        check(total, dtype, op, **given)


@types
@ops
def test_what_is_absent(dtype, op):
    names = ("bias", "residual", "norm_weight", "norm_pre_residual_weight")
    for count, n in itertools.product(range(len(names) + 1), (64, 112)):
        for absent in itertools.combinations(names, count):
            total, given = tensors(3, n, dtype)
            check(total, dtype, op, **some(given, op, *absent))


@types
@ops
def test_offset_and_eps(dtype, op):
    total, given = tensors(2, 96, dtype)
    check(total, dtype, op, **given, weight_offset=1.0, eps=0.3)


@types
@pytest.mark.parametrize("op", sorted(NEED_RESIDUAL), ids=lambda op: op.name)
def test_in_place(dtype, op):
    total, given = tensors(3, 80, dtype)
    same(native(total, dtype, op, in_place=True, **given), reference(total, dtype, op, **given))


@types
def test_what_the_operations_mean(dtype):
    """The roundings of the definition, written once more without the reference."""
    total, given = tensors(4, 64, dtype)
    bias, residual, weight, pre = (given[x] for x in ("bias", "residual", "norm_weight", "norm_pre_residual_weight"))

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6).to(dtype)

    step = torch.finfo(dtype).eps * 2

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=step, atol=step)

    Op = AllReduceFusionOp
    (plain,) = native(total, dtype, Op.NONE, **given)
    assert torch.equal(plain, total.to(dtype) + bias)
    (normed,) = native(total, dtype, Op.RMS_NORM, **given)
    close(normed, norm(plain, weight))
    for op in (Op.RESIDUAL_RMS_NORM, Op.LAST_PROCESS_FOR_UB, Op.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM):
        normed, summed = native(total, dtype, op, **given)
        assert torch.equal(summed, plain + residual)
        close(normed, norm(summed, weight))
    out, quant, also_summed = native(total, dtype, Op.RESIDUAL_RMS_NORM_OUT_QUANT_FP8, **given)
    assert torch.equal(out, normed) and torch.equal(also_summed, summed)
    assert torch.equal(quant.float(), (normed.float() / given["scale"]).to(torch.float8_e4m3fn).float())
    normed, summed = native(total, dtype, Op.RESIDUAL_RMS_PREPOST_NORM, **given)
    close(summed, norm(plain, pre) + residual)
    close(normed, norm(summed, weight))


@types
@ops
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), 3e38, 1e-45, -0.0])
def test_odd_values_in_the_sum(dtype, op, odd):
    total, given = tensors(3, 64, dtype)
    total[1, 17] = odd
    outputs = dict(zip(OUTPUTS[op], check(total, dtype, op, **given), strict=True))
    if odd == odd:
        return
    for name, out in outputs.items():  # NaN shows: where it was, and in its whole row after a norm
        if out.dtype == torch.uint8:
            continue
        nan = out.view(torch.uint8) == 0x7F if name == "quant" else out.isnan()
        twice = op == AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM
        summed = op == AllReduceFusionOp.NONE or (name == "residual" and not twice)
        assert nan.nonzero().tolist() == [[1, k] for k in ([17] if summed else range(64))]


def words(count):
    """All fp32 values that a half type has, what lies half way between two and beside that, and random words."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    fp16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    near = [high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    near += [fp16.view(torch.int32) + low for low in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)]
    generator = torch.Generator().manual_seed(1)
    near.append(torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32))
    subnormal = torch.arange(0, 2**11) * 2.0**-25  # of fp16, with the halves
    return torch.cat([torch.cat(near).view(torch.float32), subnormal, -subnormal])


@types
def test_rounding_of_all_words(dtype):
    check(words(2**20).reshape(1, -1), dtype, AllReduceFusionOp.NONE)


@types
def test_all_values_are_read(dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype) if dtype.itemsize == 2 else words(2**16)
    values, op = values.reshape(1, -1), AllReduceFusionOp.RESIDUAL_RMS_NORM
    _, residual = native(torch.full(values.shape, -0.0), dtype, op, residual=values)
    same((residual,), (values,))


def quantise(op, values, scale=1.0, dtype=torch.float32):
    """Codes (and scales) of values: a row of ones, whose norm is the weight."""
    ones = torch.ones(1, len(values))
    given = {"residual": torch.zeros(1, len(values), dtype=dtype), "scale": torch.tensor([scale])}
    given |= {"norm_weight": values.to(dtype), "weight_offset": -0.0, "eps": 0.0}
    return check(ones, dtype, op, **given)


def fp8(values, scale=1.0):
    return quantise(FP8, values, scale)[0].flatten().view(torch.uint8)


def test_e4m3_of_all_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    back = fp8(codes.view(torch.float8_e4m3fn).float())
    assert torch.equal(back, codes.masked_fill(codes == 0xFF, 0x7F))


def test_e4m3_between_the_codes():
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    infinity = torch.full_like(ties, float("inf"))
    codes = torch.arange(0x7E)
    assert torch.equal(fp8(torch.nextafter(ties, -infinity)).long(), codes)
    assert torch.equal(fp8(ties).long(), codes + codes % 2)
    assert torch.equal(fp8(torch.nextafter(ties, infinity)).long(), codes + 1)
    assert torch.equal(fp8(-ties).long(), codes + codes % 2 + 0x80)


def test_e4m3_of_all_words():
    fp8(words(2**18))
    fp8(words(2**16), 0.3)


def test_e4m3_saturates():
    large = torch.tensor([447.0, 448.0, 464.0, 465.0, 1e30, float("inf"), float("nan")])
    assert fp8(torch.cat([large, -large])).tolist() == [0x7E] * 6 + [0x7F] + [0xFE] * 6 + [0x7F]
    assert fp8(torch.tensor([1.0, -1.0]), 1e-6).tolist() == [0x7E, 0xFE]


def swizzled(row, block, blocks):
    """Where a scale lies, as the layout is defined."""
    tile = (row // 128) * -(-blocks // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


def dequantise_nvfp4(q4, sf, scale):
    """[rows, n / 2] and swizzled scales to fp32 [rows, n]."""
    rows, n = q4.shape[0], q4.shape[1] * 2
    codes = torch.stack([q4 & 15, q4 >> 4], dim=-1).flatten(1).long()
    values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    at = torch.tensor([[swizzled(row, block, n // 16) for block in range(n // 16)] for row in range(rows)])
    return values * (sf.view(torch.float8_e4m3fn).float()[at] / scale).repeat_interleave(16, dim=1)


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    infinity = torch.full_like(ties, float("inf"))
    exact = torch.cat([E2M1, -E2M1])
    values = torch.cat([exact, ties, -ties, torch.nextafter(ties, -infinity), torch.nextafter(ties, infinity)])
    blocks = torch.full((len(values), 16), 6.0)  # the largest is 6, so the scale of a block is 1
    blocks[:, 0] = values
    q4, sf, _ = quantise(NVFP4, blocks.flatten())
    even = [0, 2, 2, 4, 4, 6, 6]
    expected = [*range(8), *range(8, 16), *even, *[8 + code for code in even], *range(7), *range(1, 8)]
    assert (q4.view(-1, 8)[:, 0] & 15).tolist() == expected
    assert (q4.view(-1, 8)[:, 0] >> 4 == 7).all() and (q4.view(-1, 8)[:, 1:] == 0x77).all()
    scales = [int(sf[swizzled(0, block, len(values))]) for block in range(len(values))]
    assert scales == [0x38] * len(values)  # e4m3 of 1


@types
def test_nvfp4_gives_the_norm_back(dtype):
    total, given = tensors(130, 208, dtype)  # 13 blocks: tiles are filled up with zeros
    scale = given["scale"] = torch.tensor([40.0])
    norm, q4, sf, _ = native(total, dtype, OUT_NVFP4, **given)
    assert sf.shape == (256 * 16,) and sf.count_nonzero() == 130 * 13
    back = dequantise_nvfp4(q4, sf, scale)
    top = norm.float().unflatten(1, (13, 16)).abs().amax(-1, keepdim=True)
    # one step of e2m1 is at most a third of the largest value; the scale is rounded to 1 / 16
    assert ((back - norm.float()).unflatten(1, (13, 16)).abs() <= top * (1 / 6 + 1 / 16)).all()


def test_nvfp4_of_odd_blocks():
    blocks = torch.zeros(6, 16)
    blocks[1, 3], blocks[2, 4], blocks[3, 5] = float("nan"), float("inf"), -1e30
    blocks[4], blocks[5] = 1e-30, torch.linspace(-1, 1, 16)
    q4, sf, _ = quantise(NVFP4, blocks.flatten(), 8.0)
    scales = [int(sf[swizzled(0, block, 6)]) for block in range(6)]
    assert scales[:5] == [0, 0x7F, 0x7E, 0x7E, 0]
    codes = torch.stack([q4 & 15, q4 >> 4], dim=-1).view(6, 16)
    assert (codes[0] == 0).all() and (codes[1] == 7).all() and (codes[4] == 0).all()
    assert int(codes[2, 4]) == 7 and int(codes[3, 5]) == 15 and codes[2:4].count_nonzero() == 2
    q4, sf, _ = quantise(NVFP4, blocks.flatten(), 0.0)
    assert not (q4[0, 40:] & 0x77).any() and not sf[swizzled(0, 5, 6)]  # but for the signs


def test_nvfp4_of_random_words():
    values = words(2**16)
    quantise(NVFP4, values[: len(values) // 16 * 16], 1e-3)


@ops
def test_outputs(op):
    x = torch.zeros(2, 65, 48, dtype=torch.bfloat16)
    shapes = {
        "norm": (x.shape, torch.bfloat16),
        "residual": (x.shape, torch.bfloat16),
        "quant": ((2, 65, 24), torch.uint8) if "scale" in OUTPUTS[op] else (x.shape, torch.float8_e4m3fn),
        "scale": ((256 * 4,), torch.uint8),
    }
    assert [(out.shape, out.dtype) for out in empty_outputs(op, x)] == [shapes[name] for name in OUTPUTS[op]]
    given = {"residual": x, "scale": torch.ones(1)}
    made = reference(x.float(), x.dtype, op, **given)
    assert [(out.shape, out.dtype) for out in made] == [shapes[name] for name in OUTPUTS[op]]


def test_the_documented_order():
    short = {"norm": "h", "residual": "res", "quant": "q", "scale": "sf"}
    assert [" ".join(short[name] for name in OUTPUTS[op]) for op in AllReduceFusionOp] == [
        "h", "h res", "h res", "h res", "q res", "q sf res", "h q res", "h q sf res", "h res", "h",
    ]  # fmt: skip
    assert [op.value for op in AllReduceFusionOp] == list(range(10))


def test_what_is_needed():
    x = torch.zeros(2, 40)
    for op in NEED_RESIDUAL:
        with pytest.raises(InputError, match=f"{op.name} needs a residual of shape \\[2, 40\\]"):
            reference(x, x.dtype, op, scale=torch.ones(1))
    for op in NEED_SCALE:
        with pytest.raises(InputError, match=f"{op.name} needs a scale"):
            reference(x, x.dtype, op, residual=x)
    for op in (NVFP4, OUT_NVFP4):
        with pytest.raises(InputError, match="rows of 40 elements do not divide into NVFP4 blocks of 16"):
            reference(x, x.dtype, op, residual=x, scale=torch.ones(1))
        with pytest.raises(InputError, match="rows of 40 elements"):
            empty_outputs(op, x)


@pytest.mark.parametrize("isa", ISAS[: ISAS.index(_cpu.isa) + 1])
@pytest.mark.parametrize("path", ["tests/collectives/test_fusion.py", "tests/nn/test_rows.py"])
def test_instruction_set(isa, path):
    """All tests but this one on every instruction set that this machine has."""
    asked = f"import pytest, torch; from spmd import _cpu; assert _cpu.isa == {isa!r}"
    asked += "; torch.manual_seed(0); raise SystemExit(pytest.main())"
    result = python("-c", asked, "-q", path, "-k", "not instruction_set", SPMD_ISA=isa, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_unknown_instruction_set_is_the_best_one():
    result = python("-c", "from spmd import _cpu; print(_cpu.isa)", SPMD_ISA="avx1024")
    best = python("-c", "from spmd import _cpu; print(_cpu.isa)", SPMD_ISA="")
    assert result.stdout == best.stdout and result.stdout.strip() in ISAS
