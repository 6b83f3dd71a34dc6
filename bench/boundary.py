"""What does a bound plan cost? A layer's junctions against the same calls written by hand, two ranks, tp = 2.

Per layer two all-reduces with residual and norm: by hand one `AllReduce` with its parameters, by plan `prepare_attn`,
`prepare_mlp` and `postprocess_layer`. Both take turns in one job, a series of forwards each; the slowest rank's time,
the median of the turns. The results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import measure, pin, preamble

LAYERS, HIDDEN, ROWS, SERIES = 24, 576, 1, 10
TARGET = 2.0  # us a layer


def ranks(turns: int) -> None:
    """One rank: us per layer of both, and the elements that differ."""
    import torch

    import spmd
    from spmd.boundary.communicator import StageCommunicator
    from spmd.collectives import costs
    from spmd.collectives.epilogue import ResidualNorm
    from spmd.control import mpi

    world = mpi.world()
    pin(world.rank)
    torch.set_num_threads(1)
    mapping = spmd.Mapping(world.size, world.rank, tp_size=world.size)
    norms = [ResidualNorm(torch.ones(HIDDEN), 1e-6) for _ in range(2 * LAYERS + 1)]
    communicator = StageCommunicator(mapping, ["dense"] * LAYERS, norms, HIDDEN, torch.float32)
    group = spmd.Distributed.get(mapping).group("tp")
    all_reduce, params = spmd.AllReduce(group=group), [norm.params() for norm in norms]
    part = torch.ones(ROWS, HIDDEN)

    def block(x: torch.Tensor) -> torch.Tensor:
        return part

    def by_hand(x: Any) -> Any:
        x, residual = norms[0](x)
        for param in params[1:]:
            param.residual = residual
            x, residual = all_reduce(block(x), param)
        return x

    def by_plan(x: Any) -> Any:
        step, residual = communicator.begin((ROWS,)), None
        for layer in step.layers:
            x, residual = layer.prepare_attn(x, residual)
            x, residual = layer.prepare_mlp(block(x), residual)
            x, residual = layer.postprocess_layer(block(x), residual)
        return step.finish(x, residual)[0]

    table = costs.measure(mapping)
    times: dict[str, list[float]] = {"by hand": [], "by plan": []}
    differ = 0
    for turn in range(turns + 5):
        x, results = torch.arange(float(ROWS * HIDDEN)).view(ROWS, HIDDEN) + turn, []
        for name, call in (("by hand", by_hand), ("by plan", by_plan)):
            group.barrier()
            begin = time.perf_counter_ns()
            for _ in range(SERIES):
                made = call(x)
            took = int(group.allgather_int64([time.perf_counter_ns() - begin]).max())
            results.append(made)
            if turn >= 5:
                times[name].append(took / SERIES / LAYERS * 1e-3)
        differ += int((results[0] != results[1]).sum())
    if world.rank == 0:
        us = {name: statistics.median(values) for name, values in times.items()}
        print(json.dumps(us | {"differ": differ, "costs": asdict(table)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--costs", metavar="FILE", help="write the table of costs that the planner reads")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ranks(args.turns)
        return
    preamble(f"junctions of {LAYERS} layers, [{ROWS}, {HIDDEN}] fp32, two ranks", rounds=args.rounds)
    rounds = [measure(2, __file__, "--part", "--turns", str(args.turns)) for _ in range(args.rounds)]
    hand, planned = (statistics.median(row[name] for row in rounds) for name in ("by hand", "by plan"))
    over = statistics.median(row["by plan"] - row["by hand"] for row in rounds)
    verdict = "met" if over <= TARGET else "MISSED"
    print(f"# us a layer: by hand {hand:.2f}, by plan {planned:.2f}: {over:+.2f} <= {TARGET:.2f} {verdict}")
    table = rounds[-1]["costs"]
    print("# costs: " + ", ".join(f"{name} {value:.3g}" for name, value in table.items()))
    if args.costs:
        Path(args.costs).write_text(json.dumps(table, indent=1) + "\n")
    if differ := sum(row["differ"] for row in rounds):
        raise SystemExit(f"{differ} elements differ")


if __name__ == "__main__":
    main()
