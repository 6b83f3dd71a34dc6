"""Does every layout of every architecture compute what transformers computes?"""

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.boundary.plan import Batch, Options, plan
from spmd.control import mpi
from spmd.control.pipeline import init_pp_comm
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
def test_attention_dp_equals_transformers(tp, pp, attn_dp, batch, policy):
    compare("qwen3", tp, pp, batch, attn_dp_size=attn_dp, policy=policy)


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


def expert_layouts(world):
    """(tp, pp, attn_dp, moe_tp, moe_cluster, all-to-all) of a world: all that are legal, of larger worlds some."""
    found = []
    for pp in [1, 2] if world in (2, 4, 8) else [1]:
        tp = world // pp
        for attn_dp in divisors(tp):
            for moe_tp in divisors(tp):
                for cluster in divisors(tp // moe_tp):
                    found += [(tp, pp, attn_dp, moe_tp, cluster, a2a) for a2a in (False, True)]
    found = [layout for layout in found if fits(*layout)]
    return found if world < 6 else found[:: max(len(found) // 8, 1)]


def fits(tp, pp, attn_dp, moe_tp, cluster, a2a):
    """Whether the plan exists: the views have a common refinement, or are not asked to have one."""
    mapping = Mapping(tp * pp, 0, tp_size=tp, pp_size=pp, attn_dp_size=attn_dp, moe_tp_size=moe_tp,
                      moe_cluster_size=cluster, moe_ep_size=tp // moe_tp // cluster)  # fmt: skip
    try:
        plan(mapping, ["moe"], Batch(8, 320), options=Options(a2a=a2a))
    except InputError:
        return False
    return mapping.moe_ep_size <= 5


@pytest.mark.ranks(1, 2, 3, 4, 6, 8)
@pytest.mark.parametrize("tp,pp,attn_dp,moe_tp,cluster,a2a", expert_layouts(mpi.world().size))
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_in_every_layout_equal_transformers(name, tp, pp, attn_dp, moe_tp, cluster, a2a):
    sizes = {"moe_tp_size": moe_tp, "moe_cluster_size": cluster, "moe_ep_size": tp // moe_tp // cluster}
    policy = "seed" if moe_tp > cluster else "cost"
    compare(name, tp, pp, 5, options=Options(a2a=a2a), policy=policy, attn_dp_size=attn_dp, **sizes)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_in_the_memory_of_peers_equal_transformers(name):
    """Every rank attends to its own prompts and runs all experts, each of which one rank holds."""
    size = mpi.world().size
    for shared in {size, size // 2} - {1} if size % 2 == 0 else {size}:
        rank = mpi.world().rank % shared
        compare(name, size, 1, 5, attn_dp_size=size, dwdp_size=shared, dwdp_rank=rank)


def captured(name, mapping, chunks, texts, options=None, policy="cost"):
    """The hidden states that entered every layer for a prefill, and copies made at once."""
    checkpoint = open_checkpoint(oracle.load(name).path)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32, options, policy)
        decoder.load(checkpoint)
        kept: list = []
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        decoder(tokens, chunks, decoder.new_caches(max(len(texts), 1), 64), kept)
    return kept


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("a2a", [False, True])
def test_hidden_states_of_every_layer_equal_those_of_one_rank(policy, shared, a2a):
    """Also where the plan keeps the residual cut, and for a group with nothing to do."""
    size, rank = mpi.world().size, mpi.world().rank
    mapping = Mapping(size, rank, tp_size=size, attn_dp_size=shared, moe_ep_size=size)
    texts = [list(range(40, 52))]
    own = texts if mapping.attn_dp_rank == 0 else []
    chunks = [Chunk(0, 0, 12)]
    many = captured("qwen3_moe", mapping, chunks[: len(own)], own, Options(a2a=a2a), policy)
    alone = captured("qwen3_moe", Mapping(), chunks, texts)
    assert len(many) == len(alone) == 4
    for a, b in zip(many, alone, strict=True):
        if own:
            assert a.shape == b.shape and (a - b).abs().max() <= 2e-4
        else:
            assert a.shape == (0, b.shape[1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("a2a", [False, True])
def test_two_hosts_of_two_equal_transformers(policy, a2a, monkeypatch):
    """Rows between hosts go by the library."""
    monkeypatch.setenv("SPMD_NODES", "2x2")
    layout = {"attn_dp_size": 2, "moe_ep_size": 4, "gpus_per_node": 2}
    compare("qwen3_moe", 4, 1, 5, options=Options(a2a=a2a), policy=policy, **layout)
    Distributed.get(Mapping(4, mpi.world().rank, tp_size=4, **layout)).close()
