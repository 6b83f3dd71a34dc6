"""Sequences cut over ranks: does every way of context parallelism compute what transformers computes?"""

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.boundary.plan import Options
from spmd.collectives.costs import Costs
from spmd.context.helix import alltoall_helix, exchange
from spmd.context.softmax import combine
from spmd.control import mpi
from spmd.control.pipeline import init_pp_comm
from spmd.control.record import recorder
from spmd.errors import InputError
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate, leads
from spmd.models.weights import open_checkpoint
from spmd.nn.attention import Attention, AttentionConfig, Chunk
from tests import oracle

BLOCK = 8
SIZE = mpi.world().size


@pytest.fixture(scope="module", autouse=True)
def made_oracle():
    if mpi.world().rank == 0:
        oracle.ensure()
    mpi.wait([mpi.world().Ibarrier()], timeout=600)


def mapping_of(cp_type, tp=1, pp=1, cp=1, **sizes):
    config = {"cp_type": cp_type} | ({"tokens_per_block": BLOCK} if cp_type == "helix" else {})
    config |= {"use_nccl_for_alltoall": sizes.pop("library")} if "library" in sizes else {}
    return Mapping(tp * pp * cp, mpi.world().rank, tp_size=tp, pp_size=pp, cp_size=cp, cp_config=config, **sizes)


def compare(name, mapping, prompts=None, steps=oracle.MANY, options=None, policy="cost", microbatches=1):
    """Logits and tokens of some of a case's prompts in one batch."""
    case = oracle.load(name)
    which = range(len(case.prompts)) if prompts is None else prompts
    checkpoint = open_checkpoint(case.path)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32, options, policy)
        decoder.load(checkpoint)
    pipeline = init_pp_comm(mapping) if mapping.pp_size > 1 else None
    made = generate(
        decoder,
        [case.prompts[i] for i in which],
        Sampling(steps),
        pipeline=pipeline,
        microbatches=microbatches,
        keep_logits=True,
    )
    assert made.tokens == [case.tokens[i][:steps] for i in which]
    if mapping.is_last_pp_rank() and leads(mapping):
        for at in range(mapping.attn_dp_rank, len(which), mapping.attn_dp_size):
            assert (torch.stack(made.logits[at]) - case.logits[which[at]][:steps]).abs().max() <= 5e-4


NAMES = ["context-llama-8-2", "context-llama-9-3", "context-qwen3", "context-window", "context-deepseek_v2"]
NAMES += ["context-deepseek_v3"]
SIZES = {2: [(1, 1, 2)], 3: [(1, 1, 3)], 4: [(1, 1, 4), (2, 1, 2), (1, 2, 2)], 8: [(2, 1, 4), (2, 2, 2)]}  # tp, pp, cp


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.parametrize("tp,pp,cp", SIZES.get(SIZE, []))
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("name", NAMES)
def test_every_way_equals_transformers(name, cp_type, tp, pp, cp):
    compare(name, mapping_of(cp_type, tp, pp, cp))


RESPLIT = {4: [(1, 4, 2, 2)], 8: [(1, 8, 2, 4), (1, 8, 4, 2)]}  # tp, cp, attn_tp, attn_cp


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("tp,cp,attn_tp,attn_cp", RESPLIT.get(SIZE, []))
@pytest.mark.parametrize("cp_type", ["helix", "ring"])
@pytest.mark.parametrize("name", ["context-llama-8-2", "context-deepseek_v3"])
def test_attention_splits_its_ranks_as_it_likes(name, cp_type, tp, cp, attn_tp, attn_cp):
    mapping = mapping_of(cp_type, tp, 1, cp, attn_tp_size=attn_tp, attn_cp_size=attn_cp)
    compare(name, mapping, steps=12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["context-llama-8-2", "context-deepseek_v2"])
def test_decode_context_parallelism_inside_tp(name):
    """attn_cp of a mapping without cp: heads stay together where there are too few for tp."""
    compare(name, mapping_of("helix", 4, 1, 1, attn_tp_size=2, attn_cp_size=2), steps=12)


