"""Is latent attention in its absorbed form what it is with keys and values, over a cache of nothing but latents?"""

from dataclasses import replace

import pytest
import torch

from spmd import Mapping
from spmd.collectives.overlap import made
from spmd.errors import InputError
from spmd.nn.attention import Chunk
from spmd.nn.mla import LatentAttention, LatentConfig, rotate
from spmd.nn.rotary import RopeConfig, Rotary, interleave

CONFIG = LatentConfig(30, 9, 14, 12, 6, 4, 5, scale=0.3, bias=True)
CONFIGS = {
    "a latent of the queries": CONFIG,
    "none": replace(CONFIG, q_lora_rank=None, bias=False),
    "values wider than keys": replace(CONFIG, v_head_dim=13),
}
ROTARY = Rotary(RopeConfig(4, 10000.0))


def stored(c, seed=0):
    """Whole tensors by their names in a checkpoint: weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden),
        "kv_a_layernorm": (c.kv_lora_rank,),
    }
    shapes["kv_b_proj"] = (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    shapes["o_proj"] = (c.hidden, c.num_heads * c.v_head_dim)
    if c.q_lora_rank is None:
        shapes["q_proj"] = (c.num_heads * c.head_dim, c.hidden)
    else:
        shapes |= {"q_a_proj": (c.q_lora_rank, c.hidden), "q_a_layernorm": (c.q_lora_rank,)}
        shapes["q_b_proj"] = (c.num_heads * c.head_dim, c.q_lora_rank)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    biased = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if c.bias and name in shapes]
    return weights, {name: torch.randn(shapes[name][0], generator=generator) for name in biased}


def layer(c, mapping=None, dtype=torch.float32):
    attention = LatentAttention(c, mapping or Mapping(), dtype)
    attention.load_shard(*stored(c))
    return attention


def inputs(count, seed=1):
    return torch.randn(count, CONFIG.hidden, generator=torch.Generator().manual_seed(seed))


def run(attention, x, chunks, cache):
    rotation = ROTARY.at(torch.cat([torch.arange(c.start, c.start + c.length) for c in chunks] or [torch.arange(0)]))
    return made(attention(x, rotation, chunks, cache))


def formula(c, x):
    """One sequence in fp64, head by head, from the stored tensors."""
    weights, biases = ({name: part.double() for name, part in of.items()} for of in stored(c))
    x, turn = x.double(), ROTARY.at(torch.arange(len(x)))

    def norm(rows, weight):
        return rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def product(rows, name):
        return rows @ weights[name].t() + biases.get(name, 0)

    queries = product(x, "q_proj") if c.q_lora_rank is None else product(
        norm(product(x, "q_a_proj"), weights["q_a_layernorm"]), "q_b_proj")  # fmt: skip
    rows = product(x, "kv_a_proj_with_mqa")
    latent, key = norm(rows[:, : c.kv_lora_rank], weights["kv_a_layernorm"]), rows[:, c.kv_lora_rank :]
    turned = torch.view_as_real(torch.view_as_complex(key.unflatten(1, (-1, 2)).contiguous()) * turn).flatten(1)
    outs = []
    for head in range(c.num_heads):
        query = queries[:, head * c.head_dim : (head + 1) * c.head_dim]
        nope, rest = query.split([c.qk_nope_head_dim, c.qk_rope_head_dim], 1)
        rest = torch.view_as_real(torch.view_as_complex(rest.unflatten(1, (-1, 2)).contiguous()) * turn).flatten(1)
        keys, values = (latent @ weights["kv_b_proj"].view(c.num_heads, -1, c.kv_lora_rank)[head].t()).split(
            [c.qk_nope_head_dim, c.v_head_dim], 1
        )
        scores = (nope @ keys.t() + rest @ turned.t()) * c.scale
        outs.append(scores.masked_fill(torch.ones(scores.shape).triu(1).bool(), float("-inf")).softmax(-1) @ values)
    return product(torch.cat(outs, 1), "o_proj")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [[11], [1] * 11, [6, 5], [1, 10], [4, 1, 6]], ids=str)
def test_a_sequence_in_chunks_is_the_formula(name, cuts):
    attention, x = layer(CONFIGS[name]), inputs(11)
    cache, at, outs = attention.new_cache(1, 11, torch.float32), 0, []
    for length in cuts:
        outs.append(run(attention, x[at : at + length], [Chunk(0, at, length)], cache))
        at += length
    wanted = formula(CONFIGS[name], x).float()
    assert (torch.cat(outs) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_absorbed_form_equals_the_expanded_form(name):
    attention, x, c = layer(CONFIGS[name]), inputs(7), CONFIGS[name]
    queries, rows = attention.project(x, ROTARY.at(torch.arange(7)))
    absorbed, cache = attention.absorb(queries), attention.new_cache(1, 7, torch.float32)
    assert rows.shape == (7, c.kv_lora_rank + 4) and absorbed.shape == (7, 9, c.kv_lora_rank + 4)
    cache[0, 0:7].copy_(rows)
    o = attention.absorbed(absorbed, Chunk(0, 0, 7), cache)
    assert o.shape == (7, 9, c.kv_lora_rank)
    wanted = attention.expanded(queries, rows)
    assert (attention.finish(o) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(1, 0, 5), Chunk(0, 0, 3)],
        [Chunk(0, 4, 1), Chunk(1, 6, 1), Chunk(2, 2, 1)],
        [Chunk(0, 4, 3), Chunk(2, 0, 1), Chunk(1, 0, 6)],
        [],
    ],
    ids=str,
)
def test_sequences_together_are_each_alone(chunks):
    attention = layer(CONFIG)
    texts = {slot: inputs(12, seed=5 + slot) for slot in range(3)}
    cache, outs = attention.new_cache(3, 12, torch.float32), []
    for chunk in chunks:
        if chunk.start:
            run(attention, texts[chunk.slot][: chunk.start], [Chunk(chunk.slot, 0, chunk.start)], cache)
        whole = formula(CONFIG, texts[chunk.slot][: chunk.start + chunk.length]).float()
        outs.append(whole[chunk.start :])
    x = torch.cat([inputs(0), *(texts[c.slot][c.start : c.start + c.length] for c in chunks)])
    made_, wanted = run(attention, x, chunks, cache), torch.cat([torch.empty(0, CONFIG.hidden), *outs])
    assert made_.shape == wanted.shape
    assert torch.allclose(made_, wanted, rtol=0, atol=2e-5 * (wanted.abs().max().item() if len(wanted) else 1))


def test_a_position_again_takes_the_place_of_what_was_there():
    """Tokens that were tried and dropped, or another sequence in the slot, leave nothing."""
    attention, x = layer(CONFIG), inputs(9)
    cache = attention.new_cache(1, 9, torch.float32)
    run(attention, inputs(9, seed=8), [Chunk(0, 0, 9)], cache)
    run(attention, x[:6], [Chunk(0, 0, 6)], cache)
    run(attention, inputs(3, seed=9), [Chunk(0, 6, 3)], cache)
    again = run(attention, x[6:8], [Chunk(0, 6, 2)], cache)
    assert torch.allclose(again, formula(CONFIG, x[:8])[6:].float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_of_all_ranks_add_up(size, name):
    """Nine heads over ranks; a bias enters once; every rank caches the same rows."""
    x, c = inputs(6), CONFIGS[name]
    total, caches = torch.zeros(6, c.hidden), []
    for rank in range(size):
        attention = layer(c, Mapping(size, rank, tp_size=size))
        cache = attention.new_cache(1, 6, torch.float32)
        head = run(attention, x[:4], [Chunk(0, 0, 4)], cache)
        tail = torch.cat([run(attention, x[at : at + 1], [Chunk(0, at, 1)], cache) for at in (4, 5)])
        total += torch.cat([head, tail])
        caches.append(cache[0, 0:6])
    wanted = formula(c, x).float()
    assert (total - wanted).abs().max() <= 3e-5 * wanted.abs().max()
    assert all(torch.equal(rows, caches[0]) for rows in caches)


def test_rotary_pairs_stored_as_halves_are_reordered():
    c = replace(CONFIG, rope_interleave=False)
    weights, biases = stored(c)
    apart, beside = layer(c), layer(CONFIG)
    queries = weights["q_b_proj"].view(c.num_heads, c.head_dim, -1)
    queries[:, -4:] = torch.stack([interleave(head, 4) for head in queries[:, -4:]])
    for part in (weights["kv_a_proj_with_mqa"], biases["kv_a_proj_with_mqa"]):
        part[-4:] = interleave(part[-4:], 4)
    beside.load_shard(weights, biases)
    x, chunks = inputs(5), [Chunk(0, 0, 5)]
    made_, wanted = (run(each, x, chunks, each.new_cache(1, 5, torch.float32)) for each in (apart, beside))
    assert torch.equal(made_, wanted)
    assert not torch.allclose(made_, run(layer(CONFIG), x, chunks, apart.new_cache(1, 5, torch.float32)))


def test_the_scale_is_the_scores():
    x, chunks = inputs(5), [Chunk(0, 0, 5)]
    one = layer(replace(CONFIG, scale=0.7))
    wanted = formula(replace(CONFIG, scale=0.7), x).float()
    assert torch.allclose(run(one, x, chunks, one.new_cache(1, 5, torch.float32)), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_the_cache_holds_a_latent_and_a_rotary_key_a_token(dtype, size):
    attention = LatentAttention(CONFIG, Mapping(size, 0, tp_size=size), dtype)
    attention.load_shard(*stored(CONFIG))
    cache = attention.new_cache(2, 8, dtype)
    assert cache[1, 0:8].shape == (8, 12 + 4) and cache[1, 0:8].dtype == dtype
    x = inputs(3).to(dtype)
    out = run(attention, x, [Chunk(1, 0, 3)], cache)
    assert out.dtype == dtype and out.isfinite().all()
    _, rows = attention.project(x, ROTARY.at(torch.arange(3)))
    assert torch.equal(cache[1, 0:3], rows)


def test_bf16_is_close_in_both_forms():
    x, attention = inputs(12).bfloat16(), layer(CONFIG, dtype=torch.bfloat16)
    wanted = formula(CONFIG, x).float()
    cache = attention.new_cache(1, 12, torch.bfloat16)
    whole = run(attention, x, [Chunk(0, 0, 12)], cache).float()
    last = run(attention, x[11:], [Chunk(0, 11, 1)], cache).float()
    largest = wanted.abs().max()
    assert (whole - wanted).abs().max() <= 0.05 * largest and (last - wanted[11:]).abs().max() <= 0.05 * largest


def test_rotation_turns_adjacent_pairs():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    quarter = torch.polar(torch.ones(1, 2), torch.tensor([[torch.pi / 2, torch.pi]]))
    assert torch.allclose(rotate(x, quarter), torch.tensor([[[0.0, 1.0, 0.0, -2.0]]]), atol=1e-6)


def test_a_full_cache_is_one_line():
    attention = layer(CONFIG)
    cache = attention.new_cache(1, 4, torch.float32)
    for chunk in (Chunk(0, 0, 5), Chunk(0, 4, 1)):
        with pytest.raises(InputError, match="sequence of 5 tokens in a KV cache of 4: raise max_length"):
            run(attention, inputs(chunk.length), [chunk], cache)


def test_more_ranks_than_heads_is_one_line():
    with pytest.raises(InputError, match="9 attention heads cannot be split over 10") as error:
        LatentAttention(CONFIG, Mapping(10, 0, tp_size=10), torch.float32)
    assert "\n" not in str(error.value)
