# SPDX-License-Identifier: Apache-2.0
"""Power readings: how often they are refreshed, and their integral as a counter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_llenergy.meters.selfcheck import CheckResult

# Power readings made into a counter.
#
# A power sensor refreshes its reading every T and tells the mean power since the refresh before (or over a
# part of that time, or over longer: ``Domain.coverage`` and ``Domain.smear_s`` say so). Until the next
# refresh it says the same. What is integrated over the time of the readings is therefore the energy of T
# before:
#
#     E(t - T) = ∫ P(s) ds  up to t
#
# which ``Domain.late_s`` says. A reading that changes is taken to have changed in the middle between the two
# times at which it was read.


class IntegratedPower:
    """Joules from watts. They move when the reading does, or every ``update_period_s`` where it does not.

    With 0 seconds they move with every reading.
    """

    def __init__(self, update_period_s: float = 0.0) -> None:
        self._period_s = update_period_s
        self._last: tuple[float, float] | None = None
        self._energy_j = 0.0
        self._told_s = 0.0
        self._told_j = 0.0

    def add(self, time_s: float, watts: float) -> float:
        """Take a reading at a monotonic time (seconds).

        Returns joules since the first one: those of the middle between the reading that moved them and the
        one before, as befits a counter that was seen to have moved between the two; with a period of 0 those
        of the last reading.
        """
        last, self._last = self._last, (time_s, watts)
        if last is None:
            self._told_s = time_s
            return self._told_j
        half_s = (time_s - last[0]) / 2
        middle_j = self._energy_j + last[1] * half_s
        self._energy_j = middle_j + watts * half_s
        if not self._period_s:
            self._told_j = self._energy_j
        elif watts != last[1] or time_s - self._told_s >= self._period_s:
            self._told_j, self._told_s = middle_j, time_s
        return self._told_j


# When a power reading is refreshed, as far as watching it told.

#: Changes of a reading that tell how often it is refreshed; fewer may be those of the power itself.
ENOUGH_CHANGES = 8

#: How much longer than the slowest refresh that is possible a period may seem, for the time between polls.
LEEWAY = 1.1

#: Power that is refreshed more often than this is sampled, rather than each refresh looked for: that would
#: take readings many times as often (seconds).
SAMPLED_S = 0.015


class Refresh(NamedTuple):
    """How a power reading is refreshed and integrated, in seconds.

    - ``period_s``: nominal time between two refreshes, or the longest that is possible where it is not known.
    - ``max_age_s``: every reading is taken for a new one, and is no older than this; ``None`` where each
      refresh is looked for.
    - ``late_s``: how late the joules are told, at least and at most.
    - ``known``: whether refreshes were seen.
    """

    period_s: float
    max_age_s: float | None = None
    late_s: tuple[float, float] = (0.0, 0.0)
    known: bool = True

    def integral(self) -> IntegratedPower:
        """The counter made of the readings."""
        return IntegratedPower(self.period_s if self.max_age_s is None else 0.0)


def refresh_with_period(period_s: float, share: float | None = None) -> Refresh:
    """A reading that tells the mean power of a ``share`` (0 to 1) of the period before it.

    It stands for the period that begins with it, and so is late by (1 + share)/2 periods. Where the share is
    not known it is that of an instant, of all the time, or of anything in between.
    """
    if period_s < SAMPLED_S:
        return Refresh(period_s, max_age_s=period_s, late_s=(0.0, 2 * period_s))
    least, most = (0.5, 1.0) if share is None else ((1 + share) / 2, (1 + share) / 2)
    return Refresh(period_s, late_s=(least * period_s, most * period_s))


def refresh_from_check(result: CheckResult | None, slowest_s: float, share: float | None = None) -> Refresh:
    """What a check tells of a power reading, ``None`` if there was none; ``share`` as in ``refreshed_every``.

    Power that hardly changes does not show when it is refreshed; that takes no longer than ``slowest_s``.
    """
    if result is None or result.power_period_s is None or not _shows_refresh(result, slowest_s):
        # What it is the mean of is at most a period long, and it may be read until another has passed.
        return Refresh(slowest_s, max_age_s=slowest_s, late_s=(0.0, 2 * slowest_s), known=False)
    period_s = result.power_period_s
    if result.power_continuous:
        return Refresh(period_s, max_age_s=period_s)
    return refresh_with_period(period_s, share)


def _shows_refresh(result: CheckResult, slowest_s: float) -> bool:
    often = result.power_changes >= ENOUGH_CHANGES
    return result.power_continuous or (often and (result.power_period_s or 0.0) <= LEEWAY * slowest_s)
