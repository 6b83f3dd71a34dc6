"""How a command ends: one message, one exit code, on every rank, whatever one of them ran into."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from spmd import errors
from spmd.control import mpi, objects
from spmd.control.agree import GRACE, Agreement, default_timeout
from spmd.errors import DeadlineError, InputError, OutOfStepError, SpmdError

if TYPE_CHECKING:
    from mpi4py import MPI

_MEET = 3.0  # seconds a failed rank gives the others to come before it ends the job
_END_TAG = 1000  # of the meeting at the end; communicator creation uses smaller ones


def debug_level() -> int:
    """SPMD_DEBUG: 1 shows tracebacks of errors that are one line otherwise; 0 (default) does not."""
    text = os.environ.get("SPMD_DEBUG", "0")
    return int(text) if text.isdigit() else 0


@contextmanager
def together(comm: MPI.Comm | None, timeout: float | None = None) -> Iterator[None]:
    """Collective: either all ranks leave the block or all raise the same SpmdError, which names the odd ranks out."""
    error: SpmdError | None = None
    try:
        yield
    except SpmdError as raised:
        error = raised
    if comm is not None and comm.size > 1:
        error = _merge(objects.allgather(comm, _describe(error), timeout=timeout), error)
    if error is not None:
        raise error


def _describe(error: SpmdError | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _merge(outcomes: list[tuple[str, str] | None], own: SpmdError | None) -> SpmdError | None:
    """The one error all ranks raise: the first rank's, with the ranks it struck unless it struck all alike."""
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return None
    first, (kind, text) = next(iter(failed.items()))
    if len(failed) < len(outcomes) or len(set(failed.values())) > 1:
        same = [rank for rank, outcome in failed.items() if outcome == (kind, text)]
        who = f"rank {first}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
        text = f"{who} of {len(outcomes)}: {text}"
    merged = getattr(errors, kind, SpmdError)(text)
    merged.__cause__ = own
    return merged


def run(main: Callable[[], None]) -> NoReturn:
    """Run a command's main on every rank and leave the process with one exit code.

    At the end all ranks meet: nobody leaves while another may still fail. An SpmdError is printed once, by rank 0, and
    its exit code is everybody's. A failed rank gives the others a few seconds to come, then ends the job, as any other
    exception does at once. Ctrl-C ends it with 130.
    """
    error: SpmdError | None = None
    code, patience = 0, None
    try:
        main()
    except OutOfStepError as raised:
        _end_out_of_step(raised)
    except SpmdError as raised:
        error, code, patience = raised, raised.exit_code, _MEET
        if debug_level():
            traceback.print_exception(raised)
    except SystemExit as raised:
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
        patience = _MEET if code else None
        if isinstance(raised.code, str):
            _print(raised.code)
    except KeyboardInterrupt:
        _end(130)
    except BaseException:
        sys.stderr.write(f"spmd: {_who()}unexpected error\n{traceback.format_exc()}")
        _end(1)
    comm = _comm()
    if comm is not None:
        try:
            error, code = _meet(comm, error, code, patience)
        except DeadlineError as late:
            _print(f"{_who()}{error or late}")
            _end(code or late.exit_code)
    if error is not None and (launched_rank() if comm is None else comm.rank) == 0:
        _print(str(error))
    sys.exit(code)


def _meet(comm: MPI.Comm, error: SpmdError | None, code: int, patience: float | None) -> tuple[SpmdError | None, int]:
    """The end of all ranks: what they all report, and their one exit code."""
    if patience is None:  # ranks that wait elsewhere know more, and speak first
        patience = default_timeout() + 2 * GRACE
    Agreement(comm, "world", range(comm.size), tag=_END_TAG).check("end_of_program", patience)
    outcomes = objects.allgather(comm, (_describe(error), code), timeout=_MEET)
    return _merge([outcome for outcome, _ in outcomes], error), max(code for _, code in outcomes)


def _end_out_of_step(error: OutOfStepError) -> NoReturn:
    """Ranks of one group know that they differ, others may wait elsewhere for ever: no meeting, the job ends."""
    if debug_level():
        traceback.print_exception(error)
    time.sleep(min(error.order, 5))  # the first rank that can speak says it, the others only if it could not
    _print(f"{_who()}{error}")
    _end(error.exit_code)


def _print(text: str) -> None:
    sys.stderr.write(f"spmd: {text}\n")
    sys.stderr.flush()


def _comm() -> MPI.Comm | None:
    """The job's private communicator, if MPI was started and there is more than one rank."""
    if not mpi.world.cache_info().currsize:
        return None
    comm = mpi.world()
    return comm if comm.size > 1 else None


def _rank() -> int:
    comm = _comm()
    return comm.rank if comm is not None else 0


def _who() -> str:
    """The beginning of a line that one rank says for itself."""
    return f"rank {_rank()}: " if _comm() is not None else ""


def _end(code: int) -> NoReturn:
    if _comm() is None:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # launchers drop what they have not read when the job is aborted
    mpi.abort(code)


class Options(argparse.ArgumentParser):
    """Command-line options: an error is an InputError like any other, and help is printed by one rank."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if launched_rank() == 0:
            super()._print_message(message, file)


def launched_rank() -> int:
    """This process's rank as its launcher says, before MPI starts; 0 without a launcher."""
    for variable, _, _ in mpi.LAUNCHERS:
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return 0


def start() -> MPI.Comm | None:
    """Start MPI if a launcher started this process; None otherwise: a command runs alone without MPI.

    Errors: InputError when the launcher and the MPI library do not belong together.
    """
    comm = mpi.world() if any(name in os.environ for name, _, _ in mpi.LAUNCHERS) else None
    default_timeout()  # a bad SPMD_TIMEOUT is found before something waits
    return comm


def parse(parser: Options, comm: MPI.Comm | None) -> argparse.Namespace:
    """The options of this rank; a wrong one on any rank is an InputError on all."""
    with together(comm):
        return parser.parse_args()
