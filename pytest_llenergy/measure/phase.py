# SPDX-License-Identifier: Apache-2.0
"""Rounds start in shuffled phase to the counter.

Work that always starts in the same part of a tick always falls into the same part of what a part-time
sensor sees, and is wrong by the same amount however often it is repeated. Rounds are therefore started in
n strata of the tick, one each, in random order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from random import Random

from pytest_llenergy.meters.trace import Series, Tick

#: Counters that tick slower than this are not waited for (seconds).
LONGEST_WAIT_S = 2.0

#: Ticks among which the one is chosen that the phase is counted from, and the share of a period by which a
#: period may be off: a tick is worth less the older it is.
LOOK_BACK = 8
PERIOD_OFF = 0.02


class PhaseDither:
    """Says when the next round may start; ``n`` is the number of strata."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self._n = n
        self._random = Random(seed)
        self._strata: list[int] = []

    def wait(self, trace: Sequence[Series]) -> None:
        """Sleep until the phase of the next stratum in the ticks of the slowest counter."""
        leader = slowest(trace)
        if leader is None or not leader.ticks or not leader.period_s:
            return
        if not self._strata:
            self._strata = self._random.sample(range(self._n), self._n)
        phase = (self._strata.pop() + self._random.random()) / self._n
        period_ns = round(leader.period_s * 1e9)
        target_ns = _best_known(leader.ticks[-LOOK_BACK:]).time_ns + round(phase * period_ns)
        ahead_ns = time.monotonic_ns() - target_ns
        time.sleep((-ahead_ns % period_ns) / 1e9)


def strata_for(coverage: float) -> int:
    """Strata in which random starts leave no stretch of a tick out that is as long as the sensor looks."""
    return math.ceil(2 / coverage) if coverage < 1 else 1


def slowest(trace: Sequence[Series]) -> Series | None:
    """The series whose ticks are furthest apart, among those that can be waited for."""
    ticking = [
        series
        for series in trace
        if series.domain.max_age_s is None and 0 < (series.period_s or 0.0) <= LONGEST_WAIT_S
    ]
    return max(ticking, key=lambda series: series.period_s or 0.0, default=None)


def phase_of(trace: Sequence[Series], time_ns: int) -> float | None:
    """Where in a tick of the slowest counter a moment lies, from 0 to 1; ``None`` without ticks."""
    leader = slowest(trace)
    ticks = leader.around(time_ns, LOOK_BACK)[0] if leader is not None else []
    if leader is None or not ticks or not leader.period_s:
        return None
    return (time_ns - _best_known(ticks).time_ns) / 1e9 / leader.period_s % 1.0


def _best_known(ticks: Sequence[Tick]) -> Tick:
    """The tick from which the phase after the last one can be told best.

    On a busy machine a tick may be known to half a period only, and the one before it to a millisecond.
    """
    newest_ns = ticks[-1].time_ns
    return min(ticks, key=lambda tick: tick.gap_s / 2 + (newest_ns - tick.time_ns) / 1e9 * PERIOD_OFF)
