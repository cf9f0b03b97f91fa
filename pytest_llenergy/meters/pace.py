# SPDX-License-Identifier: Apache-2.0
"""When to read next: shortly before a tick is due and then often, and hardly at all in between.

How well a tick is known in time decides how well a window is known in joules, and reading costs CPU time
that the workload might want. A counter that ticks every 100 ms needs four readings a tick, not a hundred.
"""

from __future__ import annotations

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
MARGIN = 4.0
LEAST_MARGIN_S = 0.002

#: Readings in a margin.
STEPS = 3

#: A tick that is known no better than this many margins came before the first look. It counts as one that
#: was off by the second number of margins.
UNSEEN = 3.0
UNSEEN_DEVIATION = 2.0

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
        slow = [each for each in series if each.domain.max_age_s is None]
        self._leader = slow[0] if len(slow) == len(series) and slow else None
        self._deviation_ns = 1e6
        self._expected_ns: float | None = None
        self._period_ns: float | None = None
        self._adjust = False
        self._followed = 1
        self._seen = 0

    def next_ns(self, now_ns: int) -> int:
        """The moment of the next reading, given that one has just been made (monotonic nanoseconds)."""
        leader = self._leader
        if leader is None or not leader.ticks:
            return now_ns + self._poll_ns
        if len(leader.ticks) != self._seen:
            self._learn(leader)
        if self._expected_ns is None:
            return now_ns + self._poll_ns
        margin_ns = self._margin_ns
        early_ns = round(self._expected_ns - margin_ns)
        if now_ns < early_ns:
            return early_ns
        if now_ns > self._expected_ns + 2 * margin_ns:
            return now_ns + self._poll_ns
        return now_ns + round(max(margin_ns / STEPS, STEP_S * 1e9))

    @property
    def _margin_ns(self) -> float:
        return max(MARGIN * self._deviation_ns, LEAST_MARGIN_S * 1e9)

    def _learn(self, leader: Series) -> None:
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
            self._expected_ns = self._follow(tick, self._expected_ns, self._period_ns)

    def _follow(self, tick: Tick, expected_ns: float, period_ns: float) -> float:
        """When the next tick is due, by this one and by when it was expected."""
        # Ticks that nobody saw one by one may lie between.
        expected_ns += round((tick.latest_ns - expected_ns) / period_ns) * period_ns
        unseen = tick.latest_ns - tick.earliest_ns > UNSEEN * self._margin_ns
        # Where it came before the first look, the middle of all that time says nothing of when.
        moment_ns = min(max(expected_ns, tick.earliest_ns), tick.latest_ns) if unseen else tick.time_ns
        error_ns = moment_ns - expected_ns
        lost = abs(error_ns) > LOST * self._margin_ns
        deviation_ns = UNSEEN_DEVIATION * self._margin_ns if unseen else abs(error_ns)
        self._followed = min(self._followed + 1, MEMORY)
        self._deviation_ns += (deviation_ns - self._deviation_ns) / self._followed
        if self._adjust and not lost:
            self._period_ns = period_ns + FOLLOW_PERIOD * error_ns
        return expected_ns + (1 if lost else FOLLOW) * error_ns + period_ns
