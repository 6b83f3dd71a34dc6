"""Does a job end within ten seconds, not zero, and leave nothing, when it is interrupted or fails on one rank?"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests import launch

SECONDS = 10
LONG = ["--max-tokens", "2000", "--prompt", "hello"]  # seconds of generation with the tiny decoder

BROKEN = """
import os, sys
from spmd import run
from spmd.control import job, mpi
from spmd.errors import InputError
from spmd.models.decoder import Decoder

forward, calls = Decoder.forward, []

def broken(self, *arguments):
    calls.append(1)
    if job.launched_rank() == {rank} and len(calls) == 5:
        {fault}
    return forward(self, *arguments)

Decoder.forward = Decoder.__call__ = broken
job.run(run.main)
"""


def generating(*options: str):
    """A job of two ranks whose text has begun to come."""
    process, mark = launch.started((2, ["-m", "spmd.run", *LONG, *options]))
    assert process.stdout.read(1), process.communicate()[1]
    return process, mark


def rank_of(mark: str, rank: int) -> int:
    """The process id of a rank."""
    entries = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
    (pid,) = {pid for name in entries for pid in launch.alive(mark, f"{name}={rank}")}
    return pid


def ends(process, mark, begin, seconds=SECONDS):
    """What a job ended with that must not take long."""
    before = launch.shared_memory()
    ended = launch.finish(process, mark, seconds)
    assert time.monotonic() - begin < seconds
    assert ended.returncode != 0
    assert launch.shared_memory() <= before
    return ended


@pytest.mark.parametrize(
    ("number", "layout"),
    [(signal.SIGINT, ("--tp", "2")), (signal.SIGINT, ("--pp", "2")), (signal.SIGTERM, ("--tp", "2"))],
)
def test_a_signal_to_the_launcher(number, layout):
    process, mark = generating(*layout)
    begin = time.monotonic()
    os.kill(process.pid, number)
    ended = ends(process, mark, begin)
    assert "Traceback" not in ended.stderr


def test_ctrl_c_in_a_terminal_reaches_every_process_of_the_group():
    process, mark = generating()
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    ended = ends(process, mark, begin)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("rank", "layout"), [(0, ("--tp", "2")), (1, ("--pp", "2"))])
def test_a_killed_rank(rank, layout):
    process, mark = generating(*layout)
    victim, begin = rank_of(mark, rank), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    ends(process, mark, begin)


@pytest.mark.parametrize(("rank", "layout"), [(0, ("--tp", "2")), (1, ("--pp", "2"))])
def test_an_unexpected_exception_of_one_rank(rank, layout):
    begin = time.monotonic()
    program = BROKEN.format(rank=rank, fault="raise RuntimeError('a fault made for this test')")
    process, mark = launch.started((2, ["-c", program, *LONG, *layout]))
    ended = ends(process, mark, begin)
    assert f"spmd: rank {rank}: unexpected error\nTraceback (most recent call last):\n" in ended.stderr
    assert "RuntimeError: a fault made for this test" in ended.stderr
    assert len(re.findall(r"^Traceback", ended.stderr, re.MULTILINE)) == 1


def test_an_input_error_of_one_rank_while_the_other_waits_for_it():
    begin = time.monotonic()
    program = BROKEN.format(rank=1, fault="raise InputError('this rank alone cannot go on')")
    process, mark = launch.started((2, ["-c", program, *LONG]))
    ended = ends(process, mark, begin, 15)  # it gives the others five seconds to come
    ours = [line for line in ended.stderr.splitlines() if line.startswith("spmd: ") and "no --model" not in line]
    assert ours == ["spmd: rank 1: this rank alone cannot go on"]
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 2


def test_a_rank_that_dies_without_a_word():
    begin = time.monotonic()
    process, mark = launch.started((2, ["-c", BROKEN.format(rank=1, fault="os._exit(3)"), *LONG]))
    ends(process, mark, begin)


def test_a_rank_that_leaves_as_if_it_were_done():
    """The others may be waiting for it: the job ends when SPMD_TIMEOUT is over."""
    begin = time.monotonic()
    process, mark = launch.started((2, ["-c", BROKEN.format(rank=1, fault="sys.exit(0)"), *LONG]), SPMD_TIMEOUT="1")
    ends(process, mark, begin, 25)
