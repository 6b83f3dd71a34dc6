"""Does an exchange give every rank the rows it is to hold, summed, for every sum, gather and cut over several axes?

The truth is made of global rows: what a row is worth at a rank depends on the row and on the rank's coordinates along
the axes that owe a sum, be it finished now or later.
"""

import time
from itertools import product

import pytest
import torch

from spmd import AllReduceFusionOp, AllReduceParams, Distributed, Mapping, exchange
from spmd.collectives import fusion
from spmd.control import mpi
from spmd.errors import InputError, SpmdError
from spmd.memory.workspace import Workspace
from spmd.topology.radix import Radix

WIDTH = 32
COLUMN = torch.arange(WIDTH)
ROWS = {  # of every block
    "many": lambda blocks: [(7 * block + 5) % 17 for block in range(blocks)],
    "uneven": lambda blocks: [(3 * block + 2) % 5 for block in range(blocks)],
    "one": lambda blocks: [0] * (blocks - 1) + [3],
    "none": lambda blocks: [0] * blocks,
}
TYPES = (torch.bfloat16, torch.float32, torch.float16)
# what an axis can be: rows differ along it, unfinished sums, or neither; and what is done with it
HELD, GATHERED, SUMMED, SCATTERED, ALONE, CUT = range(6)


def shape(*sizes, ranks=()):
    name = "x".join(map(str, sizes))
    return pytest.param(dict(zip("abc", sizes, strict=False)), id=name, marks=pytest.mark.ranks(*ranks))


ALL_SHAPES = [
    shape(1, ranks=[1]),
    shape(2, ranks=[2]),
    shape(1, 2, ranks=[2]),
    shape(3, ranks=[3]),
    shape(2, 2, ranks=[4]),
    shape(5, ranks=[5]),
    shape(2, 3, ranks=[6, 8]),  # six of eight ranks
    shape(3, 2, ranks=[6]),
    shape(2, 2, 2, ranks=[8]),
]
several = pytest.mark.ranks(2, 3, 4, 5, 8)
every_shape = pytest.mark.parametrize("sizes", ALL_SHAPES)


@pytest.fixture(scope="module")
def opened():
    """Groups of the first ranks of the world, as many as are asked for; the other ranks have none."""
    made, world = {}, mpi.world()

    def make(size):
        if size not in made:
            made[size] = Distributed.get(Mapping(size, world.rank if world.rank < size else 0, tp_size=size))
        if world.rank >= size:
            return None
        group = made[size].group("tp")
        if size > 1:
            Workspace.of(group).plane.chunk_bytes = 2 * WIDTH * 4  # passes of a few rows
        return group

    yield make
    for dist in made.values():
        dist.close()


class Move:
    """One exchange: what becomes of every axis of a shape, and the rows of every block."""

    def __init__(self, sizes, kinds, rows):
        self.shape, kinds = Radix(sizes), dict(zip(sizes, kinds, strict=True))

        def named(*wanted):
            return [axis for axis, kind in kinds.items() if kind in wanted]

        self.axes = {
            "held": named(HELD, GATHERED),
            "over": named(SUMMED, SCATTERED),
            "gather": named(GATHERED),
            "cut": named(SCATTERED, CUT),
        }
        self.after = named(HELD, SCATTERED, CUT)
        self.owing = named(SUMMED, SCATTERED, ALONE)  # sums over the last are finished later, by others
        blocks = Radix({axis: size for axis, size in sizes.items() if kinds[axis] not in (SUMMED, ALONE)})
        self.rows, self.places = ROWS[rows](blocks.size), []
        for block, count in enumerate(self.rows):
            self.places += [blocks.coordinates(block)] * count  # of every global row

    def __repr__(self):
        return f"{self.shape} rows {self.rows} {self.axes}"

    def layout(self, rank, axes):
        """The global rows of a rank whose rows differ from the others' along these axes."""
        at = self.shape.coordinates(rank)
        return [row for row, place in enumerate(self.places) if all(place[axis] == at[axis] for axis in axes)]

    def values(self, rank, salt=0):
        """All global rows as a rank would bring them: small integers."""
        at = self.shape.coordinates(rank)
        weight = sum((at[axis] + 1) * 3**place for place, axis in enumerate(self.owing))
        row = torch.arange(len(self.places)).unsqueeze(1)
        return ((row * 7 + COLUMN * 3 + salt) % 11 + (row % 5 + 1) * weight).float()

    def brought(self, rank, salt=0):
        return self.values(rank, salt)[self.layout(rank, self.axes["held"])]

    def adds(self, rank):
        """Whether it is the one of those who owe a sum that adds what is folded in."""
        return all(self.shape.coordinate(rank, axis) == 0 for axis in self.axes["over"])

    def expected(self, rank, dtype, folded):
        """fp32 sums of everybody's values, each rounded, in rank order."""
        total = torch.zeros(len(self.places), WIDTH)
        for source in self.shape.group(rank, *self.axes["over"]):
            mine = self.values(source).to(dtype)
            if folded and self.adds(source):
                mine = mine + self.values(source, 5).to(dtype)
            total = total + mine.float()
        return total[self.layout(rank, self.after)]


