"""Which tokens, heads and positions of the cache has a rank? All ranks of a layout, looked at from one process."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd import Mapping, context
from spmd.context.base import Chunk, SequenceCache, cut, held
from spmd.context.helix import BLOCK
from spmd.context.softmax import visible
from spmd.errors import InputError
from spmd.nn.attention import Attention, AttentionConfig, KvCache


def ranks(cp_type, tp=1, cp=1, heads=16, block=None, **sizes):
    """The way of every rank, in order."""
    config = {"cp_type": cp_type} | ({"tokens_per_block": block} if block else {})
    mapping = Mapping(tp * cp, 0, tp_size=tp, cp_size=cp, cp_config=config, **sizes)
    return [context.of(mapping.with_rank(rank), heads) for rank in range(tp * cp)]


lengths = st.integers(0, 300)
counts = st.integers(2, 8)


# ---------------------------------------------------------------------- tokens


@given(lengths, counts, st.sampled_from(["ring", "ulysses"]))
def test_every_token_is_on_one_rank(length, cp, cp_type):
    for rank, one in enumerate(way := ranks(cp_type, cp=cp)):
        assert all(one.pieces(length, other) == way[other].pieces(length) for other in range(cp))
        pieces = one.pieces(length)
        assert all(a.stop <= b.start for a, b in pairwise(pieces)), rank
    owners = Counter(token for one in way for piece in one.pieces(length) for token in piece)
    assert owners == Counter(range(length))


@given(lengths, counts)
def test_ring_gives_a_rank_a_piece_from_either_end(length, cp):
    """Zigzag: pieces c and 2 cp - 1 - c of 2 cp, whose lengths differ by one at most."""
    way = ranks("ring", cp=cp)
    ordered = [one.pieces(length)[0] for one in way] + [one.pieces(length)[1] for one in reversed(way)]
    assert [token for piece in ordered for token in piece] == list(range(length))
    assert max(map(len, ordered)) - min(map(len, ordered)) <= 1


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [16384, 10007])
def test_rings_causal_work_is_balanced(cp, length):
    """Keys that the queries of a rank see: within a hundredth of what every other rank has to do."""
    work = [sum(token + 1 for piece in one.pieces(length) for token in piece) for one in ranks("ring", cp=cp)]
    assert sum(work) == length * (length + 1) // 2
    assert max(work) <= 1.01 * min(work)


@given(lengths, counts)
def test_ulysses_gives_a_rank_one_piece(length, cp):
    pieces = [one.pieces(length) for one in ranks("ulysses", cp=cp)]
    assert all(len(piece) == 1 for piece in pieces)
    assert [token for (piece,) in pieces for token in piece] == list(range(length))
    assert max(len(piece) for (piece,) in pieces) - min(len(piece) for (piece,) in pieces) <= 1


def test_ranks_that_differ_in_heads_have_the_same_tokens():
    for cp_type in ("ring", "ulysses"):
        way = ranks(cp_type, tp=2, cp=3)
        assert [one.rank for one in way] == [0, 1, 2] * 2
        for one, other in zip(way[:3], way[3:], strict=True):
            assert one.pieces(17) == other.pieces(17)
    shared = ranks("ring", cp=8, attn_tp_size=4, attn_cp_size=2)
    assert [one.pieces(16)[0].start for one in shared] == [0, 4] * 4


def test_helix_cuts_no_rows():
    assert all(one.pieces(40) is None for one in ranks("helix", cp=4))


# ---------------------------------------------------------------------- chunks


FRESH, LATER, SEVERAL = Chunk(0, 0, 7), Chunk(1, 9, 1), Chunk(1, 9, 2)


@pytest.mark.parametrize("cp_type", ["ring", "ulysses"])
def test_new_sequences_are_cut_and_later_tokens_are_not(cp_type):
    way = ranks(cp_type, cp=2)[1]
    assert cut(way, [FRESH, Chunk(1, 0, 1)])
    assert not cut(way, [LATER, Chunk(0, 3, 1)])
    assert not cut(way, [])
    here = [(chunk, sum(map(len, pieces))) for chunk, pieces in held(way, [FRESH, Chunk(1, 0, 1)])]
    assert here == [(chunk, sum(map(len, way.pieces(chunk.length)))) for chunk in (FRESH, Chunk(1, 0, 1))]
    assert list(held(way, [LATER])) == [(LATER, [range(1)])]


@pytest.mark.parametrize("cp_type", ["ring", "ulysses"])
@pytest.mark.parametrize("chunks", [[FRESH, LATER], [LATER, Chunk(0, 0, 1)], [SEVERAL], [LATER, SEVERAL]])
def test_mixed_batches_are_refused(cp_type, chunks):
    with pytest.raises(InputError, match=r"sequences cut over cp go on one token at a time, .* split the batch"):
        cut(ranks(cp_type, cp=2)[0], chunks)


def test_helix_and_ranks_without_a_way_take_any_batch():
    mixed = [FRESH, LATER, SEVERAL]
    for way in (ranks("helix", cp=2)[0], None):
        assert not cut(way, mixed)
        assert [(chunk, pieces) for chunk, pieces in held(way, mixed)] == [(c, [range(c.length)]) for c in mixed]


def test_what_is_cut_over_nothing_has_no_way():
    for cp_type in ("helix", "ring", "ulysses"):
        assert ranks(cp_type, tp=4) == [None] * 4
    assert [one.size for one in ranks("helix", tp=4, attn_cp_size=2)] == [2] * 4  # attention alone is cut
    assert [one.size for one in ranks("ring", tp=4, attn_cp_size=2)] == [2] * 4


# ---------------------------------------------------------------------- the cache


@given(lengths, counts, st.integers(1, 40))
def test_helix_keeps_blocks_in_turn(length, cp, block):
    way, positions = ranks("helix", cp=cp, block=block), torch.arange(length)
    owners = torch.stack([one.owned(positions) for one in way]).int()
    assert (owners.sum(0) == 1).all()
    assert owners.argmax(0).tolist() == [p // block % cp for p in range(length)]
    assert [one.capacity(length) for one in way] == owners.sum(1).tolist()
    assert not any(one.pieces(length) for one in way)


def test_helix_has_blocks_of_32_and_ranks_of_short_prompts_keep_nothing():
    way = ranks("helix", cp=4)
    assert [one.block for one in way] == [BLOCK] * 4 == [32] * 4
    assert [one.capacity(3) for one in way] == [3, 0, 0, 0]
    assert [one.capacity(33) for one in way] == [32, 1, 0, 0]
    assert [one.capacity(129) for one in way] == [33, 32, 32, 32]


@given(st.integers(1, 200), st.integers(0, 60), counts)
def test_ring_has_room_for_its_pieces_and_for_later_tokens(prompt, more, cp):
    """A prompt's pieces, and of the later positions every cp-th."""
    for rank, one in enumerate(ranks("ring", cp=cp)):
        kept = sum(map(len, one.pieces(prompt))) + sum(p % cp == rank for p in range(prompt, prompt + more))
        assert kept <= one.capacity(prompt + more)


