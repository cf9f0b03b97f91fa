# SPDX-License-Identifier: Apache-2.0
"""What a rank prints, in a file of its own host: its recent output, and its stacks if it does not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pytest_llenergy import real_time
from pytest_llenergy.ranks import timeouts

#: How much of a rank's output an error shows; enough for the stacks of its threads.
TAIL_LINES, TAIL_BYTES = 120, 16384

#: On this signal faulthandler writes a rank's stacks, also while one thread holds the interpreter's lock.
STACKS_SIGNAL = signal.SIGUSR2

#: What faulthandler writes above the frames of each thread, and how many bytes of a log are searched for it:
#: a rank may be busy printing.
STACKS_TITLE, STACKS_SEARCH_BYTES = b"(most recent call first):", 1 << 20


class LogFile:
    """The log of a rank on this host; a ``RankLog``. A log that is ``kept`` is not truncated."""

    def __init__(self, path: Path, *, kept: bool) -> None:
        self.path: Path = path
        self._kept = kept
        #: Where the output of the current request begins (bytes).
        self._start = 0

    def mark(self) -> None:
        """See ``RankLog``."""
        self._start = self.size()
        if self._start and not self._kept:
            # Otherwise the output of all tests that share these ranks would accumulate.
            with suppress(FileNotFoundError):
                os.truncate(self.path, 0)
            self._start = 0

    def tail(self) -> list[str]:
        """See ``RankLog``."""
        last = self.read(max(self._start, self.size() - TAIL_BYTES))
        return last.decode(errors="replace").splitlines()[-TAIL_LINES:]

    def size(self) -> int:
        """Return the size in bytes; 0 if the file is gone together with the supervisor."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, start: int) -> bytes:
        """Return the log after ``start`` bytes, or its beginning; empty if the file is gone."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(STACKS_SEARCH_BYTES)
        except OSError:
            return b""


def write_stacks(ranks: Mapping[int, tuple[int, LogFile]], ask: Callable[[], None]) -> dict[int, str]:
    """Let ranks write the stacks of their threads into their logs; wait until all have and the logs rest.

    ``ranks`` are their pids and logs by number, and ``ask`` sends ``STACKS_SIGNAL`` to them. Returns the
    reason for each rank that has written none.
    """
    starts = {rank: log.size() for rank, (_, log) in ranks.items()}
    ask()
    sizes: list[int] = []
    missing = set(ranks)
    for _ in range(int(timeouts.STACKS_TIMEOUT_S / timeouts.STACKS_POLL_S)):
        before, sizes = sizes, [log.size() for _, log in ranks.values()]
        missing = {each for each in missing if STACKS_TITLE not in ranks[each][1].read(starts[each])}
        # A stopped process answers no signal.
        if sizes == before and all(_state(ranks[each][0])[0] in "Tt" for each in missing):
            break
        real_time.sleep(timeouts.STACKS_POLL_S)
    return {each: f"no stacks: the process is in state {_state(ranks[each][0])}" for each in missing}


def _state(pid: int) -> str:
    """Return the state of a process as the kernel words it: ``T (stopped)``, ``D (disk sleep)``."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("State:"):
                return line.partition("\t")[2]
    return "? (ended)"
