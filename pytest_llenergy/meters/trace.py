# SPDX-License-Identifier: Apache-2.0
"""What the meters said: for each domain, the moments at which its counter moved."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from pytest_llenergy.meters.protocol import Domain


@dataclass(frozen=True)
class Tick:
    """The counter was first seen at ``energy_j`` at ``time_ns``; it moved within ``gap_s`` before."""

    time_ns: int
    energy_j: float
    gap_s: float


@dataclass
class Series:
    """The ticks of one domain in time order. ``reason`` is set once the domain could not be read."""

    meter: str
    domain: Domain
    ticks: list[Tick] = field(default_factory=list)
    reason: str | None = None
    _last_read_ns: int | None = None

    def add(self, time_ns: int, energy_j: float) -> None:
        """Note a reading; only one that moved the counter is kept."""
        previous_ns, self._last_read_ns = self._last_read_ns, time_ns
        if self.ticks and energy_j == self.ticks[-1].energy_j:
            return
        if self.ticks and energy_j < self.ticks[-1].energy_j:
            self.fail(f"{self.meter}: the counter of {self.domain.name} went backwards")
            return
        gap_s = (time_ns - previous_ns) / 1e9 if previous_ns is not None else 0.0
        period_s = self.domain.update_period_s
        self.ticks.append(Tick(time_ns, energy_j, gap_s if period_s is None else min(gap_s, period_s)))

    def fail(self, reason: str) -> None:
        """Remember the first reason for which there is no value."""
        self.reason = self.reason or reason

    def before(self, time_ns: int) -> Tick | None:
        """The last tick at or before a moment."""
        index = bisect_right(self.ticks, time_ns, key=_time) - 1
        return self.ticks[index] if index >= 0 else None

    def after(self, time_ns: int) -> Tick | None:
        """The first tick at or after a moment."""
        index = bisect_left(self.ticks, time_ns, key=_time)
        return self.ticks[index] if index < len(self.ticks) else None

    def between(self, start_ns: int, end_ns: int) -> list[Tick]:
        """The ticks within a closed interval."""
        first = bisect_left(self.ticks, start_ns, key=_time)
        last = bisect_right(self.ticks, end_ns, key=_time)
        return self.ticks[first:last]

    @property
    def tick_period_s(self) -> float | None:
        """Median time between ticks as seen; ``None`` below three ticks."""
        if len(self.ticks) < 3:
            return None
        steps = sorted(b.time_ns - a.time_ns for a, b in pairwise(self.ticks))
        return steps[len(steps) // 2] / 1e9


def _time(tick: Tick) -> int:
    return tick.time_ns
