"""The few exception types: every message is one line that names the numbers, the rank and the cure.

Each type carries the exit code that all ranks of a failed job agree on: the code depends on nothing but the type, and
the errors of a group are raised on all of its ranks (see `spmd.control.agree`).
"""


class SpmdError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class InputError(SpmdError, ValueError):
    """Something the user can change: a layout, an option, a file."""

    exit_code = 2


class SerializationError(SpmdError, TypeError):
    """An object handed to a collective cannot be pickled; raised on every rank of the group."""


class OutOfStepError(SpmdError):
    """Ranks of one group are not where the others are. `order`: place of the raising rank in the group."""

    exit_code = 3
    order = 0


class DesyncError(OutOfStepError, RuntimeError):
    """Ranks of one group called different collectives, or the same one with different arguments."""


class DeadlineError(OutOfStepError, TimeoutError):
    """A rank did not arrive within SPMD_TIMEOUT seconds."""


class LostRankError(OutOfStepError, ConnectionError):
    """The process of a rank has ended while others wait for it."""


class VerifyError(SpmdError):
    """The multi-rank forward disagrees with the one-rank forward."""

    exit_code = 4
