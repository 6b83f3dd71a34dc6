"""How the benchmarks start their measured processes, each on a core of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def pin(local_rank: int) -> None:
    """Bind this process to one of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def measure(ranks: int, script: str, *args: str) -> dict[str, Any]:
    """Run `python script args...` on some ranks (1: without a launcher) and return the JSON object of its last line."""
    launcher = [str(Path(sys.executable).parent / "mpirun"), "-np", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, sys.executable, script, *args], env=environment, stdout=subprocess.PIPE, text=True, timeout=300
    )
    if done.returncode:
        sys.exit(f"{' '.join(args)} on {ranks} ranks ended with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def preamble(title: str, **facts: object) -> None:
    """The `#` lines above a table: what is measured, on what."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    print(f"# {title}")
    print(f"# cpu {model.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores")
    for name, value in facts.items():
        print(f"# {name} {value}")
