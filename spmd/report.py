"""What a run shows and writes: text as it comes, one table at the end, JSON, a Perfetto timeline."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd._cpu import monotonic_ns as now
from spmd.control.distributed import Distributed
from spmd.control.record import perfetto, recorder
from spmd.errors import InputError
from spmd.topology.mapping import Mapping

if TYPE_CHECKING:
    from spmd.models.config import ModelConfig
    from spmd.models.generate import Generation
    from spmd.models.tokenizer import Tokenizer

WIDTH = 118


def seconds_since(begin_ns: int) -> float:
    return (now() - begin_ns) * 1e-9


def _terminal() -> bool:
    """Whether a person watches: Open MPI gives its ranks a terminal even when its own output is a file."""
    return sys.stderr.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


class Progress:
    """Rank 0: one prompt streams its text; several get a bar (on a terminal), and their texts at the end."""

    def __init__(self, tokenizer: Tokenizer | None, prompts: int, max_tokens: int) -> None:
        self._tokenizer, self._single = tokenizer, prompts == 1
        self._stream = tokenizer.stream() if tokenizer is not None and self._single else None
        self._bar = None
        if not self._single and _terminal():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("generating", total=prompts * max_tokens)
            self._bar.start()

    def token(self, prompt: int, token: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)
        elif self._single:
            sys.stdout.write(self._stream.step(token) if self._stream is not None else f"{token} ")
            sys.stdout.flush()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def texts(self, tokens: list[list[int]]) -> None:
        """What several prompts gave, in their order."""
        if self._single:
            sys.stdout.write("\n")
            return
        for index, ids in enumerate(tokens):
            text = self._tokenizer.decode(ids) if self._tokenizer is not None else " ".join(map(str, ids))
            sys.stdout.write(f"[{index}] {text}\n")


def gather(
    dist: Distributed,
    made: Generation,
    prompts: list[list[int]],
    communication: list[dict[str, Any]],
    load_s: float,
    tune_s: float,
    peak: int,
) -> dict[str, Any]:
    """Collective. Timing of rank 0; communication per operation and group, and memory, of the rank with the most.

    communication: this rank's totals during the forward; peak: this process's largest resident memory in bytes, mapped
    file pages included.
    """
    ranks = dist.allgather((communication, peak, load_s))
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for rows, _, _ in ranks:
        for row in rows:
            key = row["op"], row["group"]
            worst[key] = {k: max(v, worst[key][k]) for k, v in row.items()} if key in worst else row
    ttft, decode = made.ttft_ns * 1e-9, made.decode_ns * 1e-9
    later = sum(len(tokens) - 1 for tokens in made.tokens)
    return {
        "timing": {
            "load_s": max(load for _, _, load in ranks),
            "tune_s": tune_s,
            "ttft_ms": ttft * 1e3,
            "prefill_tokens_per_s": sum(map(len, prompts)) / ttft,
            "decode_tokens_per_s": later / decode if later else 0.0,
        },
        "forward_s": ttft + decode,
        "communication": sorted(worst.values(), key=lambda row: -row["seconds"]),
        "peak_memory": max(peak for _, peak, _ in ranks),
    }


def layout(mapping: Mapping) -> dict[str, Any]:
    """The layout's sizes, as JSON and the table show them."""
    sizes = {"world": mapping.world_size, "tp": mapping.tp_size, "pp": mapping.pp_size, "cp": mapping.cp_size}
    return sizes | {"pp_partition": mapping.to_dict()["pp_partition"]}


def document(facts: dict[str, Any], mapping: Mapping, args: argparse.Namespace) -> dict[str, Any]:
    """What --json holds. peak_memory: bytes of the largest rank; text is null without a tokenizer."""
    keys = ("text", "tokens", "timing", "communication", "peak_memory", "verify")
    return {"model": args.model, "dtype": args.dtype, "layout": layout(mapping)} | {key: facts[key] for key in keys}


def write(path: str, value: dict[str, Any]) -> None:
    """InputError when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(value) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def timeline(dist: Distributed) -> dict[str, Any] | None:
    """Collective: the events of all ranks as one document, on rank 0."""
    events = dist.gather(recorder.events)
    return None if events is None else perfetto(events)


def _render(*tables: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=False, no_color=True)
    for table in tables:
        console.print(table)
    return out.getvalue()


def table(facts: dict[str, Any], mapping: Mapping, args: argparse.Namespace) -> str:
    """The one table at the end of a run."""
    from rich.table import Table

    out = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    timing = facts["timing"]
    sizes = " ".join(f"{name} {size}" for name, size in layout(mapping).items() if size is not None)
    out.add_row("layout", f"{sizes}, {args.dtype}")
    out.add_row("load", f"{timing['load_s']:.2f} s")
    if timing["tune_s"]:
        out.add_row("warm-up", f"{timing['tune_s']:.2f} s to tune the all-reduce")
    out.add_row("time to first token", f"{timing['ttft_ms']:.1f} ms ({timing['prefill_tokens_per_s']:.0f} tokens/s)")
    out.add_row("decode", f"{timing['decode_tokens_per_s']:.1f} tokens/s")
    out.add_row("peak memory", f"{facts['peak_memory'] / 2**20:.0f} MiB on the largest rank")
    for row in facts["communication"]:
        share = 100 * row["seconds"] / facts["forward_s"]
        volume = f"{row['calls']} calls, {row['bytes'] / 1e6:.2f} MB"
        out.add_row(f"{row['op']} on {row['group']}", f"{share:.1f} % of the time, {volume}")
    if facts["verify"]:
        out.add_row("verify", facts["verify"])
    return "\n" + _render(out)


def info(config: ModelConfig, mapping: Mapping, path: str | None) -> str:
    """--info: the model, the layout and every rank's part of it."""
    from rich.table import Table

    a = config.attention
    head = f"{path or 'random weights'}: {config.family}, {config.num_layers} layers, hidden {config.hidden}, "
    head += f"{a.num_heads} heads over {a.num_kv_heads} key/value heads of {a.head_dim}, ffn {config.intermediate}, "
    head += f"vocabulary {config.vocab_size}, context {config.max_positions}, rope {config.rope.kind}"
    out = Table(box=None)
    for column in ("rank", "pp", "tp", "cp", "layers", "heads", "kv heads"):
        out.add_column(column, justify="right")
    for rank in range(mapping.world_size):
        here = mapping.with_rank(rank)
        parts = (
            here.pp_layers(config.num_layers),
            here.q_heads(a.num_heads),
            here.kv_heads(a.num_heads, a.num_kv_heads),
        )
        spans = [f"{part.start}-{part.stop - 1}" if part else "none" for part in parts]
        out.add_row(*map(str, (rank, here.pp_rank, here.tp_rank, here.cp_rank)), *spans)
    return _render(head, out)
