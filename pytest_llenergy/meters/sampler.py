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
from pytest_llenergy.meters.follower import Follower
from pytest_llenergy.meters.protocol import Meter
from pytest_llenergy.meters.thrift import Thrift
from pytest_llenergy.meters.trace import Mark, Series

#: Longest sleep from which the thread cannot be called (seconds).
LONGEST_SLEEP_S = 0.02

#: Meters due within this time of one another are read in one go (nanoseconds).
TOGETHER_NS = 300_000

#: Periods of a counter by which a tick may be late.
SLOW_TICKS = 1.5

#: How long, at most, is spent on learning how counters tick (seconds).
LEARNING_S = 2.0

#: How long a reading is waited for before it counts as one that will not come (seconds).
HANGING_S = 5.0


class Sampler:
    """Reads meters from ``__enter__`` to ``__exit__`` and keeps what they said in ``series``.

    The thread sleeps between readings; ``read_now`` reads at once from the calling thread, for edges
    in the process itself.
    """

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._followers = [Follower(meter) for meter in meters]
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
        # Power readings are joined as they come: what is read late is taken for power at another time.
        self._thrift = Thrift(
            always_closely=any(domain.integrated for meter in meters for domain in meter.domains)
        )
        self._thread = threading.Thread(target=self._run, name="llenergy-sampler", daemon=True)

    @property
    def series(self) -> list[Series]:
        """One series a domain, in the order of the meters, with all that was read so far."""
        if any(each.noted for each in self._followers) and self._take_lock():
            try:
                for each in self._followers:
                    each.catch_up()
            finally:
                self._lock.release()
        return [series for each in self._followers for series in each.series]

    def __enter__(self) -> Sampler:
        if self._thread.ident is not None:
            raise MeterError("these meters were read and closed; open them anew, with measure()")
        for each in self._followers:
            each.read()
        self._start_ns = time.monotonic_ns()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_fork():
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

    def work_ends(self) -> None:
        """See ``work_begins``. The ticks that come now matter again."""
        self._thrift.work_ends()
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
        if self._is_fork():
            return
        slowest_s = max(
            ((SLOW_TICKS + ticks) * (s.period_s or 0.0) + s.domain.smear_s for s in self.series), default=0.0
        )
        patience_s = timeout_s + slowest_s
        deadline = time.monotonic() + patience_s
        with self.closely():
            while time.monotonic() < deadline:
                # One that has stood still for as long already is not waited for again.
                stale_ns = time.monotonic_ns() - round(patience_s * 1e9)
                if all(
                    series.settled(after_ns, ticks) or series.latest_ns(self._start_ns) < stale_ns
                    for series in self.series
                ):
                    return
                time.sleep(0.002)

    def _take_lock(self) -> bool:
        """Whether the meters may be touched now: not in a fork, and not while one of them hangs."""
        if self._is_fork():
            return False
        if self._lock.acquire(timeout=0 if self._hangs else HANGING_S):
            self._hangs = False
            return True
        self._note_hanging()
        return False

    def _is_fork(self) -> bool:
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
        woken_ns, spent_ns = time.monotonic_ns(), time.thread_time_ns()
        put_off_to_ns, planned_ns, noting = 0, woken_ns, False
        while self._followers and not self._stopping:
            now_ns, sparing = time.monotonic_ns(), self._thrift.sparing
            # Where readings are put off, they are made together: to wake up costs most. At work they are then
            # rare and only noted, until the timetable can be paid for again.
            put_off = put_off_to_ns > woken_ns
            if noting:
                put_off_to_ns = max(put_off_to_ns, planned_ns)
            noting = sparing and (put_off or (noting and not self._thrift.recovered))
            until_ns = now_ns + (self._longest_ns if noting or put_off else TOGETHER_NS)
            with self._lock:
                for each in self._followers:
                    if each.due_ns > until_ns:
                        continue
                    if noting:
                        each.note(planned_ns)
                    else:
                        each.read(put_off_to_ns, sparing)
            spent_before_ns, spent_ns = spent_ns, time.thread_time_ns()
            self._thrift.pay(spent_ns - spent_before_ns, now_ns - woken_ns)
            woken_ns = now_ns
            wait_ns = 0 if self._learning(now_ns) else self._thrift.wait_ns(self._longest_ns)
            put_off_to_ns = now_ns + wait_ns
            due_ns = now_ns + self._longest_ns if noting else min(each.due_ns for each in self._followers)
            planned_ns = max(put_off_to_ns, round(due_ns))
            self._sleep((planned_ns - time.monotonic_ns()) / 1e9)
        with self._lock:
            for each in self._followers:
                each.catch_up()

    def _learning(self, now_ns: int) -> bool:
        """Whether ticks are looked at closely for a start, so that less will do later."""
        early = now_ns - self._start_ns < LEARNING_S * 1e9
        return early and not self._thrift.sparing and any(each.pace.learning for each in self._followers)

    @property
    def _longest_ns(self) -> float:
        """How long all meters may be left alone."""
        return min(each.pace.longest_ns for each in self._followers)

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
