"""What this rank's communication did: totals per operation and group, and a timeline when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spmd._cpu import monotonic_ns


@dataclass(slots=True)
class Total:
    """Sum over the calls of one operation on one group."""

    calls: int = 0
    bytes: int = 0  # handed in by this rank
    ns: int = 0


class Plane(Protocol):
    """Native collectives that count their own calls: an operation's name is OPS[number]."""

    timeline: bool

    @property
    def totals(self) -> Sequence[tuple[int, int, int, int]]: ...  # operation, calls, bytes, ns
    @property
    def events(self) -> Sequence[tuple[int, int, int, int]]: ...  # operation, bytes, start ns, end ns
    def reset(self) -> None: ...


OPS: tuple[str, ...] = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
OPS += ("exchange", "dispatch", "combine")
Event = tuple[str, str, int, int, int]


class Recorder:
    """Totals of this process, and its events (operation, group, bytes, start ns, end ns) while `timeline` is on."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], Total] = {}
        self._events: list[Event] = []
        self._planes: list[tuple[str, Plane]] = []
        self._timeline = False

    @property
    def timeline(self) -> bool:
        return self._timeline

    @timeline.setter
    def timeline(self, on: bool) -> None:
        self._timeline = on
        for _, plane in self._planes:
            plane.timeline = on

    @property
    def totals(self) -> dict[tuple[str, str], Total]:
        """By operation and group, the native calls included."""
        totals = {key: Total(t.calls, t.bytes, t.ns) for key, t in self._totals.items()}
        for group, plane in self._planes:
            _count(totals, group, plane)
        return totals

    @property
    def events(self) -> list[Event]:
        """In the order in which they began."""
        native = [event for watched in self._planes for event in _events(*watched)]
        return sorted(self._events + native, key=lambda event: event[3])

    def watch(self, group: str, plane: Plane) -> Callable[[], None]:
        """Count a plane's calls as well. Returns what ends that; what it has counted stays."""
        watched = (group, plane)
        plane.timeline = self._timeline
        self._planes.append(watched)

        def unwatch() -> None:
            self._planes.remove(watched)
            _count(self._totals, group, plane)
            self._events += _events(group, plane)

        return unwatch

    def add(self, op: str, group: str, nbytes: int, start_ns: int) -> None:
        """One finished call."""
        end_ns = monotonic_ns()
        total = self._totals.get((op, group))
        if total is None:
            total = self._totals[op, group] = Total()
        total.calls += 1
        total.bytes += nbytes
        total.ns += end_ns - start_ns
        if self._timeline:
            self._events.append((op, group, nbytes, start_ns, end_ns))

    def reset(self) -> None:
        self._totals.clear()
        self._events.clear()
        for _, plane in self._planes:
            plane.reset()

    def summary(self) -> list[dict[str, Any]]:
        """Totals as plain rows, largest time first."""
        rows = [
            {"op": op, "group": group, "calls": t.calls, "bytes": t.bytes, "seconds": t.ns * 1e-9}
            for (op, group), t in self.totals.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])


def _count(totals: dict[tuple[str, str], Total], group: str, plane: Plane) -> None:
    for op, calls, nbytes, ns in plane.totals:
        total = totals.setdefault((OPS[op], group), Total())
        total.calls, total.bytes, total.ns = total.calls + calls, total.bytes + nbytes, total.ns + ns


def _events(group: str, plane: Plane) -> list[Event]:
    return [(OPS[op], group, nbytes, start, end) for op, nbytes, start, end in plane.events]


recorder = Recorder()


def perfetto(events_by_rank: list[list[Event]]) -> dict[str, Any]:
    """The timelines of all ranks as one Perfetto (Chrome trace) document: a process per rank, in microseconds."""
    origin = min((start for events in events_by_rank for _, _, _, start, _ in events), default=0)
    out: list[dict[str, Any]] = []
    for rank, events in enumerate(events_by_rank):
        out.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for op, group, nbytes, start, end in events:
            span = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3, "pid": rank, "tid": 0}
            out.append({"name": op, "cat": group, "ph": "X", "args": {"group": group, "bytes": nbytes}} | span)
    return {"traceEvents": out, "displayTimeUnit": "ms"}
