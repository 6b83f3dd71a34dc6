"""Long sequences: rows, heads and the cache of one sequence cut over ranks, behind one interface (`base.Context`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.topology.mapping import CpType, Mapping

if TYPE_CHECKING:
    from spmd.context.base import Context


def of(mapping: Mapping, num_heads: int) -> Context | None:
    """The way that a mapping's cp_config names, for attention of so many heads; None where nothing is cut."""
    if mapping.cp_type == CpType.ULYSSES:
        from spmd.context.ulysses import Ulysses

        return Ulysses(mapping, num_heads) if mapping.cp_size > 1 else None
    if mapping.attn_cp_size == 1:
        return None
    from spmd.context.helix import Helix
    from spmd.context.ring import Ring

    return Helix(mapping, num_heads) if mapping.cp_type == CpType.HELIX else Ring(mapping, num_heads)
