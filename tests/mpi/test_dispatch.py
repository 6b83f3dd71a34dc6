"""Do tokens meet every expert they were routed to, once, and come back as the sum of what those make of them?

Values are integers, so a token that is missing, doubled or misplaced is another number.
"""

import pytest
import torch

from spmd import Distributed, Mapping
from spmd.collectives.moe import ExpertExchange
from spmd.control import mpi
from spmd.errors import InputError
from spmd.topology.split import split_first

several = pytest.mark.ranks(2, 3, 4, 5, 8)


@pytest.fixture(scope="module")
def group():
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size)
    yield Distributed.get(mapping).group("tp")
    Distributed.get(mapping).close()


def everyone(size, experts, k, sizes, width, seed):
    """Tokens, experts and weights of all ranks, the same on all."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count in sizes:
        x = torch.randint(-8, 9, (count, width), generator=generator).float()
        ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(count)] or [torch.zeros(k)])
        weights = torch.randint(1, 4, (count, k), generator=generator).float()
        made.append((x, ids[:count].to(torch.int32), weights))
    return made


def apply(rows, ids, weights, first):
    """An expert multiplies by its number plus one."""
    factor = torch.where(ids >= 0, (ids + first + 1).float() * weights, torch.zeros(())).sum(1, keepdim=True)
    return rows.float() * factor


SIZES = {"even": lambda n: [6] * n, "uneven": lambda n: [(5 * r) % 7 for r in range(n)], "idle": lambda n: [0] * n}
SIZES |= {"one": lambda n: [0] * (n - 1) + [1], "many": lambda n: [97 // n + (r < 97 % n) for r in range(n)]}


@several
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (11, 3), (9, 9)])
def test_every_expert_sees_its_tokens_and_all_come_back(group, sizes, dtype, experts, k):
    size, rank = group.size, group.rank
    if experts < size:
        pytest.fail("more ranks than experts")
    bounds = [split_first(experts, size, r).start for r in range(size)] + [experts]
    exchange = ExpertExchange(group, bounds)
    first, last = bounds[rank], bounds[rank + 1]
    for seed in range(3):
        counts = SIZES[sizes](size)
        world = everyone(size, experts, k, counts, 24, seed)
        x, ids, weights = world[rank]
        sent = exchange.dispatch(x.to(dtype), ids, weights, counts)
        assert sent is not None
        wanted = []
        for source, (rows, numbers, scale) in enumerate(world):
            here = ((numbers >= first) & (numbers < last)).any(1)
            assert sent.counts[source] == here.sum()
            wanted.append((rows[here], numbers[here], scale[here]))
        assert torch.equal(sent.rows.float(), torch.cat([rows for rows, _, _ in wanted]))
        numbers = torch.cat([part for _, part, _ in wanted])
        assert torch.equal(sent.ids, torch.where((numbers >= first) & (numbers < last), numbers - first, -1))
        assert torch.equal(sent.weights, torch.cat([part for _, _, part in wanted]))
        sent.rows.copy_(apply(sent.rows, sent.ids, sent.weights, first))
        back = exchange.combine(sent)
        truth = sum(
            apply(x, torch.where((ids >= bounds[r]) & (ids < bounds[r + 1]), ids, -1), weights, 0).to(dtype).float()
            for r in range(size)
        )
        assert back.dtype == dtype
        assert torch.equal(back, truth.to(dtype))


@several
def test_without_shared_memory_enough_all_ranks_say_so(group, monkeypatch):
    monkeypatch.setenv("FORCE_ALLREDUCE_KERNEL_WORKSPACE_SIZE", str(1 << 18))
    world = mpi.world()
    mapping = Mapping(world.size, world.rank, tp_size=world.size, gpus_per_node=3)  # another mapping: other groups
    small = Distributed.get(mapping).group("tp")
    exchange = ExpertExchange(small, [*range(small.size), small.size])
    counts = [4096] * small.size
    x, ids = torch.zeros(4096, 64), torch.zeros(4096, 1, dtype=torch.int32)
    assert exchange.dispatch(x, ids, torch.ones(4096, 1), counts) is None
    Distributed.get(mapping).close()


@several
def test_tensors_that_do_not_fit_are_refused(group):
    exchange = ExpertExchange(group, [*range(group.size), group.size])
    x, ids, weights = torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    sizes = [3] * group.size
    wrong = [
        (x.long(), ids, weights, sizes),
        (x, ids.long(), weights, sizes),
        (x, ids, weights.bfloat16(), sizes),
        (x, ids[:2], weights[:2], sizes),
        (x, ids, weights, [4] * group.size),
        (x, ids, weights, sizes[1:]),
    ]
    for given in wrong:
        with pytest.raises(InputError, match="dispatch on tp: tokens"):
            exchange.dispatch(*given)
    sent = exchange.dispatch(x.t().contiguous().t(), ids, weights, sizes)
    with pytest.raises(InputError, match="3 rows of 8 come back"):
        exchange.combine(sent, torch.ones(3, 9))
    assert torch.equal(exchange.combine(sent), x)


@pytest.mark.ranks(3, 4, 5, 8)
def test_what_comes_back_is_added_in_rank_order(group):
    """2^24 + 1 - 2^24 is 0 in fp32 from the left, and 1 in the order of the token's experts."""
    exchange = ExpertExchange(group, [*range(group.size), group.size])
    ids = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    sent = exchange.dispatch(torch.ones(1, 8), ids, torch.ones(1, 3), [1] * group.size)
    sent.rows.fill_([2.0**24, 1, -(2.0**24), 0][min(group.rank, 3)])
    assert torch.equal(exchange.combine(sent), torch.zeros(1, 8))
