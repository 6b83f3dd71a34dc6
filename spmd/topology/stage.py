"""The ranks of one pipeline stage numbered by digits: the common refinement of a mapping's three views.

A digit is a factor of the stage's rank number. The model view (tp, cp), the attention view (attn_dp, attn_tp, attn_cp)
and the expert view (moe_tp, moe_cluster, moe_ep, cp) number the same ranks; every axis of theirs is a set of digits.
Digits of size 1 do not exist, so equal sets of ranks are equal sets of digits.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from spmd.errors import InputError
from spmd.topology.mapping import Mapping
from spmd.topology.radix import Radix

Digits = frozenset[str]
NONE: Digits = frozenset()


class Stage:
    """The ranks of one pipeline stage, numbered by digits.

    digits: {digit: size}, slowest first, as a Radix; axes: the digits of every axis of the views. Errors: InputError
    where two views cut the rank number so that neither boundary divides the other (2 x 3 against 3 x 2).
    """

    def __init__(self, views: dict[str, dict[str, int]]) -> None:
        cuts = {1}
        for axes in views.values():
            below = 1
            for size in reversed(axes.values()):
                below *= size
                cuts.add(below)
        ordered = sorted(cuts)
        for low, high in pairwise(ordered):
            if high % low:
                raise InputError(f"the {' and the '.join(views)} view have no common refinement: {low} and {high}")
        self.digits = Radix({f"d{low}": high // low for low, high in reversed(list(pairwise(ordered)))})
        self.axes: dict[str, Digits] = {}
        for axes in views.values():
            below = 1
            for axis, size in reversed(axes.items()):
                self.axes[axis] = frozenset(d for d in self.digits.sizes if below <= int(d[1:]) < below * size)
                below *= size
        self.every: Digits = frozenset(self.digits.sizes)

    @classmethod
    def of(cls, mapping: Mapping, experts: bool = True) -> Stage:
        """The stages of a mapping; experts: whether the expert view takes part."""
        views = {"model": mapping.model, "attention": mapping.attention}
        if experts:
            views["experts"] = mapping.experts
        return cls({name: {a: n for a, n in radix.sizes.items() if a != "pp"} for name, radix in views.items()})

    def of_axes(self, *axes: str) -> Digits:
        return NONE.union(*(self.axes[axis] for axis in axes))

    def span(self, digits: Digits) -> int:
        """Ranks that differ along these digits only."""
        return prod(self.digits.sizes[digit] for digit in digits)

    def say(self, digits: Digits) -> str:
        """The digits as the axes they make up, largest first; those of no axis by their own names."""
        said: list[str] = []
        for axis, whole in sorted(self.axes.items(), key=lambda item: -len(item[1])):
            if whole and whole <= digits:
                said, digits = [*said, axis], digits - whole
        return " x ".join(said + sorted(digits))
