"""Is the all-reduce the sum in rank order and what is to follow it, bit for bit, on every rank and in every strategy?

Every rank makes the tensors of all ranks, sums them in fp32 in rank order and finishes them by `fusion.reference`: who
has the bits of that has those of all ranks and of all strategies.
"""

import logging
import re
from functools import lru_cache, wraps
from inspect import Signature, signature
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F

from spmd import AllReduce, AllReduceFusionOp, AllReduceParams, AllReduceStrategy, Distributed, Mapping, symmetric_empty
from spmd.collectives import allreduce
from spmd.collectives.arguments import describe
from spmd.collectives.fusion import NEED_SCALE, reference
from spmd.control import mpi, objects
from spmd.errors import DeadlineError, DesyncError, InputError, OutOfStepError, SpmdError
from spmd.memory.workspace import Workspace

S, Op = AllReduceStrategy, AllReduceFusionOp
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EXACT = [S.AUTO, S.MIN_LATENCY, S.ONESHOT, S.TWOSHOT, S.UB, S.NCCL_SYMMETRIC, S.SYMM_MEM, S.MNNVL]
SCALED = 128  # elements that share a scale on the low-precision wire
several = pytest.mark.ranks(2, 3, 4, 5, 6, 7, 8, 9)
both = pytest.mark.parametrize("mapping", [True, False], ids=["checked", "unchecked"], indirect=True)


def over(**axes):
    """As pytest.mark.parametrize, but within one test: meeting the other ranks before each would cost more than it."""

    def decorate(test):
        @wraps(test)
        def run(**given):
            for values in product(*axes.values()):
                try:
                    test(**given, **dict(zip(axes, values, strict=True)))
                except BaseException as error:
                    error.add_note(
                        f"with {', '.join(f'{axis} {value}' for axis, value in zip(axes, values, strict=True))}"
                    )
                    raise

        run.__signature__ = Signature([p for name, p in signature(test).parameters.items() if name not in axes])
        return run

    return decorate


def opened(**sizes):
    """The groups of a mapping over all ranks, made anew with the present environment; tp is all of them by default."""
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, **sizes or {"tp_size": world.size})
    Distributed.get(mapping).close()
    dist = Distributed.get(mapping)
    dist.group("tp")
    return dist


