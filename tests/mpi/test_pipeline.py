"""Do tensors go from stage to stage whole and in order, whatever happens to the sender's buffer meanwhile?"""

import pytest
import torch

from spmd import Mapping
from spmd.control import mpi, pipeline
from spmd.control.pipeline import init_pp_comm, pp_comm, pp_recv, pp_send
from spmd.errors import DeadlineError, InputError, SpmdError


def stages(size, **others):
    """This process's mapping with one stage per rank; rank 0's where the world is smaller than the job."""
    rank = mpi.world().rank
    return Mapping(size, rank if rank < size else 0, pp_size=size, **others)


@pytest.fixture
def pipe():
    """Rank r sends to r + 1, the last to the first; one rank sends to itself."""
    return init_pp_comm(stages(mpi.world().size))


def filled(like, value):
    return torch.full_like(like, value, memory_format=torch.contiguous_format)


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan") if dtype.is_floating_point else 1, dtype=dtype)


def exact(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [1, 1 << 18])
def test_the_buffer_may_be_overwritten_at_once(pipe, rows):
    mapping = pipe.mapping
    x = torch.arange(rows * 4.0).reshape(rows, 4) + mapping.rank
    pipe.send(x)
    x.fill_(float("nan"))
    got = poisoned(rows, 4)
    assert pipe.recv(got) is got
    exact(got, torch.arange(rows * 4.0).reshape(rows, 4) + mapping.prev_pp_rank)
    pipe.drain()


def test_tensors_keep_their_order(pipe):
    rank, before = pipe.mapping.rank, pipe.mapping.prev_pp_rank
    lengths = [1, 70_000, 0, 3, 0, 20_000, 2] * 4  # small and large messages take different ways through MPI
    buffer = torch.empty(max(lengths), dtype=torch.int64)
    for step, length in enumerate(lengths):
        pipe.send(buffer[:length].fill_(100 * rank + step))
    for step, length in enumerate(lengths):
        exact(pipe.recv(poisoned(length, dtype=torch.int64)), torch.full((length,), 100 * before + step))
    pipe.drain()


def test_the_neighbours_are_the_default():
    world = mpi.world()
    for tp, pp in [(1, world.size), (2, world.size // 2)] if world.size % 2 == 0 else [(1, world.size)]:
        mapping = Mapping(world.size, world.rank, tp_size=tp, pp_size=pp)
        pipe = init_pp_comm(mapping)
        x = torch.tensor([float(world.rank)])
        assert mapping.prev_pp_rank == (world.rank - tp) % world.size
        pipe.send(x)
        exact(pipe.recv(poisoned(1)), torch.tensor([float(mapping.prev_pp_rank)]))
        pipe.send(x, dest=mapping.prev_pp_rank)
        exact(pipe.recv(poisoned(1), src=mapping.next_pp_rank), torch.tensor([float(mapping.next_pp_rank)]))
        pp_send(x)
        exact(pp_recv(poisoned(1)), torch.tensor([float(mapping.prev_pp_rank)]))
        pp_send(x, mapping.prev_pp_rank)
        exact(pp_recv(poisoned(1), mapping.next_pp_rank), torch.tensor([float(mapping.next_pp_rank)]))
        pipe.drain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(5, 3), (0, 4), (3, 0), (), (1,)])
def test_every_type_and_shape(pipe, dtype, shape):
    x = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 + pipe.mapping.rank % 3).to(dtype)
    expected = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 + pipe.mapping.prev_pp_rank % 3).to(dtype)
    pipe.send(x)
    exact(pipe.recv(poisoned(*shape, dtype=dtype)), expected)
    pipe.drain()


def test_messages_of_several_pieces(pipe, monkeypatch):
    monkeypatch.setattr(pipeline, "_PIECE", 48)
    for length in (11, 12, 13, 100):
        pipe.send(torch.arange(float(length)) + pipe.mapping.rank)
    for length in (11, 12, 13, 100):
        exact(pipe.recv(poisoned(length)), torch.arange(float(length)) + pipe.mapping.prev_pp_rank)
    pipe.drain()


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 2:], lambda x: x[0].expand(3, 8)]
)
def test_a_send_may_be_non_contiguous(pipe, view):
    x, expected = (torch.arange(48.0).reshape(6, 8) + 1000 * r for r in (pipe.mapping.rank, pipe.mapping.prev_pp_rank))
    pipe.send(view(x))
    x.fill_(float("nan"))
    exact(pipe.recv(poisoned(*view(x).shape)), view(expected))
    pipe.drain()