def test_a_cache_keeps_positions_as_they_come():
    cache = SequenceCache(2, 5, (3,), torch.float32)
    rows = torch.arange(15.0).view(5, 3)
    cache.append(1, rows[:2], torch.tensor([4, 7]), 0)
    cache.append(1, rows[2:2], torch.tensor([], dtype=torch.int64), 9)  # none of the chunk is mine
    cache.append(1, rows[2:5], torch.tensor([20, 21, 22]), 20)
    kept, positions = cache[1]
    assert torch.equal(kept, rows) and positions.tolist() == [4, 7, 20, 21, 22]
    assert len(cache[0][0]) == len(cache[0][1]) == 0
    cache.append(1, rows[:1] + 1, torch.tensor([0]), 0)  # a new sequence takes the slot
    assert torch.equal(cache[1][0], rows[:1] + 1) and cache[1][1].tolist() == [0]


def test_positions_that_come_again_take_the_place_of_all_from_there_on():
    cache = SequenceCache(1, 6, (1,), torch.float32)
    cache.append(0, torch.arange(6.0)[:, None], torch.tensor([0, 1, 6, 7, 8, 9]), 0)
    cache.append(0, torch.full((2, 1), -1.0), torch.tensor([7, 9]), 7)
    assert cache[0][0].flatten().tolist() == [0, 1, 2, -1, -1] and cache[0][1].tolist() == [0, 1, 6, 7, 9]
    cache.append(0, torch.empty(0, 1), torch.tensor([], dtype=torch.int64), 1)  # none of them mine
    assert cache[0][1].tolist() == [0]


def test_a_cache_that_is_full_says_so():
    cache = SequenceCache(1, 4, (1,), torch.float32)
    cache.append(0, torch.zeros(4, 1), torch.arange(4), 0)
    with pytest.raises(InputError, match=r"^5 positions in a KV cache of 4: raise max_length$"):
        cache.append(0, torch.zeros(1, 1), torch.tensor([4]), 4)
    assert len(cache[0][0]) == 4
    cache.append(0, torch.zeros(2, 1), torch.arange(2), 0)  # what was refused left nothing behind
    with pytest.raises(InputError, match=r"^5 positions in a KV cache of 4"):
        SequenceCache(1, 4, (1,), torch.float32).append(0, torch.zeros(5, 1), torch.arange(5), 0)


def cache_bytes(cp_type, cp, length, tp=1, heads=16, kv_heads=8, **sizes):
    """Bytes of keys and values of every rank for one sequence."""
    config = AttentionConfig(32, heads, kv_heads, 4)
    found = []
    for rank in range(tp * cp):
        mapping = Mapping(tp * cp, rank, tp_size=tp, cp_size=cp, cp_config={"cp_type": cp_type}, **sizes)
        cache = Attention(config, mapping, torch.bfloat16).new_cache(1, length, torch.bfloat16)
        slots = cache._slots if isinstance(cache, KvCache) else cache._rows
        found.append(sum(slot.nbytes for slot in slots))
    return found


