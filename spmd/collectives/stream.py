"""An all-reduce of rows that are still being made: summed part by part, one part behind."""

from __future__ import annotations

import torch

from spmd.collectives.cpu import DTYPES
from spmd.collectives.epilogue import AllReduceParams, Finish
from spmd.control.mpi import Group
from spmd.memory.workspace import Workspace


class Stream:
    """Rows [T, n] of one all-reduce, written part by part to `input` and summed one part behind."""

    def __init__(self, workspace: Workspace, lent: torch.Tensor, params: AllReduceParams | None, group: Group) -> None:
        self.input, self._workspace = lent, workspace
        self._finish = None if params is None else Finish(params, lent, group)
        self._out = torch.empty_like(lent) if self._finish is None else self._finish.result[0]
        self._parts: list[slice] = []
        self._summed = 0
        self._check(workspace.plane.start(lent.nbytes, DTYPES[lent.dtype], lent.data_ptr()))

    def _check(self, status: int) -> None:
        if status:
            self._workspace.fail(status)

    def publish(self, rows: slice) -> None:
        """These rows of `input` are there; the part before them is summed now."""
        self._workspace.plane.publish()
        self._parts.append(rows)
        if len(self._parts) > 1:
            self._sum()

    def _sum(self) -> None:
        number, plane, at = self._summed, self._workspace.plane, self.input.data_ptr()
        rows = self._parts[number]
        self._summed += 1
        first, count = rows.start, rows.stop - rows.start
        if self._finish is None:
            n, code = self.input.shape[1], DTYPES[self.input.dtype]
            self._check(plane.complete(number, at, self._out.data_ptr(), n, code, first, count))
        else:
            self._check(plane.complete_rows(number, at, first, count, self._finish.fixed, *self._finish.addresses))

    def finish(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Sum the last part. Returns what the all-reduce returns."""
        while self._summed < len(self._parts):
            self._sum()
        if self._finish is None or len(self._finish.result) == 1:
            return self._out
        return self._finish.result
