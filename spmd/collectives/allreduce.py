"""The all-reduce of a row-parallel layer, alone or with what follows it: bias, residual, RMSNorm, quantisation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

import spmd._cpu as _cpu
from spmd.collectives import fusion, library, tune
from spmd.collectives.arguments import NAMES, check, describe, refuse
from spmd.collectives.cpu import DTYPES
from spmd.collectives.epilogue import AllReduceParams, Finish
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.strategy import NATIVE, AllReduceStrategy, Call, Decision, Limits, Way, decide
from spmd.collectives.stream import Stream
from spmd.collectives.two_level import TwoLevel
from spmd.control.adopt import Adoptable, TorchGroup, adopt
from spmd.control.distributed import Distributed
from spmd.control.mpi import Group
from spmd.errors import InputError
from spmd.memory.workspace import FORCED, SLOTS_OF_BUDGET, Workspace
from spmd.topology.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_log = logging.getLogger("spmd")
_logged: set[tuple[str, str]] = set()  # downgrades that have been told
_COPIED = 15  # the kernel's number for "treat symmetric memory as ordinary"


_NORM_AND_RESIDUAL = (
    AllReduceFusionOp.RESIDUAL_RMS_NORM,
    AllReduceFusionOp.LAST_PROCESS_FOR_UB,
    AllReduceFusionOp.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM,
)


@dataclass(slots=True)
class Plan:
    """What stays the same from one fused call of a layer to the next; kept in its parameters."""

    owner: AllReduce
    weight: torch.Tensor | None
    strategy: AllReduceStrategy
    eps: float
    offset: float
    elements: int
    how: int
    finish: Finish
    plane: _cpu.Plane | None  # None: nothing to communicate
    epoch: int

    def fits(self, owner: AllReduce, p: AllReduceParams) -> bool:
        return (
            owner is self.owner
            and owner._epoch == self.epoch
            and p.norm_weight is self.weight
            and p.fusion_op is self.finish.op
            and p.bias is None
            and p.enable_allreduce
            and p.strategy is self.strategy
            and p.eps == self.eps
            and p.norm_weight_offset == self.offset
        )

    def run(self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, total: torch.Tensor) -> int:
        """A plane's status; -1 where the tensors are not as they were."""
        tensors = (x, self.weight, residual, norm, total)
        return self.owner.rows(self.plane, self.finish.fixed, self.how, self.elements, *tensors)


