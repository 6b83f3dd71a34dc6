"""A job for test_killed.py: one collective again and again, until a rank is gone. Arguments: folder, kind, operation.

Kind job: it ends as commands end, by spmd.control.job. Kind one: a survivor writes to the folder what it was told and
when, and waits to be killed.
"""

import signal
import sys
import time
from pathlib import Path

import torch

from spmd import AllReduceStrategy, Distributed, Mapping, exchange, symmetric_empty
from spmd.collectives import gather
from spmd.collectives.allreduce import AllReduce
from spmd.control import job
from spmd.errors import OutOfStepError
from spmd.topology.radix import Radix


def operation(name, group):
    """One call of it."""
    size, x = group.size, torch.ones(64 * group.size, 1000)
    sums = {
        "small_sum": (AllReduceStrategy.AUTO, torch.ones(100)),
        "large_sum": (AllReduceStrategy.ONESHOT, x),
        "two_shot": (AllReduceStrategy.TWOSHOT, x),
    }
    if name in sums:
        strategy, given = sums[name]
        layer = AllReduce(group=group, strategy=strategy)
        return lambda: layer(given)
    if name == "symmetric":
        shared, layer = symmetric_empty((64, 1000), torch.float32, group).zero_(), AllReduce(group=group)
        return lambda: layer(shared, out=shared)
    if name == "exchange":
        rows = [64] * size
        return lambda: exchange(x[:64], group, Radix({"a": size}), rows, held=["a"], gather=["a"])
    calls = {
        "gather": gather.all_gather,
        "scatter": gather.reduce_scatter,
        "swap": gather.all_to_all,
        "broadcast": gather.broadcast,
    }
    return lambda: calls[name](x, group)


def main():
    folder, kind, name = sys.argv[1:]
    world = job.start()
    call = operation(name, Distributed.get(Mapping(world.size, world.rank, tp_size=world.size)).group("tp"))
    for _ in range(20):
        call()
    Path(folder, f"calling-{world.rank}").touch()
    try:
        while True:
            call()
    except OutOfStepError as error:
        if kind == "job":
            raise
        report = Path(folder, f"told-{world.rank}")  # launchers drop what is printed last
        report.with_suffix(".new").write_text(f"{time.monotonic()} {type(error).__name__}: {error}")
        report.with_suffix(".new").rename(report)
        signal.pause()  # to leave now would end the others too, before they have been told


job.run(main)
