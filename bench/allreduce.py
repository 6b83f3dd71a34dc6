"""How fast is the all-reduce? Ours against MPI libraries, gloo, and bare C++ loops of the same algorithms.

Every contender is a job of its own, one core and one thread a rank. A round runs all of them one after the other;
ratios are made within a round and the median round is shown. How one is measured: contenders.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from jobs import ALONE, DTYPES, HIDDEN, STORES_DONE, measure, preamble

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = Path(__file__).with_name("contenders.py")
# bytes: ours over the best MPI, symmetric over the best MPI, either over the probe ("+": us more, "x": times as much)
TARGETS = {
    1 << 10: (0.70, 0.55, "+", 0.9),
    8 << 10: (0.75, 0.45, "+", 1.0),
    64 << 10: (0.90, 0.33, "x", 1.25),
    1 << 20: (1.10, 0.28, "x", 1.15),
    16 << 20: (0.85, 0.25, "x", 1.15),
}
FUSED_TARGETS = {1: 0.5, 8: 0.5, 64: 0.6, 512: 0.7}  # tokens: fused over (best MPI + torch's add + torch's norm)
OVER_BARE = 1.3  # fused over our bare all-reduce
CROWDED = 3.0  # more than two ranks: ours over Open MPI


class Results:
    """rounds[i][contender][bytes] -> us, wrong, lost; judges values and counts the targets that are met."""

    def __init__(self, rounds: list[dict[str, dict[str, dict[str, float]]]]) -> None:
        self.rounds, self.names = rounds, list(rounds[0])
        self.mpis = [name.removesuffix(" in place") for name in self.names if name.endswith(" in place")]
        apart = ("probe symmetric", f"probe {STORES_DONE}")
        self.loops = [name for name in self.names if name.startswith("probe") and name not in apart]
        self.met: list[bool] = []

    def per_round(self, n: int, *names: str) -> list[float]:
        """What these contenders take together."""
        return [sum(row[name][str(n)]["us"] for name in names) for row in self.rounds]

    def us(self, n: int, name: str) -> float:
        return statistics.median(self.per_round(n, name))

    def fastest(self, n: int, names: list[str]) -> str | None:
        """Of the contenders that ran this size, over all rounds."""
        names = [name for name in names if str(n) in self.rounds[0].get(name, {})]
        return min(names, key=lambda name: self.us(n, name), default=None)

    def total(self, n: int, what: str) -> int:
        """Over rounds and contenders; gloo's own thread takes its rank's core, which says nothing about the others."""
        cells = [(name, of[str(n)]) for row in self.rounds for name, of in row.items() if str(n) in of]
        return int(sum(cell[what] for name, cell in cells if what == "wrong" or name != "gloo"))

    def against(self, n: int, name: str, others: list[str | None], limit: float | None, sign: str = "x") -> str:
        """A cell: `name` over the others together ("x") or the difference ("+"), and whether it is within the limit."""
        peers = [other for other in others if other in self.names]
        if name not in self.names or len(peers) < len(others):
            return "-"
        pairs = zip(self.per_round(n, name), self.per_round(n, *peers), strict=True)
        value = statistics.median(a - b if sign == "+" else a / b for a, b in pairs)
        cell = f"{value:+.2f}us" if sign == "+" else f"{value:.2f}"
        if limit is None:
            return cell
        self.met.append(value <= limit)
        return f"{cell} <= {limit:.2f} {'met' if self.met[-1] else 'MISSED'}"


def table(title: str, rows: list[dict[str, str]]) -> None:
    """Right-aligned columns; the keys `name (unit)` make the two lines above them."""
    print(f"#\n# {title}")
    heads = [key.partition(" (") for key in rows[0]]
    lines = [[name for name, _, _ in heads], [f"({unit}" if unit else "" for *_, unit in heads]]
    lines += [list(row.values()) for row in rows]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    for i, line in enumerate(lines):
        text = "".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("#" + text[1:] if i < 2 else text)


def times(results: Results, title: str, names: list[str], loops: list[str], args: argparse.Namespace) -> None:
    """Times of some contenders and of the fastest probe; bus bandwidth, 2 (n-1)/n bytes / time, of the first."""
    names, rows = [name for name in names if name in results.names], []
    for n in args.sizes:
        row = {"size (B)": str(n), "count": str(n // (4 if args.dtype == "float32" else 2))}
        row |= {f"{name.removesuffix(' in place')} (us)": f"{results.us(n, name):.2f}" for name in names}
        loop = results.fastest(n, loops)
        if loop:
            row |= {"probe (us)": f"{results.us(n, loop):.2f}", "its loop": loop.removeprefix("probe ")}
            done = results.fastest(n, [f"probe {STORES_DONE}"])
            if loops != ["probe symmetric"]:
                row["lamport, stores done (us)"] = f"{results.us(n, done):.2f}" if done else "-"
        if names:
            bus = 2 * (args.ranks - 1) / args.ranks * n / results.us(n, names[0])
            row[f"busbw of {names[0].removesuffix(' in place')} (GB/s)"] = f"{bus * 1e-3:.2f}"
        rows.append(row)
    if names or loops:
        table(title, rows)


def verdict(results: Results, args: argparse.Namespace) -> None:
    open_mpi = [name for name in results.mpis if name.startswith("Open MPI")]
    rows = []
    for n in args.sizes:
        mpi = results.fastest(n, results.mpis)
        plain, symmetric, sign, over = TARGETS.get(n, (None, None, "x", None))
        if args.ranks > 2:
            mpi, plain, symmetric = (open_mpi[0], CROWDED, CROWDED) if open_mpi else (mpi, None, None)
        row = {"size (B)": str(n), "MPI": mpi or "-", "ours / MPI": results.against(n, "ours", [mpi], plain)}
        row["symmetric / MPI"] = results.against(n, "symmetric", [mpi], symmetric)
        if args.ranks == 2:
            row["ours over probe"] = results.against(n, "ours", [results.fastest(n, results.loops)], over, sign)
            row["symmetric over probe"] = results.against(n, "symmetric", ["probe symmetric"], over, sign)
        rows.append(
            row | {"#wrong": str(results.total(n, "wrong")), "core lost (times)": str(results.total(n, "lost"))}
        )
    table("against the fastest MPI out of place" if args.ranks == 2 else "more ranks than two: against Open MPI", rows)


def fused_verdict(results: Results, args: argparse.Namespace) -> None:
    rows = []
    for n in args.sizes:
        tokens, mpi = n // (2 * HIDDEN), results.fastest(n, results.mpis)
        row = {"tokens": str(tokens), "MPI": mpi or "-"}
        row |= {f"{name} (us)": f"{results.us(n, name):.2f}" for name in ("add+norm", ALONE) if name in results.names}
        for name, bare in (("fused", "ours"), ("fused symmetric", "symmetric")):
            if name in results.names:
                row[f"{name} (us)"] = f"{results.us(n, name):.2f}"
                row[f"{name} / peer"] = results.against(n, name, [mpi, "add+norm"], FUSED_TARGETS.get(tokens))
                row[f"{name} / {bare}"] = results.against(n, name, [bare], OVER_BARE)
                row[f"{name} / ({bare} + epilogue)"] = results.against(n, name, [bare, ALONE], None)
        rows.append(
            row | {"#wrong": str(results.total(n, "wrong")), "core lost (times)": str(results.total(n, "lost"))}
        )
    table(f"+ residual + RMSNorm of [tokens, {HIDDEN}]; peer: fastest MPI + torch's add and rms_norm", rows)


def intel_mpi() -> str:
    """The Python of an environment with Intel MPI, made if it is not there."""
    home = ROOT / ".venv/impi"
    if not (home / "bin/mpirun").exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        packages = ["-c", ROOT / "constraints.txt", "impi-rt", "mpi4py", "numpy"]
        subprocess.run([home / "bin/pip", "install", "-q", *packages], check=True)
    return str(home / "bin/python")


def sizes(text: str) -> list[int]:
    """1024,8K,16M: bytes, multiples of 64."""
    factors = {"K": 1 << 10, "M": 1 << 20}
    found = [int(part.rstrip("KM")) * factors.get(part[-1:], 1) for part in text.upper().split(",")]
    if any(n <= 0 or n % 64 for n in found):
        raise argparse.ArgumentTypeError(f"{text}: sizes are positive multiples of 64 bytes")
    return found


def built_probe() -> str:
    spec = importlib.util.find_spec("spmd._probe")
    if spec is None or spec.origin is None:
        raise SystemExit("spmd._probe is not built: pip install -e . builds it")
    return spec.origin


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="more than 2: no probe, and the target of crowded cores")
    parser.add_argument("--sizes", type=sizes, help="bytes: 1K,8K,...")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16: MPI gets uint16 and our sum")
    parser.add_argument("--fused", action="store_true", help="all-reduce + residual + RMSNorm in bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=1000, help="of a size in a round, at most")
    parser.add_argument("--mpi-python", action="append", default=[], help="Python of another MPI's environment")
    parser.add_argument("--with-impi", action="store_true", help="add Intel MPI, installed under .venv/impi")
    parser.add_argument("--contenders", default="ours,mpi,gloo,probe", help="some of %(default)s")
    parser.add_argument("--probe", help="file of spmd._probe, if not the installed one")
    parser.add_argument("--json", action="store_true", help="print the rounds as well")
    args = parser.parse_args()
    if args.fused:
        args.dtype = "bfloat16"
    args.sizes = args.sizes or ([tokens * HIDDEN * 2 for tokens in FUSED_TARGETS] if args.fused else list(TARGETS))
    args.probe = args.probe or built_probe()
    return args


def main() -> None:
    args = options()
    pythons = [sys.executable, *args.mpi_python, *([intel_mpi()] if args.with_impi else [])]
    jobs = [("ours", sys.executable), *(("mpi", python) for python in pythons)]
    jobs += [("gloo", sys.executable)] * (not args.fused)
    jobs += [("probe", sys.executable)] * (not args.fused and args.ranks == 2)
    jobs = [job for job in jobs if job[0] in args.contenders.split(",")]
    jobs += [("add_norm", sys.executable)] * args.fused
    cores = sorted(os.sched_getaffinity(0))
    preamble(
        "all-reduce, sum",
        ranks=f"{args.ranks}, on the cores {', '.join(str(cores[r % len(cores)]) for r in range(args.ranks))}",
        dtype=args.dtype,
        rounds=f"{args.rounds}, each of every contender; ratios within a round, of these the median",
        iterations=f"at most {args.iterations}; input rewritten before each, ranks aligned by a spinning barrier",
        time="around the call; the slowest rank's of an iteration, the median iteration (nccl-tests: mean of both)",
        mpi=" ".join(pythons),
        load=f"{os.getloadavg()[0]:.1f} in the minute before",
    )
    shared = {name: getattr(args, name) for name in ("sizes", "dtype", "fused", "iterations", "probe")}
    rounds = []
    for _ in range(args.rounds):
        rounds.append({})
        for part, python in jobs:
            rounds[-1] |= measure(args.ranks, str(CONTENDERS), json.dumps(shared | {"part": part}), python=python)
    results = Results(rounds)
    in_place = [f"{name} in place" for name in results.mpis]
    times(results, "out of place (gloo: in place)", ["ours", *results.mpis, "gloo"], results.loops, args)
    times(results, "in place", ["symmetric", *in_place], ["probe symmetric"] * bool(results.loops), args)
    (fused_verdict if args.fused else verdict)(results, args)
    wrong = sum(results.total(n, "wrong") for n in args.sizes)
    print(f"# targets met: {sum(results.met)} of {len(results.met)}; wrong elements: {wrong}")
    if args.json:
        print(json.dumps(rounds))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
