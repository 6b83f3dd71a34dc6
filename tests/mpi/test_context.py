"""Sequences cut over ranks: does every way of context parallelism compute what transformers computes?"""

import pytest
import torch

from spmd import Mapping
from spmd.control import mpi
from spmd.control.pipeline import init_pp_comm
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate, leads
from spmd.models.weights import open_checkpoint
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


SIZES = {2: [(1, 1, 2)], 3: [(1, 1, 3)], 4: [(1, 1, 4), (2, 1, 2), (1, 2, 2)], 8: [(2, 1, 4), (2, 2, 2)]}  # tp, pp, cp


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.parametrize("tp,pp,cp", SIZES.get(SIZE, []))
@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("name", ["context-llama-8-2", "context-llama-9-3", "context-qwen3", "context-window"])
def test_every_way_equals_transformers(name, cp_type, tp, pp, cp):
    compare(name, mapping_of(cp_type, tp, pp, cp))
