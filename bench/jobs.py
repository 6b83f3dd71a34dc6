"""How the benchmarks start their measured processes, each on a core of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# of the all-reduce benchmark: the number of a dtype in kernels/cpu, the width and epsilon of the fused norm
DTYPES = ("float32", "bfloat16")
HIDDEN, EPS = 4096, 1e-5
STORES_DONE = "lamport, stores done"  # a probe: mailboxes cost two transfers a line, of which a call alone shows one
ALONE = "epilogue alone"  # of a fused call: no rank to wait for


def pin(local_rank: int) -> None:
    """Bind this process to one of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def measure(ranks: int, script: str, *args: str, python: str = sys.executable) -> dict[str, Any]:
    """Run `python script args...` on some ranks (1: without a launcher) and return the JSON object of its last line.

    `python` may belong to another environment, whose launcher is then used. Ranks pin themselves, see `pin`."""
    folder = Path(python).absolute().parent
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MPIEXEC_TIMEOUT": "290",
        "PATH": f"{folder}:{os.environ['PATH']}",  # Intel MPI's launcher looks for its parts here
        "I_MPI_ROOT": str(folder.parent),
        "I_MPI_PIN": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",  # prints errors on machines without its network
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    # -m mpi4py: an exception on one rank ends the job
    launcher = [str(folder / "mpirun"), "-np", str(ranks), python, "-m", "mpi4py"] if ranks > 1 else [python]
    done = subprocess.run([*launcher, script, *args], env=environment, stdout=subprocess.PIPE, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{python} {' '.join(args)} on {ranks} ranks ended with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def preamble(title: str, **facts: object) -> None:
    """The `#` lines above a table: what is measured, on what."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    print(f"# {title}")
    print(f"# cpu {model.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores")
    for name, value in facts.items():
        print(f"# {name} {value}")
