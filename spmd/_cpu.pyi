from collections.abc import Sequence
from typing import Any

import torch

isa: str

def monotonic_ns() -> int: ...
def relax(turn: int) -> None: ...
def rms_norm(
    x: int, residual: int, weight: int, y: int, sum: int, rows: int, n: int, eps: float, dtype: int
) -> None: ...
def swiglu(gate_up: int, y: int, rows: int, n: int, dtype: int) -> None: ...
def rotate_store(
    qkv: int, rotation: int, cache: int, rows: int, heads: int, kv_heads: int, d: int, dtype: int
) -> None: ...
def attend(
    queries: int,
    cache: int,
    out: int,
    heads: int,
    kv_heads: int,
    d: int,
    count: int,
    lead: int,
    share: int,
    stats: int,
    dtype: int,
) -> None: ...
def finish(
    values: int, rows: int, fixed: Epilogue, residual: int, out: int, residual_out: int, quant_out: int, scale_out: int
) -> None: ...

class Epilogue:
    def __init__(
        self,
        op: int,
        dtype: int,
        n: int,
        bias: int,
        weight: int,
        pre_weight: int,
        scale: int,
        eps: float,
        weight_offset: float,
    ) -> None: ...

class RowMap:
    def __init__(self, pieces: Sequence[tuple[int, int, int, list[int]]], rows: int, max_rows: int) -> None: ...

class CallCache:
    def __init__(self, tensor: type[torch.Tensor]) -> None: ...
    def __call__(self, *args: Any, **keywords: Any) -> Any: ...
    def remember(self, plane: Plane, dtype: int, elements: int, how: int) -> None: ...
    def forget(self) -> None: ...
    def sum(self, x: torch.Tensor, out: torch.Tensor) -> int: ...
    def rows(
        self,
        plane: Plane | None,
        fixed: Epilogue,
        how: int,
        elements: int,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        residual_out: torch.Tensor,
    ) -> int: ...

class Plane:
    timeout_s: float
    chunk_bytes: int
    stream_bytes: int
    stream_chunk_bytes: int
    timeline: bool
    mailbox_bytes: int
    slot_bytes: int
    odd: int
    call: int
    totals: list[tuple[int, int, int, int]]
    events: list[tuple[int, int, int, int]]
    def __init__(
        self,
        rank: int,
        regions: Sequence[int],
        processes: Sequence[int],
        mailbox_bytes: int,
        slot_bytes: int,
        crowded: bool,
    ) -> None: ...
    @staticmethod
    def region_bytes(mailbox_bytes: int, slot_bytes: int) -> int: ...
    def barrier(self) -> int: ...
    def all_reduce(self, x: int, out: int, count: int, how: int) -> int: ...
    def all_reduce_rows(
        self,
        x: int,
        rows: int,
        how: int,
        fixed: Epilogue,
        residual: int,
        out: int,
        residual_out: int,
        quant_out: int,
        scale_out: int,
    ) -> int: ...
    def start(self, nbytes: int, dtype: int, x: int) -> int: ...
    def publish(self) -> None: ...
    def complete(self, part: int, x: int, out: int, n: int, dtype: int, first: int, count: int) -> int: ...
    def complete_rows(
        self,
        part: int,
        x: int,
        first: int,
        count: int,
        fixed: Epilogue,
        residual: int,
        out: int,
        residual_out: int,
        quant_out: int,
        scale_out: int,
    ) -> int: ...
    def exchange(
        self, op: int, rows: RowMap, x: int, out: int, n: int, dtype: int, fold: int, signature: int
    ) -> int: ...
    def exchange_rows(
        self,
        op: int,
        rows: RowMap,
        x: int,
        fold: int,
        signature: int,
        fixed: Epilogue,
        residual: int,
        out: int,
        residual_out: int,
        quant_out: int,
        scale_out: int,
    ) -> int: ...
    def dispatch(
        self,
        at: int,
        count: int,
        k: int,
        row_bytes: int,
        rows: int,
        ids: int,
        weights: int,
        bounds: int,
        room: int,
        signature: int,
    ) -> int: ...
    def combine(
        self, at: int, count: int, k: int, ids: int, bounds: int, room: int, n: int, dtype: int, out: int
    ) -> int: ...
    def combine_parts(
        self, at: int, rows: int, heads: int, first: int, last: int, width: int, dtype: int, out: int
    ) -> int: ...
    def arrivals(self, room: int, k: int, row_bytes: int) -> tuple[int, int, int, int, int]: ...
    def add_region(self, id: int, addresses: Sequence[int], nbytes: int, lent: bool) -> None: ...
    def remove_region(self, id: int) -> None: ...
    def symmetric(self, address: int) -> bool: ...
    def close(self) -> None: ...
    def ready(self, id: int) -> int: ...
    def what(self, rank: int, number: int) -> tuple[int, int, int, int]: ...
    def gave_up(self, rank: int) -> tuple[int, int, int]: ...
    def reset(self) -> None: ...
