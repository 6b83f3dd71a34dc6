"""All-reduce over several hosts: reduce-scatter inside each, all-reduce of the shards between them, all-gather inside.

Every rank then sends its share alone over the network. Source: the hierarchical form of Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

from collections import Counter

import torch

from spmd.collectives import cpu, library
from spmd.control.adopt import TorchGroup
from spmd.control.mpi import Group
from spmd.memory.host import hosts
from spmd.memory.workspace import Workspace
from spmd.topology.split import split


class TwoLevel:
    """`TwoLevel.of(group)`: collective over the group the first time; None when hosts have different rank counts."""

    @staticmethod
    def of(group: Group) -> TwoLevel | None:
        if "two-level" not in group.kept:
            counts = Counter(hosts(group))
            if len(set(counts.values())) != 1 or isinstance(group, TorchGroup):  # which sums over hosts itself
                return None
            group.kept["two-level"] = TwoLevel(group)
        made = group.kept["two-level"]
        assert isinstance(made, TwoLevel)
        return made

    def __init__(self, group: Group) -> None:
        places = hosts(group)
        members = [[i for i, place in enumerate(places) if place == host] for host in range(max(places) + 1)]
        mine = members[places[group.rank]]
        index = mine.index(group.rank)
        self._inside = group.part("node", mine, 0)
        self._between = group.part("hosts", [host[index] for host in members], 1)
        self._workspace = Workspace.of(self._inside)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape, contiguous, fp32, bf16 or fp16 -> the sum, the same bits on every rank of the group.

        Rounded to x's type inside a host and again between them.
        """
        inside, flat = self._inside, x.view(-1)
        if self._workspace is None:
            return library.all_reduce(x, self._between)
        sizes = [len(split(len(flat), inside.size, rank)) for rank in range(inside.size)]
        shard = cpu.reduce_scatter(flat, inside, self._workspace, sizes=sizes)
        shard = library.all_reduce(shard, self._between, out=shard)
        return cpu.all_gather(shard, inside, self._workspace, sizes=sizes).view(x.shape)

    def close(self) -> None:
        """Collective over the group."""
        self._inside.close()
        self._between.close()