@pytest.fixture(scope="module")
def mapping(request):
    """Without SPMD_CHECK, unless `both` asks for it: then the ways that repeated calls have found are taken."""
    checked = getattr(request, "param", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMD_CHECK", str(int(checked)))
        patch.setenv("SPMD_TIMEOUT", "20")
        patch.setenv("SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "1")
        dist = opened()
        assert dist.group("tp").checked == (checked and mpi.world().size > 1)
        yield dist.mapping
        dist.close()


@pytest.fixture
def group(mapping):
    """The tp group; one that a failure has put out of step is not left to the next test."""
    group = Distributed.get(mapping).group("tp")
    yield group
    workspace = group.kept.get("workspace")
    if any(objects.allgather(mpi.world(), workspace is not None and workspace.plane.odd >= 0)):
        Distributed.get(mapping).close()


@pytest.fixture
def fresh(monkeypatch):
    """Makes a mapping's groups in another environment: fresh(tp_size=..., NAME="value") -> the mapping."""
    made = []

    def make(**given):
        sizes = {name: value for name, value in given.items() if name.islower()}
        for name, value in {"SPMD_DISABLE_ALLREDUCE_AUTOTUNE": "1", **given}.items():
            if not name.islower():
                monkeypatch.setenv(name, value)
        while made:
            made.pop().close()
        made.append(opened(**sizes))
        return made[-1].mapping

    yield make
    for dist in made:
        dist.close()


@lru_cache(maxsize=512)
def parts(n, shape, dtype, seed=0):
    """Every rank's tensor: random, of such different magnitudes that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    return tuple((torch.randn(shape, generator=generator) * 8.0 ** (rank % 3 - 1)).to(dtype) for rank in range(n))


@lru_cache(maxsize=64)
def whole(n, shape, dtype, seed=0):
    """Every rank's tensor: small integers, exact in every type and order."""
    count = torch.arange(torch.Size(shape).numel())
    return tuple(((count * 5 + seed) % 7 + rank + 1).reshape(shape).to(dtype) for rank in range(n))


def one(shape, dtype, seed):
    return parts(1, shape, dtype, seed)[0]


def summed(tensors):
    total = torch.zeros(tensors[0].shape)
    for x in tensors:
        total = total + x.float()
    return total


@lru_cache(maxsize=512)
def expected(n, shape, dtype, seed=0):
    return summed(parts(n, shape, dtype, seed)).to(dtype)


def allowed(tensors):
    """What FP8 blocks may be off by: at every rank a value by 2^-4 of itself, half a step of e4m3's three bits, so by
    that of its block's largest at most; and then by the rounding to the type."""

    def largest(x):
        blocks = F.pad(x.float().abs().flatten(), (0, -x.numel() % SCALED)).view(-1, SCALED)
        return blocks.amax(1, keepdim=True).expand_as(blocks).flatten()[: x.numel()].view(x.shape)

    return sum(largest(x) for x in tensors) * 2**-4 + summed(tensors).abs() * torch.finfo(tensors[0].dtype).eps


def same(got, wanted):
    """Type, shape and every bit; one NaN is as good as another."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    words = [x.contiguous().view(WORDS[x.itemsize]) for x in (got, wanted)]
    if got.dtype in DTYPES:
        assert torch.equal(got.isnan(), wanted.isnan())
        words = [word.masked_fill(got.isnan(), 0) for word in words]
    differ = words[0] != words[1]
    assert not differ.any(), f"{differ.sum()} of {got.numel()}: {got[differ][:9]} instead of {wanted[differ][:9]}"


def all_same(got, wanted):
    for a, b in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
        same(a, b)


def same_everywhere(group, x):
    everyone = objects.allgather(group.comm, x.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert everyone == everyone[:1] * group.size


def right(group, strategy, got, tensors):
    if strategy == S.LOWPRECISION:
        assert ((got.float() - summed(tensors)).abs() <= allowed(tensors)).all()
        same_everywhere(group, got)
    else:
        same(got, summed(tensors).to(got.dtype))


def poison(x):
    return x.fill_(float("nan"))


# ---------------------------------------------------------------------- sums

SHAPES = [(), (0,), (1,), (15,), (16,), (17,), (0, 4), (4, 0), (5, 3), (2, 3, 33), (1, 1031), (9, 2055), (1100, 513)]


@several
@both
@over(dtype=DTYPES, strategy=EXACT)
def test_sums(mapping, group, dtype, strategy):
    ar, n = AllReduce(mapping, strategy), group.size
    for shape in SHAPES:
        for seed in (0, 1)[: 1 + (len(shape) < 2 or shape[0] < 1000)]:  # the second call takes the remembered way
            x = parts(n, shape, dtype, seed)[group.rank].clone()
            got = ar(x)
            poison(x)
            assert got.is_contiguous()
            same(got, expected(n, shape, dtype, seed))


@several
@over(dtype=DTYPES, strategy=S)
def test_integers_in_floats_are_exact(mapping, group, dtype, strategy):
    ar = AllReduce(mapping, strategy)
    for shape in [(), (0,), (17,), (9, 2055)] + [(300_000,)] * (strategy in (S.AUTO, S.NCCL)):
        x = whole(group.size, shape, dtype)
        right(group, strategy, ar(x[group.rank].clone()), x)


@several
@over(dtype=[torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_fp32_and_rounded_once(mapping, group, dtype):
    # column j holds the big value at rank j and ones elsewhere: a sum that is rounded on the way loses ones
    n, big = group.size, 256.0 if dtype == torch.bfloat16 else 2048.0
    x = torch.ones(n).index_fill(0, torch.tensor(group.rank), big).to(dtype)
    for strategy in EXACT:
        same(AllReduce(mapping, strategy)(x), torch.full((n,), big + n - 1).to(dtype))


@several
@over(dtype=[torch.int32, torch.int64])
def test_integers_are_summed_by_the_library(mapping, group, dtype):
    for strategy in (S.AUTO, S.ONESHOT, S.LOWPRECISION, S.NCCL):
        ar = AllReduce(mapping, strategy)
        for seed in (0, 1):
            x = whole(group.size, (4, 6), dtype, seed)
            same(ar(x[group.rank].clone()), sum(x))
        assert ar.explain((4, 6), dtype).splitlines()[-1].startswith("library")
    big = torch.tensor([2**53 + 1, -(2**58)])
    same(AllReduce(mapping)(big), big * group.size)


@several
@over(dtype=DTYPES)
def test_low_precision_is_close_in_every_block(mapping, group, dtype):
    ar, n, op = AllReduce(mapping, S.LOWPRECISION), group.size, Op.RESIDUAL_RMS_NORM
    for shape in [(), (0, 3), (1,), (17,), (127,), (128,), (129,), (9, 2055), (520, 1025)]:
        steps = 2.0 ** (torch.arange(torch.Size(shape).numel()) // SCALED % 9 - 4).reshape(shape)  # a scale for each
        tensors = tuple((x.float() * steps).to(dtype) for x in parts(n, shape, dtype))
        got = ar(tensors[group.rank].clone())
        right(group, S.LOWPRECISION, got, tensors)
        if len(shape) == 2:  # the same sum, rounded before what follows
            residual = one(shape, dtype, 5)
            fused = ar(tensors[group.rank].clone(), AllReduceParams(fusion_op=op, residual=residual))
            all_same(fused, reference(got.float(), dtype, op, residual=residual))


@several
@over(dtype=DTYPES)
def test_zeros_infinities_nans_and_denormals(mapping, group, dtype):
    n, info = group.size, torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), info.max, -info.max, info.tiny, tiny, -tiny, 1.0]
    given = {"residual": None, "scale": torch.ones(1)}
    for width in (1, 3, 16, 40, 5000):
        tensors = [torch.zeros(len(special) + 1, width, dtype=dtype) for _ in range(n)]
        for row, value in enumerate(special):  # one value a row, at one rank in the first column, at all in the last
            for x in tensors:
                x[row, -1] = value
            tensors[row % n][row, 0] = value
        for x in tensors:
            x[-1] = -0.0
        mine, wanted = tensors[group.rank], summed(tensors).to(dtype)
        assert not (wanted.signbit() & (wanted == 0)).any()
        for strategy in EXACT:
            same(AllReduce(mapping, strategy)(mine.clone()), wanted)
        for strategy in (S.LOWPRECISION, S.NCCL):
            got = AllReduce(mapping, strategy)(mine.clone())
            assert got[wanted.isnan()].isnan().all()
            assert not got[wanted.isinf()].isfinite().any()
        given["residual"] = torch.ones_like(wanted)
        for strategy, op in product(EXACT[:4], [Op.RMS_NORM, Op.RESIDUAL_RMS_NORM_OUT_QUANT_FP8]):
            got = AllReduce(mapping)(mine.clone(), AllReduceParams(strategy=strategy, fusion_op=op, **given))
            all_same(got, reference(summed(tensors), dtype, op, **given))


@several
def test_every_pair_of_halves_arrives(mapping, group):
    # a word of two bf16 that a mailbox takes for "not written yet" is legal data
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), 2.0**-133], dtype=torch.bfloat16)
    x = torch.cartesian_prod(values, values).flatten()
    for dtype, strategy in product(DTYPES, EXACT):
        tensors = [x.roll(rank).to(dtype) for rank in range(group.size)]
        same(AllReduce(mapping, strategy)(tensors[group.rank]), summed(tensors).to(dtype))


@several
@over(counts=[[27, 11, 24, 256], [998, 2048], [31, 11, 27, 4], [0, 1, 0, 300, 2]])
def test_token_counts_through_one_workspace(mapping, group, counts):
    ars = {strategy: AllReduce(mapping, strategy) for strategy in (*EXACT, S.LOWPRECISION)}
    assert {id(Workspace.of(ar.group)) for ar in ars.values()} == {id(Workspace.of(group))}
    random, n, dtype, op = Random(sum(counts)), group.size, torch.bfloat16, Op.RESIDUAL_RMS_NORM
    for turn, count in product(range(2), counts):
        x, mine = parts(n, (count, 192), dtype, turn), parts(n, (count, 192), dtype, turn)[group.rank]
        for strategy in random.sample(list(ars), 3 if count > 500 else len(ars)):
            right(group, strategy, ars[strategy](mine.clone()), x)
        given = {"residual": one((count, 192), dtype, 7), "norm_weight": one((192,), dtype, 9)}
        got = ars[S.AUTO](mine.clone(), AllReduceParams(fusion_op=op, **given))
        all_same(got, reference(summed(x), dtype, op, **given))


@several
@over(strategy=[S.AUTO, S.ONESHOT, S.TWOSHOT])
def test_calls_without_rows_between_others(mapping, group, strategy):
    """Who has nothing to wait for must not run away from those who still read."""
    ar, op, full, none = AllReduce(mapping, strategy), Op.RMS_NORM, (4, 32), (0, 32)
    x, params = parts(group.size, full, torch.float32)[group.rank], AllReduceParams(fusion_op=op)
    wanted = reference(summed(parts(group.size, full, torch.float32)), torch.float32, op)
    for _ in range(200):
        all_same(ar(x, params), wanted)
        assert ar(torch.empty(none), params).shape == ar(torch.empty(none)).shape == none


@several
@over(dtype=DTYPES)
def test_many_passes_and_streaming_stores(mapping, group, dtype, monkeypatch):
    plane, n, shape = Workspace.of(group).plane, group.size, (150, 129)
    for name, value in {"chunk_bytes": 4096, "stream_bytes": 16384}.items():
        monkeypatch.setattr(plane, name, value)
    x, memory = parts(n, shape, dtype), torch.empty(150 * 129 + 1, dtype=dtype)
    for strategy, out in product(EXACT[:4], (memory[1:].view(shape), memory[:-1].view(shape))):
        same(AllReduce(mapping, strategy)(x[group.rank], out=poison(out)), expected(n, shape, dtype))
    got = AllReduce(mapping)(x[group.rank], AllReduceParams(fusion_op=Op.RMS_NORM))
    all_same(got, reference(summed(x), dtype, Op.RMS_NORM))


# ---------------------------------------------------------------------- what a tensor may be


@several
@over(strategy=EXACT)
def test_non_contiguous_and_aliased_tensors(mapping, group, strategy):
    n, dtype, op = group.size, torch.float16, Op.RESIDUAL_RMS_NORM
    ar = AllReduce(mapping, strategy)
    for view in (lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.t()[:, 1:], lambda x: x[0].expand(6, -1)):
        tensors = [view(x) for x in parts(n, (16, 34), dtype)]
        memory = parts(n, (16, 34), dtype)[group.rank].clone()
        x, kept = view(memory), memory.clone()
        assert not x.is_contiguous()
        for _ in range(2):
            got = ar(x)
            assert got.is_contiguous()
            same(got, summed(tensors).to(dtype))
        given = {"residual": x, "norm_weight": x[0], "bias": x[0]}
        all_same(ar(x, AllReduceParams(fusion_op=op, **given)), reference(summed(tensors), dtype, op, **given))
        same(memory, kept)


@several
@over(dtype=DTYPES, strategy=[S.AUTO, S.ONESHOT, S.TWOSHOT, S.UB])
def test_out(mapping, group, strategy, dtype):
    ar, n, op = AllReduce(mapping, strategy), group.size, Op.RESIDUAL_RMS_NORM
    for shape in [(3, 5), (40, 512), (301, 1024)]:
        tensors, wanted = parts(n, shape, dtype), expected(n, shape, dtype)
        for _ in range(2):
            x = tensors[group.rank].clone()
            out = poison(torch.empty_like(x))
            assert ar(x, out=out) is out
            same(out, wanted)
            same(x, tensors[group.rank])
            assert ar(x).data_ptr() != x.data_ptr()
            assert ar(x, out=x) is x
            same(x, wanted)
        wide = poison(torch.empty(shape[0], 2 * shape[1], dtype=dtype))
        view = wide[:, ::2]
        assert ar(tensors[group.rank].clone(), out=view) is view
        same(view, wanted)
        assert wide[:, 1::2].isnan().all()
        x, residual = tensors[group.rank].clone(), one(shape, dtype, 1).clone()
        wanted = reference(summed(tensors), dtype, op, residual=residual.clone())
        got = ar(x, AllReduceParams(fusion_op=op, residual=residual), out=(x, residual))  # over what they came from
        assert got[0] is x and got[1] is residual
        all_same(got, wanted)


@several
@over(dtype=DTYPES, strategy=[*EXACT, S.LOWPRECISION])
def test_symmetric_tensors(mapping, group, dtype, strategy):
    """Out of place with the input overwritten right after, in place, fused; whole tensors and from an offset."""
    n, ar, op = group.size, AllReduce(mapping, strategy), Op.RESIDUAL_RMS_NORM
    memory, out = (symmetric_empty((33 * 1200 + 7,), dtype, group) for _ in range(2))
    for offset, shape in [(0, (1,)), (7, (5, 3)), (1, (33, 1200)), (0, (0, 8)), (5, (n, 16))]:
        count = torch.Size(shape).numel()
        x, target = memory[offset : offset + count].view(shape), out[:count].view(shape)
        for seed in (0, 1):
            tensors = parts(n, shape, dtype, seed)
            for result in (None, target, x):
                x.copy_(tensors[group.rank])
                got = ar(x, out=result)
                assert result is None or got is result
                if result is not x:
                    poison(x)
                right(group, strategy, got, tensors)
            x.copy_(tensors[group.rank])
            params = AllReduceParams(fusion_op=op, residual=one(shape, dtype, 5))
            got = ar(x, params)
            poison(x)
            if strategy == S.LOWPRECISION:
                same_everywhere(group, got[0])
            else:
                all_same(got, reference(summed(tensors), dtype, op, residual=params.residual))


@several
@over(strategy=[S.AUTO, S.ONESHOT, S.TWOSHOT, S.UB])
def test_a_fused_result_over_a_symmetric_input_waits_for_its_readers(mapping, group, strategy):
    ar, shape, params = AllReduce(mapping, strategy), (64, 1024), AllReduceParams(fusion_op=Op.RMS_NORM)
    x = symmetric_empty(shape, torch.float32, group)
    for turn in range(12):
        tensors = parts(group.size, shape, torch.float32, turn % 2)
        x.copy_(tensors[group.rank])
        assert ar(x, params, out=x) is x
        all_same(x, reference(summed(tensors), torch.float32, Op.RMS_NORM))


@several
def test_symmetric_memory_that_is_gone_is_ordinary_again(mapping, group):
    ar, n, shape, dtype = AllReduce(mapping, S.UB), group.size, (6, 40), torch.float32
    for turn in range(3):
        x = symmetric_empty(shape, dtype, group).copy_(parts(n, shape, dtype, turn)[group.rank])
        same(ar(x), expected(n, shape, dtype, turn))
        del x
        same(ar(parts(n, shape, dtype, turn + 1)[group.rank].clone()), expected(n, shape, dtype, turn + 1))


@several
@over(dtype=DTYPES)
def test_lent_memory_takes_turns(mapping, group, dtype):
    ar, random, n, op = AllReduce(mapping), Random(3), group.size, Op.RESIDUAL_RMS_NORM
    for turn in range(60):
        rows = random.choice([0, 1, 4, 4, 30, 200])
        for _ in range(random.choice([1, 1, 1, 2])):  # one may be asked for and left unused
            lent = ar.lend((rows, 96), dtype)
        tensors = parts(n, (rows, 96), dtype, turn % 3)
        lent.copy_(tensors[group.rank])
        if random.random() < 0.5:
            same(ar(lent), summed(tensors).to(dtype))
        else:
            given = {"residual": one((rows, 96), dtype, 4), "norm_weight": one((96,), dtype, 9)}
            got = ar(lent, AllReduceParams(fusion_op=op, **given))
            all_same(got, reference(summed(tensors), dtype, op, **given))
        if random.random() < 0.3:
            same(ar(parts(n, (3, 96), dtype)[group.rank].clone()), expected(n, (3, 96), dtype))


@several
@over(dtype=DTYPES)
def test_rows_in_parts(mapping, group, dtype):
    ar, op = AllReduce(mapping), Op.RESIDUAL_RMS_NORM
    for cuts, fused in product([[5], [1, 2, 3], [0, 4, 0], [2, 2, 2, 2, 2]], [False, True, False]):
        shape, first = (sum(cuts), 48), 0
        tensors, residual = parts(group.size, shape, dtype), one(shape, dtype, 6)
        stream = ar.stream(shape, dtype, AllReduceParams(fusion_op=op, residual=residual) if fused else None)
        for rows in cuts:
            stream.input[first : first + rows] = tensors[group.rank][first : first + rows]
            stream.publish(slice(first, first + rows))
            first += rows
        wanted = reference(summed(tensors), dtype, op if fused else Op.NONE, residual=residual)
        all_same(stream.finish(), wanted)


# ---------------------------------------------------------------------- fusions


def arguments(op, shape, dtype, there=("bias", "norm_weight", "norm_pre_residual_weight")):
    given = {name: one(shape[-1:], dtype, 20 + index) for index, name in enumerate(there)}
    given["residual"] = one(shape, dtype, 30) * 4
    return given | ({"scale": torch.tensor([0.37])} if op in NEED_SCALE else {})


@several
@over(dtype=DTYPES, op=Op)
def test_fusions(mapping, group, op, dtype):
    n, memory = group.size, symmetric_empty((40 * 1040,), dtype, group)
    for shape in [(7, 48), (0, 32), (2, 3, 64), (16,), (40, 1040)]:
        x, given = parts(n, shape, dtype), arguments(op, shape, dtype)
        wanted = reference(summed(x), dtype, op, **given)
        for strategy in (S.AUTO, S.MIN_LATENCY, S.TWOSHOT, S.UB):
            ar, params = AllReduce(mapping, strategy), AllReduceParams(fusion_op=op, **given)
            for symmetric in (False, True, False) if strategy == S.UB else (False, False):
                place = memory[: x[0].numel()].view(shape) if symmetric else torch.empty_like(x[0])
                place.copy_(x[group.rank])
                got = ar(place, params)
                poison(place)
                assert isinstance(got, torch.Tensor) == (op in (Op.NONE, Op.RMS_NORM))
                all_same(got, wanted)
        out = tuple(torch.zeros_like(y) for y in wanted)
        result = ar(x[group.rank].clone(), params, out=out if len(out) > 1 else out[0])
        assert all(a is b for a, b in zip(result if len(out) > 1 else (result,), out, strict=True))
        all_same(out, wanted)


@several
@over(dtype=DTYPES)
def test_absent_tensors_are_not_used(mapping, group, dtype):
    shape, ar = (5, 33), AllReduce(mapping)
    x, names = parts(group.size, shape, dtype), ("bias", "norm_weight", "norm_pre_residual_weight")
    for op in (Op.NONE, Op.RMS_NORM, Op.RESIDUAL_RMS_NORM, Op.RESIDUAL_RMS_PREPOST_NORM):
        for there, (eps, offset) in product(product((False, True), repeat=3), [(1e-6, 0.0), (0.5, 1.0)]):
            given = arguments(op, shape, dtype, [name for name, use in zip(names, there, strict=True) if use])
            params = AllReduceParams(fusion_op=op, eps=eps, norm_weight_offset=offset, **given)
            wanted = reference(summed(x), dtype, op, eps=eps, weight_offset=offset, **given)
            for _ in range(2):
                all_same(ar(x[group.rank].clone(), params), wanted)


def weights_of(p):
    return {name: getattr(p, name) for name in ("bias", "residual", "norm_weight", "norm_pre_residual_weight")}


# what happens to the parameters of a layer between two of its calls
CHANGES = {
    "nothing": lambda p: None,
    "a strided weight in place": lambda p: p.norm_weight.fill_(3.0),
    "a new weight": lambda p: setattr(p, "norm_weight", one((64,), torch.float32, 4).clone()),
    "a weight in place": lambda p: p.norm_weight.mul_(2),
    "a weight's memory": lambda p: setattr(p.norm_weight, "data", one((64,), torch.float32, 5).clone()),
    "a weight's memory, strided": lambda p: setattr(p.norm_weight, "data", one((128,), torch.float32, 5)[::2]),
    "no bias": lambda p: setattr(p, "bias", None),
    "a weight's memory without bias": lambda p: p.norm_weight.set_(one((64,), torch.float32, 6).clone()),
    "eps": lambda p: setattr(p, "eps", 1.0),
    "offset": lambda p: setattr(p, "norm_weight_offset", 1.0),
    "strategy": lambda p: setattr(p, "strategy", S.TWOSHOT),
    "a strided residual": lambda p: setattr(p, "residual", one((6, 128), torch.float32, 8)[:, ::2]),
    "no weight": lambda p: setattr(p, "norm_weight", None),
    "the operation": lambda p: setattr(p, "fusion_op", Op.RESIDUAL_RMS_PREPOST_NORM),
    "a pre-norm weight": lambda p: setattr(p, "norm_pre_residual_weight", one((64,), torch.float32, 7).clone()),
    "a pre-norm weight's memory": lambda p: p.norm_pre_residual_weight.set_(one((64,), torch.float32, 9).clone()),
}


@several
def test_parameters_may_change_between_calls(mapping, group):
    """What a layer's first call has found out must not outlive what it was true of."""
    n, dtype, shape, ar = group.size, torch.float32, (6, 64), AllReduce(mapping)
    params = AllReduceParams(
        fusion_op=Op.RESIDUAL_RMS_NORM,
        residual=one(shape, dtype, 2).clone(),
        norm_weight=one((128,), dtype, 1).clone()[::2],
        bias=one((64,), dtype, 3).clone(),
    )
    for name, change in CHANGES.items():
        change(params)
        for seed in (0, 1, 1):
            x, given = parts(n, shape, dtype, seed), {"eps": params.eps, "weight_offset": params.norm_weight_offset}
            wanted = reference(summed(x), dtype, params.fusion_op, **given, **weights_of(params))
            got = ar(x[group.rank].clone(), params)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), name


@several
def test_a_layer_takes_tensors_of_other_shapes_and_types(mapping, group):
    n, ar, op = group.size, AllReduce(mapping), Op.RESIDUAL_RMS_NORM
    params = AllReduceParams(fusion_op=op, norm_weight=one((64,), torch.float32, 4))
    for shape in [(6, 64), (6, 64), (2, 3, 64), (3, 64), (384,), (6, 64), (12, 32), (6, 64), (0, 64)]:
        params.residual, x = one(shape, torch.float32, 2), parts(n, shape, torch.float32)
        mine = x[group.rank].clone()
        same(ar(mine), expected(n, shape, torch.float32))
        if shape[-1] == 64:
            wanted = reference(summed(x), torch.float32, op, residual=params.residual, norm_weight=params.norm_weight)
            all_same(ar(mine, params), wanted)
        else:  # as many elements as before, but rows that the weight is too long for or too short
            with pytest.raises(InputError):
                ar(mine, params)
    params.residual = one((6, 64), torch.float32, 2)
    with pytest.raises(InputError):
        ar(parts(n, (6, 64), torch.float16)[group.rank], params)


@several
def test_an_unfinished_sum_is_left_as_it_is(mapping, group):
    ar, x = AllReduce(mapping), parts(group.size, (4, 16), torch.float32)[group.rank]
    params = AllReduceParams(fusion_op=Op.RESIDUAL_RMS_NORM, residual=x, norm_weight=x[0])
    for _ in range(2):
        ar(x, params)
    params.enable_allreduce = False
    for refused in (params, AllReduceParams(fusion_op=Op.RMS_NORM, enable_allreduce=False)):
        with pytest.raises(ValueError, match="enable_allreduce"):
            ar(x, refused)
    assert ar(x, AllReduceParams(enable_allreduce=False)) is x


@over(dtype=DTYPES)
def test_a_group_of_one_still_finishes(dtype):
    ar, x = AllReduce(Mapping()), one((5, 32), dtype, 0)
    for given in (x, x[:, ::2], torch.ones(3, dtype=torch.int64)):
        assert ar(given) is given
    assert ar(x, AllReduceParams(enable_allreduce=False)) is x
    out = poison(torch.empty_like(x))
    assert ar(x, out=out) is out
    same(out, x)
    for op in Op:
        given, kept = arguments(op, (5, 32), dtype), x.clone()
        params = AllReduceParams(fusion_op=op, **given)
        for params.enable_allreduce in (True, True, False):
            got = ar(x, params)
            all_same(got, reference(x.float(), dtype, op, **given))
            assert (got if isinstance(got, torch.Tensor) else got[0]).data_ptr() != x.data_ptr()
        same(x, kept)
    assert "nothing" in ar.explain((5, 32), dtype)


# ---------------------------------------------------------------------- decisions


@several
@both
def test_every_rank_explains_and_one_tells_each_downgrade_once(mapping, group, monkeypatch, caplog):
    monkeypatch.setattr(allreduce, "_logged", set())
    x = torch.ones(group.size, 32)
    calls = [(S.TWOSHOT, x[:1], Op.NONE, "TWOSHOT"), (S.MNNVL, x, Op.NONE, "MNNVL"), (S.UB, x, Op.NONE, "UB")]
    calls += [(S.SYMM_MEM, x, Op.RMS_NORM, "SYMM_MEM"), (S.ONESHOT, x.int(), Op.NONE, "int32")]
    found = []
    for strategy, tensor, op, name in calls:
        caplog.clear()
        with caplog.at_level(logging.INFO, "spmd"):
            for _ in range(3):
                AllReduce(mapping, strategy)(tensor, AllReduceParams(fusion_op=op))
        lines = [record.getMessage() for record in caplog.records]
        told = AllReduce(mapping, strategy).explain(tensor.shape, tensor.dtype, op)
        found.append((name, lines, told, objects.allgather(group.comm, told)))
    caplog.clear()
    AllReduce(mapping)(x)
    assert not caplog.records
    for name, lines, told, everyone in found:
        assert everyone == [told] * group.size
        assert len(lines) == (group.rank == 0) and all(name in line for line in lines), (name, lines)
        assert all(line.split(": ", 1)[1] in told for line in lines)


@several
@over(name=["FORCE_ALL_REDUCE_DETERMINISTIC", "FORCE_DETERMINISTIC"])
def test_deterministic_means_rank_order(mapping, group, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    for strategy, dtype, shape in product(S, DTYPES, [(9, 33), (300, 1025)]):
        got = AllReduce(mapping, strategy)(parts(group.size, shape, dtype)[group.rank].clone())
        same(got, expected(group.size, shape, dtype))


@several
@over(n=[2048, 300_000], op=[Op.NONE, Op.RMS_NORM])  # fp32: too long for a small budget, and for the default one
def test_a_row_that_does_not_fit(fresh, caplog, monkeypatch, n, op):
    monkeypatch.setattr(allreduce, "_logged", set())
    caplog.clear()
    mapping = fresh(FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE=str(1 << (16 if n < 4096 else 26)))
    ar, size, rank = AllReduce(mapping), mapping.tp_size, mapping.tp_rank
    x, params = whole(size, (3, n), torch.float32), AllReduceParams(fusion_op=op)
    with caplog.at_level(logging.INFO, "spmd"):
        for _ in range(2):
            all_same(ar(x[rank].clone(), params), reference(summed(x), torch.float32, op))
    same(ar(torch.ones(4, 8)), torch.full((4, 8), float(size)))
    told = ar.explain((3, n), torch.float32, op).splitlines()
    if "library" not in told[-1]:  # it fits, or is cut
        return
    assert any(str(4 * n) in line for line in told)
    assert len([record for record in caplog.records if str(4 * n) in record.getMessage()]) == (rank == 0)
    with pytest.raises(InputError, match="FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE") as caught:
        AllReduce(mapping, overflow="error")(x[rank].clone(), params)
    assert "\n" not in str(caught.value)
    needed = max(int(number) for number in re.findall(r"\d+", str(caught.value)))
    mapping = fresh(FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE=str(needed))
    ar = AllReduce(mapping, overflow="error")  # the cure cures
    all_same(ar(x[rank].clone(), params), reference(summed(x), torch.float32, op))
    assert "library" not in ar.explain((3, n), torch.float32, op)


@several
@over(budget=["1", "1024", "70000"])
def test_small_workspaces(fresh, budget):
    mapping = fresh(FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE=budget, SPMD_TIMEOUT="5")
    group = Distributed.get(mapping).group("tp")
    for strategy, shape in product(S, [(1,), (40, 16), (3, 100), (700,)]):
        ar, x = AllReduce(mapping, strategy), whole(group.size, shape, torch.float32)
        right(group, strategy, ar(x[group.rank].clone()), x)
        got = ar(x[group.rank].clone(), AllReduceParams(fusion_op=Op.RMS_NORM))
        if strategy != S.LOWPRECISION:
            all_same(got, reference(summed(x), torch.float32, Op.RMS_NORM))
    assert AllReduce(mapping).lend((1 << 16, 64), torch.float32) is None


@several
@over(text=["", "0", "-1", "64MB"])
def test_a_workspace_size_that_is_none(fresh, text):
    mapping = fresh(FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE=text)
    with pytest.raises(InputError, match="FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE"):
        AllReduce(mapping)(torch.ones(3))


# ---------------------------------------------------------------------- several groups, several hosts


@pytest.mark.ranks(4, 6, 8)
@over(check=["0", "1"])
def test_overlapping_groups_in_random_order(fresh, check):
    n = mpi.world().size
    mapping, random = fresh(tp_size=n // 2, pp_size=2, SPMD_CHECK=check), Random(n)
    groups = [Distributed.get(mapping).group(axis) for axis in ("tp", "pp", "world")]
    ars = [(group, AllReduce(group=group, strategy=strategy)) for group, strategy in product(groups, EXACT[:5])]
    assert AllReduce(mapping).group is groups[0]
    for turn in range(60):
        group, ar = random.choice(ars)
        shape, dtype = random.choice([(1, 16), (5, 3), (40, 64), (0, 4), (33, 2000)]), random.choice(DTYPES)
        got = ar(parts(group.size, shape, dtype, turn % 2)[group.rank].clone())
        same(got, expected(group.size, shape, dtype, turn % 2))


NODES = [(3, "2x2"), (4, "2x2"), (4, "4x1"), (4, "2x3"), (6, "3x2"), (8, "2x4"), (8, "4x2"), (9, "3x3")]


@pytest.mark.parametrize("ranks,nodes", [pytest.param(*case, marks=pytest.mark.ranks(case[0])) for case in NODES])
def test_several_hosts(fresh, ranks, nodes, caplog, monkeypatch):
    monkeypatch.setattr(allreduce, "_logged", set())
    mapping, op = fresh(SPMD_NODES=nodes), Op.RESIDUAL_RMS_NORM
    group = Distributed.get(mapping).group("tp")
    hosts, each = map(int, nodes.split("x"))
    for strategy in (S.AUTO, S.ONESHOT, S.NCCL):
        ar = AllReduce(mapping, strategy)
        way = "two-level" if hosts * each == ranks and strategy != S.NCCL else "library"
        assert ar.explain((5, 33), torch.float32).splitlines()[-1].startswith(way)
        assert ar.lend((4, 4), torch.float32) is None and ar.stream((4, 4), torch.float32) is None
        for shape, dtype in product([(), (0,), (1,), (3,), (5, 33), (9, 2048)], DTYPES):
            x, random = whole(ranks, shape, dtype), parts(ranks, shape, dtype)
            for _ in range(2):
                same(ar(x[group.rank].clone()), summed(x).to(dtype))
            got = ar(random[group.rank].clone())
            same_everywhere(group, got)
            close = 4 * torch.finfo(dtype).eps * sum(y.float().abs() for y in random)
            assert ((got.float() - summed(random)).abs() <= close).all()
            if len(shape) == 2:
                given = arguments(op, shape, dtype)
                for params in [AllReduceParams(fusion_op=op, **given)] * 2:
                    all_same(ar(x[group.rank].clone(), params), reference(summed(x), dtype, op, **given))
        integers = whole(ranks, (3, 3), torch.int64)
        same(ar(integers[group.rank].clone()), sum(integers))
    told = [record.getMessage() for record in caplog.records if "hosts" in record.getMessage()]
    assert bool(told) == (group.rank == 0)  # that ONESHOT was overruled


# ---------------------------------------------------------------------- wrong arguments

X = torch.ones(4, 6)


def fused(op=Op.RESIDUAL_RMS_NORM, x=X, out=None, **given):
    return lambda ar: ar(x, AllReduceParams(fusion_op=op, **({"residual": X} | given)), out=out)


WRONG = {
    "fp64": lambda ar: ar(X.double()),
    "bool": lambda ar: ar(X.bool()),
    "complex": lambda ar: ar(X.cfloat()),
    "no residual": fused(residual=None),
    "residual of another shape": fused(residual=torch.ones(5, 6)),
    "residual of another order": fused(residual=torch.ones(6, 4)),
    "residual of another type": fused(residual=X.bfloat16()),
    "residual elsewhere": fused(residual=X.to("meta")),
    "weight too short": fused(norm_weight=torch.ones(5)),
    "weight of another type": fused(norm_weight=torch.ones(6).half()),
    "bias too long": fused(Op.NONE, bias=torch.ones(7)),
    "bias of another type": fused(Op.RMS_NORM, bias=torch.ones(6).half()),
    "pre-norm weight too short": fused(Op.RESIDUAL_RMS_PREPOST_NORM, norm_pre_residual_weight=torch.ones(5)),
    "no scale": fused(Op.RESIDUAL_RMS_NORM_QUANT_FP8),
    "scale of another shape": fused(Op.RESIDUAL_RMS_NORM_QUANT_FP8, scale=torch.ones(2)),
    "scale of another type": fused(Op.RESIDUAL_RMS_NORM_OUT_QUANT_FP8, scale=torch.ones(1).half()),
    "no blocks of 16": fused(Op.RESIDUAL_RMS_NORM_QUANT_NVFP4, scale=torch.ones(1)),
    "norm of integers": fused(Op.RMS_NORM, X.int()),
    "bias on integers": fused(Op.NONE, X.int(), bias=torch.ones(6).int()),
    "norm of a scalar": fused(Op.RMS_NORM, torch.tensor(1.0)),
    "out of another shape": lambda ar: ar(X, out=torch.empty(6, 4)),
    "out of another type": lambda ar: ar(X, out=torch.empty(4, 6).half()),
    "out elsewhere": lambda ar: ar(X, out=torch.empty(4, 6, device="meta")),
    "a tuple for one out": lambda ar: ar(X, out=(torch.empty(4, 6),)),
    "one out for a tuple": fused(out=torch.empty(2, 4, 6)),
    "an out too few": fused(out=(torch.empty(4, 6),)),
    "an out too many": fused(out=(torch.empty(4, 6),) * 3),
    "fused out of another shape": fused(out=(torch.empty(4, 6), torch.empty(4, 7))),
    "fused out of another type": fused(out=(torch.empty(4, 6).half(), torch.empty(4, 6))),
    "fused out not contiguous": fused(out=(torch.empty(4, 12)[:, ::2], torch.empty(4, 6))),
    "fused out elsewhere": fused(out=(torch.empty(4, 6, device="meta"), torch.empty(4, 6))),
    "a meta tensor": lambda ar: ar(X.to("meta")),
    "a fused meta tensor": fused(x=X.to("meta"), residual=X.to("meta")),
}


@several
@both
def test_a_wrong_argument_is_one_line_and_harms_nobody(mapping, group):
    ar, harmful = AllReduce(mapping), {}
    for name, call in WRONG.items():
        same(ar(X), X * group.size)  # what a good call remembers must not let a bad one through
        try:
            call(ar)
            harmful[name] = "accepted"
        except Exception as error:
            if not isinstance(error, InputError) or "\n" in str(error):
                harmful[name] = repr(error)
    same(ar(X), X * group.size)
    assert not harmful


@several
def test_a_remembered_fusion_lets_no_bad_tensors_through(mapping, group):
    ar, params = AllReduce(mapping), AllReduceParams(fusion_op=Op.RESIDUAL_RMS_NORM, residual=X, norm_weight=X[0])
    wanted = reference(X * group.size, X.dtype, params.fusion_op, residual=X, norm_weight=X[0])
    harmful = []
    for wrong in [X.half(), X.to("meta"), torch.ones(4, 7), torch.ones(6, 4), torch.tensor(1.0), X.int()]:
        all_same(ar(X, params), wanted)
        tensors = {"x": (wrong, X, None), "residual": (X, wrong, None)}
        tensors |= {"out": (X, X, (wrong, X.clone())), "outs": (X, X, (wrong,))}
        for name, (x, params.residual, out) in tensors.items():
            try:
                ar(x, params, out=out)
                harmful.append((name, describe(wrong), "accepted"))
            except Exception as error:
                if not isinstance(error, InputError) or "\n" in str(error):
                    harmful.append((name, describe(wrong), repr(error)))
        params.residual = X
    assert not harmful


@several
def test_types_and_groups_that_were_not_meant(mapping, group):
    with pytest.raises(InputError, match="bfloat16"):
        AllReduce(mapping, dtype=torch.bfloat16)(X)
    for wrong in ({}, {"mapping": mapping, "group": group}, {"group": "tp"}):
        with pytest.raises(InputError):
            AllReduce(**wrong)


# ---------------------------------------------------------------------- ranks that differ


def by(strategy):
    return lambda ar: ar(torch.ones(32, 6), AllReduceParams(strategy=strategy))  # more rows than ranks


# what one rank calls, and what the others call
ONE_WRONG = {
    "sizes": (lambda ar: ar(torch.ones(4, 7)), lambda ar: ar(X)),
    "a size of none": (lambda ar: ar(torch.ones(0, 6)), lambda ar: ar(X)),
    "types": (lambda ar: ar(X.half()), lambda ar: ar(X)),
    "fusions": (fused(Op.RMS_NORM), lambda ar: ar(X)),
    "no residual": (fused(residual=None), fused()),
    "a residual of another shape": (fused(residual=torch.ones(5, 6)), fused()),
    "a wrong weight": (fused(norm_weight=torch.ones(5)), fused()),
    "a wrong out": (lambda ar: ar(X, out=torch.empty(6, 4)), lambda ar: ar(X, out=torch.empty(4, 6))),
    "a type that is not known": (lambda ar: ar(X.double()), lambda ar: ar(X)),
    "an unfinished sum": (fused(enable_allreduce=False), fused()),
    "strategies": (by(S.ONESHOT), by(S.TWOSHOT)),
    "the library": (by(S.NCCL), by(S.ONESHOT)),
}


def names_a_rank(error):
    return "\n" not in str(error) and re.search(r"ranks? \d.* called ", str(error))


@several
@over(name=ONE_WRONG)
def test_one_rank_that_differs_is_one_error_on_all(fresh, name):
    """By agreement, so at once and not by a deadline; and the group goes on."""
    mapping = fresh(SPMD_CHECK="1", SPMD_TIMEOUT="3")
    ar, last = AllReduce(mapping), mapping.tp_size - 1
    same(ar(X), X * mapping.tp_size)
    odd, usual = ONE_WRONG[name]
    with pytest.raises(DesyncError) as caught:
        (odd if mapping.tp_rank == last else usual)(ar)
    assert names_a_rank(caught.value) and str(caught.value).startswith("all_reduce #")
    same(ar(X), X * mapping.tp_size)


UNCHECKED = {
    "lines": ((64,), (16,), torch.float32, torch.float32),
    "within a line": ((5,), (4,), torch.float32, torch.float32),
    "nothing": ((0,), (16,), torch.float32, torch.float32),
    "mailbox and slot": ((512,), (40_000,), torch.float32, torch.float32),
    "slots": ((50_000,), (40_000,), torch.float32, torch.float32),
    "passes": ((300, 1000), (200, 1000), torch.float32, torch.float32),
    "types": ((32,), (32,), torch.bfloat16, torch.float16),
}


@several
@over(name=UNCHECKED)
def test_sizes_that_differ_without_check_are_an_error_on_all(fresh, name):
    mapping = fresh(SPMD_CHECK="0", SPMD_TIMEOUT="3")
    ar, last = AllReduce(mapping), mapping.tp_size - 1
    odd, usual, odd_type, usual_type = UNCHECKED[name]
    same(ar(X), X * mapping.tp_size)
    shape, dtype = (odd, odd_type) if mapping.tp_rank == last else (usual, usual_type)
    with pytest.raises(OutOfStepError) as caught:
        ar(torch.ones(shape, dtype=dtype))
        ar(X)  # the smallest messages are their own flags: who has them all finds out a call later
    assert not isinstance(caught.value, DeadlineError) and re.search(r"rank \d", str(caught.value))


@several
@over(strategy=[S.AUTO, S.TWOSHOT])
def test_a_rank_that_does_not_come_is_named(fresh, strategy):
    mapping = fresh(SPMD_CHECK="0")
    group, ar, last, x = Distributed.get(mapping).group("tp"), AllReduce(mapping, strategy), mapping.tp_size - 1, X
    for _ in range(2):
        same(ar(x), x * group.size)
    objects.allgather(group.comm, None)
    Workspace.of(group).plane.timeout_s = 0.5
    if group.rank != last:
        with pytest.raises(OutOfStepError) as caught:
            ar(x)
        assert f"rank {last} has not arrived" in str(caught.value) or not isinstance(caught.value, DeadlineError)
    objects.allgather(group.comm, None)
    if group.rank == last:  # who comes too late learns that the others have left, if not from what they left behind
        with pytest.raises(OutOfStepError):
            same(ar(x), x * group.size)
            ar(x)


@several
def test_after_close_a_call_works_or_is_refused(fresh):
    mapping = fresh(SPMD_CHECK="0")
    ar = AllReduce(mapping)
    for _ in range(2):
        same(ar(X), X * mapping.tp_size)
    Distributed.get(mapping).close()
    try:
        same(ar(X), X * mapping.tp_size)
    except SpmdError as error:
        assert "\n" not in str(error)
    same(AllReduce(mapping)(X), X * mapping.tp_size)


@several
@over(strategy=S)
def test_rows_of_no_elements(mapping, group, strategy):
    ar, x = AllReduce(mapping, strategy), torch.ones(5, 0)
    assert ar(x, AllReduceParams(fusion_op=Op.RMS_NORM)).shape == (5, 0)
    got = ar(x, AllReduceParams(fusion_op=Op.RESIDUAL_RMS_NORM, residual=x))
    assert [y.shape for y in got] == [x.shape] * 2
    right(group, strategy, ar(X), [X] * group.size)
