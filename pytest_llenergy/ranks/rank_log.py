# SPDX-License-Identifier: Apache-2.0
"""What a rank prints: its recent output, and the stacks of its threads if it does not answer.

All of this happens on the rank's own host: in a file there, and in its ``/proc``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.ranks import timeouts
from pytest_llenergy.ranks.proctree import PROC

#: How much of a rank's output an error shows; enough for the stacks of its threads.
TAIL_LINES = 120
TAIL_BYTES = 16384

#: On this signal faulthandler writes a rank's stacks, also while one thread holds the interpreter's lock.
STACKS_SIGNAL = signal.SIGUSR2

#: What faulthandler writes above the frames of each thread, and how many bytes of a log are searched for it:
#: a rank may be busy printing.
STACKS_TITLE, STACKS_SEARCH_BYTES = b"(most recent call first):", 1 << 20

#: States in which a process does not answer signals (proc_pid_stat(5)).
PROCESS_STATES = {
    "T": "is stopped, by SIGSTOP or the like",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel",
    "Z": "has ended",
}


class LogFile:
    """The log of a rank on this host; a ``RankLog``.

    Args:
        path: The file that the rank prints to.
        kept: Whether the file outlives the ranks: then it is not truncated.
    """

    def __init__(self, path: Path, *, kept: bool) -> None:
        self.path: Path = path
        self._kept = kept
        #: Where the output of the current request begins (bytes).
        self._start = 0

    def mark(self) -> None:
        """See ``RankLog``."""
        # If the supervisor is gone, so is the log; the request will report it.
        with suppress(FileNotFoundError):
            self._start = self.size()
            if self._start and not self._kept:
                # Otherwise the output of all tests that share these ranks would accumulate.
                os.truncate(self.path, 0)
                self._start = 0

    def tail(self) -> list[str]:
        """See ``RankLog``."""
        return read_tail(self.path, self._start)

    def size(self) -> int:
        """Return the size in bytes; 0 if the file is gone together with the supervisor."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def has_stacks(self, start: int) -> bool:
        """Return whether the log contains stacks of threads after ``start`` bytes."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return STACKS_TITLE in file.read(STACKS_SEARCH_BYTES)
        except OSError:
            return False


def read_tail(log: Path, start: int) -> list[str]:
    """Return the last lines of a log after ``start`` bytes; empty if the log is gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


@dataclass(frozen=True)
class LoggedRank:
    """The number of a rank of this host, its pid and its log."""

    rank: int
    pid: int
    log: LogFile


def write_stacks(ranks: Sequence[LoggedRank], ask: Callable[[], None]) -> dict[int, str]:
    """Let ranks write the stacks of their threads into their logs; wait until all have and the logs rest.

    Args:
        ranks: All running ranks of a group on this host.
        ask: Sends ``STACKS_SIGNAL`` to them.

    Returns:
        For each rank that has written none, by its number, the reason.
    """
    starts = {each: each.log.size() for each in ranks}
    ask()
    deadline = time.monotonic() + timeouts.STACKS_TIMEOUT_S
    sizes: list[int] = []
    missing = list(ranks)
    while time.monotonic() < deadline:
        before, sizes = sizes, [each.log.size() for each in ranks]
        missing = [each for each in missing if not each.log.has_stacks(starts[each])]
        # A process mostly waits in the kernel (D) for a moment only.
        if sizes == before and all(_read_state(each.pid) in ("T", "t", "Z") for each in missing):
            break
        time.sleep(timeouts.STACKS_POLL_S)
    return {each.rank: _explain_missing_stacks(each.pid) for each in missing}


def _explain_missing_stacks(pid: int) -> str:
    state = _read_state(pid)
    if state in PROCESS_STATES:
        return f"no stacks: the process {PROCESS_STATES[state]}; state {state}"
    return f"it was asked for its stacks but wrote none; state {state}"


def _read_state(pid: int) -> str:
    """Return the state of a process as a letter; a question mark where it is unknown."""
    with suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return "?"
