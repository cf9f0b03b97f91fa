# SPDX-License-Identifier: Apache-2.0
"""The background reader: one thread that reads every open meter on its schedule."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from pytest_llenergy import real_time
from pytest_llenergy.energy.meters.base import READER_THREAD, Meter
from pytest_llenergy.energy.schedule import Budget, Timetable
from pytest_llenergy.energy.timeouts import READING_TIMEOUT_S, TICK_POLL_S
from pytest_llenergy.energy.trace import Mark, Series
from pytest_llenergy.errors import MeterError

#: A reading that comes later than this after it was due is noted (nanoseconds).
LATE_NS = 50_000_000

#: Power that was not read for this long (nanoseconds), or for this many periods if that is longer, is
#: unknown: no later reading makes up for it.
UNREAD_NS, UNREAD_PERIODS = 80_000_000, 1.5

#: Meters due within this time of one another are read in one wake-up (nanoseconds).
TOGETHER_NS = 300_000

#: How long, at most, counters are read closely to learn how they tick (nanoseconds).
LEARNING_NS = 2_000_000_000

#: Time that learning may take from a workload that runs meanwhile (nanoseconds): enough for the first ticks
#: of eight boards, or a dozen wake-ups beside a busy interpreter.
LEARNING_AT_WORK_NS = 5_000_000

#: The rest of this process counts as busy if it uses at least this share of a core.
BUSY = 0.1

#: How long ticks may be left unobserved in the middle of a window, or beside work in this process
#: (nanoseconds). A counter that breaks is detected after this time at the latest.
UNOBSERVED_NS = 1_000_000_000

#: Periods of the slowest counter after an edge in which every tick is observed: the joules at the edge come
#: from the two ticks after it.
EDGE_PERIODS = 2.5

#: And at least so long after an edge of a window whose work is elsewhere (nanoseconds): a short window then
#: holds several ticks of a fast counter.
EDGE_NS = 250_000_000

#: Longest sleep from which the thread cannot be woken (seconds).
LONGEST_SLEEP_S = 0.02

#: Periods of a counter by which a tick may be late.
SLOW_TICKS = 1.5


class MeterReader:
    """One open meter, with its series and the time of its next reading."""

    def __init__(self, meter: Meter, clock: Callable[[], int] = real_time.monotonic_ns) -> None:
        self.meter = meter
        self._clock = clock
        self.series: list[Series] = [Series(meter.name, domain) for domain in meter.domains]
        self.timetable: Timetable = Timetable(self.series, meter.poll_period_s)
        self.due_ns: int = 0
        #: Start of the reading in progress (monotonic nanoseconds), ``None`` between readings.
        self.pending_since_ns: int | None = None
        self.always_fresh: bool = all(each.domain.max_age_s is not None for each in self.series)

    def read(self, put_off_to_ns: int = 0) -> None:
        """Read once. The reading may have been due before ``put_off_to_ns``, but was put off until then."""
        begin_ns = self.pending_since_ns = self._clock()
        values = self._values()
        self.pending_since_ns, end_ns = None, self._clock()
        due_ns = max(self.due_ns or begin_ns, put_off_to_ns)
        for series, value in zip(self.series, values, strict=True):
            # Either the thread was not scheduled, or the driver took that long.
            if end_ns - due_ns > LATE_NS:
                self._note_late(series, due_ns, end_ns)
            if isinstance(value, str):
                series.begin_outage(begin_ns, value)
            else:
                series.add(begin_ns, end_ns, value)
        self.due_ns = self.timetable.next_ns(end_ns)

    def _note_late(self, series: Series, due_ns: int, end_ns: int) -> None:
        series.late.append((due_ns, end_ns))
        longest_ns = max(UNREAD_NS, UNREAD_PERIODS * (series.domain.update_period_s or 0.0) * 1e9)
        missed = series.domain.integrated and not getattr(self.meter, "integrates_itself", False)
        if missed and end_ns - due_ns > longest_ns:
            reason = f"the power of {series.domain.name} was not read for {(end_ns - due_ns) / 1e6:.0f} ms"
            series.add_outage(due_ns, end_ns, f"{self.meter.name}: {reason}")

    def _values(self) -> list[float | str]:
        """Read the meter, which may come from a third party: a fault in one must not stop the others."""
        count, wrong = len(self.series), ""
        try:
            values = [each if isinstance(each, str) else float(each) for each in self.meter.read()]
            if len(values) != count:
                wrong = f"it read {len(values)} values for {count} domains"
            elif odd := [each for each in values if isinstance(each, float) and not math.isfinite(each)]:
                wrong = f"it read {odd[0]}, which is not a number of joules"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        return [f"{self.meter.name}: {wrong}"] * count if wrong else values


class Reader:
    """All open meters and their common budget. The caller provides the thread.

    Args:
        clock: Monotonic time in nanoseconds.
        thread_time: CPU time of the thread that calls ``read_due_meters``, in nanoseconds.
        process_time: CPU time of the whole process, in nanoseconds.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        clock: Callable[[], int] = real_time.monotonic_ns,
        thread_time: Callable[[], int] = time.thread_time_ns,
        process_time: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self._clock, self._thread_time, self._process_time = clock, thread_time, process_time
        self.meters: list[MeterReader] = [MeterReader(meter, clock) for meter in meters]
        # Power readings are integrated as they arrive: a late one would count as power at another time.
        self.budget: Budget = Budget(
            unlimited=any(domain.integrated for meter in meters for domain in meter.domains)
        )
        #: Whether ticks are left unobserved on purpose at present.
        self.asleep: bool = False
        self.put_off_to_ns = 0
        self._edges = 0
        self._edge_ns = 0
        self._taken_ns = 0

    def begin(self) -> None:
        """Read each meter for the first time."""
        for each in self.meters:
            each.read()
        self.start_ns: int = self._clock()

    def wake(self) -> None:
        """Start to account for the CPU time of the calling thread, which then calls ``read_due_meters``."""
        self._woken_ns = self._clock()
        self._thread_ns, self._process_ns = self._thread_time(), self._process_time()

    def read_due_meters(self) -> int:
        """Read the meters that are due. Returns when to wake up again (monotonic nanoseconds)."""
        now_ns = self._clock()
        if self._edges != self.budget.edges:
            self._edges, self._edge_ns = self.budget.edges, now_ns
        # Readings that were put off are made together: waking up costs most.
        put_off = self.put_off_to_ns > self._woken_ns
        until_ns = now_ns + (self._every_tick_ns if put_off else TOGETHER_NS)
        due = [each for each in self.meters if each.due_ns <= until_ns]
        for each in due:
            each.read(self.put_off_to_ns)
        self._charge(now_ns)
        wait_ns = 0 if self._learning(now_ns) else self.budget.wait_ns(self._longest_wait_ns(now_ns))
        self.asleep = wait_ns > self._every_tick_ns
        self.put_off_to_ns = now_ns + wait_ns
        return max(self.put_off_to_ns, min(each.due_ns for each in self.meters))

    def _charge(self, now_ns: int) -> None:
        thread_ns, process_ns = self._thread_time(), self._process_time()
        cost_ns, elapsed_ns = thread_ns - self._thread_ns, now_ns - self._woken_ns
        busy = process_ns - self._process_ns - cost_ns > BUSY * elapsed_ns
        self._taken_ns += self.budget.charge(cost_ns, elapsed_ns, busy=busy)
        self._woken_ns, self._thread_ns, self._process_ns = now_ns, thread_ns, process_ns

    def _learning(self, now_ns: int) -> bool:
        """Return whether to observe ticks closely, as at the start, so that fewer readings suffice later."""
        # Learn during work too: a window that opens right after its meter would miss its first ticks.
        early = now_ns - self.start_ns < LEARNING_NS
        affordable = not self.budget.sparing or self._taken_ns < LEARNING_AT_WORK_NS
        return early and affordable and any(each.timetable.learning for each in self.meters)

    def _longest_wait_ns(self, now_ns: int) -> float:
        """Return how long all meters may stay unread at present (nanoseconds)."""
        every_tick_ns = self._every_tick_ns
        if not self.budget.skips or not all(each.timetable.periods_known for each in self.meters):
            return every_tick_ns
        slowest_ns = max(each.timetable.period_ns for each in self.meters)
        near_ns = max(EDGE_PERIODS * slowest_ns, 0 if self.budget.shares_process else EDGE_NS)
        # An edge that came during the readings is noted at the next ones.
        near_edge = now_ns - self._edge_ns < near_ns or self._edges != self.budget.edges
        return every_tick_ns if near_edge else max(every_tick_ns, UNOBSERVED_NS)

    @property
    def _every_tick_ns(self) -> float:
        return min(each.timetable.longest_ns for each in self.meters)


