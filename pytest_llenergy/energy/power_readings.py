# SPDX-License-Identifier: Apache-2.0
"""Power readings: how often they are refreshed, and their integral as a counter.

A power sensor refreshes its reading every T with the mean power since the previous refresh, or over a shorter
or longer time (``Domain.coverage``, ``Domain.smear_s``). Until the next refresh the reading stays the same.
The integral of the readings therefore lags by T:

    E(t - T) = ∫ P(s) ds  up to t

which ``Domain.late_s`` states. A reading that changed is assumed to have changed in the middle between the
two moments at which it was read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_llenergy.energy.selfcheck import CheckResult


#: Changes of a reading that show how often it is refreshed; fewer may be changes of the power itself.
ENOUGH_CHANGES = 8

#: Factor by which an observed period may exceed the slowest possible refresh, for the time between polls.
LEEWAY = 1.1

#: A reading is no average if it moves this many times faster than one can, in at least this share of its
#: time: two refreshes may come in the time of one.
FASTER, SHORTEST_SHARE = 2.5, 0.1

#: Changes in a row, each at a refresh, that show that a reading moves at every refresh.
MOVES = 5

#: Power that is refreshed more often than this is sampled, since observing each refresh would take many times
#: as many readings (seconds).
SAMPLED_S = 0.015


class PowerWatch:
    """What power readings show about themselves by how they move.

    A running average over s cannot change by more than the highest power times T/s in a time T. A reading
    that does is plain, whatever was thought before. Some boards refresh their reading rarely while idle: one
    that stands still may be out of date.

    Args:
        smear_s: Time over which the reading may average, 0 if it is plain (seconds).
        highest_w: Highest power of the device (W), if known.
        refresh_s: Usual time between two refreshes (seconds).

    Attributes:
        averages: False if the reading is no average; ``None`` if it may be one.
    """

    def __init__(self, smear_s: float, highest_w: float | None, refresh_s: float) -> None:
        self.averages: bool | None = None if smear_s else False
        self._smear_s, self._highest_w, self._refresh_s = smear_s, highest_w or math.inf, refresh_s
        self._stale: list[tuple[float, float, float]] = []
        self._changed_s = self._read_s = 0.0
        self._watts: float | None = None
        self._lowest_w = math.inf
        self._regular = 0
        self._moves = False

    def add(self, time_s: float, watts: float) -> None:
        """Add a reading made at a monotonic time (seconds)."""
        self._read_s, self._lowest_w = time_s, min(watts, self._lowest_w)
        if watts == self._watts:
            return
        if self._watts is not None:
            elapsed_s, step_w = time_s - self._changed_s, watts - self._watts
            stood_s = elapsed_s - self._refresh_s
            self._regular += 1
            self._moves |= self._regular >= MOVES
            if stood_s > self._refresh_s / 2:
                off_w = min(abs(step_w), self._most_off_w())
                self._stale.append((self._changed_s, time_s, off_w * stood_s))
                self._regular = 0
            if self._smear_s:
                share = max(elapsed_s / self._smear_s, SHORTEST_SHARE)
                self.averages = False if abs(step_w) > FASTER * self._highest_w * share else self.averages
        self._watts, self._changed_s = watts, time_s

    def _most_off_w(self) -> float:
        """Return by how much a reading may be out of date: after work, power may be as low as ever.

        One that never moves at each refresh may stand still since power does.
        """
        return self._watts - self._lowest_w if self._moves and self._watts is not None else 0.0

    def forget_before(self, time_ns: int) -> None:
        """Forget what was out of date before a moment (monotonic nanoseconds)."""
        self._stale = [each for each in self._stale if each[1] * 1e9 >= time_ns]

    def stale_j(self, start_ns: int, end_ns: int) -> float:
        """Return by how much energy readings were off that were out of date between two moments."""
        # The reader may add one meanwhile. The present reading may be out of date already.
        stale, stood_s = list(self._stale), self._read_s - self._changed_s - self._refresh_s
        if self._watts is not None and stood_s > self._refresh_s / 2:
            stale.append((self._changed_s, self._read_s, self._most_off_w() * stood_s))
        return sum(off_j for a, b, off_j in stale if a * 1e9 < end_ns and b * 1e9 > start_ns)


class IntegratedPower:
    """A counter of joules integrated from watts.

    It moves when the reading changes, and at least every ``update_period_s``; with a period of 0, at every
    reading.
    """

    def __init__(self, update_period_s: float = 0.0, watch: PowerWatch | None = None) -> None:
        self._period_s = update_period_s
        self._watch = watch
        self._last: tuple[float, float] | None = None
        self._energy_j = 0.0
        self._counter_s = 0.0
        self._counter_j = 0.0

    def add(self, time_s: float, watts: float) -> float:
        """Add a reading made at a monotonic time (seconds).

        Returns:
            Joules from the first reading to the middle between the reading that moved the counter and the
            previous one; with a period of 0, to the last reading.
        """
        if self._watch is not None:
            self._watch.add(time_s, watts)
        last, self._last = self._last, (time_s, watts)
        if last is None:
            self._counter_s = time_s
            return self._counter_j
        half_s = (time_s - last[0]) / 2
        middle_j = self._energy_j + last[1] * half_s
        self._energy_j = middle_j + watts * half_s
        if not self._period_s:
            self._counter_j = self._energy_j
        elif watts != last[1] or time_s - self._counter_s >= self._period_s:
            self._counter_j, self._counter_s = middle_j, time_s
        return self._counter_j


class Refresh(NamedTuple):
    """How a power reading is refreshed and integrated, in seconds.

    Attributes:
        period_s: Nominal time between two refreshes, or the longest possible one if it is unknown.
        max_age_s: Greatest age of a reading where every reading counts as new; ``None`` where each refresh is
            observed.
        late_s: By how much the joules lag, at least and at most.
        known: Whether refreshes were observed.
    """

    period_s: float
    max_age_s: float | None = None
    late_s: tuple[float, float] = (0.0, 0.0)
    known: bool = True

    def integral(self, watch: PowerWatch | None = None) -> IntegratedPower:
        """Return the counter made of the readings."""
        return IntegratedPower(self.period_s if self.max_age_s is None else 0.0, watch)


def refresh_with_period(period_s: float, share: float | None = None) -> Refresh:
    """Return the refresh of a reading that averages power over a ``share`` (0 to 1) of the previous period.

    The reading counts for the period that follows it, and so lags by (1 + share)/2 periods. A share of
    ``None`` is unknown: the reading may average over anything from an instant to the whole period.
    """
    if period_s < SAMPLED_S:
        return Refresh(period_s, max_age_s=period_s, late_s=(0.0, 2 * period_s))
    least, most = (0.5, 1.0) if share is None else ((1 + share) / 2, (1 + share) / 2)
    return Refresh(period_s, late_s=(least * period_s, most * period_s))


def refresh_from_check(result: CheckResult | None, slowest_s: float, share: float | None = None) -> Refresh:
    """Return the refresh of a power reading as observed by a self-check.

    Power that hardly changes does not show when it is refreshed.

    Args:
        result: Result of the check; ``None`` if there was none.
        slowest_s: Longest possible time between two refreshes.
        share: As in ``refresh_with_period``.
    """
    if result is None or result.power_period_s is None or not _shows_refresh(result, slowest_s):
        # The reading averages over at most a period, and may be read until another period has passed.
        return Refresh(slowest_s, max_age_s=slowest_s, late_s=(0.0, 2 * slowest_s), known=False)
    period_s = result.power_period_s
    if result.power_continuous:
        return Refresh(period_s, max_age_s=period_s)
    return refresh_with_period(period_s, share)


def _shows_refresh(result: CheckResult, slowest_s: float) -> bool:
    often = result.power_changes >= ENOUGH_CHANGES
    return result.power_continuous or (often and (result.power_period_s or 0.0) <= LEEWAY * slowest_s)
