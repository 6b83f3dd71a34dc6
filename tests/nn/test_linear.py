"""Is a linear layer cut as its mode says, its bias counted once, and every wrong use refused?"""

import pytest
import torch

from spmd import AllReduceParams, Linear, Mapping, TensorParallelMode
from spmd.errors import InputError

COLUMN, ROW = TensorParallelMode.COLUMN, TensorParallelMode.ROW


def ranks(size):
    return [Mapping(size, rank, tp_size=size) for rank in range(size)]


def whole(out_features, in_features):
    return torch.arange(out_features * in_features, dtype=torch.float32).reshape(out_features, in_features)


def test_split_dim_and_flip():
    assert (TensorParallelMode.split_dim(COLUMN), TensorParallelMode.split_dim(ROW)) == (0, 1)
    assert (TensorParallelMode.flip(COLUMN), TensorParallelMode.flip(ROW)) == (ROW, COLUMN)
    assert (COLUMN, ROW) == ("column", "row")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_column_shards_are_rows_of_the_weight(size):
    weight, bias = whole(7, 4), torch.arange(7.0)
    layers = [Linear(4, 7, mapping=m, tensor_parallel_mode=COLUMN) for m in ranks(size)]
    for layer in layers:
        layer.load_shard(weight, bias)
    assert torch.equal(torch.cat([layer.weight for layer in layers]), weight)
    assert torch.equal(torch.cat([layer.bias for layer in layers]), bias)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_row_parts_sum_to_the_product_with_one_bias(size):
    weight, bias, x = whole(3, 7), torch.tensor([1000.0, 2000.0, 3000.0]), torch.ones(2, 7)
    total = torch.zeros(2, 3)
    for mapping in ranks(size):
        layer = Linear(7, 3, mapping=mapping, tensor_parallel_mode=ROW, reduce_output=False)
        layer.load_shard(weight, bias)
        total += layer(x[:, layer.own[0].start : layer.own[0].stop])
    assert torch.equal(total, x @ weight.T + bias)


def test_an_unfinished_sum_has_the_bias_on_rank_0_alone():
    for mapping in ranks(3):
        layer = Linear(6, 2, mapping=mapping, tensor_parallel_mode=ROW)
        layer.load_shard(torch.zeros(2, 6), torch.tensor([5.0, 7.0]))
        out = layer(torch.ones(1, 2), all_reduce_params=AllReduceParams(enable_allreduce=False))
        assert out.tolist() == ([[5.0, 7.0]] if mapping.tp_rank == 0 else [[0.0, 0.0]])


def test_a_fused_layer_holds_its_parts_one_after_the_other():
    q, kv = whole(6, 2), 100 + whole(3, 2)
    layer = Linear(2, 9, bias=False, mapping=ranks(2)[1], tensor_parallel_mode=COLUMN, own=[range(3, 6), range(1, 3)])
    layer.load_shard([q, kv])
    assert torch.equal(layer.weight, torch.cat([q[3:6], kv[1:3]]))


@pytest.mark.parametrize("mode", [COLUMN, ROW, None])
@pytest.mark.parametrize("size", [1, 3])
def test_lora_is_added_on_top_of_its_layer_only(mode, size):
    torch.manual_seed(0)
    weight, a, b, x = (torch.randn(*shape) for shape in ((5, 6), (2, 6), (5, 2), (4, 6)))
    expected, outs = x @ (weight + 0.5 * b @ a).T, []
    for mapping in ranks(size):
        layer = Linear(6, 5, bias=False, mapping=mapping, tensor_parallel_mode=mode, reduce_output=False)
        layer.load_shard(weight)
        mine = x[:, layer.own[0].start : layer.own[0].stop] if mode == ROW else x
        adapters = {3: layer.shard_lora(a, b, 0.5)}
        out = layer(mine, lora_params=adapters, layer_idx=3)
        assert torch.equal(layer(mine, lora_params=adapters, layer_idx=4), layer(mine))
        outs.append(out)
    result = sum(outs) if mode == ROW else torch.cat(outs, -1) if mode == COLUMN else outs[0]
    torch.testing.assert_close(result, expected)


def test_leading_dimensions_are_kept():
    layer = Linear(4, 3)
    layer.load_shard(whole(3, 4), torch.zeros(3))
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(layer(x), x @ whole(3, 4).T)


def test_fewer_features_than_ranks_is_refused():
    with pytest.raises(InputError, match="2 features cannot be split over 3 ranks"):
        Linear(4, 2, mapping=ranks(3)[0], tensor_parallel_mode=COLUMN)


def test_gathering_own_ranges_needs_sizes():
    with pytest.raises(InputError, match="needs sizes"):
        Linear(4, 6, mapping=ranks(2)[0], tensor_parallel_mode=COLUMN, gather_output=True, own=[range(4)])


def test_tensors_that_do_not_fit_are_refused():
    layer = Linear(4, 4, bias=False, mapping=ranks(2)[1], tensor_parallel_mode=COLUMN)
    for stored in (torch.ones(1, 4), torch.ones(4, 3), torch.ones(2, 4)):
        with pytest.raises(InputError, match="is needed, but"):
            layer.load_shard(stored)
    with pytest.raises(InputError, match="takes 4 features"):
        layer(torch.ones(2, 5))
    with pytest.raises(InputError, match="need layer_idx"):
        layer(torch.ones(2, 4), lora_params={})
