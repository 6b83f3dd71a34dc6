"""Which way is fastest here: candidates timed in a warm-up step, one table for all ranks, kept for the next run.

A table maps what a call looks like (`strategy.table_key`) to a way. Ranks time together, rank 0 decides by the slowest
rank and tells the others, so the decision cannot differ. Calls of a size that was not tuned take the heuristic.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import spmd._cpu as _cpu
from spmd._cpu import monotonic_ns
from spmd.collectives.strategy import Call, Limits, Way, candidates, table_key
from spmd.control.mpi import Group
from spmd.memory.workspace import Workspace

_log = logging.getLogger("spmd")
_VERSION = 1  # of the file and of the kernels behind its figures
_CALLS = 15  # timed calls of a candidate; the median counts


def enabled() -> bool:
    """SPMD_DISABLE_ALLREDUCE_AUTOTUNE=1 (or TLLM_DISABLE_ALLREDUCE_AUTOTUNE=1) turns tables off."""
    names = ("SPMD_DISABLE_ALLREDUCE_AUTOTUNE", "TLLM_DISABLE_ALLREDUCE_AUTOTUNE")
    return not any(os.environ.get(name) == "1" for name in names)


@dataclass
class _Table:
    """A group's table; one that is not enabled stays empty."""

    enabled: bool
    ways: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        self.ways.clear()


def table(group: Group) -> dict[str, str]:
    """The group's table, at first what the file of rank 0 holds; collective the first time."""
    return _table(group).ways


def _table(group: Group) -> _Table:
    kept = group.kept.get("tuned")
    if not isinstance(kept, _Table):  # rank 0 says whether there is one, for ranks with another environment as well
        mine = [enabled(), read() if enabled() else {}] if group.rank == 0 else None
        kept = group.kept["tuned"] = _Table(*json.loads(_tell(group, json.dumps(mine))))
    return kept


def tune(
    group: Group, limits: Limits, calls: Iterable[Call], run: Callable[[Call, Way], Callable[[], object]]
) -> float:
    """Time the candidates of those calls that the table lacks, and keep the result; collective.

    run(call, way) prepares one call and returns what does it. Returns the seconds it took. Every rank passes the same
    calls. Only rank 0 writes the file.
    """
    begin, kept = monotonic_ns(), _table(group)
    if not kept.enabled:
        return 0.0
    ways = kept.ways
    new = {}
    for call in calls:
        key = table_key(call)
        if key not in ways and key not in new and call.nbytes:
            choices = candidates(call, limits)
            times = [_time(group, run(call, way)) for way in choices]
            slowest = group.allgather_int64(times).max(axis=0)  # the same on every rank: rank 0's word is everybody's
            new[key] = str(choices[int(slowest.argmin())])
    ways.update(new)
    workspace = group.kept.get("workspace")
    if new and isinstance(workspace, Workspace):
        for user in list(workspace.users):  # what some ranks remember the others may now decide anew
            user.forget()
    if new and group.rank == 0:
        write(ways)
    seconds = (monotonic_ns() - begin) * 1e-9
    if new:
        _log.info("all_reduce on %s: tuned %d sizes in %.2f s", group.name, len(new), seconds)
    return seconds


def _time(group: Group, once: Callable[[], object]) -> int:
    """Median ns of a call, the ranks beginning together."""
    times = []
    for turn in range(_CALLS + 2):
        group.barrier()
        begin = monotonic_ns()
        once()
        if turn >= 2:
            times.append(monotonic_ns() - begin)
    return int(statistics.median(times))


def _tell(group: Group, text: str) -> str:
    """Rank 0's text on every rank, by the one operation that all kinds of groups have."""
    data = text.encode()
    length = int(group.allgather_int64([len(data)])[0, 0])
    words = np.zeros(-(-length // 8), np.int64)
    if group.rank == 0:
        words.view(np.uint8)[:length] = np.frombuffer(data, np.uint8)
    return group.allgather_int64(words)[0].view(np.uint8)[:length].tobytes().decode()


# ------------------------------------------------------------------ the file


def path() -> Path:
    """SPMD_CACHE_DIR/allreduce.json, default ~/.cache/spmd."""
    return Path(os.environ.get("SPMD_CACHE_DIR") or Path.home() / ".cache" / "spmd") / "allreduce.json"


def machine() -> str:
    """What the figures hold for: processor, cores, instruction set."""
    model = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {_cpu.isa}"


def read() -> dict[str, str]:
    """This machine's table in the file. {} when there is none; a file that cannot be read is ignored with one line."""
    file = path()
    try:
        stored = json.loads(file.read_text())
        if stored["version"] != _VERSION:
            raise ValueError(f"it has version {stored['version']}, this is {_VERSION}")
        return {str(key): str(Way(way)) for key, way in stored["machines"].get(machine(), {}).items()}
    except FileNotFoundError:
        return {}
    except Exception as error:  # whatever is wrong with a cache, it is made anew
        _log.warning(
            "ignoring %s: %s: %s", file, type(error).__name__, str(error).splitlines()[0] if str(error) else ""
        )
        return {}


def write(ways: dict[str, str]) -> None:
    """Put this machine's table into the file in one step: a reader sees the old file or the new one."""
    file = path()
    machines: dict[str, dict[str, str]] = {}
    with suppress(Exception):  # as in `read`
        stored = json.loads(file.read_text())
        if stored["version"] == _VERSION:
            machines = dict(stored["machines"])
    machines[machine()] = ways
    new = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as handle:
            new = Path(handle.name)
            json.dump({"version": _VERSION, "machines": machines}, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(new, file)
    except OSError as error:
        _log.warning("cannot keep the tuned table in %s: %s", file, error)
        if new is not None:
            with suppress(OSError):
                new.unlink()
