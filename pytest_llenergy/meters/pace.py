# SPDX-License-Identifier: Apache-2.0
"""When to read next: shortly before a tick is due and then often, and hardly at all in between.

How well a tick is known in time decides how well a window is known in joules, and reading costs CPU time
that the workload might want. A counter that ticks every 100 ms needs four readings a tick, not a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.meters.trace import Series

#: Counters that tick faster than this are read evenly (seconds).
LEAST_PERIOD_S = 0.025

#: Closest distance of two readings (seconds).
STEP_S = 0.001

#: Ticks over which the deviation from the expected moment is averaged.
MEMORY = 8


class Pace:
    """The timetable of one meter, from the ticks of its domains (the first that ticks slowly leads)."""

    def __init__(self, series: Sequence[Series], poll_period_s: float) -> None:
        self._poll_ns = round(poll_period_s * 1e9)
        slow = [each for each in series if each.domain.max_age_s is None]
        self._leader = slow[0] if len(slow) == len(series) and slow else None
        self._deviation_ns = 2e6
        self._expected_ns: int | None = None
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
        margin_ns = max(2 * self._deviation_ns, STEP_S * 1e9)
        early_ns = round(self._expected_ns - margin_ns)
        if now_ns < early_ns:
            return early_ns
        if now_ns > self._expected_ns + 2 * margin_ns:
            return now_ns + self._poll_ns
        return now_ns + round(max(margin_ns / 2, STEP_S * 1e9))

    def _learn(self, leader: Series) -> None:
        tick = leader.ticks[-1]
        if self._expected_ns is not None and len(leader.ticks) == self._seen + 1:
            error_ns = abs(tick.time_ns - self._expected_ns)
            self._deviation_ns += (error_ns - self._deviation_ns) / MEMORY
        if self._seen < 3 * MEMORY:
            seen_s = leader.tick_period_s
            self._period_s = seen_s if seen_s is not None else leader.domain.update_period_s
        self._seen = len(leader.ticks)
        if self._period_s is None or self._period_s < LEAST_PERIOD_S:
            self._expected_ns = None
        else:
            self._expected_ns = tick.time_ns + round(self._period_s * 1e9)