SHARED = {4: [(2, 2)], 8: [(4, 2), (2, 4)]}  # tp, cp; two attention groups


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("tp,cp", SHARED.get(SIZE, []))
@pytest.mark.parametrize("cp_type", ["helix", "ring"])
@pytest.mark.parametrize("prompts", [None, [6], [0]])  # one: the other group is idle all the time
@pytest.mark.parametrize("policy", ["cost", "seed"])
def test_attention_dp_on_top(tp, cp, cp_type, prompts, policy):
    mapping = mapping_of(cp_type, tp, 1, cp, attn_dp_size=2)
    compare("context-llama-8-2", mapping, prompts, steps=10, policy=policy)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("a2a", [False, True])
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("name", ["context-moe", "context-deepseek_v2"])
def test_experts_on_top(name, cp_type, a2a, policy):
    mapping = mapping_of(cp_type, 2, 1, 2, moe_ep_size=2)
    compare(name, mapping, steps=10, options=Options(a2a=a2a), policy=policy)


@pytest.mark.ranks(2, 3)
def test_the_exchange_by_the_library_is_the_same():
    compare("context-llama-9-3", mapping_of("helix", 1, 1, SIZE, library=True), steps=20)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("prompts", [[0], [2], [11]])  # of 1, 2 and 97 tokens
def test_one_sequence_alone(cp_type, prompts):
    compare("context-llama-8-2", mapping_of(cp_type, 1, 1, SIZE), prompts, steps=20)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
