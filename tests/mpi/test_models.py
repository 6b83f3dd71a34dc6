"""Does every layout of every architecture compute what transformers computes?"""

from itertools import product

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.boundary.plan import Batch, Options, plan
from spmd.control import mpi
from spmd.control.pipeline import init_pp_comm
from spmd.control.record import recorder
from spmd.errors import InputError
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate
from spmd.models.weights import open_checkpoint
from spmd.nn.attention import Chunk
from tests import oracle

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2)], 5: [(5, 1)]}
SIZE = mpi.world().size if mpi.world().size in LAYOUTS else 1


@pytest.fixture(scope="module", autouse=True)
def made_oracle():
    if mpi.world().rank == 0:
        oracle.ensure()
    mpi.wait([mpi.world().Ibarrier()], timeout=600)


def compare(name, tp, pp, batch, microbatches=1, options=None, policy="cost", **layout):
    world = mpi.world()
    case, mapping = oracle.load(name), Mapping(tp * pp, world.rank, tp_size=tp, pp_size=pp, **layout)
    checkpoint = open_checkpoint(case.path)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32, options, policy)
        decoder.load(checkpoint)
    pipeline = init_pp_comm(mapping) if pp > 1 else None
    made = generate(
        decoder,
        case.prompts[:batch],
        Sampling(oracle.STEPS),
        pipeline=pipeline,
        microbatches=microbatches,
        keep_logits=True,
    )
    assert made.tokens == case.tokens[:batch]
    if mapping.is_last_pp_rank() and mapping.attn_tp_rank == 0:
        own = range(mapping.attn_dp_rank, batch, mapping.attn_dp_size)
        for prompt in own:
            logits = torch.stack(made.logits[prompt])
            assert logits.shape == case.logits[prompt].shape
            assert (logits - case.logits[prompt]).abs().max() <= 2e-4


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("tp,pp", LAYOUTS[SIZE])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "smollm2"])
def test_logits_and_tokens_equal_transformers(name, tp, pp, batch):
    compare(name, tp, pp, batch)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", [name for name in oracle.TINY if "-" in name])
def test_variants_equal_transformers(name):
    compare(name, mpi.world().size, 1, 5)


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("tp,pp", LAYOUTS[SIZE])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_equals_transformers(name, tp, pp):
    compare(name, tp, pp, 5)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("microbatches", [2, 3, 5, 9])
def test_microbatches_change_nothing(microbatches):
    size = mpi.world().size
    tp, pp = (2, 2) if size == 4 else (1, size)
    compare("llama", tp, pp, 5, microbatches)


SHARED = {  # attention DP: (tp, pp, attn_dp) of a world
    2: [(2, 1, 2)],
    3: [(3, 1, 3)],
    4: [(4, 1, 2), (4, 1, 4), (2, 2, 2)],
    6: [(6, 1, 2), (6, 1, 3)],
    8: [(8, 1, 4), (4, 2, 2)],
}


@pytest.mark.ranks(2, 3, 4, 6, 8)
@pytest.mark.parametrize("tp,pp,attn_dp", SHARED.get(mpi.world().size, []))
@pytest.mark.parametrize("batch", [1, 5])  # 1: all groups but one are idle all the time
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_attention_dp_equals_transformers(name, tp, pp, attn_dp, batch, policy):
    compare(name, tp, pp, batch, attn_dp_size=attn_dp, policy=policy)


