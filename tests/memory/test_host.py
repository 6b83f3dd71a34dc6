"""Is a lack of room an error and never a signal, and is nothing left of a job's memory, however the job ends?"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest

from spmd.errors import InputError
from spmd.memory import host
from tests import launch

PROGRAM = """
import os, resource, signal, sys
from types import SimpleNamespace
import torch
from spmd import Distributed, Mapping
from spmd.control import job
from spmd.memory import host
from spmd.memory.symmetric import allocate, symmetric_empty

def main():
    rank, size = job.start().rank, job.start().size
    group = Distributed.get(Mapping(size, rank, tp_size=size)).group("tp")
    {before}
    x = symmetric_empty(({nbytes},), torch.uint8, group)
    x.fill_(rank + 1)
    group.barrier()
    {after}
    if rank == 0:
        print("bytes", x.numel())

job.run(main)
"""
NAMED = "os.O_TMPFILE = 0  # as where a file must have a name: the open of a directory fails"
DIE = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()"


def program(before="pass", after="pass", nbytes=100_000):
    return dedent(PROGRAM).format(before=before, after=after, nbytes=nbytes)


def ours(stderr):
    return [line for line in stderr.splitlines() if line.startswith("spmd: ")]


def names(directory="/dev/shm"):
    return {name for name in os.listdir(directory) if name.startswith("spmd-")}


# ---------------------------------------------------------------------- how a job ends

FAIL = "raise RuntimeError('a fault made for this test')"
ENDS = {
    "returns": ("pass", "pass"),
    "returns, its files named": (NAMED, "pass"),
    "fails": ("pass", f"if rank == 1: {FAIL}\n    signal.pause()"),
    "is killed": ("pass", DIE),
    "is killed, its files named": (NAMED, DIE),
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_when_a_job(how):
    before = names()
    process, mark = launch.started((3, ["-c", program(*ENDS[how])]))
    ended = launch.finish(process, mark, 60)
    assert names() <= before
    assert (ended.returncode == 0) == how.startswith("returns")
    assert ("bytes 100000\n" in ended.stdout) == how.startswith("returns")
    assert ("RuntimeError: a fault made for this test" in ended.stderr) == (how == "fails")


@pytest.mark.parametrize("step", ["_create", "_open"])
def test_nothing_is_left_when_a_rank_dies_while_it_allocates(step):
    before = names()
    dies = f"if rank == 1: host.{step} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)"
    process, mark = launch.started((3, ["-c", program(dies)]))
    ended = launch.finish(process, mark, 60)
    assert names() <= before
    assert ended.returncode != 0
    assert "bytes" not in ended.stdout


# ---------------------------------------------------------------------- room

MOUNT = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tiny "$0" && exec "$@"']
LYING = "os.statvfs = lambda path: SimpleNamespace(f_bavail=2**20, f_frsize=4096, f_blocks=2**20)"


def test_a_limit_of_the_process_is_an_error(tmp_path):
    """The same call that finds a full filesystem finds RLIMIT_FSIZE; here on one rank of three, found by all."""
    limit = "if rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))"
    ended = launch.mpirun(3, "-c", program(limit), SPMD_SHM_DIR=str(tmp_path))
    assert ended.returncode == 2
    (line,) = ours(ended.stderr)
    assert line.startswith(f"spmd: symmetric memory on tp: rank 1 cannot take 102400 bytes in {tmp_path} (")
    assert " were free): File too large: make it larger" in line
    assert os.listdir(tmp_path) == []


def can_mount():
    return (
        bool(shutil.which("unshare")) and not subprocess.run([*MOUNT, "/tmp", "true"], capture_output=True).returncode
    )


def in_a_megabyte(folder, before, nbytes, ranks=2):
    """Run the program where SPMD_SHM_DIR is a filesystem of 1 MiB of its own."""
    command = [str(Path(sys.executable).parent / "mpirun"), "-np", str(ranks), sys.executable]
    return subprocess.run(
        [*MOUNT, str(folder), *command, "-c", program(before, nbytes=nbytes)], cwd=launch.ROOT, capture_output=True,
        text=True, timeout=120, env=launch.environment(SPMD_SHM_DIR=str(folder), MPIEXEC_TIMEOUT="60"),
    )  # fmt: skip


NEEDED = (
    "spmd: symmetric memory on tp: 2 ranks need 1204224 bytes in {} and 75264 to spare, 1048576 are free: "
    "make it larger (docker run --shm-size), set SPMD_SHM_DIR to another, or ask for less (a smaller workspace)"
)
FILLED = {
    "fits": ("pass", 400_000, None),
    "does not fit": ("pass", 600_000, NEEDED),
    "is full all the same": (LYING, 600_000, " cannot take 602112 bytes in {} (4294967296 were free): No space left"),
}


if can_mount():  # as root, or in a user's own namespace; the limit of the process is tested everywhere

    @pytest.mark.parametrize("what", FILLED)
    def test_a_filesystem_of_one_megabyte(what, tmp_path):
        before, nbytes, text = FILLED[what]
        ended = in_a_megabyte(tmp_path, before, nbytes)
        lines = ours(ended.stderr)
        if text is None:
            assert (ended.returncode, ended.stdout, lines) == (0, f"bytes {nbytes}\n", [])
        else:
            assert ended.returncode == 2, ended.stderr
            assert len(lines) == 1
            assert text.format(tmp_path) in lines[0]


# ---------------------------------------------------------------------- what the others say


class Scripted:
    """Rank 0 of four in pipeline stage 1: the others' rows are given."""

    name, ranks, rank, size = "tp", range(4, 8), 0, 4

    def __init__(self, *columns):
        self.columns = list(columns)

    def allgather_int64(self, values):
        """The first column alone differs between ranks: mine, then the others'."""
        table = np.tile(np.array(values, np.int64), (self.size, 1))
        for index, column in self.columns.pop(0).items():
            table[1:, index] = column
        return table


