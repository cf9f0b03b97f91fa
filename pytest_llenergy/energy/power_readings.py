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

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_llenergy.energy.selfcheck import CheckResult


#: Changes of a reading that show how often it is refreshed; fewer may be changes of the power itself.
ENOUGH_CHANGES = 8

#: Factor by which an observed period may exceed the slowest possible refresh, for the time between polls.
LEEWAY = 1.1

#: Power that is refreshed more often than this is sampled, since observing each refresh would take many times
#: as many readings (seconds).
SAMPLED_S = 0.015


class IntegratedPower:
    """A counter of joules integrated from watts.

    It moves when the reading changes, and at least every ``update_period_s``; with a period of 0, at every
    reading.
    """

    def __init__(self, update_period_s: float = 0.0) -> None:
        self._period_s = update_period_s
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

    def integral(self) -> IntegratedPower:
        """Return the counter made of the readings."""
        return IntegratedPower(self.period_s if self.max_age_s is None else 0.0)


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