def test_microbatches_through_stages(cp_type):
    compare("context-qwen3", mapping_of(cp_type, 1, 2, 2), steps=10, microbatches=5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("variant", [Options(defer_mlp_sum=False), Options(input_scattered=True)])
@pytest.mark.parametrize("policy", ["cost", "seed"])
def test_options_of_a_plan_change_no_result(cp_type, variant, policy):
    compare("context-llama-8-2", mapping_of(cp_type, 2, 1, 2), steps=6, options=variant, policy=policy)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("policy", ["seed", "cost"])
def test_the_worked_example(policy):
    """tp 4, cp 2 (Helix), experts 2 x 4, attention DP, one decode step: by the fixed choices, in order, per layer,
    all-gather over cp (not in the first), attention's all-to-all over cp, reduce-scatter over cp, all-gather over
    moe_tp, dispatch and combine among four, reduce-scatter over moe_tp; an all-gather after the last. Where latency
    rules, each pair is one exchange. The logits are those of one rank."""
    experts = {"moe_tp_size": 2, "moe_ep_size": 4, "enable_attention_dp": True}
    mapping = mapping_of("helix", 4, 1, 2, **experts)
    case = oracle.load("context-deepseek_v2")
    checkpoint = open_checkpoint(case.path)
    costs = Costs(latency=50.0, per_rank=0.0)
    own = [2 * mapping.attn_dp_rank, 2 * mapping.attn_dp_rank + 1]  # two prompts a group: a row for each of its ranks
    prompts, ends = [case.prompts[i] for i in own], [len(case.prompts[i]) for i in own]
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32, Options(a2a=True), policy, costs)
        decoder.load(checkpoint)
        caches = decoder.new_caches(2, 64)
        decoder(
            torch.tensor([token for prompt in prompts for token in prompt]),
            [Chunk(i, 0, end) for i, end in enumerate(ends)],
            caches,
        )
        tokens = torch.tensor([case.tokens[i][0] for i in own])
        recorder.reset()
        recorder.timeline = True
        logits = decoder(tokens, [Chunk(i, end, 1) for i, end in enumerate(ends)], caches)
        recorder.timeline = False
    assert (logits - torch.stack([case.logits[i][1] for i in own])).abs().max() <= 5e-4
    seen = [(op, group) for op, group, *_ in recorder.events if op not in ("barrier", "allgather_int64")]
    # the first layer is dense
    sparse = [("all_to_all", "cp"), ("reduce_scatter", "cp"), ("all_gather", "moe_tp"), ("dispatch", "moe_ep")]
    sparse += [("combine", "moe_ep"), ("reduce_scatter", "moe_tp"), ("all_gather", "cp")]
    if policy == "seed":
        assert seen[-21:] == sparse * 3
    else:
        pairs = [("all_to_all", "cp"), "exchange", ("dispatch", "moe_ep"), ("combine", "moe_ep"), "exchange"]
        assert [one[0] if one[0] == "exchange" else one for one in seen][-15:] == pairs * 3
    assert tuple(mapping.moe_ep_group) in ((0, 1, 2, 3), (4, 5, 6, 7))  # where dispatch and combine take place


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_what_ranks_made_of_their_parts_is_combined_alike(dtype, rows):
    """In shared memory and by the library, nine heads over all ranks, the first of which saw nothing of some rows."""
    mapping = mapping_of("helix", 1, 1, SIZE)
    group = Distributed.get(mapping).group("cp")
    shares = [range(9 * r // SIZE, 9 * (r + 1) // SIZE) for r in range(SIZE)]
    generator = torch.Generator().manual_seed(group.rank)
    o = torch.randn(rows, 9, 16, generator=generator).to(dtype)
    stats = torch.stack([torch.randn(rows, 9, generator=generator) * 20, torch.ones(rows, 9) * 3], -1)
    if group.rank == 0:
        o[:2], stats[:2, :, 0], stats[:2, :, 1] = float("nan"), float("-inf"), 0.0
    parts = [torch.stack(everyone) for everyone in zip(*Distributed.get(mapping).cp_allgather((o, stats)), strict=True)]
    own = shares[group.rank]
    truth = combine(parts[0][:, :, own.start : own.stop].double(), parts[1][:, :, own.start : own.stop])
    for by_library in (False, True):
        made = exchange(o, stats, shares, group, by_library)
        assert made.shape == (rows, len(own), 16) and made.dtype == dtype
        bound = truth.abs().amax(-1, keepdim=True) if rows else 1.0
        assert ((made.double() - truth).abs() <= bound * (1e-6 if dtype == torch.float32 else 2**-8)).all()


@pytest.mark.ranks(2)
def test_alltoall_helix_checks_its_inputs():
    group = Distributed.get(mapping_of("helix", 1, 1, 2)).group("cp")
    x = torch.arange(6.0).view(2, 3) + 10 * group.rank
    (made,) = alltoall_helix([x, x + 100], group)
    assert torch.equal(made, torch.stack([torch.arange(6.0).view(2, 3) + 10 * s + 100 * group.rank for s in range(2)]))
    for inputs, words in (([], "0 inputs"), ([x], "1 inputs for 2 ranks"), ([x, x[:1]], "must be equal")):
        with pytest.raises(InputError, match=words):
            alltoall_helix(inputs, group)


@pytest.mark.ranks(1)
def test_a_group_of_one_keeps_the_shape_rule():
    (made,) = alltoall_helix([torch.ones(2, 3)], Distributed.get(Mapping()).group("cp"))
    assert made.shape == (1, 2, 3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"cp_type": "ulysses", "tp": 1, "cp": 4, "attn_cp_size": 2}, "attn_cp_size must be 1 under ULYSSES"),
        ({"cp_type": "spiral", "tp": 1, "cp": 4}, "unknown cp_type 'spiral'"),
        ({"cp_type": "ulysses", "tp": 2, "cp": 2, "attn_dp_size": 2}, "ULYSSES with attn_dp_size 2"),
    ],
)
def test_what_cannot_be_is_one_line(layout, words):
    with pytest.raises(InputError, match=words) as error:
        Attention(AttentionConfig(64, 8, 2, 8), mapping_of(**layout), torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["ulysses", "helix"])
def test_too_few_heads_is_one_line(cp_type):
    with pytest.raises(InputError, match="3 attention heads cannot be split over 4 ranks"):
        Attention(AttentionConfig(24, 3, 1, 8), mapping_of(cp_type, 1, 1, 4), torch.float32)


@pytest.mark.ranks(2)
def test_a_block_of_nothing_is_one_line():
    config = {"cp_type": "helix", "tokens_per_block": 0}
    mapping = Mapping(2, mpi.world().rank, cp_size=2, cp_config=config)
    with pytest.raises(InputError, match="tokens_per_block must be a whole number above 0, but is 0"):
        Attention(AttentionConfig(64, 8, 2, 8), mapping, torch.float32)
