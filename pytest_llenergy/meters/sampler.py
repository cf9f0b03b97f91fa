# SPDX-License-Identifier: Apache-2.0
"""The background reader: one thread that reads every open meter at its own pace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.base import Meter
from pytest_llenergy.meters.schedule import Reader
from pytest_llenergy.meters.trace import Mark, Series

#: Longest sleep from which the thread cannot be called (seconds).
LONGEST_SLEEP_S = 0.02

#: Periods of a counter by which a tick may be late.
SLOW_TICKS = 1.5

#: How long a reading is waited for before it counts as one that will not come (seconds).
HANGING_S = 5.0


class Sampler:
    """Reads meters from ``__enter__`` to ``__exit__`` and keeps what they said in ``series``.

    The thread sleeps between readings; ``read_now`` reads at once from the calling thread, for edges
    in the process itself.
    """

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._reader = Reader(meters)
        self._followers = self._reader.followers
        self._edges = [each for each in self._followers if each.always_fresh]
        #: When windows began and ended.
        self.marks: list[Mark] = []
        self._lock = threading.Lock()
        self._stopping = False
        # Locked, but for a moment when the thread is called: to wait for an event would cost twice as much.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._hangs = False
        self._owner = os.getpid()
        self._thrift = self._reader.thrift
        self._thread = threading.Thread(target=self._run, name="llenergy-sampler", daemon=True)

    @property
    def series(self) -> list[Series]:
        """One series a domain, in the order of the meters, with all that was read so far."""
        if self._reader.has_noted and self._take_lock():
            try:
                self._reader.catch_up()
            finally:
                self._lock.release()
        return [series for each in self._followers for series in each.series]

    def __enter__(self) -> Sampler:
        if self._thread.ident is not None:
            raise MeterError("these meters were read and closed; open them anew, with measure()")
        self._reader.begin()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_fork():
            # The meters are the parent's, and so is the thread that read them.
            return
        self._stopping = True
        self._ring()
        self._thread.join(0 if self._hangs else HANGING_S)
        if not self._thread.is_alive():
            # A driver that never answers must not keep the program from its end.
            for each in self._followers:
                each.meter.close()

    @contextmanager
    def closely(self) -> Iterator[None]:
        """Read as closely as the timetable wants, unless something is at work beside it."""
        with self._thrift.closely():
            self._ring()
            yield

    def work_begins(self) -> None:
        """Keep out of the way of what is measured, until ``work_ends`` was called as often."""
        self._thrift.work_begins()
        if self._reader.asleep:
            # Within other work that leaves ticks unseen: those beside this edge matter.
            self._ring()

    def work_ends(self) -> None:
        """See ``work_begins``. The ticks that come now matter again."""
        self._thrift.work_ends()
        self._ring()

    def border(self) -> None:
        """Within work, one thing that is measured ends and another begins: the ticks beside that matter."""
        self._thrift.border()
        if self._reader.asleep:
            self._ring()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """``work_begins`` and ``work_ends``."""
        self.work_begins()
        try:
            yield
        finally:
            self.work_ends()

    def read_now(self) -> None:
        """Read every meter that is never old, from the calling thread.

        A counter that stands still between its ticks would say nothing new.
        """
        if not self._edges or not self._take_lock():
            return
        try:
            for each in self._edges:
                each.read()
        finally:
            self._lock.release()

    def await_ticks(self, after_ns: int, timeout_s: float, ticks: int = 1) -> None:
        """Sleep until every counter has ticked so often after a moment, or the time for it is over.

        Counters that are known to tick slowly have longer.
        """
        if self.is_fork():
            return
        slowest_s = max(
            (
                (SLOW_TICKS + ticks) * (s.period_s or 0.0) + s.domain.smear_s + s.domain.late_s[1]
                for s in self.series
            ),
            default=0.0,
        )
        patience_s = timeout_s + slowest_s
        deadline = time.monotonic() + patience_s
        with self.closely():
            while time.monotonic() < deadline:
                # One that has stood still for as long already is not waited for again.
                stale_ns = time.monotonic_ns() - round(patience_s * 1e9)
                if all(
                    series.settled(after_ns, ticks) or series.latest_ns(self._reader.start_ns) < stale_ns
                    for series in self.series
                ):
                    return
                time.sleep(0.002)

    def _take_lock(self) -> bool:
        """Whether the meters may be touched now: not in a fork, and not while one of them hangs."""
        if self.is_fork():
            return False
        if self._lock.acquire(timeout=0 if self._hangs else HANGING_S):
            self._hangs = False
            return True
        self._note_hanging()
        return False

    def is_fork(self) -> bool:
        """A forked child has no reader, and locks that nobody releases."""
        return os.getpid() != self._owner

    def _note_hanging(self) -> None:
        """The thread has not come back from a meter; nobody is waited for twice."""
        self._hangs, now_ns = True, time.monotonic_ns()
        for each in self._followers:
            if each.asked_ns is not None:
                waited_s = (now_ns - each.asked_ns) / 1e9
                for series in each.series:
                    series.fail(
                        each.asked_ns,
                        f"{each.meter.name}: no answer from {series.domain.name} for {waited_s:.0f} s",
                    )

    def _run(self) -> None:
        self._reader.wake()
        while self._followers and not self._stopping:
            with self._lock:
                planned_ns = self._reader.turn()
            self._sleep((planned_ns - time.monotonic_ns()) / 1e9)
        with self._lock:
            self._reader.catch_up()

    def _ring(self) -> None:
        """Call the thread from its sleep, or from its next one."""
        with suppress(RuntimeError):
            self._bell.release()

    def _sleep(self, seconds: float) -> None:
        if seconds > LONGEST_SLEEP_S:
            self._bell.acquire(timeout=seconds)
        elif seconds > 0:
            # Cheaper still.
            time.sleep(seconds)
