# SPDX-License-Identifier: Apache-2.0
"""When to read next: shortly before a tick is due and then often, and hardly at all in between.

How well a tick is known in time decides how well a window is known in joules, and reading costs CPU time
that the workload might want. A counter that ticks every 100 ms needs four readings a tick, not a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llenergy.meters.trace import Series, Tick

#: Counters that tick faster than this are read evenly (seconds).
LEAST_PERIOD_S = 0.025

#: Closest distance of two readings (seconds).
STEP_S = 0.001

#: Ticks over which the deviation from the expected moment is averaged.
MEMORY = 16

#: Ticks from which a period that is not known is taken, before it is only adjusted.
FIRST_TICKS = 24

#: A tick is looked for from so many mean deviations before it is due, and at least so long (seconds). One
#: that came before that is known to a whole period only: that costs more than some readings too many.
MARGIN = 5.0
LEAST_MARGIN_S = 0.002

#: Readings in a margin.
STEPS = 3

#: A tick that is known no better than this many margins came before the first look. It counts as one that
#: was off by the second number of margins.
UNSEEN = 3.0
UNSEEN_DEVIATION = 2.0

#: Periods within which the next reading must come, so that hardly a tick is missed.
SEEING = 0.9

#: The same for a counter that moves all the time, while others are put off (seconds).
SEEING_ALWAYS_S = 0.05

#: Ticks are looked for over this part of a period at most, however long nobody looked closely.
WIDEST = 0.25

#: The part of a period that lies between two readings then.
SEARCHING = 1 / 32

#: The part of a period by which ticks may drift away from the timetable at each of them, seen or not.
DRIFT = 0.002

#: The part of a period by which the timetable may be off when it says nothing any more.
ANY_TIME = 0.5

#: Ticks that must have been seen closely before the timetable tells when others came.
KNOWN = 8

#: Share of the deviation of one tick by which the timetable is moved: a tick that jitters says little of the
#: next. One that is further off than so many margins says that the timetable is wrong.
FOLLOW = 0.25
LOST = 5.0

#: The same for the period, once it is known: a loop of second order that is critically damped.
FOLLOW_PERIOD = FOLLOW**2 / 4


class Pace:
    """The timetable of one meter, from the ticks of its domains (the first that ticks slowly leads)."""

    def __init__(self, series: Sequence[Series], poll_period_s: float) -> None:
        self._poll_ns = round(poll_period_s * 1e9)
        self._series = series
        # Integrated power does not move at moments of its own, but at those of the readings.
        slow = [each for each in series if each.domain.max_age_s is None and not each.domain.integrated]
        self._leader = slow[0] if len(slow) == len(series) and slow else None
        self._deviation_ns = 1e6
        self._expected_ns: float | None = None
        self._period_ns: float | None = None
        self._adjust = False
        self._followed = 1
        self._seen = 0
        self._doubt_ns = 0.0
        self._came = True

    @property
    def known(self) -> bool:
        """Whether nothing depends on seeing one tick after the other: all periods are known."""
        return all(
            each.domain.max_age_s is not None or each.domain.update_period_s is not None
            for each in self._series
        )

    @property
    def period_ns(self) -> float:
        """The time between two ticks, or two readings of a counter that moves all the time (ns)."""
        return self._period_ns or self._poll_ns

    @property
    def learning(self) -> bool:
        """Whether it is not known yet how regularly the counter ticks."""
        return self._leader is not None and self._expected_ns is not None and self._followed < KNOWN

    @property
    def longest_ns(self) -> float:
        """How long after a reading the next one must come at the latest (ns)."""
        if self._leader is None:
            return max(self._poll_ns, SEEING_ALWAYS_S * 1e9)
        return SEEING * self._period_ns if self._period_ns else self._poll_ns

    def narrowed(self, tick: Tick) -> Tick:
        """The tick within what the timetable allows, where the readings around it were put off.

        Only where the counter was seen closely before, so that it is known how regularly it ticks, and
        where both agree.
        """
        expected_ns, period_ns = self._expected_ns, self._period_ns
        if not self._doubt_ns or self.learning or expected_ns is None or period_ns is None:
            return tick
        # The tick that the next one is expected after.
        around_ns = self._doubt_ns + self._margin_ns
        earliest_ns = max(tick.earliest_ns, round(expected_ns - period_ns - around_ns))
        latest_ns = tick.latest_ns
        if self._came:
            latest_ns = min(latest_ns, round(expected_ns - period_ns + around_ns))
        if earliest_ns > latest_ns:
            return tick
        return tick._replace(earliest_ns=earliest_ns, latest_ns=latest_ns)

    def next_ns(self, now_ns: int, put_off: bool = False, sparing: bool = False) -> int:
        """The moment of the next reading, given that one has just been made (monotonic nanoseconds).

        With ``put_off`` it, or the one before, was made later than it should have been: that a tick came
        in between is then no fault of the timetable. ``sparing`` takes two readings a tick for four.
        """
        leader = self._leader
        if leader is None or not leader.ticks:
            return now_ns + self._poll_ns
        if len(leader.ticks) != self._seen:
            self._learn(leader, put_off)
        if self._expected_ns is None:
            return now_ns + self._poll_ns
        around_ns = self._around_ns
        early_ns = round(self._expected_ns - around_ns)
        if now_ns < early_ns:
            return early_ns
        if now_ns > self._expected_ns + 2 * around_ns:
            return now_ns + self._poll_ns
        return now_ns + round(max(self._step_ns(sparing), STEP_S * 1e9))

    def _step_ns(self, sparing: bool) -> float:
        """How far apart readings are while a tick is looked for."""
        if self._doubt_ns and self._period_ns:
            return min(self._margin_ns, SEARCHING * self._period_ns)
        return self._margin_ns if sparing else self._margin_ns / STEPS

    @property
    def _margin_ns(self) -> float:
        return max(MARGIN * self._deviation_ns, LEAST_MARGIN_S * 1e9)

    @property
    def _around_ns(self) -> float:
        """How far around the expected moment the tick is looked for."""
        if not self._period_ns:
            return self._margin_ns
        return max(self._margin_ns, min(self._doubt_ns, WIDEST * self._period_ns))

    def _learn(self, leader: Series, put_off: bool) -> None:
        tick, known_s = leader.ticks[-1], leader.domain.update_period_s
        self._adjust = known_s is not None or len(leader.ticks) > FIRST_TICKS
        if self._period_ns is None or not self._adjust:
            period_s = known_s or leader.tick_period_s
            self._period_ns = None if period_s is None else period_s * 1e9
        in_turn = len(leader.ticks) == self._seen + 1
        self._seen = len(leader.ticks)
        if self._period_ns is None or self._period_ns < LEAST_PERIOD_S * 1e9:
            self._expected_ns = None
        elif self._expected_ns is None or not in_turn:
            self._expected_ns = tick.time_ns + self._period_ns
            # The next one may be as far off as this one is not known.
            self._deviation_ns, self._followed = max(self._deviation_ns, tick.gap_s * 1e9 / MARGIN), 1
        else:
            self._expected_ns = self._follow(tick, self._expected_ns, self._period_ns, put_off)

    def _follow(self, tick: Tick, expected_ns: float, period_ns: float, put_off: bool) -> float:
        """When the next tick is due, by this one and by when it was expected."""
        if self._doubt_ns or put_off:
            return self._find(tick, expected_ns, period_ns, put_off)
        unseen = tick.latest_ns - tick.earliest_ns > UNSEEN * self._margin_ns
        # Ticks that nobody saw one by one may lie between; what was read is what the last of them left.
        missed = (tick.latest_ns - expected_ns) / period_ns
        expected_ns += (math.floor(missed) if unseen else round(missed)) * period_ns
        # Where it came before the first look, the middle of all that time says nothing of when.
        moment_ns = min(max(expected_ns, tick.earliest_ns), tick.latest_ns) if unseen else tick.time_ns
        error_ns = moment_ns - expected_ns
        lost = abs(error_ns) > LOST * self._margin_ns
        # Within the readings around a tick nothing says when it came, so nothing that it was off.
        apart_ns = max(0.0, abs(error_ns) - tick.gap_s * 1e9 / 4)
        deviation_ns = UNSEEN_DEVIATION * self._margin_ns if unseen else apart_ns
        self._followed = min(self._followed + 1, MEMORY)
        self._deviation_ns += (deviation_ns - self._deviation_ns) / self._followed
        if self._adjust and not lost:
            self._period_ns = period_ns + FOLLOW_PERIOD * error_ns
        return expected_ns + (1 if lost else FOLLOW) * error_ns + period_ns

    def _find(self, tick: Tick, expected_ns: float, period_ns: float, put_off: bool) -> float:
        """The same for a tick of which the readings around it were put off, and for those after it.

        Each only bounds when the next one comes, but all together do so closely.
        """
        if not put_off and tick.latest_ns - tick.earliest_ns <= 2 * SEARCHING * period_ns:
            # The first that was seen again. How far off it was says nothing of how ticks jitter.
            self._doubt_ns = 0.0
            if self._followed == 1:
                # Nothing had been learned before, and what was assumed came from readings that were put off.
                self._deviation_ns = tick.gap_s * 1e9 / MARGIN
            return tick.time_ns + period_ns
        margin_ns = min(self._margin_ns, SEARCHING * period_ns)
        around_ns = (self._doubt_ns or margin_ns) + DRIFT * period_ns
        self._came = True
        if tick.latest_ns - tick.earliest_ns > period_ns:
            return self._count(tick, expected_ns, period_ns, around_ns)
        expected_ns += math.floor((tick.latest_ns + around_ns - expected_ns) / period_ns) * period_ns
        earliest_ns = max(expected_ns - around_ns, tick.earliest_ns - margin_ns)
        latest_ns = min(expected_ns + around_ns, tick.latest_ns + margin_ns)
        if earliest_ns > latest_ns:
            earliest_ns, latest_ns = tick.earliest_ns, tick.latest_ns
        self._doubt_ns = (latest_ns - earliest_ns) / 2
        return (earliest_ns + latest_ns) / 2 + period_ns

    def _count(self, tick: Tick, expected_ns: float, period_ns: float, around_ns: float) -> float:
        """The same where several ticks may have come unseen: only the timetable tells when the last did."""
        unseen = max(0.0, (tick.latest_ns - expected_ns) / period_ns)
        around_ns = min(around_ns + DRIFT * unseen * period_ns, ANY_TIME * period_ns)
        self._doubt_ns = around_ns
        reach_ns = around_ns + self._margin_ns
        expected_ns += math.floor((tick.latest_ns + reach_ns - expected_ns) / period_ns) * period_ns
        # Where it was due at just that time, the reading may be of the one before it.
        self._came = expected_ns + reach_ns < tick.latest_ns
        return expected_ns + period_ns if self._came else expected_ns
