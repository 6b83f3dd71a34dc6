"""Starting jobs from tests: mpirun in a clean environment, its processes gone afterwards."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
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


def started(*parts: tuple[int, list[str]], **env: str) -> tuple[subprocess.Popen[str], str]:
    """Start a job of (ranks, python command) parts in a session of its own; also the mark its processes carry."""
    mark = f"SPMD_TEST_JOB={uuid.uuid4().hex}"
    command = [str(Path(sys.executable).parent / "mpirun")]
    for index, (ranks, arguments) in enumerate(parts):
        command += [":"] * bool(index) + ["-np", str(ranks), sys.executable, *map(str, arguments)]
    name, value = mark.split("=")
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(**env, **{name: value}), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    return process, mark


def alive(mark: str, *also: str) -> list[int]:
    """The processes whose environment has this mark (and these entries): what a job has running, or left behind."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            entries = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile
            continue
        if all(entry.encode() in entries for entry in (mark, *also)):
            found.append(int(process.name))
    return found


def shared_memory() -> set[str]:
    """The files in /dev/shm but for those of the MPI libraries."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("mpich_", "sm_segment", "vader_"))}


def finish(process: subprocess.Popen[str], mark: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a job and of all its processes; what does not end in time is killed, and is a failure."""
    deadline, late = time.monotonic() + timeout, False
    try:
        out, err = process.communicate(timeout=timeout)
        left = [pid for pid in alive(mark) if not gone(pid, deadline - time.monotonic())]
    except subprocess.TimeoutExpired:
        late, left = True, alive(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if late:
        out, err = process.communicate()
    assert not left and not late, f"after {timeout:g} s the job had the processes {left}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def gone(pid: int, timeout: float) -> bool:
    """Wait for the end of a process that is not a child: the launcher may end before it has buried its ranks."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], max(timeout, 0))[0])
    finally:
        os.close(descriptor)
