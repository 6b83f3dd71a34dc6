"""Is a rank that dies or stands still inside a collective through shared memory named soon by all who wait for it?

By default launchers end the survivors of a dead rank at once. Where that must not be, a shell stands between launcher
and rank: it outlives the rank and holds its connection, so that the survivors have to find out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import launch

SECONDS = 5
PROGRAM = Path(__file__).with_name("collectives_for_ever.py")
MPIRUN = Path(sys.executable).parent / "mpirun"
OUTLIVES = ("sh", "-c", '"$@"; kill -STOP $$', "sh")


@dataclass
class Calling:
    """A job whose ranks are all inside collectives."""

    ranks: int
    process: subprocess.Popen[str]
    mark: str
    reports: Path
    before: set[str]  # in /dev/shm
    theirs: set[Path]  # there, of the MPI library, which does not clean up after the killed

    def stop(self, number: int, rank: int) -> float:
        """Send a rank a signal; returns when."""
        entries = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
        pids = [pid for name in entries for pid in launch.alive(self.mark, f"{name}={rank}") if _is_rank(pid)]
        assert len(pids) == 1
        maps = Path(f"/proc/{pids[0]}/maps").read_text()
        self.theirs.update(map(Path, re.findall(r"(/dev/shm/\w.*(?<! \(deleted\)))$", maps, re.MULTILINE)))
        begin = time.monotonic()
        os.kill(pids[0], number)
        return begin

    def survivors(self, begin: float, victim: int) -> dict[int, tuple[float, str]]:
        """What each survivor said, and how long after `begin`, at the latest after SECONDS."""
        expected = [rank for rank in range(self.ranks) if rank != victim]
        while len(said := self._told(begin)) < len(expected) and time.monotonic() < begin + SECONDS:
            time.sleep(0.02)
        for pid in launch.alive(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.end()
        assert sorted(said) == expected
        return said

    def _told(self, begin: float) -> dict[int, tuple[float, str]]:
        said = {}
        for file in self.reports.glob("told-*[0-9]"):
            at, _, text = file.read_text().partition(" ")
            said[int(file.name.removeprefix("told-"))] = (float(at) - begin, text)
        return said

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait until nothing of it is left, in memory neither."""
        ended = launch.finish(self.process, self.mark, 30)
        assert launch.shared_memory() <= self.before
        return ended


def _is_rank(pid: int) -> bool:
    """Not the shell around it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == str(PROGRAM).encode()


@pytest.fixture
def calling(tmp_path):
    """Starts such a job: arguments of the program, what stands between launcher and ranks, variables."""
    marks, theirs = [], set()

    def start(ranks: int, kind: str, operation: str, around: tuple[str, ...] = OUTLIVES, **env: str) -> Calling:
        before, mark = launch.shared_memory(), uuid.uuid4().hex
        marks.append(f"SPMD_TEST_JOB={mark}")
        program = [sys.executable, str(PROGRAM), str(tmp_path), kind, operation]
        env = {"SPMD_TEST_JOB": mark, "SPMD_CHECK": "0", "SPMD_TIMEOUT": "60", "MPIEXEC_TIMEOUT": "90"} | env
        process = subprocess.Popen(
            [str(MPIRUN), "-np", str(ranks), *around, *program], cwd=launch.ROOT, env=launch.environment(**env),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        while len(list(tmp_path.glob("calling-*"))) < ranks:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        return Calling(ranks, process, marks[-1], tmp_path, before, theirs)

    yield start
    for mark in marks:
        for pid in launch.alive(mark):
            os.kill(pid, signal.SIGKILL)
    for file in theirs:
        file.unlink(missing_ok=True)


# small sums wait for words that are their own flags, most others for a pass, the last two for a second flag as well
@pytest.mark.parametrize("operation", ["small_sum", "gather", "exchange", "two_shot", "symmetric"])
def test_who_died_is_told_by_the_one_who_waits_for_it(calling, operation):
    job = calling(2, "one", operation)
    begin = job.stop(signal.SIGKILL, 1)
    ((after, text),) = job.survivors(begin, 1).values()
    assert re.fullmatch(r"LostRankError: \w+ #\d+ on tp: the process of rank 1 has ended: .*", text)
    assert 0 < after < SECONDS


@pytest.mark.parametrize("victim", [0, 3])
def test_all_survivors_of_a_group_are_told_who_died(calling, victim):
    job = calling(4, "one", "gather")
    begin = job.stop(signal.SIGKILL, victim)
    said = job.survivors(begin, victim)
    for after, text in said.values():
        assert re.fullmatch(rf"LostRankError: \w+ #\d+ on tp: .*rank {victim}\b.* has ended.*", text), said
        assert 0 < after < SECONDS


def test_a_job_says_it_in_one_line_and_ends(calling):
    job = calling(3, "job", "gather")
    begin = job.stop(signal.SIGKILL, 1)
    ended = job.end()
    assert time.monotonic() - begin < SECONDS
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("spmd: ")]
    assert len(lines) == 1, ended.stderr
    assert re.search(r"all_gather #\d+ on tp: .*rank 1\b.* has ended", lines[0])


def test_a_launcher_that_ends_the_survivors_leaves_nothing_either(calling):
    job = calling(3, "one", "gather", around=())
    begin = job.stop(signal.SIGKILL, 1)
    ended = job.end()
    assert time.monotonic() - begin < SECONDS
    assert ended.returncode != 0


def test_a_rank_that_stands_still_is_named_when_time_is_up(calling):
    """Its process lives, so only the deadline can tell."""
    job = calling(3, "one", "gather", SPMD_TIMEOUT="1")
    begin = job.stop(signal.SIGSTOP, 2)
    said = job.survivors(begin, 2)
    for after, text in said.values():
        assert re.fullmatch(r"\w+Error: all_gather #\d+ on tp: .*rank 2\b.* has not arrived.*", text), said
        assert 0.9 < after < SECONDS
    assert any("DeadlineError" in text and "gave up after 1 s (SPMD_TIMEOUT)" in text for _, text in said.values())