def epilogue(rows, dtype, salt):
    return {
        "residual": ((torch.arange(rows).unsqueeze(1) * 5 + COLUMN + salt) % 13).to(dtype),
        "norm_weight": (COLUMN % 4 + 1).to(dtype),
        "norm_pre_residual_weight": (COLUMN % 3 + 1).to(dtype),
        "bias": (COLUMN % 5).to(dtype),
        "scale": torch.tensor([4.0]),
    }


def same(one, other):
    alike = (one.dtype, one.shape) == (other.dtype, other.shape) and one.is_contiguous()
    return alike and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def wrong(group, move, dtype, folded=False, op=None):
    """Do it; what is wrong with the result, in words."""
    rank, fold, tensors = group.rank, None, {}
    x, total = move.brought(rank).to(dtype), move.expected(rank, dtype, folded)
    if folded:  # nobody reads it of the others
        fold = move.brought(rank, 5).to(dtype) if move.adds(rank) else torch.full_like(x, float("nan"))
    if op is not None:
        tensors = epilogue(len(total), dtype, rank)
    params = None if op is None else AllReduceParams(fusion_op=op, **tensors)
    try:
        got = exchange(x, group, move.shape, move.rows, **move.axes, fold=fold, params=params)
    except SpmdError as error:
        return f"{move}: {type(error).__name__}: {error}"
    x.fill_(float("nan"))
    expected = (total.to(dtype),) if op is None else fusion.reference(total, dtype, op, **tensors)
    if isinstance(got, torch.Tensor) != (len(expected) == 1):  # as of AllReduce
        return f"{move}: {len(expected)} outputs came as {type(got)}"
    given = (got,) if isinstance(got, torch.Tensor) else got
    if not all(map(same, given, expected)):
        return f"{move}: got {given}, expected {expected}"
    return ""


def all_right(group, cases):
    """No rank leaves before the last case: the others wait for it."""
    if group is None:
        return
    faults = [text for case in cases if (text := wrong(group, *case))]
    assert not faults, f"{len(faults)} of {len(cases)} are wrong, such as {faults[0]}"


FUSED = [op for op in AllReduceFusionOp if op != AllReduceFusionOp.NONE]


@every_shape
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("folded", [False, True], ids=["", "folded"])
@pytest.mark.parametrize("rows", ROWS)
def test_every_sum_gather_and_cut(opened, sizes, rows, folded, fused):
    """All of them with uneven rows, zero among them; of three axes every fifth with the other rows."""
    cases = []
    for index, kinds in enumerate(product(range(6), repeat=len(sizes))):
        if rows == "uneven" or len(sizes) < 3 or index % 5 == 0:
            op = FUSED[index % len(FUSED)] if fused else None
            cases.append((Move(sizes, kinds, rows), TYPES[index % 3], folded, op))
    all_right(opened(Radix(sizes).size), cases)


@several
@pytest.mark.parametrize("op", FUSED, ids=lambda op: op.name)
def test_every_epilogue(opened, op):
    """All-reduce, reduce-scatter, all-gather and all-to-all as exchanges."""
    sizes, kinds = {"a": mpi.world().size}, (SUMMED, SCATTERED, GATHERED, HELD)
    cases = [(Move(sizes, [kind], "many"), dtype, False, op) for kind in kinds for dtype in TYPES]
    all_right(opened(mpi.world().size), cases)


@several
def test_an_addend_is_rounded_before_it_is_summed(opened):
    """256 + 1 is 256 in bf16: the sum of that and 1 is 257, which is 256 again, where 256 + 1 + 1 were 258."""
    group = opened(mpi.world().size)
    x = torch.full((1, 3), 256.0 if group.rank == 0 else 1.0 if group.rank == 1 else 0.0, dtype=torch.bfloat16)
    got = exchange(x, group, Radix({"a": group.size}), [1], held=[], over=["a"], fold=torch.ones_like(x))
    assert torch.equal(got, torch.full_like(x, 256))


