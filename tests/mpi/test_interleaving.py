"""Are collectives through shared memory right in every order and rhythm, and out of step one error on all ranks?

Without SPMD_CHECK, whose messages would put the ranks back in step and find every difference first.
"""

import os
import time
from random import Random

import pytest
import torch

from spmd import AllReduceStrategy, Distributed, Mapping
from spmd._cpu import monotonic_ns
from spmd.collectives import gather
from spmd.collectives.allreduce import AllReduce
from spmd.collectives.exchange import exchange
from spmd.control import mpi, objects
from spmd.errors import DeadlineError, OutOfStepError
from spmd.memory.workspace import Workspace
from spmd.topology.radix import Radix

several = pytest.mark.ranks(2, 3, 4, 5, 8)


@pytest.fixture
def fresh(monkeypatch):
    """Makes a mapping's groups anew, without SPMD_CHECK."""
    monkeypatch.setenv("SPMD_CHECK", "0")
    monkeypatch.setenv("SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "1")
    made = []

    def make(timeout=20, **sizes):
        monkeypatch.setenv("SPMD_TIMEOUT", str(timeout))
        world = mpi.world()
        mapping = Mapping(world.size, world.rank, **sizes)
        Distributed.get(mapping).close()  # one that was made with other settings
        made.append(Distributed.get(mapping))
        return made[-1]

    yield make
    for dist in made:
        dist.close()


def part(rank, salt, *shape, dtype=torch.float32):
    """Small integers: sums are exact in every type; other calls and other ranks have other ones."""
    numbers = torch.arange(torch.Size(shape).numel())
    return ((numbers * 5 + salt * 3) % 7 + rank + 1).reshape(shape).to(dtype)


# ---------------------------------------------------------------------- orders and rhythms


def all_reduce(strategy=AllReduceStrategy.AUTO):
    def make(group, random, salt, rows, width):
        parts = [part(rank, salt, rows, width) for rank in range(group.size)]
        return parts[group.rank], sum(parts), AllReduce(group=group, strategy=strategy)

    return make


def all_gather(group, random, salt, rows, width):
    sizes = [random.randrange(rows + 1) for _ in range(group.size)]
    parts = [part(rank, salt, size, width) for rank, size in enumerate(sizes)]
    return parts[group.rank], torch.cat(parts), lambda x: gather.all_gather(x, group, sizes=sizes)


def reduce_scatter(group, random, salt, rows, width):
    sizes = [random.randrange(rows + 1) for _ in range(group.size)]
    parts = [part(rank, salt, sum(sizes), width) for rank in range(group.size)]
    expected = sum(parts).split(sizes)[group.rank]
    return parts[group.rank], expected, lambda x: gather.reduce_scatter(x, group, sizes=sizes)


def all_to_all(group, random, salt, rows, width):
    sizes = [[random.randrange(rows + 1) for _ in range(group.size)] for _ in range(group.size)]
    parts = [part(rank, salt, sum(sizes[rank]), width) for rank in range(group.size)]
    expected = torch.cat([full.split(sizes[rank])[group.rank] for rank, full in enumerate(parts)])
    return parts[group.rank], expected, lambda x: gather.all_to_all(x, group, send_sizes=sizes[group.rank])


KINDS = (
    (all_reduce(), 3, 40),  # words that are their own flags
    (all_reduce(AllReduceStrategy.ONESHOT), 9, 40),
    (all_reduce(AllReduceStrategy.TWOSHOT), 9, 40),
    (all_reduce(), 40, 600),
    (all_gather, 4, 30),
    (all_gather, 12, 200),
    (reduce_scatter, 4, 30),
    (reduce_scatter, 6, 200),
    (all_to_all, 3, 30),
    (all_to_all, 6, 200),
)


def calls_on(group, random):
    """Prepared calls of every kind: (name, input, expected, call). Passes are made short, so that there are many."""
    plane = Workspace.of(group).plane
    plane.chunk_bytes = 4096
    return [make(group, random, salt, rows, width) for salt in range(3) for make, rows, width in KINDS]


def wait_a_little(random):
    """Nothing, some time on the core, or away from it: what other ranks see of a rank is a random rhythm."""
    kind = random.randrange(8)
    if kind == 0:
        os.sched_yield()
    elif kind == 1:
        until = monotonic_ns() + random.randrange(60_000)
        while monotonic_ns() < until:
            pass
    elif kind == 2 and not random.randrange(8):
        time.sleep(random.random() * 2e-4)


INTERLEAVINGS = {2: 10_000, 3: 3000, 4: 2000, 5: 1000, 8: 500}
CALLS = 2  # of one interleaving


def interleave(groups, seed):
    """Random orders of calls, the same on all ranks, in a rhythm of each rank's own; results bitwise right."""
    shared, own = Random(seed), Random(seed * 1000 + mpi.world().rank)
    prepared = [calls_on(group, Random(f"{seed} {group.name} {list(group.ranks)}")) for group in groups]
    inputs = [[x.clone() for x, _, _ in calls] for calls in prepared]
    for number in range(INTERLEAVINGS[mpi.world().size] // 2):
        for step in range(CALLS):
            place = shared.randrange(len(groups))
            which = shared.randrange(len(prepared[place]))
            (x, expected, call), given = prepared[place][which], inputs[place][which]
            wait_a_little(own)
            got = call(given.copy_(x))
            given.fill_(float("nan"))
            assert torch.equal(got, expected), f"interleaving {number} of seed {seed}, step {step}: {which} on {place}"


@several
def test_one_group_in_random_orders(fresh):
    interleave([fresh(tp_size=mpi.world().size).group("tp")], seed=1)


@several
def test_two_overlapping_groups_in_random_orders(fresh):
    size = mpi.world().size
    dist = fresh(tp_size=size // 2, cp_size=2) if size % 2 == 0 and size > 2 else fresh(tp_size=size)
    interleave([dist.group("tp"), dist.group("world")], seed=2)


# ---------------------------------------------------------------------- out of step


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def summing(*shape, dtype=torch.float32):
    return lambda g: AllReduce(group=g)(ones(*shape, dtype=dtype))


def gathering(last, rows=2, width=3, dtype=torch.float32):
    """all_gather of 2 rows from all but the last rank."""
    sizes = lambda g: [rows] * (g.size - 1) + [last]  # noqa: E731
    return lambda g: gather.all_gather(ones(sizes(g)[g.rank], width, dtype=dtype), g, sizes=sizes(g))


def scattering(first, dim=0):
    sizes = lambda g: [first] + [(12 - first)] + [0] * (g.size - 2)  # noqa: E731
    return lambda g: gather.reduce_scatter(ones(12, 12), g, dim=dim, sizes=sizes(g))


def swapping(rows, given=False, dtype=torch.float32):
    return lambda g: gather.all_to_all(
        ones(rows * g.size, 3, dtype=dtype), g, send_sizes=[rows] * g.size if given else None
    )


def exchanging(last, fold=False):
    def call(g):
        rows = [2] * (g.size - 1) + [last]
        x = ones(rows[g.rank], 4)
        return exchange(x, g, Radix({"a": g.size}), rows, held=["a"], gather=["a"], fold=x if fold else None)

    return call


def sending(*shape, root=0, dtype=torch.float32):
    return lambda g: gather.broadcast(ones(*shape, dtype=dtype), g, root=root)


DIFFERENT = {  # what all call, and what one calls
    "small sums": (summing(100), summing(4)),
    "a small sum and a smaller one": (summing(8), summing(4)),
    "small sums of the same bytes": (summing(50), summing(100, dtype=torch.bfloat16)),
    "large sums": (summing(5000), summing(5008)),
    "large sums of the same bytes": (summing(5000), summing(10_000, dtype=torch.float16)),
    "a large sum and a small one": (summing(5000), summing(4)),
    "a small sum and nothing": (summing(100), summing(0)),
    "a large sum and nothing": (summing(5000), summing(0)),
    "a small sum and a gather": (summing(100), gathering(2)),
    "gathered rows": (gathering(2), gathering(3)),
    "gathered rows of all": (gathering(2), gathering(3, 3)),
    "gathered rows and nothing": (gathering(2), gathering(0, 0)),
    "gathered widths": (gathering(2), gathering(2, width=4)),
    "gathered types of the same bytes": (gathering(2), gathering(2, dtype=torch.int32)),
    "scattered rows": (scattering(5), scattering(6)),
    "scattered dimensions": (scattering(5), scattering(5, dim=1)),
    "swapped rows": (swapping(2), swapping(3)),
    "swapped rows, given and not": (swapping(2), swapping(2, given=True)),
    "swapped types of the same bytes": (swapping(2), swapping(2, dtype=torch.int32)),
    "a swap and a gather": (swapping(2), gathering(2)),
    "exchanged rows": (exchanging(2), exchanging(4)),
    "exchanges with a fold and without": (exchanging(2), exchanging(2, fold=True)),
    "an exchange and a gather": (exchanging(2), gathering(2)),
    "broadcast sizes": (sending(4), sending(5)),
    "broadcast roots": (sending(4), sending(4, root=1)),
    "broadcast types of the same bytes": (sending(4), sending(4, dtype=torch.int32)),
}


def outcome(group, call):
    """The error of this rank (None: it had none), and the seconds it took."""
    begin = time.monotonic()
    try:
        call(group)
    except OutOfStepError as error:
        return error, time.monotonic() - begin
    return None, time.monotonic() - begin


@several
@pytest.mark.parametrize("odd,rhythm", [(-1, "together"), (0, "it is late"), (-1, "the others are late")])
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_the_same_error_on_all_ranks(fresh, name, odd, rhythm):
    """At once, or at the latest in the next call, where a rank waits that could finish the first."""
    group = fresh(timeout=3, tp_size=mpi.world().size).group("tp")
    odd %= group.size
    usual, different = DIFFERENT[name]
    summing(4)(group)
    if rhythm != "together" and (rhythm == "it is late") == (group.rank == odd):
        time.sleep(0.01)

    def both(group):
        (different if group.rank == odd else usual)(group)
        summing(6000)(group)

    error, took = outcome(group, both)
    every = objects.allgather(mpi.world(), (type(error).__name__, str(error), took))
    shown = "\n".join(
        f"rank {rank}, after {took:.2f} s: {kind}: {text}" for rank, (kind, text, took) in enumerate(every)
    )
    assert all(kind == "DesyncError" for kind, _, _ in every), shown
    assert all("\n" not in text for _, text, _ in every), shown
    assert max(took for *_, took in every) < 2, shown
    if group.size > 2:
        assert all(f"rank {odd} called" in text for _, text, _ in every), shown
    else:
        assert all("called" in text for _, text, _ in every), shown
    with pytest.raises(OutOfStepError):  # a group that is out of step stays so
        summing(4)(group)


CALLED = {
    "small sum": summing(4),
    "large sum": summing(5000),
    "gather": gathering(2),
    "scatter": scattering(5),
    "swap": swapping(2),
    "exchange": exchanging(2),
    "broadcast": sending(4),
}


@several
@pytest.mark.parametrize("name", CALLED)
def test_a_rank_that_does_not_come_is_named(fresh, name):
    group = fresh(timeout=0.3, tp_size=mpi.world().size).group("tp")
    absent, error = group.size - 1, None
    CALLED[name](group)
    if group.rank != absent:
        error, took = outcome(group, CALLED[name])
        assert isinstance(error, OutOfStepError)
        assert 0.25 < took < 3
    every = objects.allgather(mpi.world(), None if error is None else (type(error), str(error)), timeout=30)
    late = [text for kind, text in every[:absent] if kind is DeadlineError]
    assert late
    assert all(f"on tp: rank {absent} has not arrived: gave up after 0.3 s (SPMD_TIMEOUT)" in text for text in late)
    assert all(f"rank {absent} has not arrived" in text for _, text in every[:absent])
    # the one that comes at last may find all it needs, but then it is not left waiting either
    error, took = outcome(group, lambda g: (CALLED[name](g), CALLED[name](g)))
    assert isinstance(error, OutOfStepError)
    assert took < 3
