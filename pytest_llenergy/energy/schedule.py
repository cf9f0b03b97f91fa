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
MARGIN, SHORTEST_MARGIN_S = 4.0, 0.004

#: Readings in a margin.
STEPS = 3

#: A tick that is further off than this many margins shows that the prediction is wrong.
MAX_DEVIATION_MARGINS = 1.5

#: Margins before its prediction within which a tick is assumed that came before the first reading near it.
EARLY = 4.0

#: Growth of the margin with each tick that was not observed closely, as a share of the period.
DRIFT = 0.002

#: Widest search, as a share of the period.
MAX_MARGIN_SHARE = 0.25

#: Longest time between readings that misses hardly any tick, as a share of the period.
MAX_READING_GAP_SHARE = 0.9

#: Longest time between postponed readings of a counter that moves all the time (seconds).
CONTINUOUS_S = 0.05


class TickPoint(NamedTuple):
    """A tick: its number, moment and weight in the fit, and whether it was observed closely."""

    number: int
    time_ns: float
    weight: float
    close: bool = True


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
        self._nominal = self._leader is not None and self._leader.domain.update_period_s is not None
        self._points: deque[TickPoint] = deque(maxlen=FITTED_TICKS)
        self._ticks_used = 0
        self._index = 0
        self._due_ns = 0
        # The latest tick, narrowed, if it may have come before the first reading near it.
        self._early: Tick | None = None
        self._period_ns: float | None = None
        self._fitted = False
        self._mean_index = self._mean_ns = 0.0
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
        self._update()
        self._due_ns = self._find_next_ns(now_ns)
        return self._due_ns

    def _find_next_ns(self, now_ns: int) -> int:
        if not self._points or not (self._fitted or self._nominal):
            # Without a nominal period, read evenly to find the first ticks.
            return now_ns + self._poll_ns
        expected_ns, reach_ns = self._predict(self._index + 1), self._reach(self._index + 1)
        if now_ns < expected_ns - reach_ns:
            return round(expected_ns - reach_ns)
        if now_ns > expected_ns + 2 * reach_ns:
            return now_ns + self._poll_ns
        return now_ns + round(max(STEP_S * 1e9, self._margin_ns / STEPS))

    def _update(self) -> None:
        """Take in the latest tick of the leading domain."""
        leader = self._leader
        if leader is None or leader.ticks_seen == self._ticks_used:
            return
        self._ticks_used = leader.ticks_seen
        tick, known_s = leader.ticks[-1], leader.domain.update_period_s
        if not self._fitted:
            period_s = known_s or leader.tick_period_s
            if period_s is None or period_s < SHORTEST_PERIOD_S:
                self._period_ns = None if period_s is None else period_s * 1e9
                self._points.clear()
                return
            self._period_ns = period_s * 1e9
        if not self._points:
            self._restart(tick)
            return
        narrowed = self._locate(tick)
        if len(self._series) == 1:
            leader.ticks[-1] = narrowed

    def _number(self, tick: Tick) -> tuple[int, float]:
        """Return the number of a tick, and how far around its prediction it may lie (nanoseconds).

        If it was due at the time of the reading, it may be the tick before that.
        """
        period_ns, last_ns = self.period_ns, self._predict(self._index)
        # Several ticks may lie between the readings; the value read is that of the last one.
        reach_ns = self._reach(self._index + max(1, math.floor((tick.latest_ns - last_ns) / period_ns)))
        if tick.latest_ns - tick.earliest_ns <= period_ns / 2:
            number = round((tick.time_ns - last_ns) / period_ns)
        else:
            number = math.floor((tick.latest_ns + reach_ns - last_ns) / period_ns)
        return self._index + max(1, number), reach_ns

    def _locate(self, tick: Tick) -> Tick:
        """Number a tick and fit the line to it. Returns the tick, narrowed if readings were put off."""
        period_ns, gap_ns = self.period_ns, tick.latest_ns - tick.earliest_ns
        index, reach_ns = self._number(tick)
        expected_ns = self._predict(index)
        close = gap_ns <= self._margin_ns or not (self._fitted or self._nominal or gap_ns > period_ns / 2)
        # A tick that was due at the time of the reading may not have come yet, unless the previous tick came
        # before the previous reading.
        seen = expected_ns - period_ns + reach_ns < tick.earliest_ns
        early, self._early = self._early, None
        if not (close or seen or expected_ns + reach_ns < tick.latest_ns):
            # Either tick: the earlier one bounds its moment from below, the reading from above.
            skipped, self._index = index - 1 - self._index, index - 1
            if self.learning:
                return tick
            if not skipped and EARLY * reach_ns < period_ns / 2:
                # If the tick after this one comes next, it came before the first reading near its prediction.
                self._early = _narrow(tick, expected_ns - EARLY * reach_ns, math.inf)
            return _narrow(tick, expected_ns - period_ns - reach_ns, math.inf)
        # A tick that was not read near its prediction is placed as close to that as its readings allow.
        moment_ns = tick.time_ns if close else min(max(expected_ns, tick.earliest_ns), tick.latest_ns)
        away_ns = abs(moment_ns - expected_ns)
        if early and index == self._index + 2 and away_ns <= reach_ns and len(self._series) == 1:
            ticks = self._series[0].ticks
            if ticks[-2].energy_j == early.energy_j:
                ticks[-2] = early
        self._index = index
        if away_ns > MAX_DEVIATION_MARGINS * reach_ns:
            self._restart(tick)
            return tick
        # Readings that were put off say little.
        in_time = gap_ns <= period_ns / 2 or tick.latest_ns < self._due_ns + STEP_S * 1e9
        if close or away_ns > (0 if in_time else reach_ns):
            self._fit(moment_ns, min(gap_ns, self._margin_ns), close=close)
        if close or self.learning:
            return tick
        return _narrow(tick, expected_ns - reach_ns, expected_ns + reach_ns)

    def _restart(self, tick: Tick) -> None:
        self._points.clear()
        self._margin_ns = 0.0
        self._fit(tick.time_ns, tick.latest_ns - tick.earliest_ns)

    def _fit(self, moment_ns: float, gap_ns: float, *, close: bool = True) -> None:
        """Fit the line to one more tick. Ticks are weighted by how closely they were observed."""
        points = self._points
        points.append(TickPoint(self._index, moment_ns, 1 / (gap_ns**2 + (STEP_S * 1e9) ** 2), close))
        total = sum(p.weight for p in points)
        origin_ns = points[0].time_ns
        self._mean_index = sum(p.weight * p.number for p in points) / total
        self._mean_ns = origin_ns + sum(p.weight * (p.time_ns - origin_ns) for p in points) / total
        if len(points) >= ENOUGH_TICKS:
            self._fitted = True
            offsets = [(p.weight, p.number - self._mean_index, p.time_ns - self._mean_ns) for p in points]
            products = sum(weight * x * y for weight, x, y in offsets)
            self._period_ns = products / sum(weight * x * x for weight, x, _ in offsets)
        # A tick that was placed near its prediction does not show how far ticks come from theirs.
        exact = [p for p in points if p.close]
        margin_ns = self._margin_ns or min(1 / math.sqrt(p.weight) for p in points)
        if len(exact) > 3:
            squares = sum(p.weight * (p.time_ns - self._predict(p.number)) ** 2 for p in exact)
            squares /= sum(p.weight for p in exact)
            margin_ns = MARGIN * math.sqrt(squares * len(exact) / (len(exact) - 2))
        self._margin_ns = min(max(margin_ns, SHORTEST_MARGIN_S * 1e9), MAX_MARGIN_SHARE * self.period_ns)

    def _predict(self, index: int) -> float:
        return self._mean_ns + (index - self._mean_index) * self.period_ns

    def _reach(self, index: int) -> float:
        """Return how far around its prediction to search for a tick (nanoseconds)."""
        unobserved = index - self._points[-1].number - 1
        return min(self._margin_ns + DRIFT * unobserved * self.period_ns, MAX_MARGIN_SHARE * self.period_ns)


