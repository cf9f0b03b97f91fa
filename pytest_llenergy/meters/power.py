# SPDX-License-Identifier: Apache-2.0
"""Power readings made into a counter.

A power sensor refreshes its reading every T and gives the mean power since the refresh before (or over a
part of that time, or over longer: ``Domain.coverage`` and ``Domain.smear_s`` say so). A reading that has
just changed therefore holds for the time since the last change, backwards:

    E(t_k) = E(t_{k-1}) + P_k (t_k - t_{k-1})

which is what an energy counter that ticks every T would say. A reading that does not change for longer
than T says that power is steady, and the counter moves on with it.
"""

from __future__ import annotations


class IntegratedPower:
    """Joules from watts. ``update_period_s`` is the sensor's; 0 means that every reading is a new one."""

    def __init__(self, update_period_s: float = 0.0) -> None:
        self._update_period_s = update_period_s
        self._time_s: float | None = None
        self._watts = 0.0
        self._energy_j = 0.0

    def add(self, time_s: float, watts: float) -> float:
        """Take a reading at a monotonic time (seconds). Returns joules since the first one."""
        if self._time_s is None:
            self._time_s, self._watts = time_s, watts
            return self._energy_j
        elapsed_s = time_s - self._time_s
        if watts == self._watts and elapsed_s < self._update_period_s:
            return self._energy_j
        mean_w = watts if self._update_period_s else (watts + self._watts) / 2
        self._energy_j += mean_w * elapsed_s
        self._time_s, self._watts = time_s, watts
        return self._energy_j
