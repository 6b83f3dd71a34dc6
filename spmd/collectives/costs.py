"""What the steps of a boundary plan cost: a built-in table, one from a file, or one measured between these ranks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spmd.errors import InputError

if TYPE_CHECKING:  # a plan needs neither torch nor MPI
    from spmd.topology.mapping import Mapping

_BYTES, _TURNS, _SERIES = 1 << 18, 9, 10


@dataclass(frozen=True)
class Costs:
    """Microseconds of what a step does. The built-in numbers are those of ranks that share a host's memory.

    latency: of a collective of two ranks; per_rank: of every further one; host: of one that crosses hosts, once more.
    byte: moved to a rank; host_byte: the same between hosts; norm_byte: normalised; fused: the part of a norm that
    costs nothing when it rides on a collective (fused * norm_byte stays below byte: else paths would take collectives
    only to ride on them); copy_byte: of a copy or an addition on the spot.
    """

    latency: float = 5.0
    per_rank: float = 1.0
    host: float = 20.0
    byte: float = 1e-4
    host_byte: float = 1e-3
    norm_byte: float = 2e-4
    fused: float = 0.3
    copy_byte: float = 2e-5


def read(path: str) -> Costs:
    """The built-in table with the numbers of a JSON file in their place. InputError where it is none."""
    try:
        given = json.loads(Path(path).read_text())
        if any(type(value) not in (int, float) or not 0 <= value < float("inf") for value in given.values()):
            raise ValueError("a number below 0, or none")
        return Costs(**given)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        known = ", ".join(field.name for field in fields(Costs))
        raise InputError(f"{path} is no table of costs ({error}): it is a JSON object of {known}") from None


def measure(mapping: Mapping) -> Costs:
    """The table of the ranks of a stage, the same on all: the slowest rank's times. Collective over them, about 0.2 s.

    All-gathers of pairs and of all, of two sizes, give latencies and bytes; a norm and a copy are timed on the spot.
    What these ranks cannot show (hosts, where there is one; the share of a norm that a collective hides) stays as it is
    built in.
    """
    import torch

    from spmd._cpu import monotonic_ns
    from spmd.collectives import gather
    from spmd.collectives.epilogue import ResidualNorm
    from spmd.control.distributed import Distributed
    from spmd.memory.workspace import Workspace

    dist = Distributed.get(mapping)
    everyone = dist.group("tp_cp")

    def took(call: Callable[[], object], series: int) -> float:
        times = []
        for turn in range(2 * _TURNS):
            everyone.barrier()
            begin = monotonic_ns()
            for _ in range(series):
                call()
            if turn >= _TURNS:  # memory is warm by then
                times.append((monotonic_ns() - begin) / series)
        return float(everyone.allgather_int64([int(statistics.median(times))]).max()) * 1e-3

    width, ranks = 1024, everyone.size
    little, much = torch.zeros(1, width // 4), torch.zeros(_BYTES // width, width // 4)
    norm, spare = ResidualNorm(torch.ones(width // 4), 1e-6), torch.empty_like(much)
    norm_byte = took(lambda: norm(much, much), 1) / _BYTES
    costs = replace(Costs(), norm_byte=norm_byte, copy_byte=took(lambda: spare.copy_(much), 1) / _BYTES)
    if ranks == 1:
        return costs
    at = everyone.rank // 2 * 2
    pair = dist.along("pair", everyone.ranks[at : at + 2]) if at + 1 < ranks else None
    latency = took(lambda: pair and gather.all_gather(little, pair, dim=0), _SERIES)
    short = took(lambda: gather.all_gather(little, everyone, dim=0), _SERIES)
    long = took(lambda: gather.all_gather(much, everyone, dim=0), 1)
    byte = max(long - short, 0.0) / ((ranks - 1) * _BYTES)
    costs = replace(costs, latency=latency, fused=min(costs.fused, 0.9 * byte / norm_byte))
    if ranks > 2:
        costs = replace(costs, per_rank=max(short - latency, 0.0) / (ranks - 2))
    if Workspace.of(everyone) is None:  # they span hosts, or share no memory
        return replace(costs, host=max(short - latency, 0.0), host_byte=byte)
    return replace(costs, byte=byte)
