"""Does the all-reduce of an expert layer weigh, add, sum and norm as plain torch would, and read nothing else?

Every rank makes the tensors of all ranks; the truth is fp32 in the order of the experts, rounded once before the sum.
"""

from itertools import product

import pytest
import torch

from spmd import AllReduceFusionOp, AllReduceStrategy, Distributed, Mapping, MoEAllReduce, MoEAllReduceParams
from spmd.collectives.fusion import reference
from spmd.control import mpi
from spmd.errors import InputError, SpmdError

S = AllReduceStrategy
TAIL = AllReduceFusionOp.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WORDS = {2: torch.int16, 4: torch.int32}
both = pytest.mark.parametrize("mapping", [True, False], ids=["checked", "unchecked"], indirect=True)
several = pytest.mark.ranks(2, 3, 4, 5, 6, 7, 8, 9)
types = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
TOKENS = [0, 1, 129]  # a known kernel takes 128 at most


@pytest.fixture(scope="module")
def mapping(request):
    """Without SPMD_CHECK, unless `both` asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SPMD_CHECK", "SPMD_DISABLE_ALLREDUCE_AUTOTUNE"):
            patch.setenv(name, str(int(name != "SPMD_CHECK" or getattr(request, "param", False))))
        patch.setenv("SPMD_TIMEOUT", "20")
        mapping = opened()
        yield mapping
        Distributed.get(mapping).close()


def opened():
    """The mapping with tp over all ranks, its group made anew with the present environment."""
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)
    Distributed.get(mapping).close()
    Distributed.get(mapping).group("tp")
    return mapping


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        differ = a.view(WORDS[a.itemsize]) != b.view(WORDS[b.itemsize])
        assert not differ.any(), f"{differ.sum()} of {a.numel()}: {a[differ][:9]} instead of {b[differ][:9]}"


def tail(partials, dtype, given):
    """The partial results of all ranks, fp32 -> (norm, residual)."""
    total = torch.zeros(partials[0].shape)
    for partial in partials:
        total = total + partial.to(dtype).float()
    return reference(total, dtype, TAIL, **given)


@types
def test_min_latency(mapping, dtype):
    n, width, experts = mapping.tp_size, 48, 5
    for tokens, active in product(TOKENS, (0, 1, 4)):
        outputs = [normal(rank, experts, tokens, width).to(dtype) for rank in range(n)]
        scales = [normal(100 + rank, experts, tokens) for rank in range(n)]
        shared = [normal(200 + rank, tokens, width).to(dtype) for rank in range(n)]
        given = {"residual": normal(7, tokens, width).to(dtype), "norm_weight": normal(8, width).to(dtype)}
        partials = []
        for rank in range(n):
            total = torch.zeros(tokens, width)
            for expert in range(active):
                total = total + outputs[rank][expert].float() * scales[rank][expert].unsqueeze(1)
            partials.append(total + shared[rank].float())
        wanted = tail(partials, dtype, given | {"eps": 1e-3})
        counts = (active, torch.tensor([active]), torch.tensor(active, dtype=torch.int32))
        for count, strategy in zip(counts, (S.AUTO, S.ONESHOT, S.TWOSHOT), strict=True):
            moe = MoEAllReduce(mapping, strategy)
            x, scale = outputs[mapping.tp_rank].clone(), scales[mapping.tp_rank].clone()
            x[active:] = scale[active:] = float("nan")  # experts that are not there are not read
            params = MoEAllReduceParams(
                device_num_experts=count,
                expert_scale_factor=scale,
                shared_expert_output=shared[mapping.tp_rank].clone(),
                eps=1e-3,
                is_cutlass_min_latency=True,
                **given,
            )
            got = moe(x, all_reduce_params=params)
            x.fill_(float("nan"))
            same(got, wanted)
            assert torch.equal(params.shared_expert_output, shared[mapping.tp_rank])


@types
def test_finalise(mapping, dtype):
    moe, n, width, rank = MoEAllReduce(mapping), mapping.tp_size, 48, mapping.tp_rank
    for tokens, k in product(TOKENS, (0, 1, 3)):
        held = tokens * k + 2
        rows = [normal(r, held, width).to(dtype) for r in range(n)]
        index, scales = [], [normal(100 + r, tokens, k) for r in range(n)]
        for r in range(n):  # each rank holds some of a token's experts, in no order; the last rank none
            order = torch.randperm(held, generator=torch.Generator().manual_seed(r))[: tokens * k].view(tokens, k)
            here = normal(300 + r, tokens, k) > 0
            index.append(torch.where(here & torch.tensor(r < n - 1 or n == 1), order, -1).int())
        for scaled, shared in product((True, False), repeat=2):
            extra = [normal(200 + r, tokens, width).to(dtype) for r in range(n)]
            given = {"residual": normal(7, tokens, width).to(dtype), "norm_weight": normal(8, width).to(dtype)}
            partials = []
            for r in range(n):
                total = torch.zeros(tokens, width)
                for j in range(k):
                    there = index[r][:, j] >= 0
                    picked = rows[r][index[r][:, j].clamp(min=0).long()].float()
                    factor = scales[r][:, j] * there if scaled else there.float()
                    total = total + picked * factor.unsqueeze(1)
                partials.append(total + extra[r].float() if shared else total)
            unread = torch.ones(held, dtype=torch.bool)
            unread[index[rank][index[rank] >= 0].long()] = False
            x = rows[rank].masked_fill(unread.unsqueeze(1), float("nan"))
            got = moe(
                x,
                MoEAllReduceParams(
                    is_cutlass_min_latency=False,
                    expanded_idx_to_permuted_idx=index[rank],
                    expert_scale_factor=scales[rank].masked_fill(index[rank] < 0, float("nan")) if scaled else None,
                    shared_expert_output=extra[rank] if shared else None,
                    **given,
                ),
            )
            x.fill_(float("nan"))
            same(got, tail(partials, dtype, given))


def test_a_row_may_be_used_twice(mapping):
    x, index = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[0, 0], [1, 0], [-1, -1]], dtype=torch.int32)
    params = MoEAllReduceParams(
        is_cutlass_min_latency=False, expanded_idx_to_permuted_idx=index, residual=torch.zeros(3, 2)
    )
    _, residual = MoEAllReduce(mapping)(x, params)
    assert torch.equal(residual, torch.tensor([[2.0, 4.0], [5.0, 10.0], [0.0, 0.0]]) * mapping.tp_size)


X, SCALE, SHARED, ROWS = torch.ones(3, 4, 8), torch.ones(3, 4), torch.ones(4, 8), torch.ones(6, 8)
INDEX = torch.tensor([[0, 1], [2, -1], [-1, -1], [3, 4]], dtype=torch.int32)


def least(x=X, **given):
    right = {"device_num_experts": 3, "expert_scale_factor": SCALE, "shared_expert_output": SHARED, "residual": SHARED}
    return x, MoEAllReduceParams(is_cutlass_min_latency=True, **(right | given))


def final(x=ROWS, **given):
    right = {"expanded_idx_to_permuted_idx": INDEX, "residual": SHARED}
    return x, MoEAllReduceParams(is_cutlass_min_latency=False, **(right | given))


def test_what_is_valid():
    assert least()[1].is_valid() and final()[1].is_valid()
    for name in ("device_num_experts", "expert_scale_factor", "shared_expert_output"):
        assert not least(**{name: None})[1].is_valid()
        assert final(**{name: None})[1].is_valid()
    assert not final(expanded_idx_to_permuted_idx=None)[1].is_valid()


WRONG = {
    "no experts": least(device_num_experts=None),
    "no scales": least(expert_scale_factor=None),
    "no shared output": least(shared_expert_output=None),
    "more experts than there are": least(device_num_experts=4),
    "fewer experts than none": least(device_num_experts=-1),
    "scales of too few experts": least(expert_scale_factor=SCALE[:2]),
    "scales of other tokens": least(expert_scale_factor=torch.ones(3, 5)),
    "scales for all tokens": least(expert_scale_factor=torch.ones(3)),
    "a shared output of one row": least(shared_expert_output=torch.ones(1, 8)),
    "a shared output of other rows": final(shared_expert_output=torch.ones(5, 8)),
    "no residual": least(residual=None),
    "no residual to finalise with": final(residual=None),
    "a residual of other rows": least(residual=torch.ones(5, 8)),
    "experts without tokens": least(x=X[0]),
    "rows of experts": final(x=X),
    "no index": final(expanded_idx_to_permuted_idx=None),
    "a flat index": final(expanded_idx_to_permuted_idx=INDEX[0]),
    "an index past the rows": final(x=torch.ones(4, 8)),
    "an index below -1": final(expanded_idx_to_permuted_idx=INDEX - 1),
    "an index of fractions": final(expanded_idx_to_permuted_idx=INDEX.float()),
    "scales of another shape": final(expert_scale_factor=torch.ones(4, 3)),
    "rows of a type that is not known": final(x=ROWS.double()),
    "experts of integers": least(x=X.int()),
    "a bias, which has no place here": least(bias=torch.ones(8)),
}


@both
def test_a_wrong_argument_is_one_line_and_harms_nobody(mapping):
    moe, harmful = MoEAllReduce(mapping), {}
    for name, (x, params) in WRONG.items():
        try:
            moe(x, params)
            harmful[name] = "accepted"
        except Exception as error:
            if not isinstance(error, InputError) or "\n" in str(error):
                harmful[name] = repr(error)
        assert torch.equal(moe(*least())[1], SHARED * 4 * mapping.tp_size + SHARED)
    assert not harmful


@several
def test_an_unfinished_sum_is_not_normalised(mapping):
    x, params = least(enable_allreduce=False)
    with pytest.raises(InputError):
        MoEAllReduce(mapping)(x, params)


@several
@pytest.mark.parametrize("wrong", ["an index past the rows", "no shared output", "a residual of other rows"])
def test_one_rank_that_is_wrong_is_an_error_on_all(monkeypatch, wrong):
    for name, value in {"SPMD_CHECK": "1", "SPMD_TIMEOUT": "3"}.items():
        monkeypatch.setenv(name, value)
    mapping = opened()
    moe, good = MoEAllReduce(mapping), final() if "index" in wrong else least()
    for _ in range(2):
        with pytest.raises(SpmdError, match="called"):
            moe(*(WRONG[wrong] if mapping.tp_rank == mapping.tp_size - 1 else good))
    moe(*good)
    Distributed.get(mapping).close()
