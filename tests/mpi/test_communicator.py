"""Does a bound plan move what the plan says, decide nothing on the way, and leave what was handed out alone?"""

import sys

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.boundary.communicator import StageCommunicator
from spmd.boundary.plan import Options
from spmd.collectives.epilogue import ResidualNorm
from spmd.collectives.moves import Padding
from spmd.control import mpi
from spmd.control.record import recorder
from spmd.errors import InputError

HIDDEN = 16


def stage(mapping, kinds, options=None, policy="cost"):
    norms = [ResidualNorm(torch.ones(HIDDEN), 1e-6) for _ in range(2 * len(kinds) + 1)]
    return StageCommunicator(mapping, kinds, norms, HIDDEN, torch.float32, options, policy)


def forward(communicator, counts, x, blocks):
    """The junctions around blocks that keep their rows; returns every residual on the way."""
    step, residual, seen = communicator.begin(counts), None, []
    for layer in step.layers:
        x, residual = layer.prepare_attn(x, residual)
        seen.append(residual)
        x, residual = layer.prepare_mlp(blocks[0](x), residual)
        x, residual = layer.postprocess_layer(blocks[1](x), residual)
    return step.finish(x, residual), seen


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
@pytest.mark.parametrize("shared", [1, 2])
def test_blocks_of_ones_add_up_once(policy, shared):
    """Every rank hands in one part of a block that makes ones of everything: a sum made twice doubles."""
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size, attn_dp_size=shared)
    communicator = stage(mapping, ["dense"] * 3, policy=policy)
    counts = (5, 3)[:shared]
    rows = counts[mapping.attn_dp_rank]
    attend = lambda x: torch.full_like(x, 1 / mapping.attn_tp_size)  # noqa: E731
    mlp = lambda x: torch.full_like(x, 1 / mapping.tp_size)  # noqa: E731
    (x, _), seen = forward(communicator, counts, torch.ones(rows, HIDDEN), (attend, mlp))
    assert x.shape == (rows, HIDDEN)
    assert torch.allclose(x, torch.ones(()))  # the norm of equal numbers
    for layer, residual in enumerate(seen):  # the embedding, and two blocks a layer
        assert torch.equal(residual, torch.full_like(residual, 1 + 2 * layer))
    Distributed.get(mapping).close()


@pytest.mark.ranks(2, 4)
def test_the_forward_decides_nothing():
    """After a step has been bound, no line of the planner runs, and none that knows a mapping."""
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)
    communicator = stage(mapping, ["dense"] * 2)
    half = lambda x: x / world.size  # noqa: E731
    x = torch.ones(4, HIDDEN)
    for _ in range(2):
        forward(communicator, (4,), x, (half, half))
    ran = set()

    def watch(frame, event, argument):
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.setprofile(watch)
    forward(communicator, (4,), x, (half, half))
    sys.setprofile(None)
    assert any(name.endswith("boundary/communicator.py") for name in ran)
    for room in ("boundary/plan.py", "boundary/layout.py", "boundary/seed.py", "topology/"):
        assert not [name for name in ran if f"spmd/{room}" in name]
    Distributed.get(mapping).close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
