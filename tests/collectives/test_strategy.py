"""Does the chain of decisions come in its documented order, with a reason for everything that overrules the caller?"""

from dataclasses import fields, replace
from inspect import signature
from itertools import product

import pytest
import torch

import spmd
from spmd.collectives.allreduce import AllReduceParams
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.moe import MoEAllReduceParams
from spmd.collectives.strategy import AllReduceStrategy, Call, Limits, Way, candidates, decide, table_key

S, Op = AllReduceStrategy, AllReduceFusionOp
HERE = Limits(mailbox_bytes=1 << 16, slot_bytes=1 << 20)
AWAY = Limits(away="the ranks are on several hosts")
TWO_LEVEL = replace(AWAY, two_level=True)
PLAIN = Call(ranks=4, rows=64, row_bytes=1024, dtype="bf16")
FUSED = replace(PLAIN, fusion=Op.RESIDUAL_RMS_NORM)
ZERO_COPY = (S.UB, S.NCCL_SYMMETRIC, S.SYMM_MEM)
DETERMINISTIC = ("FORCE_ALL_REDUCE_DETERMINISTIC", "FORCE_DETERMINISTIC")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)


def way(strategy, call=PLAIN, limits=HERE):
    return decide(strategy, call, limits).way


def overruled(strategy, call=PLAIN, limits=HERE):
    return " | ".join(decide(strategy, call, limits).downgrades)


# ---------------------------------------------------------------------- what users see


def test_the_numbers_of_strategies_and_fusions():
    names = "NCCL MIN_LATENCY UB AUTO ONESHOT TWOSHOT LOWPRECISION MNNVL NCCL_SYMMETRIC SYMM_MEM"
    assert [(s.name, s.value) for s in S] == [(name, value) for value, name in enumerate(names.split())]
    names = """NONE RESIDUAL_RMS_NORM LAST_PROCESS_FOR_UB RESIDUAL_RMS_PREPOST_NORM RESIDUAL_RMS_NORM_QUANT_FP8
        RESIDUAL_RMS_NORM_QUANT_NVFP4 RESIDUAL_RMS_NORM_OUT_QUANT_FP8 RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4
        MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM RMS_NORM"""
    assert [(op.name, op.value) for op in Op] == [(name, value) for value, name in enumerate(names.split())]


def test_public_names():
    names = {
        "AllReduce",
        "AllReduceParams",
        "AllReduceStrategy",
        "AllReduceFusionOp",
        "MoEAllReduce",
        "symmetric_empty",
    }
    assert names <= set(spmd.__all__)
    assert all(getattr(spmd, name).__name__ == name for name in names)


def test_parameters():
    wanted = {"strategy": S.AUTO, "fusion_op": Op.NONE, "bias": None, "residual": None, "norm_weight": None}
    wanted |= {"scale": None, "norm_pre_residual_weight": None, "eps": 1e-6, "enable_allreduce": True}
    wanted |= {"trigger_completion_at_end": True}
    given = signature(AllReduceParams).parameters
    assert [(name, given[name].default) for name in list(given)[: len(wanted)]] == list(wanted.items())
    x = torch.ones(2)
    for name, ask in [("norm_weight", "has_affine"), ("bias", "has_bias"), ("scale", "has_scale")]:
        assert getattr(AllReduceParams(), ask)() == 0
        assert getattr(AllReduceParams(**{name: x}), ask)() == 1
    more = {field.name for field in fields(MoEAllReduceParams)} - {field.name for field in fields(AllReduceParams)}
    wanted = {"device_num_experts", "expert_scale_factor", "expanded_idx_to_permuted_idx", "shared_expert_output"}
    assert more == wanted | {"is_cutlass_min_latency"}


# ---------------------------------------------------------------------- the chain, link by link


def test_a_group_of_one_does_nothing():
    for strategy, op in product(S, Op):
        decision = decide(strategy, replace(PLAIN, ranks=1, fusion=op), Limits())
        assert decision.way == Way.NOTHING and not decision.downgrades