VARIANTS = {
    "eager": Options(defer_mlp_sum=False),
    "input scattered": Options(input_scattered=True),
    "both": Options(defer_mlp_sum=False, input_scattered=True),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("shared", [False, True])
def test_options_of_a_plan_change_no_result(variant, policy, shared):
    size = mpi.world().size
    compare("qwen3", size, 1, 5, options=VARIANTS[variant], policy=policy, attn_dp_size=2 if shared else 1)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2-noq", "deepseek_v3"])
@pytest.mark.parametrize("shared", [1, 2])
def test_latents_of_scattered_inputs_equal_transformers(name, policy, shared):
    """Projections down on 1/tp of the rows, and only what is narrow is gathered."""
    size = mpi.world().size
    layout = {"attn_dp_size": shared if size % shared == 0 else 1}
    compare(name, size, 1, 5, options=Options(input_scattered=True), policy=policy, **layout)


@pytest.mark.ranks(4)
def test_latents_are_what_is_gathered():
    """A prefill by the fixed choices: before attention, of 12 rows on 4 ranks, 3 rows of queries' and keys' latents."""
    mapping = Mapping(4, mpi.world().rank, tp_size=4)
    _, _, traced = prefill("deepseek_v2", mapping, [list(range(40, 52))], Options(input_scattered=True), "seed")
    gathered = [nbytes for op, _, nbytes in traced if op == "all_gather"]
    assert gathered.count(3 * (24 + 20 + 8) * 4) == 4  # once a layer


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("padding", ["max_len", "sum_len", "auto"])
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("batch", [1, 5])
def test_padding_is_never_seen(padding, policy, batch, monkeypatch):
    """A checked run fills it with NaN; groups are uneven, and but for one idle with a batch of 1."""
    monkeypatch.setenv("SPMD_CHECK", "1")
    size = mpi.world().size
    layout = {"attn_dp_size": 2, "moe_ep_size": size}
    compare("qwen3_moe", size, 1, batch, options=Options(padding=padding), policy=policy, **layout)
    Distributed.get(Mapping(size, mpi.world().rank, tp_size=size, **layout)).close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["llama", "smollm2"])  # with and without a table of its own
def test_a_head_over_all_ranks_under_attention_dp(name):
    size = mpi.world().size
    compare(name, size, 1, 5, attn_dp_size=2, enable_lm_head_tp_in_adp=True)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


SPARSE = {"mixtral": 5, "qwen2_moe": 7, "qwen3_moe": 8, "deepseek_v2": 8, "deepseek_v3": 8}  # their experts


