# SPDX-License-Identifier: Apache-2.0
"""Power readings made into a counter.

A power sensor refreshes its reading every T and gives the mean power since the refresh before (or over a
part of that time, or over longer: ``Domain.coverage`` and ``Domain.smear_s`` say so). A reading that has
just changed therefore holds for the time since the last change, backwards:

    E(t_k) = E(t_{k-1}) + P_k (t_k - t_{k-1})

which is what an energy counter that ticks every T would say. A reading that does not change for longer
than T says that power is steady, and the counter moves on with it, in steps of T from the last change.
"""

from __future__ import annotations

import math


class IntegratedPower:
    """Joules from watts.

    ``update_period_s`` is the sensor's. With 0 every reading is a new one, of the power at that moment; with
    infinity each is the mean power since the reading before.
    """

    def __init__(self, update_period_s: float = 0.0) -> None:
        self._period_s = update_period_s
        self._refresh_s: float | None = None
        self._watts = 0.0
        self._energy_j = 0.0
        self._told_j = 0.0

    def add(self, time_s: float, watts: float) -> float:
        """Take a reading at a monotonic time (seconds). Returns joules since the first one."""
        if self._refresh_s is None:
            self._refresh_s, self._watts = time_s, watts
            return self._told_j
        elapsed_s = time_s - self._refresh_s
        if not self._period_s:
            self._energy_j += (watts + self._watts) / 2 * elapsed_s
            self._refresh_s = time_s
        elif math.isinf(self._period_s):
            self._energy_j += watts * elapsed_s
            self._refresh_s = time_s
        elif watts != self._watts:
            # It holds for one period back. The phase that was assumed while nothing changed may have been
            # wrong; what was counted too much at the old power is then taken back.
            self._energy_j += watts * self._period_s + self._watts * (elapsed_s - self._period_s)
            self._refresh_s = time_s
        else:
            # Refreshed without a change, at its own moments and not at those of the readings.
            refreshed = elapsed_s // self._period_s
            self._energy_j += watts * self._period_s * refreshed
            self._refresh_s += self._period_s * refreshed
        self._watts = watts
        # A counter does not run backwards.
        self._told_j = max(self._told_j, self._energy_j)
        return self._told_j
