"""What this rank's communication did: totals per operation and group, and a timeline when one is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spmd._cpu import monotonic_ns


@dataclass(slots=True)
class Total:
    """Sum over the calls of one operation on one group."""

    calls: int = 0
    bytes: int = 0  # handed in by this rank
    ns: int = 0


@dataclass
class Recorder:
    """Totals of this process, and its events (operation, group, bytes, start ns, end ns) while `timeline` is on."""

    totals: dict[tuple[str, str], Total] = field(default_factory=dict)
    events: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    timeline: bool = False

    def add(self, op: str, group: str, nbytes: int, start_ns: int) -> None:
        """One finished call."""
        end_ns = monotonic_ns()
        total = self.totals.get((op, group))
        if total is None:
            total = self.totals[op, group] = Total()
        total.calls += 1
        total.bytes += nbytes
        total.ns += end_ns - start_ns
        if self.timeline:
            self.events.append((op, group, nbytes, start_ns, end_ns))

    def reset(self) -> None:
        self.totals.clear()
        self.events.clear()

    def summary(self) -> list[dict[str, Any]]:
        """Totals as plain rows, largest time first."""
        rows = [
            {"op": op, "group": group, "calls": t.calls, "bytes": t.bytes, "seconds": t.ns * 1e-9}
            for (op, group), t in self.totals.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])


recorder = Recorder()


def perfetto(events_by_rank: list[list[tuple[str, str, int, int, int]]]) -> dict[str, Any]:
    """The timelines of all ranks as one Perfetto (Chrome trace) document: a process per rank, in microseconds."""
    origin = min((start for events in events_by_rank for _, _, _, start, _ in events), default=0)
    out: list[dict[str, Any]] = []
    for rank, events in enumerate(events_by_rank):
        out.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for op, group, nbytes, start, end in events:
            span = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3, "pid": rank, "tid": 0}
            out.append({"name": op, "cat": group, "ph": "X", "args": {"group": group, "bytes": nbytes}} | span)
    return {"traceEvents": out, "displayTimeUnit": "ms"}
