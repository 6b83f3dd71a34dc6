"""One rank of bench/allreduce.py: the loop that measures a contender, and the contenders.

Runs in any environment with numpy and mpi4py; who needs torch or the package imports it. The argument is a JSON object:
part (of PARTS), sizes (bytes), dtype, fused, iterations (at most), probe (the file of spmd._probe).
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from jobs import ALONE, DTYPES, EPS, HIDDEN, STORES_DONE, pin
from mpi4py import MPI

PROBE_CHUNKS = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10)
WARMUP, SECONDS = 5, 1.5  # iterations; time of one size, which limits the iterations of slow contenders
Row = tuple[str, int, dict[str, float]]  # contender, bytes, {us, wrong, lost}


class Contender(NamedTuple):
    """source: address of the input; call: what is timed; wrong: (iteration, the call's result) -> wrong elements."""

    source: int
    call: Callable[[], object]
    wrong: Callable[[int, Any], int]


class Rank:
    """What contenders are made of, and how one is measured."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args, self.comm = args, MPI.COMM_WORLD
        self.rank, self.ranks, self.dtype = self.comm.rank, self.comm.size, DTYPES.index(args.dtype)
        pin(self.rank)
        spec = importlib.util.spec_from_file_location("_probe", args.probe)
        assert spec is not None and spec.loader is not None
        self.probe = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.probe)
        self.shared = self.share(self.probe.shared_bytes(0))
        self.switches = 0  # involuntary ones, until the last result

    def share(self, size: int) -> int:
        """The address of zeroed memory that all ranks see."""
        window = MPI.Win.Allocate_shared(size if self.rank == 0 else 0, comm=self.comm)
        memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
        memory[:] = 0
        self.comm.Barrier()
        return memory.ctypes.data

    def vector(self, n: int) -> np.ndarray:
        """n zero bytes that begin on a cache line: the same memory for every contender."""
        memory = np.zeros(n + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + n]

    def tensor(self, n: int) -> Any:
        import torch

        return torch.from_numpy(self.vector(n)).view(getattr(torch, self.args.dtype))

    def fill(self, address: int, n: int, iteration: int, first: int, ranks: int = 1) -> None:
        """Write the sum of the inputs that these ranks have in an iteration."""
        self.probe.fill(address, n, self.dtype, first, ranks, iteration)

    def sum_at(self, address: int, n: int) -> Callable[[int, Any], int]:
        """The check of an all-reduce whose result lies at an address."""
        return lambda iteration, _: self.probe.wrong(address, n, self.dtype, self.ranks, iteration)

    def iterations(self, n: int) -> int:
        return max(15, min(self.args.iterations, (128 << 20) // n))

    def measure(self, n: int, contender: Contender) -> dict[str, float]:
        gc.disable()
        begin = time.perf_counter()
        _, bad = self.iterate(n, contender, range(WARMUP))
        each = (time.perf_counter() - begin) / WARMUP
        count = self.comm.bcast(max(10, min(self.iterations(n), int(SECONDS / each))))
        times, more = self.iterate(n, contender, range(WARMUP, WARMUP + count))
        gc.enable()
        return self.result(times, bad + more)

    def iterate(self, n: int, contender: Contender, numbers: range) -> tuple[np.ndarray, int]:
        """Rewrite the input, align the ranks, time the call, check the result; ns of each iteration, wrong elements."""
        clock, barrier, (source, call, wrong) = time.perf_counter_ns, self.probe.barrier, contender
        times, bad = np.empty(len(numbers), np.int64), 0
        for i in numbers:
            self.fill(source, n, i, self.rank)
            barrier(self.shared, self.rank, self.ranks)
            begin = clock()
            result = call()
            times[i - numbers.start] = clock() - begin
            bad += wrong(i, result)
        return times, bad

    def result(self, times: np.ndarray, bad: int) -> dict[str, float]:
        """The slowest rank's time of each iteration, of these the median (us); of all ranks together the wrong elements
        and how often a rank has lost its core to somebody since the last result."""
        before, self.switches = self.switches, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        slowest = np.empty_like(times)
        self.comm.Allreduce(times, slowest, MPI.MAX)
        us = float(np.median(slowest)) * 1e-3
        return {"us": us, "wrong": self.comm.allreduce(bad), "lost": self.comm.allreduce(self.switches - before)}


def ours(rank: Rank) -> Iterator[Row]:
    import torch

    import spmd

    mapping = spmd.Mapping(rank.ranks, rank.rank, tp_size=rank.ranks)
    group = spmd.Distributed.get(mapping).group("tp")
    all_reduce = spmd.AllReduce(mapping)
    for n in rank.args.sizes:
        x, y = rank.tensor(n), rank.tensor(n)
        shared = spmd.symmetric_empty((x.numel(),), x.dtype, group)
        for name, source, target in (("ours", x, y), ("symmetric", shared, shared)):
            call = partial(all_reduce, source, out=target)
            yield name, n, rank.measure(n, Contender(source.data_ptr(), call, rank.sum_at(target.data_ptr(), n)))
        if not rank.args.fused:
            continue
        residual, weight = rank.tensor(n).view(-1, HIDDEN), torch.linspace(0.5, 1.5, HIDDEN).to(x.dtype)
        rank.fill(residual.data_ptr(), n, 0, rank.ranks)
        fusion = spmd.AllReduceFusionOp.RESIDUAL_RMS_NORM
        check, out = partial(fused_wrong, rank, residual.clone(), weight), (y.view_as(residual), residual.clone())
        alone = spmd.AllReduce(group=MPI.COMM_SELF)
        variants = [("fused", x, all_reduce, check), ("fused symmetric", shared, all_reduce, check)]
        for name, source, layer, wrong in [*variants, (ALONE, x, alone, no_check)]:
            params = spmd.AllReduceParams(fusion_op=fusion, residual=residual, norm_weight=weight, eps=EPS)
            call = partial(layer, source.view(-1, HIDDEN), params, out=out)
            yield name, n, rank.measure(n, Contender(source.data_ptr(), call, wrong))


def no_check(iteration: int, result: Any) -> int:
    return 0


def fused_wrong(rank: Rank, residual: Any, weight: Any, iteration: int, result: Any) -> int:
    """Of every 16th iteration: norms further from torch's than a few roundings, and residuals that are not the sum."""
    import torch

    if iteration % 16:
        return 0
    total = torch.empty_like(residual)
    rank.fill(total.data_ptr(), total.nbytes, iteration, 0, rank.ranks)
    total += residual  # integers of up to 8 bits: exact
    norm = torch.nn.functional.rms_norm(total.float(), (HIDDEN,), weight.float(), EPS)
    bad = ((result[0].float() - norm).abs() > 2**-6 * norm.abs().clamp(min=1)) | (result[1] != total)
    return int(bad.sum())


def add_norm(rank: Rank) -> Iterator[Row]:
    """What torch does after an all-reduce that is not fused: two operators on a tensor this core has just written."""
    import torch

    for n in rank.args.sizes:
        x, residual = rank.tensor(n).view(-1, HIDDEN), rank.tensor(n).view(-1, HIDDEN)
        weight, total = torch.ones(HIDDEN, dtype=x.dtype), torch.empty_like(x)

        def call(x: Any = x, residual: Any = residual, weight: Any = weight, total: Any = total) -> Any:
            torch.add(x, residual, out=total)
            return torch.nn.functional.rms_norm(total, (HIDDEN,), weight, EPS), total

        with torch.inference_mode():
            yield "add+norm", n, rank.measure(n, Contender(x.data_ptr(), call, no_check))


def mpi(rank: Rank) -> Iterator[Row]:
    vendor, version = MPI.get_vendor()
    kind, op = MPI.FLOAT, MPI.SUM
    if rank.args.dtype == "bfloat16":  # no MPI type: uint16 with a vectorised sum, put where mpi4py keeps the handle
        kind, op = MPI.UINT16_T, MPI.Op()
        create = ctypes.CDLL(MPI.__file__).MPI_Op_create
        create(ctypes.c_void_p(rank.probe.mpi_bf16_sum), 1, ctypes.c_void_p(MPI._addressof(op)))
    for n in rank.args.sizes:
        x, y = rank.vector(n), rank.vector(n)
        count = n // kind.Get_size()
        for suffix, source, target in (("", (x, count, kind), y), (" in place", MPI.IN_PLACE, x)):
            name = f"{vendor} {'.'.join(map(str, version))}{suffix}"
            call = partial(rank.comm.Allreduce, source, (target, count, kind), op)
            yield name, n, rank.measure(n, Contender(x.ctypes.data, call, rank.sum_at(target.ctypes.data, n)))


def gloo(rank: Rank) -> Iterator[Row]:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = rank.comm.bcast(free.getsockname()[1])
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank.rank, world_size=rank.ranks)
    for n in rank.args.sizes:
        x = rank.tensor(n)
        call = partial(dist.all_reduce, x)
        yield "gloo", n, rank.measure(n, Contender(x.data_ptr(), call, rank.sum_at(x.data_ptr(), n)))
    dist.destroy_process_group()