def test_mnnvl_and_symm_mem_become_auto_where_they_cannot_serve():
    for call in (PLAIN, FUSED, replace(PLAIN, rows=1)):
        assert way(S.MNNVL, call) == way(S.AUTO, call) and "MNNVL" in overruled(S.MNNVL, call)
    assert way(S.SYMM_MEM, FUSED) == way(S.AUTO, FUSED) and "SYMM_MEM" in overruled(S.SYMM_MEM, FUSED)
    for op in Op:  # plain sums only, wherever the tensor lies
        call = replace(PLAIN, fusion=op, symmetric=True)
        assert bool(overruled(S.SYMM_MEM, call)) == (op != Op.NONE)


@pytest.mark.parametrize("strategy", ZERO_COPY)
def test_an_ordinary_tensor_is_copied_in_and_that_is_said(strategy):
    assert "copied" in overruled(strategy) and way(strategy) in (Way.LAMPORT, Way.ONE_SHOT, Way.TWO_SHOT)
    assert not overruled(strategy, replace(PLAIN, symmetric=True))
    assert way(strategy, replace(PLAIN, symmetric=True)) in (Way.ONE_SHOT, Way.TWO_SHOT)  # in place: no mailboxes


def test_explicit_strategies_are_taken_at_their_word():
    for rows in (4, 5, 64, 5000):
        for call in (replace(PLAIN, rows=rows), replace(FUSED, rows=rows), replace(FUSED, rows=rows, symmetric=True)):
            assert way(S.ONESHOT, call) == Way.ONE_SHOT
            assert way(S.TWOSHOT, call) == Way.TWO_SHOT
            assert way(S.LOWPRECISION, call) == Way.LOW_PRECISION
            assert way(S.NCCL, call) == Way.LIBRARY
            assert not any(overruled(strategy, call) for strategy in (S.ONESHOT, S.TWOSHOT, S.LOWPRECISION, S.NCCL))
    assert way(S.MIN_LATENCY, replace(PLAIN, rows=1)) == Way.LAMPORT


def test_two_shot_with_fewer_tokens_than_ranks_becomes_one_shot():
    for rows in range(9):
        call = replace(PLAIN, rows=rows)
        assert way(S.TWOSHOT, call) == (Way.ONE_SHOT if rows < 4 else Way.TWO_SHOT)
        assert bool(overruled(S.TWOSHOT, call)) == (rows < 4)
        assert rows >= 4 or all(word in overruled(S.TWOSHOT, call) for word in (f"{rows} rows", "4 ranks", "ONESHOT"))


def test_a_row_past_the_workspace_goes_to_the_library_with_its_size():
    for strategy in S:
        call = replace(FUSED, row_bytes=HERE.slot_bytes + 64)
        decision = decide(strategy, call, HERE)
        assert decision.way == Way.LIBRARY
        assert strategy == S.NCCL or decision.too_small == call.row_bytes
        assert strategy == S.NCCL or any(str(call.row_bytes) in reason for reason in decision.downgrades)
        assert decide(strategy, replace(call, row_bytes=HERE.slot_bytes), HERE).too_small == 0


def test_several_hosts():
    for strategy in S:
        assert way(strategy, PLAIN, AWAY) == Way.LIBRARY
        assert way(strategy, PLAIN, TWO_LEVEL) == (Way.LIBRARY if strategy == S.NCCL else Way.TWO_LEVEL)
    for strategy in (S.ONESHOT, S.TWOSHOT, S.MIN_LATENCY, S.LOWPRECISION):  # what was asked for is not what is done
        assert "several hosts" in overruled(strategy, PLAIN, TWO_LEVEL)
    assert not overruled(S.AUTO, PLAIN, TWO_LEVEL)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_excludes_what_adds_in_another_order(monkeypatch, name):
    for value, forced in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(name, value)
        for strategy, call in product(S, (PLAIN, FUSED, replace(PLAIN, symmetric=True))):
            excluded = strategy in (S.NCCL, S.LOWPRECISION)
            assert (way(strategy, call) in (Way.LIBRARY, Way.LOW_PRECISION)) == (excluded and not forced)
            if excluded:
                assert ("DETERMINISTIC" in overruled(strategy, call)) == forced
                assert not forced or way(strategy, call) == way(S.AUTO, call)
        for limits in (AWAY, TWO_LEVEL):  # there is no other: then it is said
            assert not forced or "DETERMINISTIC" in overruled(S.AUTO, PLAIN, limits)


