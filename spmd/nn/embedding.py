"""The vocabulary cut over the tensor-parallel ranks: token embedding and LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spmd.collectives import gather
from spmd.collectives.allreduce import AllReduce
from spmd.control.distributed import Distributed
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

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype | None, mapping: Mapping) -> None:
        if vocab_size < mapping.tp_size:
            raise InputError(f"a vocabulary of {vocab_size} cannot be split over {mapping.tp_size} ranks")
        self.mapping = mapping
        self.own = split(vocab_size, mapping.tp_size, mapping.tp_rank)
        self.sizes = [len(split(vocab_size, mapping.tp_size, rank)) for rank in range(mapping.tp_size)]
        self._all_reduce = AllReduce(mapping)
        # stored by channel, as in Linear: the LM head reads all of it for every token, the embedding one column
        self._columns = torch.empty(hidden, len(self.own), dtype=dtype)
        self.weight = self._columns.t()

    def load_shard(self, table: Source) -> None:
        """Copy this rank's rows of the whole stored table [vocab_size, hidden]. InputError when it is too small."""
        fill(self.weight, table[slice(self.own.start, self.own.stop), slice(0, self.weight.shape[1])], table)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.mapping.tp_size == 1:
            return F.embedding(ids, self.weight)
        elsewhere = (ids < self.own.start) | (ids >= self.own.stop)
        rows = F.embedding((ids - self.own.start).masked_fill_(elsewhere, 0), self.weight)
        rows[elsewhere] = 0
        total = self._all_reduce(rows)
        assert isinstance(total, torch.Tensor)
        return total

    __call__ = forward

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], equal on all ranks -> scores [T, vocab_size] of x's type, on every rank."""
        scores = torch.mm(x, self._columns)
        if self.mapping.tp_size == 1:
            return scores
        return gather.all_gather(scores, Distributed.get(self.mapping).group("tp"), dim=-1, sizes=self.sizes)