def probe(rank: Rank) -> Iterator[Row]:
    """The loops of probe.cpp, which time themselves."""
    shared = rank.share(rank.probe.shared_bytes(max(rank.args.sizes)))
    for n in rank.args.sizes:
        x, y = rank.vector(n).ctypes, rank.vector(n).ctypes
        variants = [("lamport", 0), (STORES_DONE, 0)] * (n <= 1 << 20) + [("chunked", 0), ("symmetric", 0)]
        variants += [(name, c) for name in ("chunked", "chunked-nt") for c in PROBE_CHUNKS if 2 * c <= n <= 256 * c]
        for name, chunk in variants:
            times = np.empty(rank.iterations(n), np.int64)
            loop, done = ("lamport", True) if name == STORES_DONE else (name, False)
            which, where = (shared, rank.rank, x.data, y.data), (len(times), times.ctypes.data)
            bad = rank.probe.run(loop, done, *which, n, rank.dtype, chunk, *where)
            label = f"{name} {chunk >> 10}K" if chunk else "flags" if name == "chunked" else name
            yield f"probe {label}", n, rank.result(times, bad)


PARTS = {"ours": ours, "mpi": mpi, "gloo": gloo, "probe": probe, "add_norm": add_norm}


def main() -> None:
    rank = Rank(SimpleNamespace(**json.loads(sys.argv[1])))
    rows: dict[str, dict[int, dict[str, float]]] = {}
    rank.switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    for name, n, row in PARTS[rank.args.part](rank):
        rows.setdefault(name, {})[n] = row
    if rank.rank == 0:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
