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

#: Latest ticks through which the line is fitted, and those needed before it predicts the next one.
FITTED_TICKS, ENOUGH_TICKS = 16, 8

#: A tick is searched for within this many standard deviations of the fitted ticks, and at least this long
#: before and after it is due (seconds). The time of an earlier tick is uncertain by a whole period, which
#: costs more than a few extra readings.
MARGIN, SHORTEST_MARGIN_S = 4.0, 0.004

#: Readings in a margin.
STEPS = 3

#: Growth of the margin with each tick that was not observed closely, as a share of the period.
DRIFT = 0.002

#: Widest search, as a share of the period. A tick between two readings that are no further apart is fitted.
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
        self._nominal = self._leader is not None and self._leader.domain.update_period_s is not None
        self._points: deque[TickPoint] = deque(maxlen=FITTED_TICKS)
        self._ticks_used = 0
        # Number of the latest tick, and the line: a moment with its number.
        self._latest = 0
        self._origin = 0.0, 0.0
        self._period_ns: float | None = None
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
        if leader is not None and leader.ticks_seen > self._ticks_used:
            self._ticks_used = leader.ticks_seen
            leader.ticks[-1] = self._take(leader, leader.ticks[-1])
        expected_ns, reach_ns = self._predict(self._latest + 1)
        predicts = bool(self._points) and (self._nominal or not self.learning)
        if not predicts or now_ns > expected_ns + 2 * reach_ns:
            return now_ns + self._poll_ns
        if now_ns < expected_ns - reach_ns:
            return round(expected_ns - reach_ns)
        return now_ns + round(max(STEP_S * 1e9, self._margin_ns / STEPS))

    def _take(self, leader: Series, tick: Tick) -> Tick:
        """Take in a tick. Returns it, narrowed to its prediction if it was not read near that."""
        if self.learning:
            period_s = leader.period_s
            self._period_ns = None if period_s is None else period_s * 1e9
            if period_s is None or period_s < SHORTEST_PERIOD_S:
                return tick
        gap_ns = tick.latest_ns - tick.earliest_ns
        if gap_ns <= (MAX_MARGIN_SHARE * self.period_ns if self.learning else self._margin_ns):
            self._latest = max(self._number(tick.time_ns), self._latest + 1) if self._points else self._latest
            expected_ns, reach_ns = self._predict(self._latest)
            if not self.learning and abs(tick.time_ns - expected_ns) > reach_ns + gap_ns / 2:
                self._forget()
            self._fit(tick.time_ns, gap_ns)
            return tick
        if not self._points:
            return tick
        # The reading shows the last tick before it: the one that had surely come, or the one after that.
        _, reach_ns = self._predict(self._number(tick.latest_ns))
        sure, possible = (self._number(tick.latest_ns + way * reach_ns, down=True) for way in (-1, 1))
        if self._predict(sure)[0] + reach_ns < tick.earliest_ns:
            sure = possible
        self._latest = sure = max(sure, self._latest + 1)
        (first_ns, _), (last_ns, _) = self._predict(sure), self._predict(max(sure, possible))
        # As close to its prediction as the readings allow.
        moment_ns = min(max(first_ns, tick.earliest_ns), tick.latest_ns)
        if abs(moment_ns - first_ns) > reach_ns / 2:
            self._forget()
        if self.learning:
            return tick
        if moment_ns != first_ns and sure >= possible:
            self._fit(moment_ns, self._margin_ns, close=False)
        # One that came before it was due may be another one, if the counter ticks faster under load.
        if first_ns - moment_ns > reach_ns / 2:
            return tick
        return _narrow(tick, first_ns - reach_ns, last_ns + reach_ns)

    def _forget(self) -> None:
        """Start anew, since a prediction was wrong."""
        self._points.clear()
        self._margin_ns = 0.0

    def _fit(self, time_ns: float, gap_ns: float, *, close: bool = True) -> None:
        """Fit the line to the latest tick. Ticks are weighted by how closely they were observed."""
        points = self._points
        points.append(TickPoint(self._latest, time_ns, 1 / (gap_ns**2 + (STEP_S * 1e9) ** 2), close))
        total, start_ns = sum(p.weight for p in points), points[0].time_ns
        middle = sum(p.weight * p.number for p in points) / total
        middle_ns = start_ns + sum(p.weight * (p.time_ns - start_ns) for p in points) / total
        self._origin = middle, middle_ns
        if len(points) >= ENOUGH_TICKS:
            offsets = [(p.weight, p.number - middle, p.time_ns - middle_ns) for p in points]
            products = sum(weight * x * y for weight, x, y in offsets)
            self._period_ns = products / sum(weight * x * x for weight, x, _ in offsets)
        # A tick that was placed near its prediction does not show how far ticks come from theirs.
        exact = [p for p in points if p.close]
        margin_ns = self._margin_ns or 1 / math.sqrt(points[-1].weight)
        if len(exact) > 3:
            squares = sum(p.weight * (p.time_ns - self._predict(p.number)[0]) ** 2 for p in exact)
            squares /= sum(p.weight for p in exact)
            margin_ns = MARGIN * math.sqrt(squares * len(exact) / (len(exact) - 2))
        self._margin_ns = min(max(margin_ns, SHORTEST_MARGIN_S * 1e9), MAX_MARGIN_SHARE * self.period_ns)

    def _number(self, time_ns: float, *, down: bool = False) -> int:
        """Return the number of the tick nearest to a moment, or of the last one before it."""
        number, origin_ns = self._origin
        ticks = number + (time_ns - origin_ns) / self.period_ns
        return math.floor(ticks) if down else round(ticks)

    def _predict(self, number: int) -> tuple[float, float]:
        """Return when a tick is due, and how far around that to search for it (nanoseconds)."""
        middle, middle_ns = self._origin
        unobserved = number - self._points[-1].number - 1 if self._points else 0
        reach_ns = self._margin_ns + DRIFT * max(0, unobserved) * self.period_ns
        due_ns = middle_ns + (number - middle) * self.period_ns
        return due_ns, min(reach_ns, MAX_MARGIN_SHARE * self.period_ns)


def _narrow(tick: Tick, earliest_ns: float, latest_ns: float) -> Tick:
    """Narrow a tick to its prediction, which is more precise than readings that were put off."""
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
