"""Do all ranks of a group have one tuned table, decided by rank 0, kept in its file, and never another result?"""

import logging
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from spmd import AllReduce, AllReduceFusionOp, AllReduceParams, AllReduceStrategy, Distributed, Mapping
from spmd.collectives import tune
from spmd.collectives.fusion import NEED_SCALE, reference
from spmd.collectives.strategy import Call, Limits, Way, candidates, table_key
from spmd.control import mpi, objects

Op = AllReduceFusionOp
several = pytest.mark.ranks(2, 3, 4, 5, 6, 7, 8, 9)
LIMITS = Limits(mailbox_bytes=1 << 16, slot_bytes=1 << 20)


@pytest.fixture(autouse=True)
def cache(monkeypatch, caplog):
    """Every rank has a folder of its own for the file (pytest's are cleaned up by all ranks at once), and no table."""
    for name in ("SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "TLLM_DISABLE_ALLREDUCE_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPMD_CHECK", "0")
    monkeypatch.setenv("SPMD_TIMEOUT", "20")
    caplog.set_level(logging.INFO, "spmd")
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("SPMD_CACHE_DIR", folder)
        yield Path(folder, "allreduce.json")


@pytest.fixture
def new_group():
    """Makes the tp group of all ranks anew: another run."""
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)

    def make():
        Distributed.get(mapping).close()
        return Distributed.get(mapping).group("tp")

    yield make
    Distributed.get(mapping).close()


def calls(n):
    plain = Call(n, 64, 256, "fp32")
    return [plain, replace(plain, rows=1000), replace(plain, fusion=Op.RMS_NORM), replace(plain, symmetric=True)]


class Clock:
    """Time that passes only while a way is being tried, on every rank by another measure."""

    def __init__(self, group, monkeypatch):
        self.group, self.now, self.tried = group, 0, []
        monkeypatch.setattr(tune, "monotonic_ns", lambda: self.now)

    @staticmethod
    def cost(rank, call, way):
        return 1000 + hash((rank, call.rows, call.symmetric, len(way), int(call.fusion))) % 1000

    def run(self, call, way):
        def once():
            self.now += self.cost(self.group.rank, call, way)

        self.tried.append((call, way))
        return once

    def slowest(self, call, way):
        return max(self.cost(rank, call, way) for rank in range(self.group.size))


@several
def test_the_way_that_is_fastest_on_the_slowest_rank_is_everybodys(new_group, monkeypatch, cache):
    group = new_group()
    clock = Clock(group, monkeypatch)
    assert tune.tune(group, LIMITS, calls(group.size), clock.run) > 0
    table = tune.table(group)
    assert objects.allgather(group.comm, table) == [table] * group.size
    for call in calls(group.size):
        ways = candidates(call, LIMITS)
        assert table[table_key(call)] == min(ways, key=lambda way: clock.slowest(call, way))
        assert [way for other, way in clock.tried if other == call] == ways
    assert len(table) == len(calls(group.size))
    assert cache.exists() == (group.rank == 0)
    assert group.rank or tune.read() == table


@several
def test_a_later_run_reads_rank_0s_file_and_times_nothing(new_group, monkeypatch, cache, caplog):
    group = new_group()
    clock = Clock(group, monkeypatch)
    tune.tune(group, LIMITS, calls(group.size), clock.run)
    kept = dict(tune.table(group))
    clock.tried.clear()
    tune.tune(group, LIMITS, calls(group.size), clock.run)
    assert not clock.tried
    if group.rank:
        cache.write_text("what others have is not read")
    caplog.clear()
    group = new_group()
    assert tune.table(group) == kept
    tune.tune(group, LIMITS, calls(group.size), clock.run)
    assert not clock.tried and not caplog.records
    more = replace(calls(group.size)[0], dtype="bf16")
    tune.tune(group, LIMITS, [*calls(group.size), more], clock.run)
    assert {call for call, _ in clock.tried} == {more}
    assert tune.table(group).items() > kept.items()


@several
def test_a_corrupt_file_is_one_line_and_tuned_anew(new_group, monkeypatch, cache, caplog):
    cache.write_text('{"version": 1, "machines": ')
    group = new_group()
    clock = Clock(group, monkeypatch)
    assert tune.table(group) == {}
    assert len(caplog.records) == (group.rank == 0)
    tune.tune(group, LIMITS, calls(group.size), clock.run)
    assert group.rank or tune.read() == tune.table(group)


