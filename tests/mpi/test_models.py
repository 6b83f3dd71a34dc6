"""Does every layout of every architecture compute what transformers computes?"""

import pytest
import torch

from spmd import Mapping
from spmd.control import mpi
from spmd.control.pipeline import init_pp_comm
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate
from spmd.models.weights import open_checkpoint
from tests import oracle

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2)], 5: [(5, 1)]}
SIZE = mpi.world().size if mpi.world().size in LAYOUTS else 1


@pytest.fixture(scope="module", autouse=True)
def made_oracle():
    if mpi.world().rank == 0:
        oracle.ensure()
    mpi.wait([mpi.world().Ibarrier()], timeout=600)


def compare(name, tp, pp, batch, microbatches=1):
    world = mpi.world()
    case, mapping = oracle.load(name), Mapping(tp * pp, world.rank, tp_size=tp, pp_size=pp)
    checkpoint = open_checkpoint(case.path)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32)
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
    if mapping.is_last_pp_rank() and mapping.tp_rank == 0:
        logits = torch.stack([torch.stack(rows) for rows in made.logits])
        assert logits.shape == case.logits[:batch].shape
        assert (logits - case.logits[:batch]).abs().max() <= 2e-4


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
