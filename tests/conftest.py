"""Test runs that end: under mpirun a phase that failed on one rank failed on all; a rank that never comes ends the job.

Rank 0 alone writes to the terminal and shows what the others ran into. MPI tests (tests/mpi) are deselected without
--with-mpi, and by `@pytest.mark.ranks(2, 4)` at other world sizes; the rest of the suite runs in one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("SPMD_CHECK", "1")
os.environ.setdefault("SPMD_TIMEOUT", "60")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# not the user's tuned table
os.environ.setdefault("SPMD_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "cache"))

MPI_TESTS = Path(__file__).parent / "mpi"


def _comm():
    """A private communicator for the outcomes, or None in a single process."""
    from spmd.control import mpi

    global _outcomes
    if _outcomes is None:
        _outcomes = mpi.world().Dup()
    return _outcomes if _outcomes.size > 1 else None


_outcomes = None


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if config.getoption("--with-mpi") and _comm() is not None and _comm().rank > 0:
        config.pluginmanager.unregister(config.pluginmanager.getplugin("terminalreporter"))


def pytest_report_header(config):
    if not config.getoption("--with-mpi"):
        return None
    from mpi4py import MPI

    version = MPI.Get_library_version().replace("\0", "").strip().splitlines()[0]
    return f"mpi: {version}, {MPI.COMM_WORLD.size} ranks, mpi4py from {Path(sys.modules['mpi4py'].__file__).parent}"


def pytest_collection_modifyitems(config, items):
    with_mpi = config.getoption("--with-mpi")
    size = 1
    if with_mpi:
        from mpi4py import MPI

        size = MPI.COMM_WORLD.size

    def wanted(item):
        mpi_test = MPI_TESTS in item.path.parents
        marker = item.get_closest_marker("ranks")
        if not mpi_test:
            return size == 1
        return with_mpi and (marker is None or not marker.args or size in marker.args)

    keep = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if not item.config.getoption("--with-mpi") or _comm() is None:
        return report
    from spmd.control import mpi, objects
    from spmd.errors import DeadlineError

    comm = _comm()
    mine = report.longreprtext if report.failed else None
    try:
        texts = objects.allgather(comm, mine, timeout=60)
    except DeadlineError:
        sys.stderr.write(f"rank {comm.rank}: {item.nodeid} {report.when}: another rank did not come\n{mine or ''}\n")
        mpi.abort(1)
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if failed:
        report.outcome = "failed"
        shown = "\n".join(f"--- rank {rank}\n{texts[rank]}" for rank in failed[:2])
        report.longrepr = f"failed on ranks {failed} of {comm.size}\n{shown}"
    return report
