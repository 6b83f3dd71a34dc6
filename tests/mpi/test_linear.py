"""Do cut layers give the whole layer's result on every rank, for uneven cuts too?"""

import pytest
import torch

from spmd import Linear, Mapping, TensorParallelMode
from spmd.control import mpi
from spmd.nn.embedding import VocabParallelEmbedding

SIZE, RANK = mpi.world().size, mpi.world().rank
MAPPING = Mapping(SIZE, RANK, tp_size=SIZE)
WEIGHT = torch.arange(13 * 11, dtype=torch.float32).reshape(13, 11)  # integers: exact in any order of summation
BIAS = 1000.0 * torch.arange(13)
X = torch.arange(22, dtype=torch.float32).reshape(2, 11)
EXPECTED = X @ WEIGHT.T + BIAS


@pytest.mark.parametrize("bias", [True, False])
def test_row_sum_on_every_rank(bias):
    layer = Linear(11, 13, bias, mapping=MAPPING, tensor_parallel_mode=TensorParallelMode.ROW)
    layer.load_shard(WEIGHT, BIAS if bias else None)
    mine = X[:, layer.own[0].start : layer.own[0].stop]
    assert torch.equal(layer(mine), EXPECTED if bias else X @ WEIGHT.T)


def test_column_gathered_with_its_sizes():
    layer = Linear(11, 13, mapping=MAPPING, tensor_parallel_mode=TensorParallelMode.COLUMN, gather_output=True)
    layer.load_shard(WEIGHT, BIAS)
    assert torch.equal(layer(X), EXPECTED)


@pytest.mark.parametrize("ids", [[0, 12, 5, 5], list(range(13)), []])
def test_embedding_and_head_over_a_cut_vocabulary(ids):
    layer = VocabParallelEmbedding(13, 11, torch.float32, MAPPING)
    layer.load_shard(WEIGHT)
    assert torch.equal(layer(torch.tensor(ids, dtype=torch.int64)), WEIGHT[ids])
    assert torch.equal(layer.logits(X), X @ WEIGHT.T)
