# SPDX-License-Identifier: Apache-2.0
"""How often the background reader may run: what it takes, the workload has not.

On a slow machine a single reading takes more than a tenth of a millisecond, most of it to wake up. Where
several boards tick in their own time, all of them cannot be read closely at every tick for a hundredth of
a core. Close readings are therefore kept for where they matter: the quiet gaps of a round, and the ticks
after a window has ended. Elsewhere readings are put off until they can be paid for, and then made for all
boards that are due: the time of a tick is known less well there, and says so.

A loop in the same process loses most: each call of a driver hands the interpreter's lock over and back. Ticks
in the middle of its windows are therefore left unseen, since counters go on unread. Those after
an edge are seen, and paid for later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Share of a core that the reader takes at most, on average.
SHARE = 0.01

#: The same while a window is open or a round is at work.
SHARE_AT_WORK = 0.0025

#: What a thread loses that must hand over the interpreter's lock and get it back (ns). An estimate, not a
#: measurement: a loop in a virtual machine lost 0.8 % (give or take 0.5 %) to some 51 wake-ups a second, of
#: two hand-overs each.
HANDOVER_NS = 75_000

#: CPU time that may be saved up and spent at once (ns): the tick of each of eight boards, and of one.
CREDIT_NS = 5_000_000
CREDIT_AT_WORK_NS = 300_000

#: Debt that is paid back there, and not forgotten (ns): of the readings of four ticks of eight boards.
DEBT_BESIDE_NS = 5_000_000

#: How long all meters may be left alone there (ns). A counter that breaks is to be found out.
ALONE_NS = 1_000_000_000

#: Wake-ups in a row that waited for the lock of a busy process. A single one was perhaps only late.
BESIDE_WAKES = 2


class Thrift:
    """Says when the reader may run next. All times are in nanoseconds."""

    def __init__(self, *, always_closely: bool = False) -> None:
        self._lock = threading.Lock()
        self._always_closely = always_closely
        self._close = 0
        self._at_work = 0
        self._beside_wakes = 0
        #: How often work has begun or ended.
        self.edges: int = 0
        self._credit_ns = 0.0
        self._credit_at_work_ns: float = CREDIT_AT_WORK_NS

    @contextmanager
    def closely(self) -> Iterator[None]:
        """Read as closely as the timetable wants, unless something is at work beside it."""
        with self._lock:
            self._close += 1
        try:
            yield
        finally:
            with self._lock:
                self._close -= 1

    def work_begins(self) -> None:
        """Something is measured, until ``work_ends`` was called as often."""
        with self._lock:
            self._at_work += 1
            self.edges += 1

    def work_ends(self) -> None:
        """See ``work_begins``."""
        with self._lock:
            self._at_work -= 1
            self.edges += 1

    def border(self) -> None:
        """Within the work, one thing that is measured ends and another begins."""
        with self._lock:
            self.edges += 1

    @property
    def sparing(self) -> bool:
        """Whether something is at work."""
        return bool(self._at_work) and not self._close and not self._always_closely

    @property
    def _free(self) -> bool:
        return self._always_closely or (bool(self._close) and not self._at_work)

    @property
    def recovered(self) -> bool:
        """Whether enough was saved at work to go by the timetable again."""
        return self._credit_at_work_ns >= CREDIT_AT_WORK_NS / 2

    @property
    def beside(self) -> bool:
        """Whether what is at work is a loop in this process, which hands its lock over for each reading."""
        return self.sparing and self._beside_wakes >= BESIDE_WAKES

    def pay(self, cost_ns: int, elapsed_ns: int, handovers: int = 0, *, busy: bool = False) -> None:
        """Note the CPU time of one wake-up, and the time since the one before.

        ``handovers`` is how often it took the interpreter's lock from the work beside it; ``busy`` tells that
        this work is in the same process.
        """
        self._beside_wakes = self._beside_wakes + 1 if busy and handovers else 0
        if self._free:
            return
        credit_ns = self._credit_ns + SHARE * elapsed_ns - cost_ns
        self._credit_ns = max(-CREDIT_NS, min(credit_ns, CREDIT_NS))
        if not self._at_work:
            self._credit_at_work_ns = CREDIT_AT_WORK_NS
            return
        taken_ns = cost_ns + handovers * HANDOVER_NS
        at_work_ns = self._credit_at_work_ns + SHARE_AT_WORK * elapsed_ns - taken_ns
        most_ns = DEBT_BESIDE_NS if self.beside else CREDIT_AT_WORK_NS
        self._credit_at_work_ns = max(-most_ns, min(at_work_ns, CREDIT_AT_WORK_NS))

    def wait_ns(self, longest_ns: float) -> int:
        """How long the next wake-up must be put off, but never for longer than ``longest_ns``."""
        if self._free:
            return 0
        wait_ns = max(0.0, -self._credit_ns / SHARE)
        if self.sparing:
            wait_ns = max(wait_ns, -self._credit_at_work_ns / SHARE_AT_WORK)
        return round(min(wait_ns, longest_ns))
