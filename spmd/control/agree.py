"""How ranks find out that they disagree, or that one of them is missing, instead of hanging.

Under SPMD_CHECK=1 every collective first sends one short text, its signature ("all_reduce bf16[16,576]"), to the first
rank of the group, which compares them and answers. A difference or a missing rank becomes one line on every rank that
can still speak. Without it waits of the control plane and of the pipeline still have a deadline, but cannot say who is
late; tensors move by MPI's own blocking calls, which wait for ever.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from spmd._cpu import monotonic_ns, relax
from spmd.errors import DeadlineError, DesyncError, InputError

if TYPE_CHECKING:
    from mpi4py import MPI

_WIDTH = 512  # bytes of a signature or a verdict on the wire; longer texts are cut and end in a hash of the whole
AGREE_TAG = 32000  # and the next: signatures; messages of users stay below (MPI grants tags up to 32767)
_abandoned: list[object] = []  # what MPI may still write to: requests of waits that were given up, and their memory
GRACE = 5.0  # seconds that the others give the first rank to send its verdict after their own deadline


def checking() -> bool:
    """Whether collectives agree on their signature first: SPMD_CHECK=1."""
    return os.environ.get("SPMD_CHECK", "0") == "1"


def default_timeout() -> float:
    """Seconds a rank waits for the others: SPMD_TIMEOUT, default 300."""
    text = os.environ.get("SPMD_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InputError(f"SPMD_TIMEOUT must be a number of seconds above 0, but is {text!r}")
    return seconds


def wait(
    requests: Sequence[MPI.Request],
    timeout: float | None = None,
    late: Callable[[], str] | None = None,
    memory: object = None,
) -> None:
    """Wait for MPI requests and give the core away meanwhile. DeadlineError after `timeout` s (None: SPMD_TIMEOUT).

    late says, when time is up, who or what is missing. memory: what the requests read and write, if they do not hold it
    themselves; it outlives a wait that was given up.
    """
    from mpi4py import MPI

    if MPI.Request.Testall(requests):
        return
    limit = default_timeout() if timeout is None else timeout
    deadline = monotonic_ns() + int(min(limit, 1e9) * 1e9)
    for turn in count():
        if MPI.Request.Testall(requests):
            return
        if turn > 256 and monotonic_ns() > deadline:
            _abandoned.append((requests, memory))
            what = late() if late else "a rank has not arrived (SPMD_CHECK=1 names it)"
            raise DeadlineError(f"{what}: gave up after {limit:g} s (SPMD_TIMEOUT)")
        relax(turn)


def _pack(text: str) -> np.ndarray:
    data = text.encode()
    if len(data) > _WIDTH:  # long texts that differ at their end still differ
        data = data[: _WIDTH - 17] + b"#" + hashlib.sha256(data).hexdigest()[:16].encode()
    return np.frombuffer(data.ljust(_WIDTH, b"\0"), dtype=np.uint8).copy()


def _unpack(data: np.ndarray) -> str:
    return data.tobytes().rstrip(b"\0").decode(errors="replace")


class Agreement:
    """The signature check of one group.

    comm: where the messages go; peers: the members' ranks in it (default: all of it); ranks: the members' global
    numbers, for the error messages; tag: the first of two message tags that nobody else uses on `comm`.
    """

    def __init__(
        self, comm: MPI.Comm, name: str, ranks: Sequence[int], peers: Sequence[int] | None = None, tag: int = 0
    ) -> None:
        self._comm, self._name, self._ranks, self._tag = comm, name, ranks, tag
        self._peers = range(comm.size) if peers is None else peers
        self._calls = 0

    def check(self, text: str, timeout: float | None = None) -> None:
        """Collective. DesyncError on every rank if one brings another text; DeadlineError if one does not come.

        timeout: seconds (None: SPMD_TIMEOUT); the other ranks give the first one a little longer to send its verdict.
        """
        call, self._calls = self._calls, self._calls + 1
        op = text.split(" ", 1)[0]
        here = f"{op} #{call} on {self._name}"
        comm, first, tag = self._comm, self._peers[0], self._tag
        if comm.rank == first:
            verdict, arrived = self._judge(text, here, timeout)
            answer = _pack(verdict)
            verdict = _unpack(answer)
            wait([comm.Isend(answer, self._peers[index], tag + 1) for index in arrived if index], GRACE)
        else:
            mine, answer = _pack(text), np.empty(_WIDTH, np.uint8)
            requests = [comm.Isend(mine, first, tag), comm.Irecv(answer, first, tag + 1)]
            limit = default_timeout() + GRACE if timeout is None else timeout + 1
            try:
                wait(requests, limit, lambda: f"{here}: rank {self._ranks[0]} has not arrived")
            except DeadlineError as late:
                late.order = self._peers.index(comm.rank)
                raise
            verdict = _unpack(answer)
        if verdict:
            error = (DeadlineError if verdict.startswith("late ") else DesyncError)(verdict.split(" ", 1)[1])
            error.order = self._peers.index(comm.rank)
            raise error

    def _judge(self, text: str, here: str, timeout: float | None) -> tuple[str, list[int]]:
        """On the first rank: collect the texts and compare. Returns the verdict ("" is agreement) and who arrived."""
        size = len(self._peers)
        inbox = [np.empty(_WIDTH, np.uint8) for _ in range(size)]
        requests = [self._comm.Irecv(inbox[i], self._peers[i], self._tag) for i in range(1, size)]
        try:
            wait(requests, timeout)
        except DeadlineError as error:
            arrived = [0] + [index for index, request in enumerate(requests, 1) if request.Test()]
            missing = [self._ranks[index] for index in range(size) if index not in arrived]
            return f"late {here}: {say_have(missing)} not arrived{str(error)[str(error).rindex(':') :]}", arrived
        texts = [_unpack(_pack(text))] + [_unpack(inbox[index]) for index in range(1, size)]
        if len(set(texts)) == 1:
            return "", list(range(size))
        return f"desync {difference(texts, self._ranks, here)}", list(range(size))


def say_have(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def difference(texts: list[str], ranks: Sequence[int], here: str) -> str:
    """Who differs from the majority: 'all_reduce #41 on tp: rank 3 called X, the others Y'."""
    usual = Counter(texts).most_common(1)[0][0]
    here = here.replace(here.split(" ", 1)[0], usual.split(" ", 1)[0], 1)
    odd: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text != usual:
            odd.setdefault(text, []).append(rank)
    called = "; ".join(
        f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))} called {text}" for text, who in odd.items()
    )
    return f"{here}: {called}, the others {usual}"