def test_a_receive_is_contiguous(pipe):
    with pytest.raises(InputError, match="contiguous"):
        pipe.irecv(torch.empty(4, 6).t())
    with pytest.raises(InputError, match="contiguous"):
        pipe.recv(torch.empty(4, 6)[:, ::2])


def test_receives_are_posted_ahead(pipe):
    before = pipe.mapping.prev_pp_rank
    buffers = [poisoned(rows, 3) for rows in (2, 0, 40_000)]
    coming = [pipe.irecv(buffer) for buffer in buffers]
    mpi.wait([mpi.world().Ibarrier()])  # every receive is posted before anything is sent
    for step, buffer in enumerate(buffers):
        pipe.send(filled(buffer, 10 * pipe.mapping.rank + step))
    for step in (2, 0, 1):  # waited for in another order
        assert coming[step].wait() is buffers[step]
        exact(buffers[step], filled(buffers[step], 10 * before + step))
    pipe.drain()


def test_a_late_stage_is_named_and_may_still_come(pipe):
    before = pipe.mapping.prev_pp_rank
    got = poisoned(2)
    coming = pipe.irecv(got)
    with pytest.raises(DeadlineError, match=rf"^pipeline receive: rank {before} has not sent: gave up after 0\.1 s"):
        coming.wait(timeout=0.1)
    mpi.wait([mpi.world().Ibarrier()])
    pipe.send(torch.tensor([1.0, 2.0]))
    exact(coming.wait(), torch.tensor([1.0, 2.0]))
    pipe.drain()


# ---------------------------------------------------------------------- one communicator


def test_the_same_world_is_reused_with_the_new_mapping(pipe):
    size, rank = mpi.world().size, mpi.world().rank
    other = Mapping(size, rank, tp_size=size)
    assert init_pp_comm(other) is pipe
    assert pipe.mapping == other
    assert pp_comm() is pipe
    pipe.send(torch.tensor([rank]))  # every rank is its own next stage now
    exact(pipe.recv(torch.tensor([-1])), torch.tensor([rank]))
    assert init_pp_comm(stages(size)) is pipe
    assert pipe.mapping == stages(size)


@pytest.mark.ranks(2, 3, 4, 5, 8)
def test_another_world_replaces_it_with_a_warning(pipe):
    size, rank = mpi.world().size, mpi.world().rank
    with pytest.warns(UserWarning, match=rf"world {size} -> {size - 1}$"):
        smaller = init_pp_comm(stages(size - 1))
    assert smaller is not pipe
    assert pp_comm() is smaller
    if rank < size - 1:
        smaller.send(torch.tensor([rank]))
        exact(smaller.recv(torch.tensor([-1])), torch.tensor([(rank - 1) % (size - 1)]))
    with pytest.warns(UserWarning, match=rf"world {size - 1} -> {size}$"):
        whole = init_pp_comm(stages(size))
    whole.send(torch.tensor([rank]))
    exact(whole.recv(torch.tensor([-1])), torch.tensor([(rank - 1) % size]))


@pytest.mark.filterwarnings("ignore:replacing the pipeline communicator")
def test_a_mapping_larger_than_the_world_changes_nothing(pipe):
    size, rank = mpi.world().size, mpi.world().rank
    with pytest.raises(InputError, match=f"needs {size + 1} ranks"):
        init_pp_comm(stages(size + 1))
    assert pp_comm() is pipe
    assert pipe.mapping == stages(size)
    pipe.send(torch.tensor([rank]))
    exact(pipe.recv(torch.tensor([-1])), torch.tensor([(rank - 1) % size]))


def test_a_first_use_outside_start_up_is_an_error(monkeypatch):
    monkeypatch.setattr(pipeline, "_pp_comm", None)
    for call in (pp_comm, lambda: pp_send(torch.ones(1)), lambda: pp_recv(torch.ones(1))):
        with pytest.raises(SpmdError, match=r"call init_pp_comm\(mapping\) at start-up"):
            call()