def test_residuals_that_were_handed_out_stay_as_they_were(policy):
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)
    communicator = stage(mapping, ["dense"] * 4, Options(), policy)
    half = lambda x: x / world.size  # noqa: E731
    x = torch.arange(4.0 * HIDDEN).view(4, HIDDEN)
    kept = []

    def remember(x):
        kept.append((x, x.clone()))
        return half(x)

    _, seen = forward(communicator, (4,), x, (remember, half))
    copies = [residual.clone() for residual in seen]
    forward(communicator, (4,), x + 1, (half, half))
    assert all(torch.equal(a, b) for a, b in zip(seen, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in kept)
    Distributed.get(mapping).close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("padding", Padding)
@pytest.mark.parametrize("policy", ["cost", "seed"])
def test_steps_of_uneven_groups_and_of_none(padding, policy, monkeypatch):
    """Rows that say whose they are; what rows are padded with is NaN."""
    monkeypatch.setenv("SPMD_CHECK", "1")
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size, attn_dp_size=2)
    communicator = stage(mapping, ["dense"] * 2, Options(padding=padding), policy)
    part = lambda x: x / mapping.attn_tp_size, lambda x: x / mapping.tp_size
    for counts in ((3, 0), (0, 0), (0, 1), (7, 5), (12, 0), (1, 3), (5, 9), (0, 0)):
        mine = counts[mapping.attn_dp_rank]
        assert communicator.agree(mine, mine) == (counts, counts, False)
        first = sum(counts[: mapping.attn_dp_rank])
        rows = torch.arange(first, first + counts[mapping.attn_dp_rank]).float()[:, None]
        x = torch.cat([rows + 1, -rows - 2] * (HIDDEN // 2), 1)
        step, residual, alone = communicator.begin(counts, decode=True), None, x
        y = x
        for layer in step.layers:
            for junction, block in ((layer.prepare_attn, part[0]), (layer.prepare_mlp, part[1])):
                y, residual = junction(y, residual)
                y = block(y)
            y, residual = layer.postprocess_layer(y, residual)
        y, _ = step.finish(y, residual)
        normed = lambda total: total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-6)  # noqa: E731
        for _ in range(4):
            alone = alone + normed(alone)
        assert y.shape == x.shape and torch.allclose(y, normed(alone), atol=1e-5)
    Distributed.get(mapping).close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp_type", ["ring", "helix"])
def test_rows_are_agreed_on_for_every_rank_of_a_step_that_is_cut(cp_type):
    """Two groups attend by twos. Rows of every rank where they differ inside a group, else of every group."""
    rank = mpi.world().rank
    mapping = Mapping(4, rank, tp_size=2, cp_size=2, cp_config={"cp_type": cp_type}, attn_dp_size=2)
    communicator = stage(mapping, ["dense"])
    assert communicator.agree((2, 2, 1, 1)[rank], (2, 2, 1, 1)[rank]) == ((2, 1), (2, 1), False)
    if cp_type == "ring":  # the second group has nothing, and learns of it
        cut = communicator.agree((3, 2, 0, 0)[rank], (1, 1, 0, 0)[rank], rank < 2)
        assert cut == ((3, 2, 0, 0), (1, 0), True)
    Distributed.get(mapping).close()


def traced(mapping, policy, counts, layers=3):
    """(operation, group) of every collective of one forward, in order."""
    communicator = stage(mapping, ["dense"] * layers, policy=policy)
    part = lambda x: x / mapping.tp_size  # noqa: E731
    x = torch.ones(counts[mapping.attn_dp_rank], HIDDEN)
    forward(communicator, counts, x, (part, part))
    recorder.reset()
    recorder.timeline = True
    forward(communicator, counts, x, (part, part))
    recorder.timeline = False
    moved = [event for event in recorder.events if event[0] != "barrier"]
    Distributed.get(mapping).close()
    return [event[:2] for event in sorted(moved, key=lambda event: event[3])]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("policy", ["cost", "seed"])
def test_tensor_parallelism_alone_is_seen_to_have_two_sums_a_layer(policy):
    world = mpi.world()
    mapping = Mapping(4, world.rank, tp_size=4)
    assert traced(mapping, policy, (2,)) == [("all_reduce", "tp")] * 6


@pytest.mark.ranks(4)
def test_attention_dp_by_the_fixed_choices_is_seen_to_gather_and_to_sum():
    """An exchange sums over two and gathers to four before the MLP; after it the sum over four; the cut is local."""
    world = mpi.world()
    mapping = Mapping(4, world.rank, tp_size=4, attn_dp_size=2)
    assert traced(mapping, "seed", (2, 3)) == [("exchange", "tp"), ("all_reduce", "tp")] * 3


@pytest.mark.ranks(4)
def test_a_long_prefill_is_seen_to_keep_the_residual_cut():
    world = mpi.world()
    mapping = Mapping(4, world.rank, tp_size=4)
    communicator = stage(mapping, ["dense"])
    assert {layer.states.middle_residual for layer in communicator.plan_for(1).layers} == {frozenset()}
    assert traced(mapping, "cost", (16384,), 2) == [("reduce_scatter", "tp"), ("all_gather", "tp")] * 4


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("rows", [16384, 2])
def test_rows_that_are_not_what_was_agreed_are_refused(rows):
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)
    communicator = stage(mapping, ["dense"])
    step = communicator.begin((rows,))
    layer = step.layers[0]
    with pytest.raises(InputError, match=r"a norm of fp32\[16\]"):
        layer.prepare_attn(torch.ones(rows, HIDDEN + 1), None)
    _, residual = layer.prepare_attn(torch.ones(rows, HIDDEN), None)
    with pytest.raises(InputError):
        layer.prepare_mlp(torch.ones(rows - 1, HIDDEN), residual)
    Distributed.get(mapping).close()
