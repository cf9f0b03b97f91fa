# SPDX-License-Identifier: Apache-2.0
"""When a power reading is refreshed, as far as watching it told."""

from __future__ import annotations

from typing import NamedTuple

from pytest_llenergy.meters.checkresult import CheckResult
from pytest_llenergy.meters.power import IntegratedPower

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


def refreshed_every(period_s: float) -> Refresh:
    """A reading tells the mean power of the period before it, and stands for another."""
    return Refresh(period_s, late_s=(period_s, period_s))


def refresh_seen(result: CheckResult | None, slowest_s: float) -> Refresh:
    """What a check tells of a power reading; ``None`` if there was none.

    Power that does not change does not show when it is refreshed; that takes no longer than ``slowest_s``.
    """
    if result is None or result.power_period_s is None:
        # What it is the mean of is at most a period long, and it may be read until another has passed.
        return Refresh(slowest_s, max_age_s=slowest_s, late_s=(0.0, 2 * slowest_s), known=False)
    period_s = result.power_period_s
    if result.power_continuous:
        return Refresh(period_s, max_age_s=period_s)
    if period_s < SAMPLED_S:
        # It may be a mean or not.
        return Refresh(period_s, max_age_s=period_s, late_s=(0.0, 2 * period_s))
    return refreshed_every(period_s)
