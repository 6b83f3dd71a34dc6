"""Do the collectives give every rank the right rows, bit for bit, for every type, size, dimension and order?

Every case runs over both paths: MPI's library and the shared memory of one host.
"""

from itertools import product
from random import Random
from types import SimpleNamespace

import pytest
import torch

from spmd import Distributed, Mapping, allgather, alltoall, cp_allgather, reducescatter
from spmd.collectives import gather, library
from spmd.collectives.allreduce import AllReduce
from spmd.control import mpi, objects
from spmd.control.record import OPS
from spmd.errors import InputError, SpmdError
from spmd.memory.workspace import Workspace

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
DIMS = (0, 1, 2, -1, -2, -3)
several = pytest.mark.ranks(2, 3, 4, 5, 8)
SIZES = {
    "equal": lambda n: [2] * n,
    "uneven": lambda n: [(3 * rank + 1) % 4 for rank in range(n)],
    "last": lambda n: [0] * (n - 1) + [5],
    "none": lambda n: [0] * n,
}


@pytest.fixture(scope="module")
def opened():
    """tp is the whole world, pp and cp are groups of one."""
    world = mpi.world()
    dist = Distributed.get(Mapping(world.size, world.rank, tp_size=world.size))
    yield dist
    dist.close()


@pytest.fixture
def group(opened):
    return opened.group("tp")


NATIVE = SimpleNamespace(
    all_reduce=lambda x, group, out=None: AllReduce(group=group)(x, out=out),
    all_gather=gather.all_gather,
    reduce_scatter=gather.reduce_scatter,
    all_to_all=gather.all_to_all,
    broadcast=gather.broadcast,
)


@pytest.fixture(params=["library", "native"])
def path(request):
    return library if request.param == "library" else NATIVE