@several
@pytest.mark.parametrize("kind", [SUMMED, SCATTERED, GATHERED])
def test_rows_longer_than_a_slot_are_right_or_one_error(opened, kind):
    group = opened(mpi.world().size)
    move = Move({"a": group.size}, [kind], "one")
    width = Workspace.of(group).plane.slot_bytes // 4 + 5
    x = torch.full((len(move.brought(group.rank)), width), float(group.rank + 1))
    try:
        got = exchange(x, group, move.shape, move.rows, **move.axes)
    except InputError as error:
        assert str(width * 4) in str(error)
    else:
        value = float(group.size) if kind == GATHERED else float(sum(range(group.size + 1)))
        assert torch.equal(got, torch.full((len(move.layout(group.rank, move.after)), width), value))
    all_right(group, [(Move({"a": group.size}, [SUMMED], "many"), torch.float32)])


X = torch.ones(2, 4)
WRONG = {
    "integers": (X.to(torch.int32), {"held": ["a"], "gather": ["a"]}),
    "fp64": (X.double(), {"held": ["a"], "gather": ["a"]}),
    "three dimensions": (torch.ones(2, 2, 2), {"held": ["a"], "gather": ["a"]}),
    "gather what is not held": (X, {"held": [], "gather": ["a"]}),
    "sum what is held": (X, {"held": ["a"], "over": ["a"]}),
    "cut what is held": (X, {"held": ["a"], "cut": ["a"]}),
    "another row count": (torch.ones(3, 4), {"held": ["a"], "gather": ["a"]}),
    "a block too few": (X, {"held": ["a"], "gather": ["a"], "blocks": -1}),
    "a block too many": (X, {"held": ["a"], "gather": ["a"], "blocks": 1}),
    "rows below 0": (X, {"held": ["a"], "gather": ["a"], "rows": [-2]}),
    "an unknown axis": (X, {"held": ["z"], "gather": ["z"]}),
    "a fold of another shape": (X, {"held": ["a"], "gather": ["a"], "fold": torch.ones(1, 4)}),
    "a fold of another type": (X, {"held": ["a"], "gather": ["a"], "fold": X.bfloat16()}),
    "no residual": (X, {"held": ["a"], "params": AllReduceParams(fusion_op=AllReduceFusionOp.RESIDUAL_RMS_NORM)}),
    "a residual of the rows before": (
        X,
        {
            "held": ["a"],
            "gather": ["a"],
            "params": AllReduceParams(fusion_op=AllReduceFusionOp.RESIDUAL_RMS_NORM, residual=X),
        },
    ),
}


@several
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_line_and_harms_nobody(opened, name):
    group = opened(mpi.world().size)
    x, given = WRONG[name]
    given = dict(given)
    rows = given.pop("rows", [2]) * (group.size + given.pop("blocks", 0))
    with pytest.raises(InputError) as caught:
        exchange(x, group, Radix({"a": group.size}), rows, **given)
    assert "\n" not in str(caught.value)
    all_right(group, [(Move({"a": group.size}, [SUMMED], "many"), torch.float32)])


ALONE_WRONG = {
    "a row too many": (torch.ones(3, 4), {}),
    "a fold of another shape": (X, {"fold": torch.ones(1, 4)}),
    "a residual of the rows before": (X, {"params": WRONG["a residual of the rows before"][1]["params"]}),
}


@several
@pytest.mark.parametrize("name", ALONE_WRONG)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(monkeypatch, name):
    """Under SPMD_CHECK=1 nobody waits for the rank that refuses."""
    monkeypatch.setenv("SPMD_TIMEOUT", "3")
    size, rank = mpi.world().size, mpi.world().rank
    mapping = Mapping(size, rank, tp_size=size)
    Distributed.get(mapping).close()
    dist = Distributed.get(mapping)
    group, rows, kept = dist.group("tp"), [2] * size, {}
    if name == "a residual of the rows before":
        params = AllReduceParams(fusion_op=AllReduceFusionOp.RESIDUAL_RMS_NORM, residual=torch.ones(2 * size, 4))
        kept["params"] = params
    elif name == "a fold of another shape":
        kept["fold"] = X
    x, alone = ALONE_WRONG[name] if rank == size - 1 else (X, {})
    Workspace.of(group)
    begin = time.monotonic()
    with pytest.raises(SpmdError):
        exchange(x, group, Radix({"a": size}), rows, held=["a"], gather=["a"], **kept | alone)
    assert time.monotonic() - begin < 2
    dist.close()
