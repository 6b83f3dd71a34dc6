"""Does the router choose and weigh as its options say, and does every token meet exactly the experts chosen for it?"""

import pytest
import torch
import torch.nn.functional as F

from spmd import Mapping
from spmd.collectives.overlap import made
from spmd.errors import InputError
from spmd.nn.experts import Experts, MoeConfig, all_at_once, choose


def logits(tokens, experts, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def test_softmax_top_k_best_first():
    x = logits(50, 9)
    ids, weights = choose(x, MoeConfig(9, 3, 4, normalise=False))
    for row, numbers, scale in zip(x.softmax(-1), ids, weights, strict=True):
        order = sorted(range(9), key=lambda e: -row[e])[:3]
        assert numbers.tolist() == order
        assert torch.equal(scale, row[order])


def test_normalised_weights_add_up_to_the_scale():
    ids, weights = choose(logits(20, 8), MoeConfig(8, 4, 4, scale=2.5))
    assert torch.allclose(weights.sum(1), torch.full((20,), 2.5))
    assert ids.dtype == torch.int64


def test_a_bias_chooses_and_does_not_weigh():
    x, bias = logits(30, 6), torch.tensor([0.0, 0, 0, 0, 0, 10.0])
    config = MoeConfig(6, 2, 4, normalise=False, scoring="sigmoid")
    ids, weights = choose(x, config, bias)
    assert (ids[:, 0] == 5).all()
    assert torch.equal(weights, x.sigmoid().gather(1, ids))


@pytest.mark.parametrize("of_group", [1, 2])
def test_only_the_best_groups_are_looked_at(of_group):
    x = logits(40, 12)
    config = MoeConfig(12, 3, 4, normalise=False, groups=4, kept_groups=2, group_score=of_group)
    ids, _ = choose(x, config)
    for row, numbers in zip(x.softmax(-1), ids, strict=True):
        best = [row[3 * g : 3 * g + 3].topk(of_group).values.sum() for g in range(4)]
        kept = sorted(range(4), key=lambda g: -best[g])[:2]
        allowed = [e for g in kept for e in range(3 * g, 3 * g + 3)]
        assert numbers.tolist() == sorted(allowed, key=lambda e: -row[e])[:3]


@pytest.mark.parametrize("groups", [1, 4])
def test_no_rows_choose_nothing(groups):
    ids, weights = choose(logits(0, 12), MoeConfig(12, 3, 4, groups=groups, kept_groups=min(groups, 2)))
    assert ids.shape == weights.shape == (0, 3)


def filled(config, hidden=8, seed=1):
    experts = Experts(hidden, config, Mapping(), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    whole = [[torch.randn(shape, generator=generator) for shape in shapes(config.intermediate, hidden)]
             for _ in range(config.num_experts)]  # fmt: skip
    for number, parts in enumerate(whole):
        experts.load_expert(number, *parts)
    experts.gate.copy_(torch.randn(experts.gate.shape, generator=generator))
    return experts, whole


def shapes(inner, hidden):
    return (inner, hidden), (inner, hidden), (hidden, inner)


def expert(parts, x):
    gate, up, down = parts
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "together"),
    [(0, 4, 2, False), (1, 4, 2, False), (2, 4, 2, True), (8, 16, 2, True), (9, 16, 2, False), (8, 17, 2, False)],
)
def test_when_all_experts_run_on_all_rows(rows, experts, top_k, together):
    assert all_at_once(rows, MoeConfig(experts, top_k, 4)) == together


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 8, 9, 33])
def test_every_token_meets_its_experts(tokens):
    config = MoeConfig(5, 2, 12)
    experts, whole = filled(config)
    x = logits(tokens, 8, seed=3)
    ids, weights = choose(F.linear(x, experts.gate), config)
    truth = torch.zeros(tokens, 8)
    for t in range(tokens):
        for number, weight in zip(ids[t].tolist(), weights[t], strict=True):
            truth[t] += weight * expert(whole[number], x[t : t + 1])[0]
    assert torch.allclose(made(experts(x)), truth, atol=1e-5)


def test_one_expert_alone_and_a_shared_one():
    """Where the router sees one expert only, it gets coefficient one; the shared expert has one as well."""
    config = MoeConfig(3, 1, 12, shared=12)
    experts, whole = filled(config)
    experts.load_shared(*whole[0])
    experts.gate.zero_()
    experts.gate[2] = 100.0
    x = logits(7, 8, seed=4).abs()
    assert torch.allclose(made(experts(x)), expert(whole[2], x) + expert(whole[0], x), atol=1e-4)


def test_rows_do_not_meet():
    config = MoeConfig(4, 2, 12)
    experts, _ = filled(config)
    x = logits(6, 8, seed=5)
    clean = made(experts(x))
    x[3] = float("nan")
    dirty = made(experts(x))
    rows = [0, 1, 2, 4, 5]
    assert torch.allclose(dirty[rows], clean[rows], atol=1e-5)  # a product of other row counts rounds otherwise
    assert dirty[3].isnan().all()


def test_more_ranks_than_experts():
    with pytest.raises(InputError, match="2 experts cannot be split over moe_ep_size 4"):
        Experts(8, MoeConfig(2, 1, 8), Mapping(4, 0, tp_size=4, moe_ep_size=4), torch.float32)