class Sampler:
    """Reads meters in a background thread from ``__enter__`` to ``__exit__`` and keeps their ``series``.

    ``read_now`` reads at once from the calling thread, for edges in this process.

    Args:
        meters: The open meters.
        threaded: Whether a thread reads; otherwise only ``read_now`` does.
    """

    def __init__(self, meters: Sequence[Meter], *, threaded: bool = True) -> None:
        self._threaded = threaded
        self._reader = Reader(meters)
        self._meters = self._reader.meters
        self._fresh = [each for each in self._meters if each.always_fresh]
        #: When windows began and ended.
        self.marks: list[Mark] = []
        self._lock = threading.Lock()
        self._stopping = False
        # Released to wake the thread. Waiting for an Event would cost twice as much.
        self._wake_up = threading.Lock()
        self._wake_up.acquire()
        self._hangs = False
        self._budget = self._reader.budget
        self._thread = threading.Thread(target=self._run, name=READER_THREAD, daemon=True)

    @property
    def series(self) -> list[Series]:
        """One series for each domain, in the order of the meters."""
        return [series for each in self._meters for series in each.series]

    def __enter__(self) -> Sampler:
        if self._thread.ident is not None:
            raise MeterError("these meters were closed; open new ones with measure()")
        self._reader.begin()
        if self._threaded:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        self._wake_thread()
        if self._threaded:
            self._thread.join(0 if self._hangs else READING_TIMEOUT_S)
        if not self._thread.is_alive():
            # Closing a meter whose driver never answers would keep the program from ending.
            for each in self._meters:
                each.meter.close()

    @contextmanager
    def reading_closely(self) -> Iterator[None]:
        """Read every tick closely, unless work is under way."""
        with self._budget.reading_closely():
            self._wake_thread()
            yield

    def begin_work(self, *, window: bool = False) -> None:
        """Read rarely, to spare the measured work, until the matching ``end_work``. Calls nest.

        Of a ``window`` without phases, only the ticks next to its edges are observed.
        """
        self._budget.begin_work(window=window)
        if self._reader.asleep:
            # Other work may leave its ticks unobserved, but the ticks next to this edge matter.
            self._wake_thread()

    def end_work(self, *, window: bool = False) -> None:
        """End the work that ``begin_work`` began, and observe the next ticks."""
        self._budget.end_work(window=window)
        self._wake_thread()

    def note_edge(self) -> None:
        """Observe the next ticks: within the work, one measured part ends and another begins."""
        self._budget.note_edge()
        if self._reader.asleep:
            self._wake_thread()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Call ``begin_work`` and ``end_work`` around a block."""
        self.begin_work()
        try:
            yield
        finally:
            self.end_work()

    def read_now(self) -> None:
        """Read every meter whose readings are always fresh, in the calling thread.

        Reading a counter that stands still between its ticks would gain nothing.
        """
        if not self._fresh or not self._take_lock():
            return
        try:
            for each in self._fresh:
                if not self._threaded:
                    # Nothing was due.
                    each.due_ns = 0
                each.read(self._reader.put_off_to_ns)
        finally:
            self._lock.release()

    def forget_before(self, time_ns: int) -> None:
        """Drop what was read before a moment (monotonic nanoseconds), but not the latest ticks."""
        if not self._take_lock():
            return
        try:
            for series in self.series:
                series.forget_before(time_ns)
        finally:
            self._lock.release()

    def await_ticks(self, after_ns: int, timeout_s: float, ticks: int = 1) -> None:
        """Sleep until every counter has ticked so often after a moment, or has had the time to."""
        wait_s = timeout_s + self.slowest_s(ticks)
        deadline_s = real_time.monotonic() + wait_s
        with self.reading_closely():
            while real_time.monotonic() < deadline_s:
                # Do not wait again for a counter that has already stood still for this long.
                stale_ns = real_time.monotonic_ns() - round(wait_s * 1e9)
                if all(
                    series.has_ticked_after(after_ns, ticks)
                    or series.latest_ns(self._reader.start_ns) < stale_ns
                    for series in self.series
                ):
                    return
                real_time.sleep(TICK_POLL_S)

    def slowest_s(self, ticks: int = 1) -> float:
        """Return how long the slowest counter may need for so many ticks (seconds)."""
        return max(
            (
                (SLOW_TICKS + ticks) * (s.period_s or 0.0) + 2 * s.smear_s + s.domain.late_s[1]
                for s in self.series
            ),
            default=0.0,
        )

    def _take_lock(self) -> bool:
        """Take the lock for a reading. Returns False while a meter hangs."""
        if self._lock.acquire(timeout=0 if self._hangs else READING_TIMEOUT_S):
            self._hangs = False
            return True
        self._note_hanging()
        return False

    def _note_hanging(self) -> None:
        """Record an outage for the meter whose driver does not answer, and stop waiting for it."""
        self._hangs, now_ns = True, real_time.monotonic_ns()
        for each in self._meters:
            if each.pending_since_ns is not None:
                waited_s = (now_ns - each.pending_since_ns) / 1e9
                for series in each.series:
                    series.begin_outage(
                        each.pending_since_ns,
                        f"{each.meter.name}: no answer from {series.domain.name} for {waited_s:.0f} s",
                    )

    def _run(self) -> None:
        self._reader.wake()
        while self._meters and not self._stopping:
            with self._lock:
                planned_ns = self._reader.read_due_meters()
            self._sleep((planned_ns - real_time.monotonic_ns()) / 1e9)

    def _wake_thread(self) -> None:
        """Wake the thread from its sleep, or from its next one."""
        with suppress(RuntimeError):
            self._wake_up.release()

    def _sleep(self, seconds: float) -> None:
        if seconds > LONGEST_SLEEP_S:
            self._wake_up.acquire(timeout=seconds)
        elif seconds > 0:
            # Cheaper than waiting for a lock.
            real_time.sleep(seconds)
