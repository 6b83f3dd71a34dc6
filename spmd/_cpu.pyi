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
    dtype: int,
) -> None: ...