class AllReduce(_cpu.CallCache):
    """Sum x over a group of ranks, and finish it: `ar(x)` or `ar(x, AllReduceParams(fusion_op=..., ...))`.

    The group is the tp group of a mapping, or `group`: one of ours, an mpi4py communicator or a torch process group
    (then all its ranks make the object together). x: [..., n] fp32, bf16 or fp16 on the CPU, the same shape on all
    ranks, who all make the same calls in the same order.

    Every rank gets the same bits: the sum made in fp32 in rank order and rounded once, in every native way and every
    run. NONE and RMS_NORM return a tensor, the other ops a tuple in the order of `fusion.OUTPUTS`. The input may be
    changed right after the call; the output never is the input unless out= says so: a tensor, or for a tuple one of
    each. In a group of one the epilogue is still applied.

    strategy: see `strategy.decide`, whose chain `explain` shows. overflow: "library" or "error", for a row longer than
    the workspace holds. dtype: what the tensors will be; others are refused (None: any).
    Errors: InputError (a ValueError) for arguments that cannot be; DesyncError, DeadlineError and LostRankError as in
    `cpu`. Sources: the one-shot and two-shot kernels of TensorRT-LLM; NCCL's LL protocol for the smallest messages.
    """

    def __init__(
        self,
        mapping: Mapping | None = None,
        strategy: AllReduceStrategy = AllReduceStrategy.AUTO,
        dtype: torch.dtype | None = None,
        *,
        group: Adoptable | None = None,
        overflow: Literal["library", "error"] = "library",
    ) -> None:
        super().__init__(torch.Tensor)
        if (mapping is None) == (group is None):
            raise InputError("AllReduce takes a mapping or a group: give one of them")
        self.mapping, self.strategy, self.dtype, self._overflow = mapping, strategy, dtype, overflow
        self._group: Group | None = None if group is None else adopt(group)
        self._workspace: Workspace | None = None
        self._two_level: TwoLevel | None = None
        self._limits: Limits | None = None
        self._epoch = 0

    @property
    def group(self) -> Group:
        """The group, asked for at first use."""
        if self._group is None:
            assert self.mapping is not None
            self._group = Distributed.get(self.mapping).group("tp")
        return self._group

    def _open(self) -> Limits:
        """What the group can do; collective the first time."""
        if self._limits is None:
            group = self.group
            self._workspace = Workspace.of(group)
            if self._workspace is not None:
                self._workspace.users.add(self)
                plane = self._workspace.plane
                table = tune.table(group)
                self._limits = Limits(plane.mailbox_bytes, plane.slot_bytes, overflow=self._overflow, table=table)
            elif group.size == 1:
                self._limits = Limits()
            else:
                self._two_level = TwoLevel.of(group)
                away = "the ranks are on several hosts"
                if self._two_level is None:
                    away += " with different numbers of ranks"
                self._limits = Limits(away=away, two_level=self._two_level is not None)
        return self._limits

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a result that the next call here sums: peers read it where it lies. None: use your own."""
        self._open()
        return None if self._workspace is None else self._workspace.lend(shape, dtype)

    def stream(
        self, shape: tuple[int, int], dtype: torch.dtype, params: AllReduceParams | None = None
    ) -> Stream | None:
        """An all-reduce of rows that are still being made; None where it cannot be. All ranks ask alike."""
        strategy = self.strategy if params is None or params.strategy == AllReduceStrategy.AUTO else params.strategy
        if dtype not in DTYPES or strategy not in (AllReduceStrategy.AUTO, AllReduceStrategy.ONESHOT):
            return None
        lent = self.lend(shape, dtype)
        if lent is None or self._workspace is None or shape[1] * dtype.itemsize > self._workspace.plane.slot_bytes:
            return None
        if self.group.checked:
            self.group.agree(f"all_reduce of rows in parts {describe(lent)}")
        return Stream(self._workspace, lent, params, self.group)

    def tune(self, calls: Iterable[tuple[tuple[int, int], torch.dtype, AllReduceFusionOp, bool]]) -> float:
        """Time the ways that such calls could take: (shape, dtype, fusion_op, in lent memory). Collective, in a warm-up
        step: the result is the same on all ranks and kept for later runs (`tune`). Returns the seconds it took."""
        limits, group = self._open(), self.group
        if self._workspace is None or group.size == 1:
            return 0.0
        shapes: dict[Call, tuple[tuple[int, int], torch.dtype]] = {}
        for shape, dtype, op, symmetric in calls:
            nbytes, params = shape[1] * dtype.itemsize, AllReduceParams(fusion_op=op)
            if self.decide(shape, dtype, params, symmetric).way in NATIVE:
                shapes[Call(group.size, shape[0], nbytes, NAMES[dtype], op, symmetric)] = (shape, dtype)

        def run(call: Call, way: Way) -> Callable[[], object]:
            shape, dtype = shapes[call]
            lent = self.lend(shape, dtype) if call.symmetric else None
            x = torch.zeros(shape, dtype=dtype) if lent is None else lent.zero_()
            if not call.whole_rows:
                y, decision = torch.empty(shape, dtype=dtype), Decision(way, ())
                return lambda: self._sum(x, y, decision, lent is not None)
            params = AllReduceParams(
                fusion_op=call.fusion,
                residual=torch.zeros(shape, dtype=dtype),
                norm_weight=torch.ones(shape[1], dtype=dtype),
                scale=torch.ones(1),
            )
            finish = Finish(params, x, group)
            return lambda: self.finished(x, finish, way, lent is not None)

        return tune.tune(group, limits, shapes, run)

    def forget(self) -> None:
        """Decide anew at the next call."""
        super().forget()
        self._epoch += 1

    def forward(
        self,
        x: torch.Tensor,
        all_reduce_params: AllReduceParams | None = None,
        *,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See the class; the same as calling the object."""
        return self(x, all_reduce_params, out=out)

    def _call(
        self,
        x: torch.Tensor,
        all_reduce_params: AllReduceParams | None = None,
        *,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What is not a plain sum into `out` that is remembered: those end in the extension."""
        if all_reduce_params is not None:
            plan = all_reduce_params._plan
            if plan is not None and plan.fits(self, all_reduce_params):
                outputs = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
                two = isinstance(outputs, tuple) and len(outputs) == 2
                status = plan.run(x, all_reduce_params.residual, *outputs) if two else -1
                if status == 0:
                    return outputs  # type: ignore[return-value]
                if status > 0:
                    self._fail(status)
        elif out is None:
            made = torch.empty_like(x)
            status = self.sum(x, made)
            if status == 0:
                return made
            if status > 0:
                self._fail(status)
        return self._slowly(x, all_reduce_params, out)

    def _fail(self, status: int) -> NoReturn:
        assert self._workspace is not None
        self._workspace.fail(status)

    def decide(
        self, shape: Sequence[int], dtype: torch.dtype, params: AllReduceParams | None = None, symmetric: bool = False
    ) -> Decision:
        """The way such a call takes, and the chain of reasons; collective the first time."""
        limits = self._open()
        strategy, op, bias = self.strategy, AllReduceFusionOp.NONE, False
        if params is not None:
            op, bias = params.fusion_op, params.bias is not None
            if params.strategy != AllReduceStrategy.AUTO:
                strategy = params.strategy
        n = shape[-1] if len(shape) else 1
        rows = 1
        for size in shape[:-1]:
            rows *= size
        call = Call(self.group.size, rows, n * dtype.itemsize, NAMES.get(dtype, str(dtype)), op, symmetric, bias)
        return decide(strategy, call, limits)

    def explain(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fusion_op: AllReduceFusionOp = AllReduceFusionOp.NONE,
        symmetric: bool = False,
    ) -> str:
        """The chain of decisions for such a call, a line for each."""
        params = AllReduceParams(fusion_op=fusion_op)
        return "\n".join(self.decide(shape, dtype, params, symmetric).chain)

    def _slowly(
        self, x: torch.Tensor, params: AllReduceParams | None, out: torch.Tensor | Sequence[torch.Tensor] | None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        group, params = self.group, params or AllReduceParams()
        op = params.fusion_op
        if not params.enable_allreduce and group.size > 1:
            if op != AllReduceFusionOp.NONE:
                refuse("all_reduce", group, f"{op.name} would normalise an unfinished sum: drop enable_allreduce=False")
            return x
        self._check(x, params, out)
        plain, one = op == AllReduceFusionOp.NONE and params.bias is None, len(fusion.OUTPUTS[op]) == 1
        finish = None
        if not plain:
            finish = Finish(params, x, group, (out,) if one and out is not None else out)  # type: ignore[arg-type]
        if plain and group.size == 1:
            return x if out is None or out is x else out.copy_(x)  # type: ignore[union-attr]
        source = x.contiguous()
        symmetric = group.size > 1 and self._is_symmetric(source)
        decision = self.decide(x.shape, x.dtype, params, symmetric)
        if group.checked:
            place = " in symmetric memory" if symmetric else ""
            group.agree(f"all_reduce {op.name} {describe(x)} {decision.way}{place}")
        for reason in decision.downgrades:
            if group.rank == 0 and (group.name, reason) not in _logged:
                _logged.add((group.name, reason))
                _log.warning("all_reduce on %s: %s", group.name, reason)
        if decision.too_small and self._overflow == "error":
            needed = decision.too_small * SLOTS_OF_BUDGET
            refuse("all_reduce", group, f"{decision.chain[-1]}: set {FORCED} to {needed} bytes or more")
        if finish is None:
            made = self._sum(source, out, decision, symmetric)  # type: ignore[arg-type]
            rowless = self.strategy != AllReduceStrategy.TWOSHOT  # whose way depends on how many rows there are
            if x is source and params.strategy == AllReduceStrategy.AUTO and rowless and not group.checked:
                self._remember_sum(x)
            return made
        self.finished(source, finish, decision.way, symmetric)
        if op in _NORM_AND_RESIDUAL and params.bias is None and not group.checked:
            self._remember_fused(x, params, finish)
        return finish.result[0] if one else finish.result

    def _is_symmetric(self, x: torch.Tensor) -> bool:
        self._open()
        return self._workspace is not None and self._workspace.plane.symmetric(x.data_ptr())

    def finished(self, x: torch.Tensor, finish: Finish, way: Way, symmetric: bool) -> None:
        """Sum contiguous x by a given way and finish its rows."""
        if way in NATIVE:
            assert self._workspace is not None
            status = self._workspace.plane.all_reduce_rows(
                x.data_ptr(),
                finish.rows,
                _how(way, way if symmetric else None, x.dtype),
                finish.fixed,
                *finish.addresses,
            )
            if status:
                self._workspace.fail(status)
        else:
            finish.local(x if way == Way.NOTHING else self._elsewhere(x, way))

    def _sum(self, x: torch.Tensor, out: torch.Tensor | None, decision: Decision, symmetric: bool) -> torch.Tensor:
        """A plain sum of contiguous x."""
        if decision.way in NATIVE and x.dtype in DTYPES:
            assert self._workspace is not None
            target = out if out is not None and out.is_contiguous() else torch.empty_like(x)
            how = _how(decision.way, decision.way if symmetric else None, x.dtype)
            if x.numel():
                status = self._workspace.plane.all_reduce(x.data_ptr(), target.data_ptr(), x.numel(), how)
                if status:
                    self._workspace.fail(status)
        else:
            target = self._elsewhere(x, decision.way)
        return target if out is None or target is out else out.copy_(target)

    def _remember_sum(self, x: torch.Tensor) -> None:
        """How plain sums of this size are made, in ordinary and in symmetric memory, for the next call."""
        ways = [self.decide(x.shape, x.dtype, None, symmetric).way for symmetric in (False, True)]
        if self._workspace is not None and x.numel() and x.dtype in DTYPES and all(way in NATIVE for way in ways):
            how = _how(ways[0], ways[1], x.dtype)
            self.remember(self._workspace.plane, DTYPES[x.dtype], x.numel(), how)

    def _remember_fused(self, x: torch.Tensor, p: AllReduceParams, finish: Finish) -> None:
        """What the next call with these parameters and a tensor like x can take over."""
        if p.norm_weight is None or not p.norm_weight.is_contiguous():
            return
        fixed = (self, p.norm_weight, p.strategy, p.eps, p.norm_weight_offset, x.numel())
        ways = [self.decide(x.shape, x.dtype, p, symmetric).way for symmetric in (False, True)]
        if ways == [Way.NOTHING] * 2:
            p._plan = Plan(*fixed, 0, finish, None, self._epoch)
        elif self._workspace is not None and all(way in NATIVE for way in ways):
            how = _how(ways[0], ways[1], x.dtype)
            p._plan = Plan(*fixed, how, finish, self._workspace.plane, self._epoch)

    def _elsewhere(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        if isinstance(self.group, TorchGroup):
            return self.group.all_reduce(x)
        if way == Way.TWO_LEVEL and x.dtype in DTYPES:
            assert self._two_level is not None
            return self._two_level.all_reduce(x)
        return library.all_reduce(x, self.group)

    def _check(self, x: torch.Tensor, params: AllReduceParams, out: object) -> None:
        group, wanted = self.group, len(fusion.OUTPUTS[params.fusion_op])
        check("all_reduce", group, x)
        outs = [out] if wanted == 1 else list(out) if isinstance(out, tuple | list) else [out] * (out is not None)
        if out is not None and (len(outs) != wanted or not all(isinstance(o, torch.Tensor) and o.is_cpu for o in outs)):
            refuse(
                "all_reduce", group, f"{params.fusion_op.name} has {wanted} outputs: out must be as many CPU tensors"
            )
        plain = params.fusion_op == AllReduceFusionOp.NONE and params.bias is None
        if plain and isinstance(out, torch.Tensor) and (out.dtype != x.dtype or out.shape != x.shape):
            refuse("all_reduce", group, f"out is {describe(out)}, but the result {describe(x)}")
        if params.fusion_op != AllReduceFusionOp.NONE and x.dim() == 0:
            refuse("all_reduce", group, f"{params.fusion_op.name} of a scalar: it needs rows")
        if x.dtype not in DTYPES and (params.fusion_op != AllReduceFusionOp.NONE or params.bias is not None):
            refuse("all_reduce", group, f"{params.fusion_op.name} needs fp32, bf16 or fp16, not {describe(x)}")
        if self.dtype is not None and x.dtype != self.dtype:
            refuse("all_reduce", group, f"made for {self.dtype}, but the tensor is {describe(x)}")


def _how(ordinary: Way, symmetric: Way | None, dtype: torch.dtype) -> int:
    """The kernel's number: the way in ordinary memory, in symmetric memory (None: as in ordinary), the dtype."""
    second = _COPIED if symmetric is None else NATIVE.index(symmetric)
    return NATIVE.index(ordinary) | second << 4 | DTYPES[dtype] << 8
