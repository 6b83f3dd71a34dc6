"""The all-reduce of a row-parallel layer, alone or with what follows it: bias, residual, RMSNorm, quantisation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

import spmd._cpu as _cpu
from spmd.collectives import fusion, library, tune
from spmd.collectives.arguments import NAMES, check, describe, refuse
from spmd.collectives.cpu import DTYPES
from spmd.collectives.fusion import AllReduceFusionOp
from spmd.collectives.strategy import NATIVE, AllReduceStrategy, Call, Decision, Limits, Way, decide
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


@dataclass(slots=True)
class AllReduceParams:
    """What one call asks for.

    strategy: overrules the layer's unless AUTO. fusion_op: what follows the sum; the tensors it needs: residual (of the
    input's shape), norm_weight and norm_pre_residual_weight [n], bias [n] (added to the sum), scale fp32 [1] of the
    quantisation. norm_weight_offset: 1.0 where the norm multiplies by 1 + weight, as Gemma's does.
    enable_allreduce=False leaves the sum unfinished: somebody else completes it, a reduce-scatter for example.
    trigger_completion_at_end: on GPUs, when a dependent launch is released; no effect on the CPU.
    """

    strategy: AllReduceStrategy = AllReduceStrategy.AUTO
    fusion_op: AllReduceFusionOp = AllReduceFusionOp.NONE
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    norm_pre_residual_weight: torch.Tensor | None = None
    eps: float = 1e-6
    enable_allreduce: bool = True
    trigger_completion_at_end: bool = True
    norm_weight_offset: float = 0.0
    _plan: _Plan | None = field(default=None, repr=False, compare=False)

    def has_affine(self) -> int:
        """1 when the norm has a weight. These three choose the kernel's variant: an absent tensor is never read."""
        return int(self.norm_weight is not None)

    def has_bias(self) -> int:
        """1 when a bias is added."""
        return int(self.bias is not None)

    def has_scale(self) -> int:
        """1 when the quantisation has a scale."""
        return int(self.scale is not None)


_NORM_AND_RESIDUAL = (
    AllReduceFusionOp.RESIDUAL_RMS_NORM,
    AllReduceFusionOp.LAST_PROCESS_FOR_UB,
    AllReduceFusionOp.MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM,
)


@dataclass(slots=True)
class _Plan:
    """What stays the same from one fused call of a layer to the next; kept in its parameters."""

    owner: AllReduce
    weight: torch.Tensor | None
    strategy: AllReduceStrategy
    eps: float
    offset: float
    elements: int
    how: int
    finish: Finish
    shortcuts: _cpu.Shortcuts | None

    def fits(self, owner: AllReduce, p: AllReduceParams) -> bool:
        return (
            owner is self.owner
            and owner._shortcuts is self.shortcuts
            and p.norm_weight is self.weight
            and p.fusion_op is self.finish.op
            and p.bias is None
            and p.enable_allreduce
            and p.strategy is self.strategy
            and p.eps == self.eps
            and p.norm_weight_offset == self.offset
        )

    def run(
        self,
        shortcuts: _cpu.Shortcuts | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        total: torch.Tensor,
    ) -> int:
        """A plane's status; -1 where the tensors are not as they were."""
        finish = self.finish
        if shortcuts is not None:
            return shortcuts.rows(finish.fixed, self.how, self.elements, x, self.weight, residual, norm, total)
        if residual is None or any(
            t.dtype != x.dtype or t.shape != x.shape or not t.is_contiguous() for t in (x, residual, norm, total)
        ):
            return -1
        rows = x.numel() // finish.n
        same = x.dtype == finish.x_dtype and x.shape[-1] == finish.n and x.is_cpu and residual.is_cpu
        if (
            not same
            or self.weight is None
            or self.weight.data_ptr() != finish.weight
            or self.weight.numel() != finish.n
        ):
            return -1
        _cpu.finish(x.data_ptr(), rows, finish.fixed, residual.data_ptr(), norm.data_ptr(), total.data_ptr(), 0, 0)
        return 0


