"""Sequences cut over ranks: does every way of context parallelism compute what transformers computes?"""

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.boundary.plan import Options
from spmd.collectives.costs import Costs
from spmd.context import ring
from spmd.context.helix import alltoall_helix, exchange
from spmd.context.softmax import combine
from spmd.control import mpi
from spmd.control.pipeline import init_pp_comm
from spmd.control.record import recorder
from spmd.errors import InputError
from spmd.memory.workspace import Workspace
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate, leads
from spmd.models.weights import open_checkpoint
from spmd.nn.attention import Attention, AttentionConfig, Chunk
from spmd.topology.split import split
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
SIZES = {2: [(1, 1, 2)], 3: [(1, 1, 3)], 4: [(1, 1, 4), (2, 1, 2), (1, 2, 2)]}  # tp, pp, cp
SIZES |= {6: [(2, 1, 3), (1, 2, 3)], 8: [(2, 1, 4), (2, 2, 2)]}


@pytest.mark.ranks(2, 3, 4, 6, 8)
@pytest.mark.parametrize("tp,pp,cp", SIZES.get(SIZE, []))
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("name", NAMES)
def test_every_way_equals_transformers(name, cp_type, tp, pp, cp):
    compare(name, mapping_of(cp_type, tp, pp, cp), steps=oracle.MANY if tp * pp == 1 else 12)


RESPLIT = {4: [(1, 4, 2, 2)], 8: [(1, 8, 2, 4), (1, 8, 4, 2)]}  # tp, cp, attn_tp, attn_cp


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("tp,cp,attn_tp,attn_cp", RESPLIT.get(SIZE, []))
@pytest.mark.parametrize("cp_type", ["helix", "ring"])
@pytest.mark.parametrize("name", ["context-llama-8-2", "context-deepseek_v3"])
def test_attention_splits_its_ranks_as_it_likes(name, cp_type, tp, cp, attn_tp, attn_cp):
    mapping = mapping_of(cp_type, tp, 1, cp, attn_tp_size=attn_tp, attn_cp_size=attn_cp)
    compare(name, mapping, steps=12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["helix", "ring"])
@pytest.mark.parametrize("name", ["context-llama-8-2", "context-deepseek_v2"])
def test_decode_context_parallelism_inside_tp(name, cp_type):
    """attn_cp of a mapping without cp: heads stay together where there are too few for tp."""
    compare(name, mapping_of(cp_type, 4, 1, 1, attn_tp_size=2, attn_cp_size=2), steps=12)


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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("padding", ["max_len", "sum_len", "auto"])
@pytest.mark.parametrize("prompts", [[3, 0, 9, 4], [2]], ids=["some", "one"])
def test_padding_is_never_seen(cp_type, padding, prompts):
    """A checked run fills it with NaN; ranks hold other numbers of tokens, and one group of two may hold none."""
    mapping = mapping_of(cp_type, 2, 1, 2, moe_ep_size=2, **({} if cp_type == "ulysses" else {"attn_dp_size": 2}))
    compare("context-moe", mapping, prompts, steps=6, options=Options(padding=padding))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("tile", [1, 5, 16])
@pytest.mark.parametrize("name", ["context-llama-9-3", "context-window"])
def test_keys_and_values_go_round_in_tiles(name, tile, monkeypatch):
    """Pieces of many tiles, of some ranks more than of others; windows longer and shorter than a tile."""
    monkeypatch.setattr(ring, "TILE", tile)
    compare(name, mapping_of("ring", cp=SIZE), steps=2)


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


@pytest.fixture
def group():
    dist = Distributed.get(mapping_of("helix", cp=SIZE))
    yield dist.along("attn_cp")
    dist.close()


