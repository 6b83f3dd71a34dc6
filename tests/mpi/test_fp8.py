"""Does every rank of an FP8 checkpoint hold, and compute, bit for bit what it does of the same one dequantised?"""

import pytest
import torch

from spmd import Mapping
from spmd.control import mpi, objects
from spmd.control.pipeline import init_pp_comm
from spmd.models.decoder import Decoder
from spmd.models.generate import Sampling, generate
from spmd.models.weights import open_checkpoint
from tests import tiny

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1)]}.get(mpi.world().size, [])
SIZES = {"ragged": tiny.RAGGED, "whole": tiny.WHOLE}
PROMPTS = [[5], [7, 200, 2], list(range(40, 52))]


def loaded(path, mapping, dtype):
    """A decoder and its matrices and vectors, by name."""
    checkpoint = open_checkpoint(path)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, dtype)
        decoder.load(checkpoint)
    held = {"embed": decoder.embed, "head": decoder.head, "norm": decoder.norm if decoder.last else None}
    for layer in decoder.layers:
        held |= {f"{layer.index} attn_norm": layer.attn_norm, f"{layer.index} mlp_norm": layer.mlp_norm}
        held |= {f"{layer.index} qkv": layer.attention.qkv_proj, f"{layer.index} o": layer.attention.o_proj}
        held |= {f"{layer.index} gate_up": layer.mlp.gate_up_proj, f"{layer.index} down": layer.mlp.down_proj}
    return decoder, {name: part.weight for name, part in held.items() if part is not None}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("tp,pp", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", tiny.FP8)
def test_weights_and_logits_equal_those_of_the_checkpoint_dequantised(tmp_path, form, sizes, dtype, tp, pp):
    mapping = Mapping(tp * pp, mpi.world().rank, tp_size=tp, pp_size=pp)
    twins = tiny.save_fp8(tmp_path / "model", form, **SIZES[sizes])
    decoder, weights = loaded(tmp_path / "model", mapping, dtype)
    twin, expected = loaded(twins[dtype], mapping, dtype)
    assert weights.keys() == expected.keys()
    differ = [name for name in weights if not torch.equal(weights[name], expected[name])]
    assert objects.allgather(mpi.world(), differ) == [[]] * mpi.world().size  # all ranks end here or none
    pipeline = init_pp_comm(mapping) if pp > 1 else None
    made, right = (
        generate(model, PROMPTS, Sampling(4), pipeline=pipeline, keep_logits=True) for model in (decoder, twin)
    )
    assert made.tokens == right.tokens
    if mapping.is_last_pp_rank() and mapping.tp_rank == 0:
        logits, rows = (torch.stack([torch.stack(steps) for steps in run.logits]) for run in (made, right))
        assert logits.isfinite().all() and torch.equal(logits, rows)
