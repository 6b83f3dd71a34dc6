"""Is one exchange faster than the pair it replaces? Sum over one axis and gather over another, 2 x 2 ranks.

An exchange and an all-reduce followed by an all-gather, turn by turn in one job; the slowest rank's time of each, the
median of the turns. Both results are compared bit for bit in every turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from jobs import measure, preamble

TARGET = 0.65  # of the pair's time


def ranks(nbytes: int, turns: int) -> None:
    import torch

    import spmd
    from spmd.collectives import gather
    from spmd.control import mpi
    from spmd.topology.radix import Radix

    world = mpi.world()
    mapping = spmd.Mapping(world.size, world.rank, tp_size=2, cp_size=2)
    dist = spmd.Distributed.get(mapping)
    block, tp, cp = dist.group("tp_cp"), dist.group("tp"), dist.group("cp")
    torch.set_num_threads(1)
    all_reduce, shape = spmd.AllReduce(mapping), Radix({"tp": 2, "cp": 2})
    rows, width = [4, 4], nbytes // 4 // 4
    x = torch.empty(rows[0], width)
    times: dict[str, list[int]] = {"exchange": [], "pair": []}
    wrong = 0

    def pair() -> torch.Tensor:
        total = all_reduce(x)
        assert isinstance(total, torch.Tensor)
        return gather.all_gather(total, cp, dim=0)

    def exchange() -> torch.Tensor:
        made = spmd.exchange(x, block, shape, rows, held=["cp"], over=["tp"], gather=["cp"])
        assert isinstance(made, torch.Tensor)
        return made

    for turn in range(turns + 20):
        x.copy_(torch.arange(x.numel()).view_as(x) % 61 + world.rank + turn)
        results = []
        for name, call in (("pair", pair), ("exchange", exchange)):
            block.barrier()
            begin = time.perf_counter_ns()
            results.append(call())
            took = int(block.allgather_int64([time.perf_counter_ns() - begin]).max())
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
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ranks(args.bytes, args.turns)
        return
    preamble("exchange against all-reduce + all-gather, fp32, 2 x 2 ranks", bytes=args.bytes, rounds=args.rounds)
    given = ("--part", "--bytes", str(args.bytes), "--turns", str(args.turns))
    rounds = [measure(4, __file__, *given) for _ in range(args.rounds)]
    us = {name: statistics.median(row[name] for row in rounds) for name in ("exchange", "pair")}
    ratio = statistics.median(row["exchange"] / row["pair"] for row in rounds)
    print(f"# exchange {us['exchange']:.1f} us, pair {us['pair']:.1f} us: {ratio:.2f} of the pair (target {TARGET})")
    if wrong := sum(row["wrong"] for row in rounds):
        raise SystemExit(f"{wrong} elements differ")


if __name__ == "__main__":
    main()
