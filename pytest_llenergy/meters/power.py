# SPDX-License-Identifier: Apache-2.0
"""Power readings made into a counter.

A power sensor refreshes its reading every T and tells the mean power since the refresh before (or over a
part of that time, or over longer: ``Domain.coverage`` and ``Domain.smear_s`` say so). Until the next refresh
it says the same. What is integrated over the time of the readings is therefore the energy of T before:

    E(t - T) = ∫ P(s) ds  up to t

which ``Domain.late_s`` says. A reading that changes is taken to have changed in the middle between the two
times at which it was read.
"""

from __future__ import annotations


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
