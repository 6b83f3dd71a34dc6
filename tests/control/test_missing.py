"""Does a job of three end soon, with one line and one exit code, when one of its ranks does something else?"""

import time
from textwrap import dedent

import pytest

from tests.launch import mpirun

PROGRAM = """
import signal, sys
import torch
from spmd import Distributed, Mapping
from spmd.collectives import library
from spmd.control import job
from spmd.errors import InputError

def main():
    rank = job.start().rank
    dist = Distributed.get(Mapping(3, rank, tp_size=3))
    group = dist.group("tp")
    if {warm}:
        library.all_reduce(torch.ones(4), group)
    if rank == {odd}:
        {does}
    {others}

job.run(main)
"""
MEET = "library.all_reduce(torch.ones(4), group)"


def outcome(odd, does, others=MEET, warm=True, limit=40.0, **env):
    """Exit code, our lines on stderr, and all of stderr, of a job that ended within the limit.

    The limit counts the start of three processes, which takes seconds on a busy machine, with what it bounds.
    """
    begin = time.monotonic()
    program = dedent(PROGRAM).format(odd=odd, does=does, others=others, warm=warm)
    done = mpirun(3, "-c", program, timeout=60, SPMD_CHECK="1", **{"SPMD_TIMEOUT": "30"} | env)
    took = time.monotonic() - begin
    assert took < limit, f"took {took:.1f} s\n{done.stderr}"
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("spmd: ")], done.stderr


HANG, LEAVE = "signal.pause()", "return"


@pytest.mark.parametrize(
    "odd,does,warm", [(0, HANG, True), (2, HANG, True), (1, HANG, False), (0, LEAVE, True), (2, LEAVE, False)]
)
def test_a_missing_rank_is_named_in_one_line(odd, does, warm):
    code, lines, stderr = outcome(odd, does, warm=warm, SPMD_TIMEOUT="3")
    assert code == 3
    assert len(lines) == 1, stderr
    assert f"rank {odd} has not arrived" in lines[0]
    assert "all_reduce" in lines[0] or not warm
    assert "on tp" in lines[0]
    assert "Traceback" not in stderr


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("others", [MEET, "pass", "signal.pause()"], ids=["wait", "done", "hang"])
def test_an_exception_of_one_rank_ends_the_job(odd, others):
    code, lines, stderr = outcome(odd, "raise ZeroDivisionError('seven')", others, limit=20)
    assert code == 1
    assert lines == [f"spmd: rank {odd}: unexpected error"]
    assert stderr.count("ZeroDivisionError: seven") == 1


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("others", [MEET, "pass"], ids=["wait", "done"])
def test_an_error_of_one_rank_is_one_line_that_names_it(odd, others):
    code, lines, stderr = outcome(odd, "raise InputError('no such file')", others, limit=20)
    assert code == 2
    assert len(lines) == 1, stderr
    assert lines[0].startswith(f"spmd: rank {odd}")
    assert lines[0].endswith("no such file")
    assert "Traceback" not in stderr


def test_an_error_of_all_ranks_is_one_line_without_a_rank():
    code, lines, stderr = outcome(0, "pass", "raise InputError('no such file')", limit=20)
    assert (code, lines) == (2, ["spmd: no such file"]), stderr


@pytest.mark.parametrize("odd", [0, 1])
def test_sys_exit_of_one_rank_ends_the_job(odd):
    code, _, stderr = outcome(odd, "sys.exit(5)", limit=20)
    assert code == 5, stderr


def test_sys_exit_of_all_ranks_is_the_exit_code():
    code, lines, stderr = outcome(0, "pass", "sys.exit(5)", limit=20)
    assert (code, lines) == (5, []), stderr


def test_a_rank_that_differs_is_one_line():
    code, lines, stderr = outcome(1, "library.all_reduce(torch.ones(7), group)", limit=20)
    assert code == 3
    assert len(lines) == 1, stderr
    assert lines[0].endswith(
        "all_reduce #1 on tp: rank 1 called all_reduce sum fp32[7], the others all_reduce sum fp32[4]"
    )