# ---------------------------------------------------------------------- the tuned table


def test_the_table_decides_for_auto_alone():
    for call in (PLAIN, FUSED, replace(PLAIN, symmetric=True), replace(PLAIN, rows=2)):
        for choice in candidates(call, HERE):
            limits = replace(HERE, table={table_key(call): str(choice)})
            decision = decide(S.AUTO, call, limits)
            assert decision.way == choice and "tuned" in decision.chain[-1] and not decision.downgrades
            assert way(S.ONESHOT, call, limits) == Way.ONE_SHOT
            other = replace(call, ranks=call.ranks + 1)
            assert "tuned" not in decide(S.AUTO, other, limits).chain[-1]


def test_a_table_cannot_choose_what_cannot_be():
    few, long = replace(PLAIN, rows=2), replace(PLAIN, rows=100)
    for call, choice in [(few, Way.TWO_SHOT), (long, Way.LAMPORT), (PLAIN, Way.LIBRARY), (PLAIN, Way.LOW_PRECISION)]:
        assert way(S.AUTO, call, replace(HERE, table={table_key(call): str(choice)})) == way(S.AUTO, call)


def test_keys_tell_calls_apart_by_all_that_is_tuned():
    calls = [PLAIN, FUSED, replace(PLAIN, ranks=5), replace(PLAIN, dtype="fp32"), replace(PLAIN, rows=128)]
    calls += [replace(PLAIN, symmetric=True), replace(PLAIN, rows=0), replace(PLAIN, rows=1)]
    assert len({table_key(call) for call in calls}) == len(calls)
    buckets = [replace(PLAIN, rows=1, row_bytes=size).bucket for size in (0, 1, 2, 3, 4, 5, 8, 9, 1 << 20)]
    assert buckets == [0, 0, 1, 2, 2, 3, 3, 4, 20]


# ---------------------------------------------------------------------- everything at once

SIZES = [(0, 64), (1, 0), (1, 64), (3, 4096), (4, 4096), (64, 16384), (5, 1 << 20), (2, (1 << 20) + 4)]


@pytest.mark.parametrize("limits", [HERE, Limits(64, 64), Limits(), AWAY, TWO_LEVEL], ids=str)
@pytest.mark.parametrize("forced", ["0", "1"])
def test_every_decision_is_possible_and_has_its_reasons(monkeypatch, limits, forced):
    monkeypatch.setenv("FORCE_DETERMINISTIC", forced)
    asked = {S.NCCL: Way.LIBRARY, S.ONESHOT: Way.ONE_SHOT, S.TWOSHOT: Way.TWO_SHOT, S.LOWPRECISION: Way.LOW_PRECISION}
    for strategy, op, (rows, row_bytes), ranks, symmetric in product(S, Op, SIZES, (2, 3, 8, 200), (False, True)):
        call = Call(ranks, rows, row_bytes, "fp32", op, symmetric)
        decision = decide(strategy, call, limits)
        assert decision == decide(strategy, call, limits)
        assert decision.chain[0].startswith(strategy.name)
        assert all(line and "\n" not in line for line in decision.chain)
        assert set(decision.downgrades) <= set(decision.chain)
        assert str(decision.way) in decision.chain[-1]
        assert decision.way != Way.NOTHING
        if limits.away:
            assert decision.way == (Way.TWO_LEVEL if limits.two_level and strategy != S.NCCL else Way.LIBRARY) or forced
        if decision.way == Way.LAMPORT:
            assert call.nbytes <= limits.mailbox_bytes
        if decision.way == Way.TWO_SHOT and op != Op.NONE:
            assert rows >= ranks
        if op != Op.NONE and decision.way not in (Way.LIBRARY, Way.TWO_LEVEL):
            assert row_bytes <= limits.slot_bytes
        if decision.way != asked.get(strategy, decision.way):
            assert decision.downgrades
        assert decision.way != Way.LOW_PRECISION or strategy == S.LOWPRECISION
