# SPDX-License-Identifier: Apache-2.0
"""What the meters said: for each domain, the moments at which its counter moved."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from pytest_llenergy.meters.protocol import Domain


@dataclass(frozen=True)
class Tick:
    """The counter moved to ``energy_j`` within ``gap_s`` around ``time_ns``: between two readings."""

    time_ns: int
    energy_j: float
    gap_s: float

    @property
    def earliest_ns(self) -> int:
        """The counter did not move before this."""
        return self.time_ns - round(self.gap_s * 5e8)

    @property
    def latest_ns(self) -> int:
        """The counter had moved by then."""
        return self.time_ns + round(self.gap_s * 5e8)


@dataclass
class Series:
    """The ticks of one domain in time order. ``reason`` is set once the domain could not be read."""

    meter: str
    domain: Domain
    ticks: list[Tick] = field(default_factory=list)
    reason: str | None = None
    _last: tuple[int, float] | None = None

    def add(self, time_ns: int, energy_j: float) -> None:
        """Note a reading; only one that moved the counter is kept."""
        last, self._last = self._last, (time_ns, energy_j)
        period_s = self.domain.update_period_s
        if last is None:
            # When the counter came to its first value is not known, unless it is known to be young.
            if period_s is not None:
                self._tick(time_ns, energy_j, period_s)
        elif energy_j < last[1]:
            self.fail(f"{self.meter}: the counter of {self.domain.name} went backwards")
        elif energy_j > last[1]:
            gap_s = (time_ns - last[0]) / 1e9
            self._tick(time_ns, energy_j, gap_s if period_s is None else min(gap_s, period_s))

    def _tick(self, seen_ns: int, energy_j: float, gap_s: float) -> None:
        self.ticks.append(Tick(seen_ns - round(gap_s * 5e8), energy_j, gap_s))

    def fail(self, reason: str) -> None:
        """Remember the first reason for which there is no value."""
        self.reason = self.reason or reason

    def before(self, time_ns: int) -> Tick | None:
        """The last tick that was surely over at a moment."""
        index = bisect_right(self.ticks, time_ns, key=_latest) - 1
        return self.ticks[index] if index >= 0 else None

    def after(self, time_ns: int) -> Tick | None:
        """The first tick that surely came at or after a moment."""
        index = bisect_left(self.ticks, time_ns, key=_earliest)
        return self.ticks[index] if index < len(self.ticks) else None

    def between(self, start_ns: int, end_ns: int) -> list[Tick]:
        """The ticks that surely came within a closed interval."""
        first = bisect_left(self.ticks, start_ns, key=_earliest)
        last = bisect_right(self.ticks, end_ns, key=_latest)
        return self.ticks[first:last]

    @property
    def tick_period_s(self) -> float | None:
        """Median time between ticks as seen; ``None`` below three ticks."""
        if len(self.ticks) < 3:
            return None
        steps = sorted(b.time_ns - a.time_ns for a, b in pairwise(self.ticks))
        return steps[len(steps) // 2] / 1e9


def _earliest(tick: Tick) -> int:
    return tick.earliest_ns


def _latest(tick: Tick) -> int:
    return tick.latest_ns