def part(rank, *shape, dtype=torch.float32):
    """Small integers that differ between ranks and places: their sums are exact in every type and order."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 7 + 1) * (rank + 1)).reshape(shape).to(dtype)


def total(parts):
    return torch.stack([x.double() for x in parts]).sum(0).to(parts[0].dtype)


def poison(x):
    return x.fill_(float("nan") if x.is_floating_point() else -77)


def exact(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert torch.equal(got, expected), f"got {got}, expected {expected}"


def same_everywhere(group, x):
    everyone = objects.allgather(group.comm, x.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert everyone == everyone[:1] * group.size


# ---------------------------------------------------------------------- all_reduce


@several
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (1,), (), (0, 4), (2, 1, 1031)])
def test_all_reduce(group, path, dtype, shape):
    parts = [part(rank, *shape, dtype=dtype) for rank in range(group.size)]
    x = parts[group.rank].clone()
    got = path.all_reduce(x, group)
    poison(x)
    exact(got, total(parts))


@several
def test_every_rank_has_the_same_bits(group, path):
    # values whose sum depends on the order: whatever order MPI takes, it must be one for all ranks
    x = torch.rand(3, 1031, generator=torch.Generator().manual_seed(group.rank)) * 10.0 ** (group.rank % 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same_everywhere(group, path.all_reduce(x.to(dtype), group))
        same_everywhere(group, path.all_gather(x.to(dtype), group, dim=1))
        same_everywhere(group, path.broadcast(x.to(dtype), group))


@several
@pytest.mark.parametrize("op,choose", [("max", torch.amax), ("min", torch.amin)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_max_and_min(group, dtype, op, choose):
    parts = [(part(rank, 4, 3) * (-1) ** rank).to(dtype) for rank in range(group.size)]
    exact(library.all_reduce(parts[group.rank], group, op=op), choose(torch.stack(parts), 0))


@pytest.mark.ranks(3, 4, 5, 8)
@pytest.mark.parametrize("dtype,big", [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_half_types_are_summed_in_fp32_and_rounded_once(group, path, dtype, big):
    # column j holds the big value at rank j and ones elsewhere: big + 1 rounds back to big, so that a sum made in the
    # half type loses ones in at least one column, whatever its order
    x = torch.ones(group.size).index_fill(0, torch.tensor(group.rank), big).to(dtype)
    expected = torch.full((group.size,), big + group.size - 1).to(dtype)
    assert (torch.tensor(big, dtype=dtype) + 1).item() == big < expected[0].item()
    exact(path.all_reduce(x, group), expected)
    exact(path.reduce_scatter(x, group), expected[:1])


@several
def test_int64_sums_are_exact_beyond_doubles(group, path):
    got = path.all_reduce(torch.tensor([2**53 + 1, -(2**58)]), group)
    exact(got, torch.tensor([(2**53 + 1) * group.size, -(2**58) * group.size]))


@several
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_out(group, path, dtype):
    parts = [part(rank, 4, 6, dtype=dtype) for rank in range(group.size)]
    for x in (parts[group.rank].clone(), parts[group.rank].t().contiguous().t()):
        out = poison(torch.empty_like(x, memory_format=torch.contiguous_format))
        kept = x.clone()
        assert path.all_reduce(x, group, out=out) is out
        exact(out, total(parts))
        assert torch.equal(x, kept)
        assert path.all_reduce(x, group, out=x) is x
        assert torch.equal(x, total(parts))
    wide = poison(torch.empty(4, 12, dtype=dtype))
    view = wide[:, ::2]
    assert path.all_reduce(parts[group.rank], group, out=view) is view
    exact(view.contiguous(), total(parts))
    assert torch.equal(wide[:, 1::2].isnan() | (wide[:, 1::2] == -77), torch.ones(4, 6, dtype=torch.bool))


# ---------------------------------------------------------------------- moving rows


def cut(rank, rows, dim, dtype=torch.float32):
    shape = [2, 3, 4]
    shape[dim] = rows
    return part(rank, *shape, dtype=dtype)


@several
@pytest.mark.parametrize("kind", SIZES)
def test_all_gather(group, path, kind):
    sizes = SIZES[kind](group.size)
    for dim, dtype in product(DIMS, DTYPES):
        parts = [cut(rank, rows, dim, dtype) for rank, rows in enumerate(sizes)]
        x = parts[group.rank].clone()
        got = path.all_gather(x, group, dim=dim, sizes=None if kind == "equal" else sizes)
        poison(x)
        exact(got, torch.cat(parts, dim))


@several
@pytest.mark.parametrize("kind", SIZES)
def test_reduce_scatter(group, path, kind):
    sizes = SIZES[kind](group.size)
    for dim, dtype in product(DIMS, DTYPES):
        parts = [cut(rank, sum(sizes), dim, dtype) for rank in range(group.size)]
        x = parts[group.rank].clone()
        got = path.reduce_scatter(x, group, dim=dim, sizes=None if kind == "equal" else sizes)
        poison(x)
        exact(got, total(parts).split(sizes, dim)[group.rank].contiguous())


@several
@pytest.mark.parametrize("kind", ["equal", "asked", "given", "one", "none"])
def test_all_to_all(group, path, kind):
    n = group.size
    uneven = [[(sender + 2 * receiver) % 3 for receiver in range(n)] for sender in range(n)]
    one = [[4 * (sender == 0 and receiver == n - 1) for receiver in range(n)] for sender in range(n)]
    sizes = {"equal": [[2] * n] * n, "one": one, "none": [[0] * n] * n}.get(kind, uneven)
    arriving = [sizes[rank][group.rank] for rank in range(n)] if kind == "given" else None
    leaving = None if kind == "equal" else sizes[group.rank]
    for dim, dtype in product(DIMS, DTYPES):
        parts = [cut(rank, sum(sizes[rank]), dim, dtype) for rank in range(n)]
        x = parts[group.rank].clone()
        got = path.all_to_all(x, group, dim=dim, send_sizes=leaving, recv_sizes=arriving)
        poison(x)
        exact(got, torch.cat([parts[rank].split(sizes[rank], dim)[group.rank] for rank in range(n)], dim))


@several
def test_the_unchecked_path_gives_the_same(group, path, monkeypatch):
    assert group.checked
    monkeypatch.setattr(group, "checked", False)
    n, rank = group.size, group.rank
    sizes = SIZES["uneven"](n)
    parts, fulls = [cut(i, sizes[i], 1) for i in range(n)], [cut(i, sum(sizes), 1) for i in range(n)]
    exact(path.all_reduce(fulls[rank], group), total(fulls))
    exact(path.all_gather(parts[rank], group, dim=1, sizes=sizes), torch.cat(parts, 1))
    got = path.reduce_scatter(fulls[rank], group, dim=1, sizes=sizes)
    exact(got, total(fulls).split(sizes, 1)[rank].contiguous())
    got = path.all_to_all(fulls[rank], group, dim=1, send_sizes=sizes)
    exact(got, torch.cat([full.split(sizes, 1)[rank] for full in fulls], 1))
    exact(path.broadcast(fulls[rank], group, root=n - 1), fulls[n - 1])


@several
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(group, path, dtype):
    for root in range(group.size):
        for shape in [(3, 4), (), (0, 2)]:
            expected = part(root, *shape, dtype=dtype)
            x = expected.clone() if group.rank == root else poison(expected.clone())
            kept = x.clone()
            got = path.broadcast(x, group, root=root)
            assert torch.equal(x.nan_to_num(-5), kept.nan_to_num(-5))
            poison(x)
            exact(got, expected)
        x = expected.clone() if group.rank == root else poison(expected.clone())
        out = poison(torch.empty_like(expected))
        assert path.broadcast(x, group, root=root, out=out) is out
        exact(out, expected)
        assert path.broadcast(x, group, root=root, out=x) is x
        exact(x, expected)


@several
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, ::2].t(), lambda x: x.t()[:, 1:], lambda x: x[0].expand(x.shape[1], -1)],
    ids=["transposed", "strided", "offset", "expanded"],
)
def test_non_contiguous_input_is_copied(group, path, dtype, view):
    n = group.size
    parts = [view(part(rank, 3 * n, 2 * n, dtype=dtype)) for rank in range(n)]
    x = parts[group.rank]
    assert not x.is_contiguous()
    rows = [x.shape[0] // n] * (n - 1)
    rows.append(x.shape[0] - sum(rows))
    mine, last = group.rank, n - 1
    exact(path.all_reduce(x, group), total(parts))
    exact(path.all_gather(x, group, dim=1), torch.cat(parts, 1))
    exact(path.reduce_scatter(x, group, sizes=rows), total(parts).split(rows)[mine])
    got = path.all_to_all(x, group, send_sizes=rows)
    exact(got, torch.cat([other.split(rows)[mine] for other in parts]))
    exact(path.broadcast(x, group, root=last), parts[last].contiguous())
    assert torch.equal(x, view(part(mine, 3 * n, 2 * n, dtype=dtype)))


LARGE = {
    "one pass": (300, 300),
    "several passes": (3000, 300),
    "rows as long as a slot": (5, 1 << 18),
    "rows longer than a slot": (5, (1 << 18) + 3),
    "one row longer than a slot": (1, 3 << 18),
}


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_messages_of_any_length(group, path, shape):
    n, rank, (rows, width) = group.size, group.rank, shape
    sizes = [(i + 1) * rows // n - i * rows // n for i in range(n)]
    fulls = [part(i, rows, width) for i in range(n)]
    cuts = [full[: sizes[i]] for i, full in enumerate(fulls)]
    expected = total(fulls)
    exact(path.all_reduce(fulls[rank], group), expected)
    exact(path.reduce_scatter(fulls[rank], group, sizes=sizes), expected.split(sizes)[rank])
    exact(path.all_gather(cuts[rank], group, sizes=sizes), torch.cat(cuts))
    got = path.all_to_all(fulls[rank], group, send_sizes=sizes)
    exact(got, torch.cat([full.split(sizes)[rank] for full in fulls]))
    exact(path.broadcast(fulls[rank], group, root=n - 1), fulls[n - 1])


@several
def test_rows_go_through_shared_memory_where_they_can(group):
    plane, x = Workspace.of(group).plane, part(group.rank, group.size, 3)
    for op, call in vars(NATIVE).items():
        before = {OPS[number]: calls for number, calls, *_ in plane.totals}.get(op, 0)
        call(x, group)
        assert {OPS[number]: calls for number, calls, *_ in plane.totals}[op] == before + 1


def test_a_group_of_one_returns_its_input(opened, path):
    alone, x = opened.group("pp"), part(3, 4, 5)
    assert alone.size == 1
    assert path.all_reduce(x, alone) is x
    assert path.all_gather(x, alone, dim=1) is x
    assert path.reduce_scatter(x, alone) is x
    assert path.all_to_all(x, alone) is x
    assert path.broadcast(x, alone) is x
    for op in (path.all_reduce, path.broadcast):
        out = poison(torch.empty(4, 5))
        assert op(x, alone, out=out) is out
        exact(out, x)


# ---------------------------------------------------------------------- by mapping


@several
def test_mapping_forms_take_lists_and_keep_none(opened):
    mapping, world = opened.mapping, mpi.world()
    n, rank = world.size, world.rank
    sizes = SIZES["uneven"](n)
    parts, fulls = [part(i, 3, sizes[i]) for i in range(n)], [part(i, 3, sum(sizes)) for i in range(n)]
    exact(allgather(parts[rank], mapping, sizes=sizes), torch.cat(parts, -1))
    first, nothing, second = allgather([parts[rank], None, parts[rank].to(torch.int32)], mapping, -1, sizes)
    exact(first, torch.cat(parts, -1))
    exact(second, torch.cat(parts, -1).to(torch.int32))
    assert nothing is None
    exact(reducescatter(fulls[rank], mapping, sizes=sizes), total(fulls).split(sizes, -1)[rank].contiguous())
    nothing, only = reducescatter([None, fulls[rank]], mapping, 1, sizes)
    exact(only, total(fulls).split(sizes, 1)[rank].contiguous())
    assert nothing is None
    squares = [part(i, 2 * n, 3) for i in range(n)]
    arrived = torch.cat([square.chunk(n)[rank] for square in squares])
    exact(alltoall(squares[rank], mapping), arrived)
    nothing, only = alltoall([None, squares[rank]], mapping, 0)
    exact(only, arrived)
    assert nothing is None
    assert allgather([None, None], mapping) == [None, None]
    assert allgather([], mapping) == []


def test_mapping_forms_return_the_input_of_a_group_of_one(opened):
    x, items = part(1, 4, 4), [part(1, 2, 2), None]
    for given in (x, items):
        assert allgather(given, opened.mapping, axis="pp") is given
        assert reducescatter(given, opened.mapping, axis="pp") is given
        assert alltoall(given, opened.mapping, axis="pp") is given
        assert cp_allgather(given, opened.mapping) is given


@several
def test_cp_allgather():
    world = mpi.world()
    n, rank = world.size, world.rank
    dist = Distributed.get(Mapping(n, rank, cp_size=n, cp_config={"cp_type": "helix"}))
    parts = [part(i, 2, i) for i in range(n)]
    exact(cp_allgather(parts[rank], dist.mapping, -1, list(range(n))), torch.cat(parts, -1))
    got, nothing = cp_allgather([part(rank, 2, 3), None], dist.mapping, 0)
    exact(got, torch.cat([part(i, 2, 3) for i in range(n)]))
    assert nothing is None
    dist.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", range(4))
def test_overlapping_groups_in_random_order(path, seed):
    world, random = mpi.world(), Random(seed)
    dist = Distributed.get(Mapping(4, world.rank, tp_size=2, pp_size=2))
    for step in range(80):
        group = dist.group(random.choice(["tp", "pp", "world"]))
        rows = [random.randrange(4) for _ in range(4)][: group.size]
        op, root = random.choice(["sum", "gather", "scatter", "swap", "broadcast", "objects"]), random.randrange(2)
        parts = [part(rank, sum(rows), 3) + step for rank in group.ranks]
        mine = parts[group.rank]
        if op == "sum":
            exact(path.all_reduce(mine, group), total(parts))
        elif op == "gather":
            cuts = [other[:count] for other, count in zip(parts, rows, strict=True)]
            exact(path.all_gather(cuts[group.rank], group, sizes=rows), torch.cat(cuts))
        elif op == "scatter":
            exact(path.reduce_scatter(mine, group, sizes=rows), total(parts).split(rows)[group.rank])
        elif op == "swap":
            got = path.all_to_all(mine, group, send_sizes=rows)
            exact(got, torch.cat([other.split(rows)[group.rank] for other in parts]))
        elif op == "broadcast":
            exact(path.broadcast(mine, group, root=root), parts[root])
        else:
            assert dist.allgather((world.rank, step), axis=group.name) == [(rank, step) for rank in group.ranks]
    dist.close()


# ---------------------------------------------------------------------- wrong arguments


X = torch.ones(4, 6)
WRONG = {
    "all_reduce of fp64": lambda path, g: path.all_reduce(X.double(), g),
    "all_gather of bool": lambda path, g: path.all_gather(X.bool(), g),
    "reduce_scatter of uint8": lambda path, g: path.reduce_scatter(
        X.to(torch.uint8), g, sizes=[4] + [0] * (g.size - 1)
    ),
    "all_to_all of complex": lambda path, g: path.all_to_all(X.cfloat(), g, send_sizes=[4] + [0] * (g.size - 1)),
    "broadcast of fp64": lambda path, g: path.broadcast(X.double(), g),
    "all_reduce of a meta tensor": lambda path, g: path.all_reduce(X.to("meta"), g),
    "all_reduce prod": lambda _, g: library.all_reduce(X, g, op="prod"),
    "all_reduce out of another shape": lambda path, g: path.all_reduce(X, g, out=torch.empty(2, 4, 6)),
    "all_reduce out of a smaller shape": lambda path, g: path.all_reduce(X, g, out=torch.empty(4, 5)),
    "all_reduce out of another type": lambda path, g: path.all_reduce(X.bfloat16(), g, out=torch.empty(4, 6)),
    "broadcast out of another shape": lambda path, g: path.broadcast(X, g, out=torch.empty(6, 4)),
    "broadcast out of another type": lambda path, g: path.broadcast(X, g, out=torch.empty(4, 6, dtype=torch.int32)),
    "broadcast root too large": lambda path, g: path.broadcast(X, g, root=g.size),
    "broadcast root below 0": lambda path, g: path.broadcast(X, g, root=-1),
    "all_gather with sizes of others": lambda path, g: path.all_gather(X, g, sizes=[5] * g.size),
    "all_gather with a size too few": lambda path, g: path.all_gather(X, g, sizes=[4] * (g.size - 1)),
    "all_gather along dim 2": lambda path, g: path.all_gather(X, g, dim=2),
    "all_gather along dim -3": lambda path, g: path.all_gather(X, g, dim=-3),
    "all_gather of a scalar": lambda path, g: path.all_gather(torch.tensor(1.0), g),
    "reduce_scatter not dividing": lambda path, g: path.reduce_scatter(torch.ones(g.size + 1, 2), g),
    "reduce_scatter sizes not summing": lambda path, g: path.reduce_scatter(X, g, sizes=[4] * g.size),
    "reduce_scatter with a size too many": lambda path, g: path.reduce_scatter(X, g, sizes=[4] + [0] * g.size),
    "reduce_scatter with a size below 0": lambda path, g: path.reduce_scatter(X, g, sizes=[5, -1] + [0] * (g.size - 2)),
    "reduce_scatter along dim 2": lambda path, g: path.reduce_scatter(torch.ones(g.size, g.size), g, dim=2),
    "reduce_scatter of a scalar": lambda path, g: path.reduce_scatter(torch.tensor(1.0), g),
    "all_to_all not dividing": lambda path, g: path.all_to_all(torch.ones(g.size + 1, 2), g),
    "all_to_all sizes not summing": lambda path, g: path.all_to_all(X, g, send_sizes=[4] * g.size),
    "all_to_all with a size too few": lambda path, g: path.all_to_all(X, g, send_sizes=[4] + [0] * (g.size - 2)),
    "all_to_all with a size below 0": lambda path, g: path.all_to_all(X, g, send_sizes=[5, -1] + [0] * (g.size - 2)),
    "all_to_all along dim -3": lambda path, g: path.all_to_all(torch.ones(g.size, g.size), g, dim=-3),
    "all_to_all of a scalar": lambda path, g: path.all_to_all(torch.tensor(1.0), g),
    "all_to_all with too few to receive": lambda path, g: path.all_to_all(
        X, g, send_sizes=[4] + [0] * (g.size - 1), recv_sizes=[4] * (g.size - 1)
    ),
}


@several
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_line_and_harms_nobody(group, path, name):
    with pytest.raises(InputError) as caught:
        WRONG[name](path, group)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{name.split()[0]} on tp: ")
    exact(path.all_reduce(X, group), X * group.size)


@several
def test_receive_sizes_that_nobody_sends_are_refused(group, path):
    assert group.checked
    sizes = [3 if rank == 0 and group.rank == 0 else 2 for rank in range(group.size)]  # rank 0 expects a row too many
    with pytest.raises(SpmdError) as caught:
        path.all_to_all(torch.ones(2 * group.size, 3), group, send_sizes=[2] * group.size, recv_sizes=sizes)
    assert "\n" not in str(caught.value)
    exact(path.all_reduce(X, group), X * group.size)