def expert_layouts(world):
    """(model, tp, pp, attn_dp, moe_tp, moe_cluster, all-to-all) of a world, all that are legal: for every model, and of
    6 and 8 ranks for one after the other."""
    found = []
    for pp in [1, 2] if world in (2, 4, 8) else [1]:
        tp = world // pp
        for attn_dp, moe_tp in product(divisors(tp), repeat=2):
            for cluster, a2a in product(divisors(tp // moe_tp), (False, True)):
                layout = (tp, pp, attn_dp, moe_tp, cluster, a2a)
                names = [name for name, experts in SPARSE.items() if experts >= tp // moe_tp // cluster]
                if planned(*layout):
                    found += [
                        (name, *layout) for name in (names if world < 6 else names[len(found) % len(names) :][:1])
                    ]
    return found


def planned(tp, pp, attn_dp, moe_tp, cluster, a2a):
    """Whether the plan exists: the views have a common refinement, or are not asked to have one."""
    mapping = Mapping(tp * pp, 0, tp_size=tp, pp_size=pp, attn_dp_size=attn_dp, moe_tp_size=moe_tp,
                      moe_cluster_size=cluster, moe_ep_size=tp // moe_tp // cluster)  # fmt: skip
    try:
        plan(mapping, ["moe"], Batch(8, 320), options=Options(a2a=a2a))
    except InputError:
        return False
    return True


@pytest.mark.ranks(1, 2, 3, 4, 6, 8)
@pytest.mark.parametrize("name,tp,pp,attn_dp,moe_tp,cluster,a2a", expert_layouts(mpi.world().size))
def test_experts_in_every_layout_equal_transformers(name, tp, pp, attn_dp, moe_tp, cluster, a2a):
    sizes = {"moe_tp_size": moe_tp, "moe_cluster_size": cluster, "moe_ep_size": tp // moe_tp // cluster}
    policy = "seed" if moe_tp > cluster else "cost"
    compare(name, tp, pp, 5, options=Options(a2a=a2a), policy=policy, attn_dp_size=attn_dp, **sizes)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_experts_in_the_memory_of_peers_equal_transformers(name):
    """Every rank attends to its own prompts and runs all experts, each of which one rank holds."""
    size = mpi.world().size
    for shared in {size, size // 2} - {1} if size % 2 == 0 else {size}:
        rank = mpi.world().rank % shared
        compare(name, size, 1, 5, attn_dp_size=size, dwdp_size=shared, dwdp_rank=rank)


def prefill(name, mapping, texts, options=None, policy="cost"):
    """Logits, and the hidden states that entered every layer, of this rank's prompts; what was traced on the way."""
    checkpoint = open_checkpoint(oracle.load(name).path)
    chunks = [Chunk(slot, 0, len(text)) for slot, text in enumerate(texts)]
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32, options, policy)
        decoder.load(checkpoint)
        hidden: list = []
        caches = decoder.new_caches(max(len(texts), 1), 256)
        logits = decoder(tokens, chunks, caches, hidden)
        recorder.reset()
        recorder.timeline = True
        decoder(tokens, chunks, caches)
        recorder.timeline = False
    return logits, hidden, [event[:3] for event in recorder.events if event[0] != "barrier"]


TOKENS = {  # of the attention groups; None: the group's rank has no prompt
    1: [(9,)],
    2: [(7, 5), (12, 0), (0, 12)],
    4: [(1, 3, 2, 0), (0, 0, 0, 5)],
    8: [tuple((97 * (i + 1)) // 8 - 97 * i // 8 for i in range(8)), (127, 128, 128, 128, 128, 128, 128, 128)],
}


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("counts", TOKENS.get(mpi.world().size, []), ids=str)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("a2a", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_hidden_states_and_logits_of_uneven_groups_equal_those_of_one_rank(name, counts, policy, a2a):
    size, rank = mpi.world().size, mpi.world().rank
    mapping = Mapping(size, rank, tp_size=size, attn_dp_size=size, moe_ep_size=size)
    texts = [[(7 * i + 13 * group) % 331 for i in range(count)] for group, count in enumerate(counts)]
    own = [texts[rank]] if texts[rank] else []
    logits, many, _ = prefill(name, mapping, own, Options(a2a=a2a), policy)
    assert len(many) == 4
    if own:
        wanted, alone, _ = prefill(name, Mapping(), own)
        assert (logits - wanted).abs().max() <= 5e-4
        for a, b in zip(many, alone, strict=True):
            assert a.shape == b.shape and (a - b).abs().max() <= 5e-4
    else:
        assert len(logits) == 0 and all(len(a) == 0 for a in many)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("a2a", [False, True])
def test_hidden_states_where_ranks_attend_together(policy, a2a):
    """Also where the plan keeps the residual cut."""
    size, rank = mpi.world().size, mpi.world().rank
    text = [list(range(40, 52))]
    mapping = Mapping(size, rank, tp_size=size, moe_ep_size=size)
    _, many, _ = prefill("qwen3_moe", mapping, text, Options(a2a=a2a), policy)
    _, alone, _ = prefill("qwen3_moe", Mapping(), text)
    assert all(a.shape == b.shape and (a - b).abs().max() <= 5e-4 for a, b in zip(many, alone, strict=True))


@pytest.mark.ranks(2)
def test_dense_to_experts_to_dense_as_seen_in_a_run():
    """Layers dense, sparse, dense, sparse by the fixed choices. Experts in place take and leave whole rows, as a dense
    MLP does; by all-to-all the reduce-scatter before them brings half of what the all-reduce in its place does."""
    mapping = Mapping(2, mpi.world().rank, tp_size=2, moe_ep_size=2)
    text, row_bytes = [list(range(40, 52))], 80 * 4
    whole, half = 12 * row_bytes, 6 * row_bytes
    sums = ("all_reduce", "tp", whole)
    _, _, in_place = prefill("qwen3_moe", mapping, text, policy="seed")
    assert in_place[: 1 + 8] == [sums] * 9  # the embedding, two a layer
    _, _, alltoall = prefill("qwen3_moe", mapping, text, Options(a2a=True), "seed")
    experts = [("reduce_scatter", "tp", whole), "dispatch", "combine", ("all_gather", "tp", half)]
    named = [event[0] if event[0] in experts else event for event in alltoall]
    residual = ("all_gather", "tp", half)  # it was cut for the experts, and the dense MLP wants it whole
    assert named[:14] == [sums, sums, sums, *experts, residual, sums, sums, *experts]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("a2a", [False, True])
def test_two_hosts_of_two_equal_transformers(policy, a2a, monkeypatch):
    """Rows between hosts go by the library."""
    monkeypatch.setenv("SPMD_NODES", "2x2")
    layout = {"attn_dp_size": 2, "moe_ep_size": 4, "gpus_per_node": 2}
    compare("qwen3_moe", 4, 1, 5, options=Options(a2a=a2a), policy=policy, **layout)
    Distributed.get(Mapping(4, mpi.world().rank, tp_size=4, **layout)).close()