def partials(rank, rows, heads, width, dtype, seed=0):
    """What a rank makes of its part of the sequence; of some rows it saw nothing, and then o is not to be read."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    o = torch.randn(rows, heads, width, generator=generator)
    largest = torch.randn(rows, heads, generator=generator) * (1e4 if seed % 2 else 3.0)
    sums = torch.rand(rows, heads, generator=generator) * 50 + 1
    nothing = torch.rand(rows, heads, generator=generator) < 0.3
    nothing[rank % 2 :: 5] = True  # a whole row; every tenth is seen by nobody
    o[nothing], largest[nothing], sums[nothing] = float("nan"), float("-inf"), 0.0
    return o.to(dtype), torch.stack([largest, sums], -1)


TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.ranks(2, 3, 4, 5, 8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [SIZE, 9, 37])
def test_what_ranks_made_of_their_parts_is_combined(group, dtype, heads):
    """In shared memory and by the library, of uneven heads, of rows from none to many, against all of it in fp64."""
    shares = [split(heads, SIZE, rank) for rank in range(SIZE)]
    own = shares[group.rank]
    for seed, rows in enumerate((3, 0, 1, 200, 1, 12, 0, 20)):
        every = [partials(rank, rows, heads, 20, dtype, seed) for rank in range(SIZE)]
        o, stats = (torch.stack([part[i] for part in every])[:, :, own.start : own.stop] for i in (0, 1))
        truth = combine(o.double(), stats.double())
        native, library = (exchange(*map(torch.clone, every[group.rank]), shares, group, way) for way in (False, True))
        largest = o.double().nan_to_num(0.0).abs().amax((0, 3)).unsqueeze(-1) if rows else 0.0
        for made in (native, library):
            assert made.shape == (rows, len(own), 20) and made.dtype == dtype
            assert ((made.double() - truth).abs() <= TOLERANCE[dtype] * largest).all()
        assert torch.equal(native == 0, library == 0)


@pytest.mark.ranks(2, 4)
def test_partials_may_be_overwritten_right_after_the_exchange(group):
    shares = [split(9, SIZE, rank) for rank in range(SIZE)]
    o, stats = partials(group.rank, 30, 9, 16, torch.float32)
    wanted = exchange(o, stats, shares, group, True)
    for _ in range(20):
        mine = o.clone(), stats.clone()
        made = exchange(*mine, shares, group)
        mine[0].fill_(7.0)
        mine[1].fill_(7.0)
        assert torch.allclose(made, wanted, atol=1e-6)


@pytest.mark.ranks(2, 3)
def test_partials_that_do_not_fit_shared_memory_go_by_the_library(group, monkeypatch):
    shares = [split(9, SIZE, rank) for rank in range(SIZE)]
    o, stats = partials(group.rank, 50, 9, 16, torch.float32)
    wanted = exchange(o, stats, shares, group, True)
    monkeypatch.setattr(Workspace.of(group), "lend", lambda shape, dtype: None)
    assert torch.equal(exchange(o, stats, shares, group), wanted)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("rows", [0, 5])
def test_several_all_to_alls_at_once(group, blocks, rows):
    """Of every block, this rank gets what the others put at its place; blocks may differ in shape and type."""
    types = (torch.float32, torch.bfloat16, torch.float32)
    inputs = [
        torch.full((rows, 2, block + 1), 100 * block + 10 * group.rank + to, dtype=types[block])
        for block in range(blocks)
        for to in range(SIZE)
    ]
    outs = alltoall_helix(inputs, group)
    assert len(outs) == blocks
    for block, out in enumerate(outs):
        assert out.shape == (SIZE, rows, 2, block + 1) and out.dtype == types[block]
        for source in range(SIZE):
            assert (out[source] == torch.tensor(100 * block + 10 * source + group.rank, dtype=out.dtype)).all()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "inputs,message",
    [
        (lambda n: [], f"0 inputs for {SIZE} ranks: needs a multiple, one for each rank"),
        (lambda n: [torch.zeros(3)] * (2 * n + 1), f"{2 * SIZE + 1} inputs for {SIZE} ranks"),
        (lambda n: [torch.zeros(3)] * (2 * n - 1) + [torch.zeros(4)], r"fp32\[3\], fp32\[4\]: they must be equal"),
        (lambda n: [torch.zeros(3)] * n + [torch.zeros(3).half()] + [torch.zeros(3)] * (n - 1), r"fp16\[3\]"),
    ],
    ids=["none", "no multiple", "shapes", "types"],
)
def test_inputs_that_no_all_to_all_can_take(group, inputs, message):
    given = inputs(SIZE)
    if SIZE == 1 and given:
        assert len(alltoall_helix(given, group)) == len(given)  # each is a block of its own
        return
    with pytest.raises(InputError, match=message) as raised:
        alltoall_helix(given, group)
    assert "\n" not in str(raised.value)


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
