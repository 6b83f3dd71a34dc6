"""How fast do tokens reach their experts and come back? Dispatch and combine against the same rows by all-to-all.

Two ranks; every token goes once to each rank that owns any of its experts. The peers move exactly those rows there and
the same number back, packed beforehand and added by nobody: mpi4py's Alltoallv and gloo's all_to_all_single. One after
the other in one job; the slowest rank's time, the median of the turns, as ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable

from jobs import measure, pin, preamble

TOKENS, TOP, EXPERTS, HIDDEN = 512, 8, 64, 2048
TARGET = 0.6  # of either peer's time


def ranks(turns: int) -> None:
    """One rank: the times of all three, and whether what came back is right."""
    import numpy as np
    import torch
    import torch.distributed as gloo
    from mpi4py import MPI

    import spmd
    from spmd.collectives.moe import ExpertExchange

    world = MPI.COMM_WORLD
    pin(world.rank)
    torch.set_num_threads(1)
    group = spmd.Distributed.get(spmd.Mapping(world.size, world.rank, tp_size=world.size)).group("tp")
    bounds = [EXPERTS * rank // world.size for rank in range(world.size + 1)]
    exchange = ExpertExchange(group, bounds)
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(TOKENS)]).to(torch.int32)
    weights, sizes = torch.ones(TOKENS, TOP), [TOKENS] * world.size
    x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    goes = torch.stack([((ids >= bounds[r]) & (ids < bounds[r + 1])).any(1) for r in range(world.size)])
    sends = goes.sum(1).tolist()
    receives = [row[world.rank] for row in world.allgather(sends)]
    packed = x.new_zeros(sum(sends), HIDDEN)
    arrived, back = x.new_empty(sum(receives), HIDDEN), torch.empty_like(packed)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = world.bcast(free.getsockname()[1])
    gloo.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size)

    out = torch.empty_like(x)

    def ours() -> torch.Tensor:
        sent = exchange.dispatch(x, ids, weights, sizes)
        assert sent is not None
        return exchange.combine(sent, out)

    def layout(rows: list[int]) -> tuple[list[int], list[int]]:
        counts = [row * HIDDEN * 2 for row in rows]
        return counts, [sum(counts[:r]) for r in range(len(counts))]

    of, into = layout(sends), layout(receives)
    views = [tensor.view(torch.uint8).numpy() for tensor in (packed, arrived, back)]

    def mpi() -> None:
        world.Alltoallv([views[0], *of, MPI.BYTE], [views[1], *into, MPI.BYTE])
        world.Alltoallv([views[1], *into, MPI.BYTE], [views[2], *of, MPI.BYTE])

    def by_gloo() -> None:
        gloo.all_to_all_single(arrived, packed, receives, sends)
        gloo.all_to_all_single(back, arrived, sends, receives)

    calls: dict[str, Callable[[], object]] = {"ours": ours, "mpi4py Alltoallv": mpi, "gloo all_to_all_single": by_gloo}
    times: dict[str, list[float]] = {name: [] for name in calls}
    wrong, parts = 0, goes.sum(0, keepdim=True).t().bfloat16()
    for name, call in calls.items():
        for turn in range(turns + 5):
            x.copy_((torch.arange(TOKENS)[:, None] + torch.arange(HIDDEN) + turn) % 17 - 8)
            if call is not ours:
                packed.copy_(torch.cat([x[goes[r]] for r in range(world.size)]))
            world.Barrier()
            begin = time.perf_counter_ns()
            made = call()
            took = world.allreduce(time.perf_counter_ns() - begin, MPI.MAX)
            if turn >= 5:
                times[name].append(took)
            if isinstance(made, torch.Tensor):
                wrong += int((made != x * parts).sum())
            else:
                wrong += int((back != packed).sum())
    wrong = world.allreduce(wrong)
    gloo.destroy_process_group()
    if world.rank == 0:
        us = {name: float(np.median(ns)) * 1e-3 for name, ns in times.items()}
        print(json.dumps(us | {"wrong": wrong, "rows": sum(sends)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ranks(args.turns)
        return
    preamble(
        f"dispatch + combine, two ranks, {TOKENS} tokens x top {TOP} of {EXPERTS} experts x hidden {HIDDEN}, bf16",
        rounds=args.rounds,
    )
    rounds = [measure(2, __file__, "--part", "--turns", str(args.turns)) for _ in range(args.rounds)]
    names = [name for name in rounds[0] if name not in ("wrong", "rows")]
    print(f"# {'':26s}{'us':>10s}{'of it, ours':>24s}")
    met = 0
    for name in names:
        us = statistics.median(row[name] for row in rounds)
        ratio = statistics.median(row["ours"] / row[name] for row in rounds)
        said = "" if name == "ours" else f"{ratio:.2f} <= {TARGET:.2f} {'met' if ratio <= TARGET else 'MISSED'}"
        met += name != "ours" and ratio <= TARGET
        print(f"{name:28s}{us:10.1f}{said:>24s}")
    wrong = sum(row["wrong"] for row in rounds)
    print(
        f"# rows sent by rank 0: {rounds[0]['rows']}; targets met: {met} of {len(names) - 1}; wrong elements: {wrong}"
    )
    if wrong:
        raise SystemExit(f"{wrong} elements are wrong")


if __name__ == "__main__":
    main()