REFUSED = [
    ([{0: [64, 64, 32]}], "rank 7 asked for 32 bytes, the others for 64: all must ask for the same"),
    ([{0: [8, 16, 8]}], "rank 4 asked for 64 bytes, rank 6 asked for 16 bytes, the others for 8: all must"),
    ([{}, {0: [0, 7, 7]}], "not on the host of rank 4: ranks 5, 6, 7: use the node group"),
    ([{1: [0, 0, 0]}, {}], "SPMD_SHM_DIR of ranks 5, 6, 7 is not rank 4's: give all the same"),
    ([{2: [9, -13, -13]}, {}], "ranks 6, 7 cannot use /dev/shm: Permission denied: set SPMD_SHM_DIR to another"),
    ([{2: [2**40, 17_407, 2**40]}, {}], "4 ranks need 16384 bytes in /dev/shm and 1024 to spare, 17407 are free: "),
]


@pytest.mark.parametrize("columns,text", REFUSED)
def test_errors_name_global_ranks_and_numbers(columns, text):
    with pytest.raises(InputError) as caught:
        host._check(Scripted(*columns), 64, "/dev/shm")
    assert str(caught.value).startswith(f"symmetric memory on tp: {text}")
    assert "\n" not in str(caught.value)


def test_the_least_free_rank_counts():
    assert host._check(Scripted({2: [2**40, 17_408, 2**40]}, {}), 64, "/dev/shm") == 17_408


def test_a_tmpfs_without_a_limit_has_room(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0))
    assert host._free("/dev/shm") == 2**62


def test_one_host_is_asked_for_once_per_group():
    group = Scripted({0: [1, 1, 2]})
    assert host.hosts(group) == [0, 1, 1, 2]
    assert host.hosts(group) == [0, 1, 1, 2]
    assert not host.same_host(group)
