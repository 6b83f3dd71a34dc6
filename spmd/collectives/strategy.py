"""How an all-reduce is done, and why: the names, the chain of decisions, every reason on the way.

The decision is a pure function of what all ranks know alike; nothing that only one rank measures enters it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from spmd.collectives.fusion import AllReduceFusionOp


class AllReduceStrategy(IntEnum):
    """What a user may ask for. On the CPU: NCCL is the library (MPI); MIN_LATENCY, ONESHOT and TWOSHOT go through
    shared memory; UB, NCCL_SYMMETRIC and SYMM_MEM read tensors where they lie in symmetric memory; LOWPRECISION sends
    FP8 blocks; MNNVL is for GPUs."""

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6
    MNNVL = 7
    NCCL_SYMMETRIC = 8
    SYMM_MEM = 9


class Way(StrEnum):
    """What is done in the end."""

    NOTHING = "nothing"
    LIBRARY = "library"
    TWO_LEVEL = "two-level"
    LAMPORT = "lamport"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    LOW_PRECISION = "low-precision"


SUMMED = ("fp32", "bf16", "fp16")  # what the kernels sum
NATIVE = (Way.LAMPORT, Way.ONE_SHOT, Way.TWO_SHOT, Way.LOW_PRECISION)  # in the order of the kernel's numbers
_ZERO_COPY = (AllReduceStrategy.UB, AllReduceStrategy.NCCL_SYMMETRIC, AllReduceStrategy.SYMM_MEM)
_EXPLICIT = {
    AllReduceStrategy.ONESHOT: Way.ONE_SHOT,
    AllReduceStrategy.TWOSHOT: Way.TWO_SHOT,
    AllReduceStrategy.LOWPRECISION: Way.LOW_PRECISION,
}


@dataclass(frozen=True)
class Call:
    """What is known of a call, the same on all ranks. row_bytes: of one row; bias: one is added."""

    ranks: int
    rows: int
    row_bytes: int
    dtype: str
    fusion: AllReduceFusionOp = AllReduceFusionOp.NONE
    symmetric: bool = False
    bias: bool = False

    @property
    def whole_rows(self) -> bool:
        """Whether a row must be in one place: something is done to it besides the sum."""
        return self.bias or self.fusion != AllReduceFusionOp.NONE

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def bucket(self) -> int:
        """Sizes up to a power of two share an entry of the tuned table."""
        return (self.nbytes - 1).bit_length() if self.nbytes > 1 else 0


@dataclass(frozen=True)
class Limits:
    """What a group can do. away: why it has no shared memory; "": it has."""

    mailbox_bytes: int = 0
    slot_bytes: int = 0
    away: str = ""
    two_level: bool = False
    overflow: str = "library"  # or "error": what happens to a row that does not fit
    table: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Decision:
    """The way, and the chain of reasons that led there; `downgrades` are those that overrule what was asked for."""

    way: Way
    chain: tuple[str, ...]
    downgrades: tuple[str, ...] = ()
    too_small: int = 0  # bytes a slot would need


def deterministic() -> bool:
    """FORCE_ALL_REDUCE_DETERMINISTIC=1 or FORCE_DETERMINISTIC=1: only ways that add in rank order."""
    return any(os.environ.get(name) == "1" for name in ("FORCE_ALL_REDUCE_DETERMINISTIC", "FORCE_DETERMINISTIC"))


def table_key(call: Call) -> str:
    """The entry of a tuned table: group size, dtype, size bucket, fusion, where the tensor lies."""
    place = "symmetric" if call.symmetric else "ordinary"
    return f"{call.ranks} {call.dtype} 2^{call.bucket} {call.fusion.name} {place}"


def candidates(call: Call, limits: Limits) -> list[Way]:
    """What tuning compares: ways with the same bits."""
    ways = [Way.ONE_SHOT]
    if call.nbytes <= limits.mailbox_bytes:
        ways.insert(0, Way.LAMPORT)
    if call.ranks > 1 and call.rows >= call.ranks:
        ways.append(Way.TWO_SHOT)
    return ways


def heuristic(call: Call, limits: Limits) -> tuple[Way, str]:
    """Without a table. Figures of bench/allreduce.py stand behind the limits."""
    if call.symmetric and call.fusion == AllReduceFusionOp.NONE:
        return Way.TWO_SHOT, "in symmetric memory: every rank sums its part in place"
    if not call.symmetric and call.nbytes <= min(LAMPORT_BYTES, limits.mailbox_bytes):
        return Way.LAMPORT, f"at most {LAMPORT_BYTES} bytes: words that are their own flags"
    if call.ranks > 2 and call.rows >= call.ranks and call.nbytes > TWO_SHOT_BYTES:
        return Way.TWO_SHOT, f"more than {TWO_SHOT_BYTES} bytes on more than two ranks: each sums its part"
    return Way.ONE_SHOT, "every rank reads all others"


LAMPORT_BYTES = 16 << 10
TWO_SHOT_BYTES = 32 << 10


def decide(strategy: AllReduceStrategy, call: Call, limits: Limits) -> Decision:
    """The chain of decisions, in its documented order."""
    chain: list[str] = []
    downgrades: list[str] = []

    def down(reason: str) -> None:
        chain.append(reason)
        downgrades.append(reason)

    def done(way: Way, reason: str) -> Decision:
        return Decision(way, (*chain, f"{way}: {reason}"), tuple(downgrades))

    chain.append(f"{strategy.name}: {call.rows} x {call.row_bytes} bytes of {call.dtype} on {call.ranks} ranks")
    if call.ranks == 1:
        return done(Way.NOTHING, "a group of one")
    if strategy == AllReduceStrategy.MNNVL:
        down("MNNVL needs GPUs: AUTO")
        strategy = AllReduceStrategy.AUTO
    if strategy == AllReduceStrategy.SYMM_MEM and call.fusion != AllReduceFusionOp.NONE:
        down(f"SYMM_MEM makes plain sums, not {call.fusion.name}: AUTO")
        strategy = AllReduceStrategy.AUTO
    if strategy in _ZERO_COPY:
        if not call.symmetric:
            down(f"{strategy.name}: the tensor is not in symmetric memory: it is copied in once")
        strategy = AllReduceStrategy.AUTO
    if deterministic() and strategy in (AllReduceStrategy.NCCL, AllReduceStrategy.LOWPRECISION):
        down(f"{strategy.name} does not add in rank order, which FORCE_ALL_REDUCE_DETERMINISTIC=1 asks for: AUTO")
        strategy = AllReduceStrategy.AUTO
    if strategy == AllReduceStrategy.NCCL:
        return done(Way.LIBRARY, "asked for")
    if call.dtype not in SUMMED:
        down(f"{call.dtype} is summed by the library")
        return done(Way.LIBRARY, "fp32, bf16 and fp16 are native")
    in_order = "FORCE_ALL_REDUCE_DETERMINISTIC=1 cannot be kept: MPI adds in an order of its own"
    if limits.away:
        way = Way.TWO_LEVEL if limits.two_level else Way.LIBRARY
        if strategy != AllReduceStrategy.AUTO or way == Way.LIBRARY:
            down(f"{strategy.name}: {limits.away}: {way}")
        if deterministic():
            down(in_order)
        return done(way, limits.away)
    if call.whole_rows and call.row_bytes > limits.slot_bytes:
        reason = f"a row of {call.row_bytes} bytes does not fit the workspace's {limits.slot_bytes}"
        if deterministic():
            down(in_order)
        down(f"{reason}: {limits.overflow}")
        return Decision(Way.LIBRARY, tuple(chain), tuple(downgrades), call.row_bytes)
    if strategy == AllReduceStrategy.TWOSHOT and call.rows < call.ranks:
        down(f"TWOSHOT with {call.rows} rows on {call.ranks} ranks: ONESHOT")
        strategy = AllReduceStrategy.ONESHOT
    if strategy in _EXPLICIT:
        return done(_EXPLICIT[strategy], "asked for")
    if strategy == AllReduceStrategy.MIN_LATENCY:
        if call.nbytes <= limits.mailbox_bytes:
            return done(Way.LAMPORT, "MIN_LATENCY, and it fits a mailbox")
        return done(Way.ONE_SHOT, f"MIN_LATENCY, but more than a mailbox of {limits.mailbox_bytes} bytes")
    tuned = limits.table.get(table_key(call))
    if tuned is not None and Way(tuned) in candidates(call, limits):
        return done(Way(tuned), f"tuned: {table_key(call)}")
    way, reason = heuristic(call, limits)
    return done(way, reason)
