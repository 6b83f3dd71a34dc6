"""Is one exchange faster than the pair it replaces? Sum over one axis and gather over another, 2 x 2 ranks.

An exchange and an all-reduce followed by an all-gather, turn by turn in one job; the slowest rank's time of each, the
median of the turns. Both results are compared bit for bit in every turn. "kernels": the same work in calls of the
extension with nothing of Python around; four ranks on two cores cannot do better.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from jobs import measure, preamble

SERIES = 20  # calls in a row: one alone is mostly the wait for ranks that share a core to get it
TARGET = 0.65  # of the pair's time


def ranks(nbytes: int, turns: int) -> None:
    import torch

    import spmd
    from spmd.collectives import gather
    from spmd.collectives.exchange import Exchange
    from spmd.control import mpi
    from spmd.control.record import OPS
    from spmd.memory.workspace import Workspace
    from spmd.topology.radix import Radix

    world = mpi.world()
    mapping = spmd.Mapping(world.size, world.rank, tp_size=2, cp_size=2)
    dist = spmd.Distributed.get(mapping)
    block, tp, cp = dist.group("tp_cp"), dist.group("tp"), dist.group("cp")
    torch.set_num_threads(1)
    all_reduce, shape = spmd.AllReduce(mapping), Radix({"tp": 2, "cp": 2})
    rows, width = [4, 4], nbytes // 4 // 4
    x = torch.empty(rows[0], width)
    move = Exchange(block, shape, held=["cp"], over=["tp"], gather=["cp"])
    halves = (
        Exchange(tp, Radix({"tp": 2}), held=[], over=["tp"]),
        Exchange(cp, Radix({"cp": 2}), held=["cp"], gather=["cp"]),
    )

    def kernel(move: Exchange, rows: list[int], x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        assert torch.equal(out, move(x, rows))  # type: ignore[arg-type]
        workspace = Workspace.of(move.group)
        assert workspace is not None
        route, call = move.route(rows), workspace.plane.exchange
        given = (OPS.index("exchange"), route.map, x.data_ptr(), out.data_ptr(), width, 0, 0, route.signature)
        return lambda: (call(*given), out)  # which keeps its memory

    def pair() -> torch.Tensor:
        total = all_reduce(x)
        assert isinstance(total, torch.Tensor)
        return gather.all_gather(total, cp, dim=0)

    x.zero_()
    both = torch.zeros(8, width)
    first, second = kernel(halves[0], [4], x, both[:4]), kernel(halves[1], rows, both[:4], both.clone())
    calls: dict[str, Callable[[], object]] = {
        "pair": pair,
        "exchange": lambda: move(x, rows),
        "pair's kernels": lambda: (first(), second()),
        "exchange's kernel": kernel(move, rows, x, both.clone()),
    }
    times: dict[str, list[int]] = {name: [] for name in calls}
    wrong = 0
    for turn in range(turns + 20):
        x.copy_(torch.arange(x.numel()).view_as(x) % 61 + world.rank + turn)
        results: list[Any] = []
        for name, call in calls.items():
            block.barrier()
            begin = time.perf_counter_ns()
            for _ in range(SERIES - 1):
                call()
            results.append(call())
            took = int(block.allgather_int64([time.perf_counter_ns() - begin]).max()) // SERIES
            if turn >= 20:
                times[name].append(took)
        wrong += int((results[0] != results[1]).sum())
    wrong = int(block.allgather_int64([wrong]).sum())
    assert tp.size == cp.size == 2
    if world.rank == 0:
        print(json.dumps({name: statistics.median(ns) * 1e-3 for name, ns in times.items()} | {"wrong": wrong}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=8192, help="of each rank's tensor")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ranks(args.bytes, args.turns)
        return
    preamble("exchange against all-reduce + all-gather, fp32, 2 x 2 ranks", bytes=args.bytes, rounds=args.rounds)
    given = ("--part", "--bytes", str(args.bytes), "--turns", str(args.turns))
    rounds = [measure(4, __file__, *given) for _ in range(args.rounds)]
    for one, two, limit in (("exchange", "pair", f" (target {TARGET})"), ("exchange's kernel", "pair's kernels", "")):
        us = [statistics.median(row[name] for row in rounds) for name in (one, two)]
        ratio = statistics.median(row[one] / row[two] for row in rounds)
        print(f"# {one} {us[0]:.1f} us, {two} {us[1]:.1f} us: {ratio:.2f}{limit}")
    if wrong := sum(row["wrong"] for row in rounds):
        raise SystemExit(f"{wrong} elements differ")


if __name__ == "__main__":
    main()