class Finish:
    """The epilogue of one call: its tensors checked, its outputs made, all as the kernels take them.

    outputs: what to write to instead of new tensors, in the documented order; shape: of the result, x's by default.
    """

    def __init__(
        self,
        params: AllReduceParams,
        x: torch.Tensor,
        group: Group,
        outputs: Sequence[torch.Tensor] | None = None,
        shape: torch.Size | None = None,
    ) -> None:
        op, n = params.fusion_op, x.shape[-1] if x.dim() else 1
        shape = x.shape if shape is None else shape
        rows = shape.numel() // max(n, 1)
        names = fusion.OUTPUTS[op]
        residual = params.residual if op in fusion.NEED_RESIDUAL else None
        if op in fusion.NEED_RESIDUAL and residual is None:
            refuse("all_reduce", group, f"{op.name} needs a residual")
        self._keep: list[torch.Tensor] = []
        at = {
            "residual": self._address(group, "residual", residual, x.dtype, shape),
            "bias": self._address(group, "bias", params.bias, x.dtype, (n,)),
            "weight": self._address(group, "norm_weight", params.norm_weight, x.dtype, (n,)),
            "pre": self._address(group, "norm_pre_residual_weight", params.norm_pre_residual_weight, x.dtype, (n,)),
            "scale": self._address(group, "scale", params.scale, torch.float32, (1,)),
        }
        if op in fusion.NEED_SCALE and params.scale is None:
            refuse("all_reduce", group, f"{op.name} needs a scale: fp32 [1]")
        if "scale" in names and n % fusion.BLOCK:
            refuse("all_reduce", group, f"{op.name} of rows of {n}: they need whole blocks of {fusion.BLOCK}")
        fresh = fusion.empty_outputs(op, x if shape == x.shape else x.new_empty(shape))
        made = dict(zip(names, fresh if outputs is None else outputs, strict=True))
        for name, wanted in zip(names, fresh, strict=True):
            got = made[name]
            if got.dtype != wanted.dtype or got.shape != wanted.shape or not got.is_contiguous():
                refuse("all_reduce", group, f"out for {name} is {describe(got)}, but the result {describe(wanted)}")
        self.result = tuple(made[name] for name in names)
        self.rows, self.op, self.x_dtype, self.n, self.weight = rows, op, x.dtype, n, at["weight"]
        self.fixed = _cpu.Epilogue(
            op,
            DTYPES[x.dtype],
            n,
            at["bias"],
            at["weight"],
            at["pre"],
            at["scale"],
            params.eps,
            params.norm_weight_offset,
        )
        outs = [made[name].data_ptr() if name in made else 0 for name in ("norm", "residual", "quant", "scale")]
        self.addresses = (at["residual"], *outs)

    def _address(
        self, group: Group, name: str, x: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> int:
        if x is None:
            return 0
        if x.dtype != dtype or x.shape != shape or not x.is_cpu:
            refuse("all_reduce", group, f"{name} is {describe(x)}, but needs {NAMES[dtype]}{list(shape)}")
        x = x.contiguous()
        self._keep.append(x)
        return x.data_ptr()

    def local(self, total: torch.Tensor) -> None:
        """Do it to a finished sum of the input's type: no communication."""
        total = total.contiguous()
        _cpu.finish(total.data_ptr(), self.rows, self.fixed, *self.addresses)


class AllReduce:
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
        if (mapping is None) == (group is None):
            raise InputError("AllReduce takes a mapping or a group: give one of them")
        self.mapping, self.strategy, self.dtype, self._overflow = mapping, strategy, dtype, overflow
        self._given = group
        self._group: Group | None = None if group is None else adopt(group)
        self._workspace: Workspace | None = None
        self._two_level: TwoLevel | None = None
        self._limits: Limits | None = None
        self._shortcuts: _cpu.Shortcuts | None = None

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
        self._shortcuts = None

    def forward(
        self,
        x: torch.Tensor,
        all_reduce_params: AllReduceParams | None = None,
        *,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See the class."""
        shortcuts = self._shortcuts
        if all_reduce_params is not None:
            plan = all_reduce_params._plan
            if plan is not None and plan.fits(self, all_reduce_params):
                outputs = (torch.empty_like(x), torch.empty_like(x)) if out is None else tuple(out)
                two = len(outputs) == 2
                status = plan.run(shortcuts, x, all_reduce_params.residual, *outputs) if two else -1
                if status == 0:
                    return outputs
                if status > 0:
                    self._workspace.fail(status)  # type: ignore[union-attr]
        elif shortcuts is not None:
            target: torch.Tensor = torch.empty_like(x) if out is None else out  # type: ignore[assignment]
            status = shortcuts.sum(x, target)
            if status == 0:
                return target
            if status > 0:
                self._workspace.fail(status)  # type: ignore[union-attr]
        return self._slowly(x, all_reduce_params, out)

    __call__ = forward

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
            refuse(
                "all_reduce",
                group,
                f"{decision.chain[-1]}: set {FORCED} to {needed} bytes or more",
            )
        if finish is None:
            made = self._sum(source, out, decision, symmetric)  # type: ignore[arg-type]
            rowless = self.strategy != AllReduceStrategy.TWOSHOT  # whose way depends on how many rows there are
            if x is source and params.strategy == AllReduceStrategy.AUTO and rowless and not group.checked:
                self._remember(x)
            return made
        self.finished(source, finish, decision.way, symmetric)
        if op in _NORM_AND_RESIDUAL and params.bias is None and not group.checked:
            self._plan(x, params, finish)
        return finish.result[0] if one else finish.result

    def _is_symmetric(self, x: torch.Tensor) -> bool:
        self._open()
        return self._workspace is not None and self._workspace.plane.symmetric(x.data_ptr())

    def finished(self, x: torch.Tensor, finish: Finish, way: Way, symmetric: bool) -> None:
        """Sum contiguous x by a given way and finish its rows."""
        if way in NATIVE:
            assert self._workspace is not None
            status = self._workspace.plane.all_reduce_rows(
                x.data_ptr(), finish.rows, _how(way, symmetric, x.dtype), finish.fixed, *finish.addresses
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
            how = _how(decision.way, symmetric, x.dtype)
            if x.numel():
                status = self._workspace.plane.all_reduce(x.data_ptr(), target.data_ptr(), x.numel(), how)
                if status:
                    self._workspace.fail(status)
        else:
            target = x if decision.way == Way.NOTHING else self._elsewhere(x, decision.way)
        return target if out is None or target is out else out.copy_(target)

    def _remember(self, x: torch.Tensor) -> None:
        """How plain sums of this size are made, in ordinary and in symmetric memory, for the next call."""
        ways = [self.decide(x.shape, x.dtype, None, symmetric).way for symmetric in (False, True)]
        if self._workspace is not None and x.numel() and x.dtype in DTYPES and all(way in NATIVE for way in ways):
            how = _how(ways[0], False, x.dtype) & ~0xF0 | _how(ways[1], True, x.dtype) & 0xF0
            self._shortcuts = self._shortcuts or _cpu.Shortcuts(self._workspace.plane, torch.Tensor)
            self._shortcuts.remember(DTYPES[x.dtype], x.numel(), how)

    def _plan(self, x: torch.Tensor, p: AllReduceParams, finish: Finish) -> None:
        """What the next call with these parameters and a tensor like x can take over."""
        if p.norm_weight is None or not p.norm_weight.is_contiguous():
            return
        fixed = (self, p.norm_weight, p.strategy, p.eps, p.norm_weight_offset, x.numel())
        ways = [self.decide(x.shape, x.dtype, p, symmetric).way for symmetric in (False, True)]
        if ways == [Way.NOTHING] * 2:
            p._plan = _Plan(*fixed, 0, finish, None)
        elif self._workspace is not None and all(way in NATIVE for way in ways):
            how = _how(ways[0], False, x.dtype) & ~0xF0 | _how(ways[1], True, x.dtype) & 0xF0
            self._shortcuts = self._shortcuts or _cpu.Shortcuts(self._workspace.plane, torch.Tensor)
            p._plan = _Plan(*fixed, how, finish, self._shortcuts)

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


def _how(way: Way, symmetric: bool, dtype: torch.dtype) -> int:
    """The kernel's number: ordinary way, way in symmetric memory, dtype."""
    number = NATIVE.index(way)
    return number | (number if symmetric else _COPIED) << 4 | DTYPES[dtype] << 8
