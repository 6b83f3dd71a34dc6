"""Runs a plan on integers, all ranks in one process: what every rank holds is compared with the truth all the way.

Values are integers, so a sum that is made twice, or not at all, or of the wrong ranks, is another number. Moves go by
`pieces_of`, as they do between real ranks; which rows a rank must hold is worked out here by enumeration.
"""

from __future__ import annotations

import numpy as np

from spmd.boundary.plan import needs
from spmd.topology.rows import pieces_of
from spmd.topology.stage import NONE

WIDTH, MODULUS = 2, 1009


def fine_rows(radix, held, counts):
    """Rows of the finest blocks: ranks that agree along `held` have the same rows, which are cut evenly among them."""
    cells = {}
    for block in range(radix.size):
        cells.setdefault(tuple(radix.coordinate(block, d) for d in radix.sizes if d in held), []).append(block)
    rows = [0] * radix.size
    for cell, n in zip(sorted(cells), counts, strict=True):
        for i, block in enumerate(cells[cell]):
            k = len(cells[cell])
            rows[block] = (i + 1) * n // k - i * n // k
    return rows


class Simulation:
    def __init__(self, plan, counts, options, seed=0):
        """counts: rows of the ranks whose rows attention leaves apart, by the digits along which it does."""
        self.plan, self.stage, self.options, self.radix = plan, plan.stage, options, plan.stage.digits
        self.attention = self.needs("attention")
        self.home = self.attention.leaves.layout
        self.rows = fine_rows(self.radix, self.home, counts)
        self.ranks, self.rng = range(plan.stage.digits.size), np.random.default_rng(seed)
        ends = np.cumsum([0, *self.rows])
        self.ids = [np.arange(ends[b], ends[b + 1]) for b in range(len(self.rows))]
        self.total = int(ends[-1])

    def needs(self, kind):
        return needs(self.stage, self.plan.mapping, kind, self.options, self.plan.batch.cut)

    def held(self, rank, layout):
        """Numbers of the rows that a rank holds in a layout."""
        mine = self.radix.coordinates(rank)
        blocks = [
            self.ids[b]
            for b in range(self.radix.size)
            if all(self.radix.coordinate(b, digit) == mine[digit] for digit in layout)
        ]
        return np.concatenate(blocks) if blocks else np.arange(0)

    def give(self, truth, state):
        """Every rank's part of the truth in a state: sums that are owed are split at random."""
        out = [truth[self.held(rank, state.layout)] for rank in self.ranks]
        for rank in self.ranks:
            group = self.radix.group(rank, *state.partial)
            if rank == group[0] and len(group) > 1:
                noise = [self.rng.integers(-50, 50, out[rank].shape) for _ in group[1:]]
                for other, part in zip(group, [out[rank] - sum(noise), *noise], strict=True):
                    out[other] = part
        return out

    def expect(self, truth, data, layout):
        for rank in self.ranks:
            assert np.array_equal(data[rank], truth[self.held(rank, layout)]), (rank, layout)

    def move(self, data, held, over=NONE, gather=NONE, cut=NONE):
        out = []
        for rank in self.ranks:
            axes = {"held": held, "over": over, "gather": gather, "cut": cut}
            pieces = pieces_of(self.radix, rank, self.rows, blocks=self.radix, **axes)
            made = [sum(data[s][p.start : p.start + p.rows] for s in p.sources) for p in pieces]
            out.append(np.concatenate(made) if made else np.zeros((0, WIDTH), np.int64))
        return out

    def run_path(self, path, data, state, residual, where):
        """where: the residual's layout, None before there is one, "folded"."""
        assert (path.state, path.where) == (state, where if isinstance(where, frozenset) else None)
        for step in path.steps:
            if step.op not in ("fold", "norm", "add"):
                cut = step.over if step.op == "reduce_scatter" else step.cut
                assert step.over <= state.partial and step.gather <= state.layout
                data = self.move(data, state.layout, step.over, step.gather, cut)
                state = step.after(state)
                assert not state.layout & state.partial
                continue
            layout = state.layout
            if isinstance(where, frozenset):
                residual = self.move(residual, where, NONE, step.gather, step.cut)
                assert where - step.gather | step.cut == layout
            if step.op == "fold":
                for rank in self.ranks:
                    if all(self.radix.coordinate(rank, digit) == 0 for digit in state.partial):
                        data[rank] = data[rank] + residual[rank]
                residual, where = None, "folded"
                continue
            assert not state.partial
            if isinstance(where, frozenset):
                data = [x + r for x, r in zip(data, residual, strict=True)]
            residual, where = data, layout | step.keep
            if step.keep:
                residual = self.move(residual, layout, cut=step.keep)
            if step.op == "norm":
                data = [norm(x) for x in data]
        return data, state, residual, where

    def run(self):
        """The whole stack."""
        plan, attention = self.plan, self.attention
        x = self.rng.integers(0, 100, (self.total, WIDTH))
        true, data, state, residual, where = np.zeros_like(x), self.give(x, plan.start), plan.start, None, None
        for index, layer in enumerate(plan.layers):
            for name, path in layer.junctions.items():
                if name == "prepare_attn" and index:
                    assert state == plan.layers[index - 1].states.layer_output
                data, state, residual, where = self.run_path(path, data, state, residual, where)
                if name == "postprocess":
                    assert state == layer.states.layer_output
                    continue
                block = attention if name == "prepare_attn" else self.needs(layer.kind)
                true = true + x
                x = norm(true)
                assert state == (block.takes, NONE)
                self.expect(x, data, block.takes)
                self.expect(true, residual, where)
                if name == "prepare_mlp":
                    assert where == layer.states.middle_residual
                x = (x * (3 + index) + np.arange(self.total)[:, None]) % MODULUS
                state = block.leaves
                data = self.give(x, state)
        data, state, residual, where = self.run_path(plan.finish, data, state, residual, where)
        true = true + x
        last = any(step.op == "norm" for step in plan.finish.steps)
        assert state == (self.home, NONE)
        self.expect(norm(true) if last else true, data, self.home)


def norm(x):
    """Row by row, and no sum of parts."""
    return (x * 7 + 5) % MODULUS
