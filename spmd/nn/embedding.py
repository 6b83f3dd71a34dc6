"""The vocabulary cut over the tensor-parallel ranks: token embedding and LM head."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F

from spmd.collectives import gather
from spmd.collectives.allreduce import AllReduce
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.nn.linear import Source, fill
from spmd.topology.mapping import Mapping
from spmd.topology.split import split


class VocabParallelEmbedding:
    """Every rank holds the rows [floor(r*V/n), floor((r+1)*V/n)) of a [vocab_size, hidden] table.

    forward(ids [T] int64) -> [T, hidden], equal on all ranks: rows of others count as zero and one all-reduce adds up.
    `logits(x [T, hidden])` -> [T, vocab_size] on every rank, the same table read as LM head.
    Errors: InputError when there are fewer words than ranks. Source: Shoeybi et al., Megatron-LM, 2019.
    """

    def __init__(
        self, vocab_size: int, hidden: int, dtype: torch.dtype | None, mapping: Mapping, axis: str = "tp"
    ) -> None:
        """axis: of the mapping, along which the table is cut and whose ranks call with the same rows."""
        self.size, rank = getattr(mapping, f"{axis}_size"), getattr(mapping, f"{axis}_rank")
        if vocab_size < self.size:
            raise InputError(f"a vocabulary of {vocab_size} cannot be split over {self.size} ranks")
        self.mapping, self.axis = mapping, axis
        self.own = split(vocab_size, self.size, rank)
        self.sizes = [len(split(vocab_size, self.size, rank)) for rank in range(self.size)]
        # stored by channel, as in Linear: the LM head reads all of it for every token, the embedding one column
        self._columns = torch.empty(hidden, len(self.own), dtype=dtype)
        self.weight = self._columns.t()

    def load_shard(self, table: Source) -> None:
        """Copy this rank's rows of the whole stored table [vocab_size, hidden]. InputError when it is too small."""
        fill(self.weight, table[slice(self.own.start, self.own.stop), slice(0, self.weight.shape[1])], table)

    @cached_property
    def group(self) -> Group:
        return Distributed.get(self.mapping).along(self.axis)

    @cached_property
    def all_reduce(self) -> AllReduce:
        return AllReduce(group=self.group)

    def partial(self, ids: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over the axis that `forward` is."""
        if self.size == 1:
            return F.embedding(ids, self.weight)
        elsewhere = (ids < self.own.start) | (ids >= self.own.stop)
        rows = F.embedding((ids - self.own.start).masked_fill_(elsewhere, 0), self.weight)
        rows[elsewhere] = 0
        return rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.partial(ids)
        total = rows if self.size == 1 else self.all_reduce(rows)
        assert isinstance(total, torch.Tensor)
        return total

    __call__ = forward

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], equal on all ranks -> scores [T, vocab_size] of x's type, on every rank."""
        scores = torch.mm(x, self._columns)
        if self.size == 1:
            return scores
        return gather.all_gather(scores, self.group, dim=-1, sizes=self.sizes)
