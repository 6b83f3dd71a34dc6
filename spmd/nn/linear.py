"""A linear layer cut over the tensor-parallel ranks, by output features (COLUMN) or input features (ROW)."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F

from spmd.collectives import gather, overlap
from spmd.collectives.allreduce import AllReduce
from spmd.collectives.epilogue import AllReduceParams
from spmd.collectives.overlap import Partial
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.topology.mapping import Mapping
from spmd.topology.split import split


class TensorParallelMode(StrEnum):
    """How a layer's weight [out_features, in_features] is cut."""

    COLUMN = "column"
    ROW = "row"

    @classmethod
    def split_dim(cls, mode: TensorParallelMode) -> int:
        """The dimension of the weight that is cut."""
        return 1 if mode == cls.ROW else 0

    @classmethod
    def flip(cls, mode: TensorParallelMode) -> TensorParallelMode:
        """The mode of scales that run across the weight: one per input feature of a COLUMN layer, and the reverse."""
        return cls.ROW if mode == cls.COLUMN else cls.COLUMN


class Source(Protocol):
    """A stored tensor of which slices can be read: a torch tensor, or a name in a checkpoint."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class LoraWeights:
    """A low-rank update scale * b @ a, already cut like its layer: a [rank, local in], b [local out, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _listed(stored: Source | Sequence[Source]) -> list[Source]:
    return list(stored) if isinstance(stored, list | tuple) else [cast(Source, stored)]


def fill(target: torch.Tensor, part: torch.Tensor, whole: Source) -> None:
    """Copy a slice of a stored tensor to its place; torch would broadcast one that is too small."""
    if part.shape != target.shape:
        stored = list(whole.shape) if isinstance(whole, torch.Tensor) else "stored"
        raise InputError(
            f"a slice of shape {list(target.shape)} is needed, but the {stored} tensor gives {list(part.shape)}"
        )
    target.copy_(part)


class Linear:
    """y = x @ weight.T + bias over the ranks of the mapping's tp group, or of another `axis` of it.

    COLUMN: x [..., in_features] equal on all ranks; every rank gets its own output features, or with `gather_output`
    all of them. ROW: x [..., local in features]; every rank gets the whole sum, or with `reduce_output=False` (or
    `AllReduceParams(enable_allreduce=False)`) its part of it: partial results, whose sum over the group is y. The bias
    enters exactly once: in the partial result of group rank 0. No mode: the whole layer on every rank.

    own: the features this rank holds of the cut dimension, one range per stored tensor: a fused layer lists several
    tensors, which lie one after the other (out_features then counts all of them). Default: an even `split`. `sizes`
    are every rank's feature counts, needed to gather when `own` is given.

    Errors: InputError for a layer that cannot be cut, a wrong input width, or a stored tensor of another shape.
    Source of the cut: Shoeybi et al., Megatron-LM, 2019.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        mapping: Mapping | None = None,
        tensor_parallel_mode: TensorParallelMode | None = None,
        gather_output: bool = False,
        *,
        reduce_output: bool = True,
        own: Sequence[range] | None = None,
        sizes: Sequence[int] | None = None,
        axis: str = "tp",
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.mapping, self.axis = mapping or Mapping(), axis
        self.tp_mode = tensor_parallel_mode
        self.tp_size = getattr(self.mapping, f"{axis}_size")
        self.tp_rank = getattr(self.mapping, f"{axis}_rank")
        self.gather_output = gather_output and tensor_parallel_mode == TensorParallelMode.COLUMN
        self.reduce_output = reduce_output and tensor_parallel_mode == TensorParallelMode.ROW
        cut = {TensorParallelMode.COLUMN: out_features, TensorParallelMode.ROW: in_features, None: 0}[self.tp_mode]
        if self.tp_mode is not None and cut < self.tp_size:
            raise InputError(f"{cut} features cannot be split over {self.tp_size} ranks: use a smaller tp")
        self.own = [split(cut, self.tp_size, self.tp_rank)] if own is None else list(own)
        width = sum(map(len, self.own))
        self.gather_sizes: Sequence[int] | None = sizes
        if self.gather_output and sizes is None:
            if own is not None and self.tp_size > 1:
                raise InputError("gather_output with own ranges needs sizes: the feature count of every rank")
            self.gather_sizes = [len(split(cut, self.tp_size, rank)) for rank in range(self.tp_size)]
        local_out = width if self.tp_mode == TensorParallelMode.COLUMN else out_features
        local_in = width if self.tp_mode == TensorParallelMode.ROW else in_features
        # stored by input feature: the product of one token then reads the weight in order
        self._columns = torch.empty(local_in, local_out, dtype=dtype)
        self.weight = self._columns.t()
        self.bias = torch.empty(local_out, dtype=dtype) if bias else None
        self._partial_bias = self.bias if self.tp_rank == 0 or self.tp_mode != TensorParallelMode.ROW else None

    @cached_property
    def group(self) -> Group:
        """The group along the axis, asked for at first use."""
        return Distributed.get(self.mapping).along(self.axis)

    @cached_property
    def all_reduce(self) -> AllReduce:
        """What finishes the sum of a ROW layer."""
        return AllReduce(group=self.group)

    def leave_bias(self) -> None:
        """Another rank's partial result has it: for sums that go over more than the layer's axis."""
        self._partial_bias = None

    def partial(self, input: torch.Tensor) -> Partial:
        """A ROW layer's part of the sum over its group, still owed: input [T, local in], not even multiplied yet."""
        return Partial(self._product, input, self.weight.shape[0])

    def load_shard(self, weights: Source | Sequence[Source], biases: Source | Sequence[Source] | None = None) -> None:
        """Copy this rank's slices of whole stored tensors: one per range of `own` (weight [out, in], bias [out]).

        Errors: InputError when a stored tensor is too small, or a torch tensor is not what the layer's sizes say.
        """
        many = _listed(weights)
        column = self.tp_mode == TensorParallelMode.COLUMN
        full = [range(self.in_features if column else self.out_features)]
        own = self.own if self.tp_mode is not None else [range(self.in_features)]
        at = 0
        for weight, part in zip(many, own, strict=True):
            target = self.weight.narrow(0 if column else 1, at, len(part))
            rows, cols = (part, full[0]) if column else (full[0], part)
            fill(target, weight[_slice(rows), _slice(cols)], weight)
            at += len(part)
        if biases is None or self.bias is None:
            return
        at = 0
        for stored, part in zip(_listed(biases), self.own if column else full, strict=True):
            fill(self.bias.narrow(0, at, len(part)), stored[(_slice(part),)], stored)
            at += len(part)

    def shard_lora(self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> LoraWeights:
        """Cut a whole update (a [rank, in_features], b [out_features, rank]) like this layer.

        The features of the stored tensors of a fused layer are numbered one after the other by the caller.
        """
        if self.tp_mode == TensorParallelMode.COLUMN:
            b = torch.cat([b[_slice(part)] for part in self.own])
        elif self.tp_mode == TensorParallelMode.ROW:
            a = torch.cat([a[:, _slice(part)] for part in self.own], dim=1)
        return LoraWeights(a, b, scale)

    def forward(
        self,
        input: torch.Tensor,
        *,
        all_reduce_params: AllReduceParams | None = None,
        lora_params: Dict[int, LoraWeights] | None = None,
        layer_idx: int | None = None,
    ) -> Any:
        """input [..., in] -> [..., out] of the layer's type; what each rank takes and gets: see the class.

        all_reduce_params: what follows the sum of a ROW layer, see `AllReduce`, whose outputs are then returned.
        lora_params: updates by layer number, of which `layer_idx`'s is added on top. Errors: InputError for a wrong
        input; those of `AllReduce` and `allgather`.
        """
        if input.dim() != 2:
            made = self.forward(
                input.reshape(-1, input.shape[-1]),
                all_reduce_params=all_reduce_params,
                lora_params=lora_params,
                layer_idx=layer_idx,
            )
            if isinstance(made, tuple):
                return tuple(part.view(*input.shape[:-1], -1) if part.dim() == 2 else part for part in made)
            return made.view(*input.shape[:-1], made.shape[-1])
        if lora_params is not None and layer_idx is None:
            raise InputError("lora_params need layer_idx: which layer's update is it?")
        lora = lora_params.get(layer_idx) if lora_params is not None and layer_idx is not None else None
        if not self.reduce_output or (all_reduce_params is not None and not all_reduce_params.enable_allreduce):
            output = self._product(input, lora)
            if self.gather_output and self.tp_size > 1:
                return gather.all_gather(output, self.group, dim=-1, sizes=self.gather_sizes)
            return output
        if self.tp_size == 1:
            output = self._product(input, lora)
            return output if all_reduce_params is None else self.all_reduce(output, all_reduce_params)
        if lora is None and overlap.worth(input.shape[0]):
            made = overlap.product_and_sum(
                self._product, input, self.weight.shape[0], self.all_reduce, all_reduce_params
            )
            if made is not None:
                return made
        lent = self.all_reduce.lend((input.shape[0], self.weight.shape[0]), input.dtype)
        return self.all_reduce(self._product(input, lora, lent), all_reduce_params)

    def _product(
        self, input: torch.Tensor, lora: LoraWeights | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input [T, in] -> this rank's part [T, out], in `out` if there is one."""
        try:
            if self._partial_bias is None:
                output = torch.mm(input, self._columns, out=out)
            else:
                output = torch.addmm(self._partial_bias, input, self._columns, out=out)
        except RuntimeError as error:
            needed = f"{self._columns.shape[0]} features of {self._columns.dtype}"
            raise InputError(f"the layer takes {needed}, but got {list(input.shape)} of {input.dtype}") from error
        if lora is not None:
            output += F.linear(F.linear(input, lora.a), lora.b) * lora.scale
        return output

    __call__ = forward
