"""Starting jobs from tests: mpirun in a clean environment, its processes gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / ".models"
SMOLLM = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAUNCHER = ("PMI", "OMPI_", "PMIX_", "PRTE_", "HYDRA", "MPIR_", "MPI_LOCAL")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher put there, with what running as root needs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    clean |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    clean |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    return clean | extra


def mpirun(ranks: int, *command: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python command...` on some ranks and wait for the end."""
    launcher = [str(Path(sys.executable).parent / "mpirun"), "-np", str(ranks), sys.executable]
    return subprocess.run(
        [*launcher, *command], cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=timeout
    )


def python(*command: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python command...` alone, without a launcher."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=timeout
    )