@pytest.mark.parametrize("cp_type", ["helix", "ring", "ulysses"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_bytes_of_a_cache_are_a_cp_th(cp_type, cp):
    """Of a long sequence, every rank keeps 1 / cp: by positions under Helix and Ring, by heads under Ulysses."""
    length = 8192
    (alone,) = cache_bytes(cp_type, 1, length)
    assert alone == length * 2 * 8 * 4 * 2
    assert all(abs(one * cp / alone - 1) <= 0.01 for one in cache_bytes(cp_type, cp, length))
    both = cache_bytes(cp_type, cp // 2, length, tp=2)  # tensor parallelism cuts heads as well
    assert all(abs(one * cp / alone - 1) <= 0.01 for one in both)


def test_helix_cuts_where_heads_cannot_be():
    """One key/value head on 8 ranks: by heads every rank would keep all of it, in blocks an eighth."""
    sizes = {"heads": 8, "kv_heads": 1}
    (alone,) = cache_bytes("helix", 1, 4096, **sizes)
    assert cache_bytes("ulysses", 8, 4096, **sizes) == [alone] * 8
    assert cache_bytes("helix", 8, 4096, **sizes) == [alone // 8] * 8


# ---------------------------------------------------------------------- heads


@pytest.mark.parametrize("heads", [8, 9, 16, 37])
@pytest.mark.parametrize("tp,cp", [(1, 2), (1, 8), (2, 4), (4, 2)])
def test_heads_are_shared_out_once(heads, tp, cp):
    for cp_type in ("helix", "ulysses"):
        way = ranks(cp_type, tp=tp, cp=cp, heads=heads)
        shared = [[one.heads.start + head for head in one.shares[one.rank]] for one in way]
        assert [head for share in shared for head in share] == list(range(heads))
        assert {one.heads for one in way} == {one.heads for one in ranks("ring", tp=tp, cp=cp, heads=heads)}
    for one, share in zip(ranks("helix", tp=tp, cp=cp, heads=heads), shared, strict=True):
        assert list(one.output_heads) == share
    for one, share in zip(ranks("ulysses", tp=tp, cp=cp, heads=heads), shared, strict=True):
        assert one.output_heads == one.heads and set(share) <= set(one.heads)


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("cp_type", "tp", "cp", "sizes", "message"),
    [
        ("ulysses", 2, 4, {"heads": 7}, "7 attention heads cannot be split over 8 ranks"),
        ("helix", 2, 4, {"heads": 7}, "7 attention heads cannot be split over 8 ranks"),
        ("helix", 1, 8, {"heads": 7, "attn_tp_size": 2, "attn_cp_size": 4}, "7 attention heads .* over 8 ranks"),
        ("ring", 4, 2, {"heads": 3}, "3 attention heads cannot be split over 4 ranks"),
        ("ulysses", 2, 2, {"attn_cp_size": 2}, "attn_cp_size must be 1 under ULYSSES, but got -1, 2"),
        ("ulysses", 4, 2, {"attn_dp_size": 2}, "ULYSSES with attn_dp_size 2: .* use HELIX or RING"),
        ("spiral", 1, 2, {}, "unknown cp_type 'spiral': it is one of ULYSSES, RING, HELIX"),
    ],
)
def test_layouts_that_cannot_be_are_refused_in_one_line(cp_type, tp, cp, sizes, message):
    with pytest.raises(InputError, match=message) as raised:
        ranks(cp_type, tp, cp, **sizes)
    assert "\n" not in str(raised.value)


def test_ring_needs_heads_for_its_tensor_parallel_ranks_only():
    assert [list(one.heads) for one in ranks("ring", tp=2, cp=4, heads=3)] == [[0]] * 4 + [[1, 2]] * 4


@pytest.mark.parametrize("block", [0, -1, 1.5, "8", True, None])
def test_blocks_are_whole_numbers_above_zero(block):
    config = {"cp_type": "helix", "tokens_per_block": block}
    mapping = Mapping(2, 0, cp_size=2, cp_config=config)
    with pytest.raises(InputError, match=f"^tokens_per_block must be a whole number above 0, but is {block!r}$"):
        context.of(mapping, 8)


# ---------------------------------------------------------------------- who sees whom


@given(
    st.lists(st.integers(0, 30), max_size=8),
    st.lists(st.integers(0, 30), max_size=8),
    st.sampled_from([None, 1, 4, 100]),
)
def test_positions_say_who_sees_whom(queries, keys, window):
    mask = visible(torch.tensor(queries, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64), window)
    wanted = [[key <= query and (window is None or query - key < window) for key in keys] for query in queries]
    if mask is None:
        assert all(all(row) for row in wanted)
    else:
        assert mask.tolist() == wanted
