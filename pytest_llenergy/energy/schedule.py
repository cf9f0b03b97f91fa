# SPDX-License-Identifier: Apache-2.0
"""When to read each meter: close to the predicted ticks of its counter, within a budget of CPU time.

The uncertainty of a tick's time determines the uncertainty of a window's energy, but reading takes CPU time
from the workload. A counter that ticks every 100 ms needs four readings a tick, not a hundred.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pytest_llenergy.energy.trace import Series, Tick

#: Counters with a shorter period than this are read evenly (seconds).
SHORTEST_PERIOD_S = 0.025

#: Shortest distance of two readings (seconds): polled much faster, some counters are said to err.
STEP_S = 0.002

#: Latest ticks through which the line is fitted, and those needed before its slope and scatter are used.
FITTED_TICKS, ENOUGH_TICKS = 16, 8

#: A tick is searched for within this many standard deviations of the fitted ticks, and at least this long
#: before and after it is due (seconds). The time of an earlier tick is uncertain by a whole period, which
#: costs more than a few extra readings.
MARGIN, SHORTEST_MARGIN_S = 4.0, 0.003

#: Readings in a margin.
STEPS = 3

#: A tick that is further off than this many margins shows that the prediction is wrong.
MAX_DEVIATION_MARGINS = 1.5

#: Further margins before its prediction within which a tick came that none of the readings near it preceded.
EARLY = 3.0

#: Growth of the margin with each tick that was not observed closely, and its limit, as shares of the period.
DRIFT, MAX_MARGIN_SHARE = 0.002, 0.25

#: Longest time between readings that misses hardly any tick, as a share of the period.
MAX_READING_GAP_SHARE = 0.9

#: Longest time between postponed readings of a counter that moves all the time (seconds).
CONTINUOUS_S = 0.05


class TickPoint(NamedTuple):
    """A tick: its number, moment and weight in the fit, and whether it was observed closely."""

    number: int
    time_ns: float
    weight: float
    close: bool


class Timetable:
    """Predicts when a counter ticks, from a straight line through the latest ticks observed closely.

    The domains of one meter share a timetable: the first domain that ticks leads. A meter with a domain that
    moves all the time, or whose joules are integrated from power readings, is read every ``poll_period_s``.
    """

    def __init__(self, series: Sequence[Series], poll_period_s: float) -> None:
        self._poll_ns = round(poll_period_s * 1e9)
        self._series = series
        ticking = [each for each in series if each.domain.max_age_s is None and not each.domain.integrated]
        self._leader = ticking[0] if ticking and len(ticking) == len(series) else None
        self._points: deque[TickPoint] = deque(maxlen=FITTED_TICKS)
        self._ticks_used = self._number = 0
        # Whether the latest tick surely has that number, and not the next one.
        self._sure = True
        self._period_ns: float | None = None
        # The line goes through this point.
        self._middle, self._middle_ns = 0.0, 0.0
        self._margin_ns = 0.0

    @property
    def periods_known(self) -> bool:
        """Whether all counters have a known period, so that ticks may be left unobserved."""
        return all(
            each.domain.max_age_s is not None or each.domain.update_period_s is not None
            for each in self._series
        )

    @property
    def learning(self) -> bool:
        """Whether the counter ticks in steps, but too few ticks were observed to predict the next one."""
        steps = self._period_ns is None or self._period_ns >= SHORTEST_PERIOD_S * 1e9
        return self._leader is not None and steps and len(self._points) < ENOUGH_TICKS

    @property
    def period_ns(self) -> float:
        """Time between ticks, or between readings of a counter that moves all the time (nanoseconds)."""
        return self._period_ns or self._poll_ns

    @property
    def longest_ns(self) -> float:
        """Longest time between two readings that misses hardly any tick (nanoseconds)."""
        if self._leader is None:
            return max(self._poll_ns, CONTINUOUS_S * 1e9)
        return MAX_READING_GAP_SHARE * self._period_ns if self._period_ns else self._poll_ns

    def next_ns(self, now_ns: int) -> int:
        """Return when to read next, given that one reading has just been made (monotonic nanoseconds)."""
        leader = self._leader
        if leader is not None and leader.ticks_seen != self._ticks_used:
            self._ticks_used = leader.ticks_seen
            tick = self._take(leader, leader.ticks[-1])
            if len(self._series) == 1:
                leader.ticks[-1] = tick
        # Without a nominal period, read evenly to find the first ticks.
        nominal = leader is not None and leader.domain.update_period_s is not None
        if not self._points or (self.learning and not nominal):
            return now_ns + self._poll_ns
        expected_ns, reach_ns = self._predict(self._number + 1), self._reach(self._number + 1)
        if now_ns < expected_ns - reach_ns:
            return round(expected_ns - reach_ns)
        if now_ns > expected_ns + 2 * reach_ns:
            return now_ns + self._poll_ns
        return now_ns + round(max(STEP_S * 1e9, self._margin_ns / STEPS))

    def _take(self, leader: Series, tick: Tick) -> Tick:
        """Number a tick and fit the line to it. Returns the tick, narrowed if readings were put off."""
        known_s = leader.domain.update_period_s
        if len(self._points) < ENOUGH_TICKS:
            period_s = known_s or leader.tick_period_s
            self._period_ns = period_s * 1e9 if period_s else None
            if period_s is None or period_s < SHORTEST_PERIOD_S:
                self._points.clear()
                return tick
        if not self._points:
            self._fit(tick)
            return tick
        period_ns, last_ns = self.period_ns, self._predict(self._number)
        passed = max(1, math.floor((tick.latest_ns - last_ns) / period_ns))
        reach_ns, gap_ns = self._reach(self._number + passed), tick.latest_ns - tick.earliest_ns
        close = gap_ns <= max(self._margin_ns, 0.0 if self.learning and known_s is None else STEP_S * 1e9)
        close |= self.learning and known_s is None and gap_ns <= period_ns / 2
        if gap_ns <= period_ns / 2:
            first = last = self._number + max(1, round((tick.time_ns - last_ns) / period_ns))
        else:
            # Several ticks may lie between the readings; the value read is that of the last one, which may
            # not have come yet if it was due at the time of the reading.
            last = self._number + max(1, math.floor((tick.latest_ns + reach_ns - last_ns) / period_ns))
            due_ns = self._predict(last)
            came = due_ns + reach_ns < tick.latest_ns or due_ns - period_ns + reach_ns < tick.earliest_ns
            first = last if came else max(last - 1, self._number + self._sure)
        self._number, self._sure = first, first == last
        expected_ns = self._predict(last)
        moment_ns = tick.time_ns if close else min(max(expected_ns, tick.earliest_ns), tick.latest_ns)
        if first == last and abs(moment_ns - expected_ns) > MAX_DEVIATION_MARGINS * reach_ns:
            self._points.clear()
            self._margin_ns = 0.0
        if not self._points or close:
            self._fit(tick)
            return tick
        if self.learning:
            return tick
        if first == last and moment_ns != expected_ns:
            # Not where it was predicted: as close to that as its readings allow.
            self._fit(tick, moment_ns)
        earliest_ns = self._predict(first) - reach_ns
        if earliest_ns >= tick.latest_ns:
            # It came before the first reading near its prediction.
            earliest_ns -= EARLY * reach_ns
        return _narrow(tick, earliest_ns, expected_ns + reach_ns)

    def _fit(self, tick: Tick, moment_ns: float | None = None) -> None:
        """Fit the line to one more tick, at ``moment_ns`` if it was not observed closely."""
        points, gap_ns = self._points, tick.latest_ns - tick.earliest_ns
        if moment_ns is not None:
            gap_ns = min(gap_ns, round(self._margin_ns))
        weight = 1 / (gap_ns**2 + (STEP_S * 1e9) ** 2)
        points.append(TickPoint(self._number, moment_ns or tick.time_ns, weight, moment_ns is None))
        total = sum(p.weight for p in points)
        origin_ns = points[0].time_ns
        self._middle = sum(p.weight * p.number for p in points) / total
        self._middle_ns = origin_ns + sum(p.weight * (p.time_ns - origin_ns) for p in points) / total
        if len(points) >= ENOUGH_TICKS:
            offsets = [(p.weight, p.number - self._middle, p.time_ns - self._middle_ns) for p in points]
            slope = sum(weight * x * y for weight, x, y in offsets)
            self._period_ns = slope / sum(weight * x * x for weight, x, _ in offsets)
        margin_ns = self._margin_ns or min(1 / math.sqrt(p.weight) for p in points)
        # A tick that was placed near its prediction does not show how far ticks come from theirs.
        exact = [p for p in points if p.close]
        if len(exact) > 3:
            squares = sum(p.weight * (p.time_ns - self._predict(p.number)) ** 2 for p in exact)
            squares /= sum(p.weight for p in exact)
            margin_ns = MARGIN * math.sqrt(squares * len(exact) / (len(exact) - 2))
        self._margin_ns = min(max(margin_ns, SHORTEST_MARGIN_S * 1e9), MAX_MARGIN_SHARE * self.period_ns)

    def _predict(self, number: int) -> float:
        return self._middle_ns + (number - self._middle) * self.period_ns

    def _reach(self, number: int) -> float:
        """Return how far around its prediction to search for a tick (nanoseconds)."""
        unobserved = number - self._points[-1].number - 1
        return min(self._margin_ns + DRIFT * unobserved * self.period_ns, MAX_MARGIN_SHARE * self.period_ns)


def _narrow(tick: Tick, earliest_ns: float, latest_ns: float) -> Tick:
    """Narrow a tick to its prediction, which is more precise than postponed readings.

    This reduces the median error of a window under load from 1.1 % to 0.6 % (benchmarks/plugin/coverage).
    """
    first_ns = max(tick.earliest_ns, round(earliest_ns))
    last_ns = min(tick.latest_ns, round(latest_ns))
    return tick._replace(earliest_ns=first_ns, latest_ns=last_ns) if first_ns < last_ns else tick


#: Share of a core that the reader may use on average, and while a window is open or a round is at work.
SHARE, SHARE_AT_WORK = 0.01, 0.0025

#: Time that a workload in this process loses to a wake-up besides the CPU time of the reader, as the
#: interpreter's lock changes hands and caches refill (ns). In a virtual machine, a loop lost 0.44 to 0.57 ms
#: to each wake-up, of which the reader used 0.23 ms (benchmarks/plugin/cost/cost_wakes.py).
DISTURBED_NS = 300_000

#: CPU time that may be saved and spent at once (ns): enough for one tick of each of eight boards; at work, of
#: one board. Debt has the same limit, so that one slow reading does not put off the following ones for long.
CREDIT_NS, CREDIT_AT_WORK_NS = 5_000_000, 300_000


class Budget:
    """CPU time that the reader may use, in nanoseconds.

    Close readings are reserved for the quiet gaps of a round and for the ticks after an edge of a window.
    Elsewhere readings are put off until the budget allows them.
    """

    def __init__(self, *, unlimited: bool = False) -> None:
        self._lock = threading.Lock()
        self._unlimited = unlimited
        self._close = 0
        self._at_work = 0
        self._busy = False
        self._credit_ns = 0.0
        self._credit_at_work_ns: float = CREDIT_AT_WORK_NS
        #: Number of edges so far: work began or ended, or one measured part followed another.
        self.edges: int = 0

    @contextmanager
    def reading_closely(self) -> Iterator[None]:
        """Lift the budget within the block, unless something is at work."""
        with self._lock:
            self._close += 1
        try:
            yield
        finally:
            with self._lock:
                self._close -= 1

    def begin_work(self) -> None:
        """Spare a workload until the matching ``end_work``. Calls nest."""
        with self._lock:
            self._at_work += 1
            self.edges += 1

    def end_work(self) -> None:
        """End the work that ``begin_work`` began."""
        with self._lock:
            self._at_work -= 1
            self.edges += 1

    def note_edge(self) -> None:
        """Note an edge within the work: one measured part ends and another begins."""
        with self._lock:
            self.edges += 1

    @property
    def sparing(self) -> bool:
        """Whether a workload is spared at present."""
        return bool(self._at_work) and not self._close and not self._unlimited

    @property
    def shares_process(self) -> bool:
        """Whether the workload that is spared runs in this process.

        Such a workload loses most, since each call of a driver takes the interpreter's lock from it. Ticks in
        the middle of its windows are therefore left unobserved; the counter advances unread.
        """
        return self.sparing and self._busy

    @property
    def _lifted(self) -> bool:
        return self._unlimited or (bool(self._close) and not self._at_work)

    def charge(self, cost_ns: int, elapsed_ns: int, *, busy: bool = False) -> int:
        """Charge the CPU time of a wake-up to the budget. Returns what it took from a workload (nanoseconds).

        Args:
            cost_ns: CPU time of the reader since the previous wake-up.
            elapsed_ns: Time since the previous wake-up.
            busy: Whether the rest of this process was at work in that time.
        """
        self._busy = busy
        if self._lifted:
            return 0
        credit_ns = self._credit_ns + SHARE * elapsed_ns - cost_ns
        self._credit_ns = max(-CREDIT_NS, min(credit_ns, CREDIT_NS))
        if not self._at_work:
            self._credit_at_work_ns = CREDIT_AT_WORK_NS
            return 0
        # If the workload runs in this process, the ticks after an edge are observed on credit.
        lowest_ns = -CREDIT_AT_WORK_NS
        if self.shares_process:
            cost_ns += DISTURBED_NS
            lowest_ns = -CREDIT_NS
        credit_ns = self._credit_at_work_ns + SHARE_AT_WORK * elapsed_ns - cost_ns
        self._credit_at_work_ns = max(lowest_ns, min(credit_ns, CREDIT_AT_WORK_NS))
        return cost_ns

    def wait_ns(self, longest_ns: float) -> int:
        """Return how long to put off the next wake-up (nanoseconds), at most ``longest_ns``."""
        if self._lifted:
            return 0
        wait_ns = max(0.0, -self._credit_ns / SHARE)
        if self.sparing:
            wait_ns = max(wait_ns, -self._credit_at_work_ns / SHARE_AT_WORK)
        return round(min(wait_ns, longest_ns))
