"""What the steps of a boundary plan cost: a built-in table, one from a file, or one measured between these ranks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spmd.errors import InputError

if TYPE_CHECKING:  # a plan needs neither torch nor MPI
    from spmd.control.mpi import Group

_BYTES, _TURNS, _SERIES = 1 << 20, 7, 10


@dataclass(frozen=True)
class Costs:
    """Microseconds of what a step does. The built-in numbers are those of ranks that share a host's memory.

    latency: of a collective of two ranks; per_rank: of every further one; host: of one that crosses hosts, once more.
    byte: moved to a rank; host_byte: the same between hosts; norm_byte: normalised; fused: the part of a norm that
    costs nothing when it rides on a collective (fused * norm_byte stays below byte: else paths would take collectives
    only to ride on them); copy_byte: of a copy or an addition on the spot.
    """

    latency: float = 5.0
    per_rank: float = 2.5
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


def write(path: str, costs: Costs) -> None:
    Path(path).write_text(json.dumps(asdict(costs), indent=1) + "\n")


def measure(group: Group) -> Costs:
    """The table of this group, the same on all its ranks: the slowest rank's times. Collective, about 0.1 s.

    Two sizes of an all-gather give latency and bytes; a norm and a copy are timed on the spot. What this group cannot
    show (hosts, where it has one; the share of a norm that a collective hides) stays as built in.
    """
    import torch

    from spmd._cpu import monotonic_ns
    from spmd.collectives import gather
    from spmd.collectives.epilogue import ResidualNorm
    from spmd.memory.workspace import Workspace

    def took(call: Callable[[], object], series: int) -> float:
        times = []
        for _ in range(_TURNS):
            group.barrier()
            begin = monotonic_ns()
            for _ in range(series):
                call()
            times.append((monotonic_ns() - begin) / series)
        return float(group.allgather_int64([int(statistics.median(times))]).max()) * 1e-3

    base, width = Costs(), 1024
    little, much = torch.zeros(1, width // 4), torch.zeros(_BYTES // width, width // 4)
    norm, spare = ResidualNorm(torch.ones(width // 4), 1e-6), torch.empty_like(much)
    own = replace(
        base,
        norm_byte=took(lambda: norm(much, much), 1) / _BYTES,
        copy_byte=took(lambda: spare.copy_(much), 1) / _BYTES,
    )
    if group.size == 1:
        return own
    short = took(lambda: gather.all_gather(little, group, dim=0), _SERIES)
    long = took(lambda: gather.all_gather(much, group, dim=0), 1)
    byte = max(long - short, 0.0) / ((group.size - 1) * _BYTES)
    own = replace(own, fused=min(base.fused, 0.9 * byte / own.norm_byte))
    inside = base.latency + base.per_rank * (group.size - 2)
    if Workspace.of(group) is None:  # it spans hosts, or shares no memory
        return replace(own, host=max(short - inside, 0.0), host_byte=byte)
    scale = short / inside
    return replace(own, latency=base.latency * scale, per_rank=base.per_rank * scale, byte=byte)