@several
@pytest.mark.parametrize("name", ["SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "TLLM_DISABLE_ALLREDUCE_AUTOTUNE"])
def test_off_is_off(new_group, monkeypatch, cache, name):
    group = new_group()
    ar, shape = AllReduce(group=group), (64, 64)
    call = Call(group.size, 64, 256, "fp32")
    usual = ar.explain(shape, torch.float32)
    tune.write({table_key(call): "one-shot"})
    monkeypatch.setenv(name, "1")
    group = new_group()
    ar = AllReduce(group=group)
    assert ar.tune([((32, 64), torch.float32, Op.NONE, False)]) == 0
    assert tune.table(group) == {} and ar.explain(shape, torch.float32) == usual
    assert tune.read() == {table_key(call): "one-shot"}
    monkeypatch.delenv(name)
    ar = AllReduce(group=new_group())
    assert "tuned" in ar.explain(shape, torch.float32)


def part(rank, *shape):
    return (torch.arange(torch.Size(shape).numel()) % 7 + rank + 1).reshape(shape).float()


@several
def test_tuning_changes_no_result(new_group, cache, caplog):
    group = new_group()
    ar = AllReduce(group=group)
    shapes = [(1, 64), (64, 1024), (0, 64)]
    usual = [
        (shape, torch.float32, op, symmetric)
        for shape, op, symmetric in product(shapes, (Op.NONE, Op.RESIDUAL_RMS_NORM), (False, True))
    ]
    usual += [((16, 64), torch.bfloat16, op, False) for op in NEED_SCALE]
    given = {(shape, op): (part(7, *shape), torch.ones(1)) for shape, _, op, _ in usual}

    def check(ar):
        for shape, dtype, op, symmetric in usual:
            x = sum(part(rank, *shape) for rank in range(group.size))
            residual, scale = given[shape, op]
            extra = {"residual": residual.to(dtype)} | ({"scale": scale} if op in NEED_SCALE else {})
            mine = ar.lend(shape, dtype) if symmetric else torch.empty(shape, dtype=dtype)
            mine.copy_(part(group.rank, *shape))
            got = ar(mine, AllReduceParams(fusion_op=op, **extra))
            wanted = reference(x, dtype, op, **extra)
            for a, b in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (shape, dtype, op, symmetric)
            same = ar(mine.clone())
            assert torch.equal(same, x.to(dtype))

    check(ar)
    caplog.clear()
    assert ar.tune(usual) > 0
    assert ("tuned" in caplog.text) and " s" in caplog.text  # announced, with its time
    check(ar)
    again = AllReduce(group=group)
    check(again)
    for shape, dtype, op, symmetric in usual:
        told = objects.allgather(group.comm, again.explain(shape, dtype, op, symmetric))
        assert told == told[:1] * group.size
        assert ("tuned" in told[0]) == (shape[0] > 0)
    assert ar.tune(usual) < 5
    assert group.rank or tune.read() == tune.table(group)


@several
def test_rows_that_no_workspace_holds_are_left_out(new_group):
    group = new_group()
    ar = AllReduce(group=group)
    wide = (3, 400_000)  # 1.6 MB a row
    for op in (Op.NONE, Op.RMS_NORM):
        ar.tune([(wide, torch.float32, op, False), ((1, 64), torch.float32, op, False)])
        x = sum(part(rank, *wide) for rank in range(group.size))
        got = ar(part(group.rank, *wide), AllReduceParams(fusion_op=op))
        assert torch.equal(got, reference(x, torch.float32, op)[0])
        assert "tuned" in ar.explain((1, 64), torch.float32, op)


@several
@pytest.mark.parametrize("fused", [False, True])
def test_what_one_rank_has_remembered_does_not_part_the_ranks(new_group, fused):
    """A layer's calls before another layer's tuning, remembered by some ranks only."""
    group = new_group()
    layer, shape, op = AllReduce(group=group), (8, 64), Op.RESIDUAL_RMS_NORM if fused else Op.NONE
    x = part(group.rank, *shape)
    made = AllReduceParams(fusion_op=op, residual=part(3, *shape), norm_weight=part(2, 64)) if fused else None

    def params():
        return made if group.rank or not fused else replace(made, _plan=None)

    strided = torch.empty(8, 128)[:, ::2].copy_(x)
    first = layer(strided if group.rank == 0 and not fused else x, params())
    before = layer.decide(shape, torch.float32, made).way
    call = Call(group.size, 8, 256, "fp32", op)
    other = next(way for way in candidates(call, LIMITS) if way != before)

    def run(call, way):  # takes its time, all but the other way
        return lambda: [torch.ones(100).sum() for _ in range(1 if way == other else 2000)]

    tune.tune(group, LIMITS, [call], run)
    assert tune.table(group)[table_key(call)] == other
    for _ in range(3):
        got = layer(x, params())
        for a, b in zip(got if fused else (got,), first if fused else (first,), strict=True):
            assert torch.equal(a, b)
    assert layer.decide(shape, torch.float32, made).way == other


def test_a_group_of_one_has_nothing_to_tune(cache):
    ar = AllReduce(Mapping(), AllReduceStrategy.AUTO)
    assert ar.tune([((8, 64), torch.float32, Op.NONE, False)]) == 0
    assert not cache.exists()
    assert ar.decide((8, 64), torch.float32).way == Way.NOTHING