def _narrow(tick: Tick, earliest_ns: float, latest_ns: float) -> Tick:
    """Narrow a tick to its prediction, which is more precise than postponed readings.

    This reduces the median error of a window under load from 1.1 % to 0.6 % (benchmarks/plugin/coverage).
    """
    first_ns = max(tick.earliest_ns, round(earliest_ns))
    last_ns = tick.latest_ns if tick.latest_ns <= latest_ns else round(latest_ns)
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
        self._at_work = self._windows = 0
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

    def begin_work(self, *, window: bool = False) -> None:
        """Spare a workload until the matching ``end_work``; of a ``window``, only the edges matter. Nests."""
        with self._lock:
            self._at_work += 1
            self._windows += window
            self.edges += 1

    def end_work(self, *, window: bool = False) -> None:
        """End the work that ``begin_work`` began."""
        with self._lock:
            self._at_work -= 1
            self._windows -= window
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

        Such a workload loses most, since each call of a driver takes the interpreter's lock from it.
        """
        return self.sparing and self._busy

    @property
    def skips(self) -> bool:
        """Whether ticks are left unobserved except near edges; the counter advances unread."""
        return self.shares_process or (self.sparing and self._windows == self._at_work)

    @property
    def _lifted(self) -> bool:
        return self._unlimited or (bool(self._close) and not self._at_work)

    def charge(self, cost_ns: int, elapsed_ns: int, *, busy: bool = False) -> int:
        """Charge the CPU time of a wake-up to the budget. Returns what it took from a workload (nanoseconds).

        The rest of this process was ``busy`` in the time that has elapsed since the previous wake-up.
        """
        self._busy = busy
        if self._lifted:
            return 0
        credit_ns = self._credit_ns + SHARE * elapsed_ns - cost_ns
        self._credit_ns = max(-CREDIT_NS, min(credit_ns, CREDIT_NS))
        if not self._at_work:
            self._credit_at_work_ns = CREDIT_AT_WORK_NS
            return 0
        # Where ticks may be left unobserved, those after an edge are observed on credit.
        lowest_ns = -CREDIT_NS if self.skips else -CREDIT_AT_WORK_NS
        if self.shares_process:
            cost_ns += DISTURBED_NS
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
