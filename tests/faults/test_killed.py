"""Is a rank that dies or stands still inside a collective through shared memory named soon by all who wait for it?

By default launchers end the survivors at once; here they are told not to, so that the survivors have to find out.
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
from functools import cache
from pathlib import Path

import pytest

from tests import launch

SECONDS = 5
PROGRAM = Path(__file__).with_name("collectives_for_ever.py")
MPIRUN = Path(sys.executable).parent / "mpirun"


@cache
def leave_survivors() -> str:
    """The option of this launcher by which the end of a rank does not end the others."""
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=60).stdout
    return "-disable-auto-cleanup" if "HYDRA" in version else "--enable-recovery"


@dataclass
class Calling:
    """A job whose ranks are all inside collectives."""

    ranks: int
    process: subprocess.Popen[str]
    mark: str
    reports: Path
    before: set[str]  # in /dev/shm

    def stop(self, number: int, *ranks: int) -> float:
        """Send ranks a signal; returns when."""
        entries = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
        pids = [pid for rank in ranks for name in entries for pid in launch.alive(self.mark, f"{name}={rank}")]
        assert len(pids) == len(ranks)
        begin = time.monotonic()
        for pid in pids:
            os.kill(pid, number)
        return begin

    def survivors(self, begin: float, *victims: int) -> dict[int, tuple[float, str]]:
        """What each survivor said, and how long after `begin`; they have told within SECONDS and are gone then."""
        expected = [rank for rank in range(self.ranks) if rank not in victims]
        while len(said := self._told(begin)) < len(expected) and time.monotonic() < begin + SECONDS:
            time.sleep(0.02)
        for pid in launch.alive(self.mark, f"SPMD_TEST_RANKS={self.ranks}"):
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


@pytest.fixture
def calling(tmp_path):
    """Starts such a job: program arguments, options of the launcher, variables."""
    marks = []

    def start(ranks: int, *arguments: str, options: tuple[str, ...] = (), **env: str) -> Calling:
        before, mark = launch.shared_memory(), uuid.uuid4().hex
        marks.append(f"SPMD_TEST_JOB={mark}")
        program = [sys.executable, str(PROGRAM), str(tmp_path), *arguments]
        env |= {"SPMD_TEST_JOB": mark, "SPMD_TEST_RANKS": str(ranks), "SPMD_CHECK": "0", "MPIEXEC_TIMEOUT": "90"}
        process = subprocess.Popen(
            [str(MPIRUN), *options, "-np", str(ranks), *program], cwd=launch.ROOT, env=launch.environment(**env),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        while len(list(tmp_path.glob("calling-*"))) < ranks:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        return Calling(ranks, process, marks[-1], tmp_path, before)

    yield start
    for mark in marks:
        for pid in launch.alive(mark):
            os.kill(pid, signal.SIGKILL)


# small sums wait for words that are their own flags, most others for a pass, the last two for a second flag as well
@pytest.mark.parametrize("operation", ["small_sum", "gather", "exchange", "two_shot", "symmetric"])
def test_who_died_is_told_by_the_one_who_waits_for_it(calling, operation):
    job = calling(2, "one", operation, options=(leave_survivors(),), SPMD_TIMEOUT="60")
    begin = job.stop(signal.SIGKILL, 1)
    ((after, text),) = job.survivors(begin, 1).values()
    assert re.fullmatch(r"LostRankError: \w+ #\d+ on tp: the process of rank 1 has ended: .*", text)
    assert 0 < after < SECONDS


@pytest.mark.parametrize("victim", [0, 3])
def test_all_survivors_of_a_group_are_told_who_died(calling, victim):
    job = calling(4, "one", "gather", options=(leave_survivors(),), SPMD_TIMEOUT="60")
    begin = job.stop(signal.SIGKILL, victim)
    said = job.survivors(begin, victim)
    for after, text in said.values():
        assert re.fullmatch(rf"LostRankError: \w+ #\d+ on tp: .*rank {victim}\b.* has ended.*", text), said
        assert 0 < after < SECONDS


def test_a_job_says_it_in_one_line_and_ends(calling):
    job = calling(3, "job", "gather", options=(leave_survivors(),), SPMD_TIMEOUT="60")
    begin = job.stop(signal.SIGKILL, 1)
    ended = job.end()
    assert time.monotonic() - begin < SECONDS
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("spmd: ")]
    assert len(lines) == 1, ended.stderr
    assert re.search(r"all_gather #\d+ on tp: .*rank 1\b.* has ended", lines[0])


def test_a_launcher_that_ends_the_survivors_leaves_nothing_either(calling):
    job = calling(3, "one", "gather", SPMD_TIMEOUT="60")
    begin = job.stop(signal.SIGKILL, 1)
    ended = job.end()
    assert time.monotonic() - begin < SECONDS
    assert ended.returncode != 0


def test_a_rank_that_stands_still_is_named_when_time_is_up(calling):
    """Its process lives, so only the deadline can tell."""
    job = calling(3, "one", "gather", options=(leave_survivors(),), SPMD_TIMEOUT="1")
    begin = job.stop(signal.SIGSTOP, 2)
    said = job.survivors(begin, 2)
    for after, text in said.values():
        assert re.fullmatch(r"\w+Error: all_gather #\d+ on tp: .*rank 2\b.* has not arrived.*", text), said
        assert 0.9 < after < SECONDS
    assert any("DeadlineError" in text and "gave up after 1 s (SPMD_TIMEOUT)" in text for _, text in said.values())
