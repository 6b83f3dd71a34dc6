"""Stage-to-stage tensors: one world communicator that outlives layouts, buffered sends, receives posted ahead.

The communicator depends on (world, rank) alone. A second engine in the same workers with the same world reuses it and
swaps the mapping; another world size replaces it with a warning. Names follow TensorRT-LLM's pipeline module.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from spmd._cpu import monotonic_ns
from spmd.control import mpi
from spmd.control.agree import wait
from spmd.control.distributed import Distributed
from spmd.control.record import recorder
from spmd.errors import InputError, SpmdError
from spmd.topology.mapping import Mapping

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

_PIECE = 1 << 30  # bytes of one message: MPI counts are 32-bit


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).reshape(-1).numpy() if tensor.dim() else tensor.reshape(1).view(torch.uint8).numpy()


class Receiving:
    """A tensor on its way here."""

    def __init__(self, tensor: torch.Tensor, requests: list[MPI.Request], src: int) -> None:
        self._tensor, self._requests, self._src = tensor, requests, src

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """The received tensor. DeadlineError names the stage that did not send."""
        start = monotonic_ns()
        wait(self._requests, timeout, lambda: f"pipeline receive: rank {self._src} has not sent")
        recorder.add("recv", "pp", self._tensor.nbytes, start)
        return self._tensor


class PipelineComm:
    """Send to and receive from the neighbouring stages of a mapping; CPU tensors over MPI."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._comm = mpi.world().Dup()
        self._sending: list[tuple[list[MPI.Request], torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, dest: int | None = None) -> None:
        """Start sending to global rank `dest` (None: the next stage). The tensor may be overwritten right away."""
        start = monotonic_ns()
        dest = self.mapping.next_pp_rank if dest is None else dest
        self._sending = [entry for entry in self._sending if not self._done(entry[0])]
        copy = tensor.clone(memory_format=torch.contiguous_format)
        data = _bytes(copy)
        requests = [self._comm.Isend(data[at : at + _PIECE], dest) for at in range(0, max(data.size, 1), _PIECE)]
        self._sending.append((requests, copy))
        recorder.add("send", "pp", tensor.nbytes, start)

    def irecv(self, tensor: torch.Tensor, src: int | None = None) -> Receiving:
        """Start receiving into a contiguous tensor of the sender's shape from `src` (None: the previous stage)."""
        if not tensor.is_contiguous():
            raise InputError(f"a receive needs a contiguous tensor, but got strides {tensor.stride()}")
        src = self.mapping.prev_pp_rank if src is None else src
        data = _bytes(tensor)
        requests = [self._comm.Irecv(data[at : at + _PIECE], src) for at in range(0, max(data.size, 1), _PIECE)]
        return Receiving(tensor, requests, src)

    def recv(self, tensor: torch.Tensor, src: int | None = None) -> torch.Tensor:
        """Receive into `tensor` in place, and return it."""
        return self.irecv(tensor, src).wait()

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything sent from here has left."""
        for requests, _ in self._sending:
            wait(requests, timeout, lambda: "pipeline send: the next stage has not received")
        self._sending.clear()

    def close(self) -> None:
        self.drain()
        self._comm.Free()

    @staticmethod
    def _done(requests: list[MPI.Request]) -> bool:
        from mpi4py import MPI

        return MPI.Request.Testall(requests)


_pp_comm: PipelineComm | None = None


def init_pp_comm(mapping: Mapping) -> PipelineComm:
    """Make the pipeline communicator, or give the one there is the new mapping. Collective over the job, at start-up.

    What else needs all ranks is made here as well: under pipelining a first use inside a forward would wait for ever.
    """
    global _pp_comm
    Distributed.get(mapping)
    if _pp_comm is not None and _pp_comm.mapping.world_size != mapping.world_size:
        old = _pp_comm.mapping.world_size
        warnings.warn(f"replacing the pipeline communicator: world {old} -> {mapping.world_size}", stacklevel=2)
        _pp_comm.close()
        _pp_comm = None
    if _pp_comm is None:
        _pp_comm = PipelineComm(mapping)
    _pp_comm.mapping = mapping
    return _pp_comm


def pp_comm() -> PipelineComm:
    """The communicator that init_pp_comm made: a first creation inside a forward could deadlock."""
    if _pp_comm is None:
        raise SpmdError("the pipeline communicator does not exist: call init_pp_comm(mapping) at start-up")
    return _pp_comm


def pp_send(tensor: torch.Tensor, dest: int | None = None) -> None:
    """`PipelineComm.send` on the process's communicator."""
    pp_comm().send(tensor, dest)


def pp_recv(tensor: torch.Tensor, src: int | None = None) -> torch.Tensor:
    """`PipelineComm.recv` on the process's communicator."""
    return pp_comm().recv(tensor, src)
