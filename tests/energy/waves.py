# SPDX-License-Identifier: Apache-2.0
"""Waves of exactly known power, sensors with counters, and the series that a reader gets from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random

from pytest_llenergy.energy.meters.base import Domain, within
from pytest_llenergy.energy.trace import Series

MS = 1_000_000
S = 1_000_000_000

#: A moment well after the clock's start.
EPOCH = 1000 * S


@dataclass(frozen=True)
class Wave:
    """Power in watts from each moment (nanoseconds) to the next; zero before the first."""

    steps: tuple[tuple[int, float], ...]
    _moments: list[int] = field(init=False, repr=False)
    _joules: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = [watts * (end - start) / S for (start, watts), (end, _) in pairwise(self.steps)]
        object.__setattr__(self, "_moments", [start for start, _ in self.steps])
        object.__setattr__(self, "_joules", list(accumulate(parts, initial=0.0)))

    def energy_j(self, time_ns: int) -> float:
        """Return the energy since the first moment."""
        index = bisect_right(self._moments, time_ns) - 1
        if index < 0:
            return 0.0
        start_ns, watts = self.steps[index]
        return self._joules[index] + watts * (time_ns - start_ns) / S

    def joules(self, start_ns: int, end_ns: int) -> float:
        """Return the true energy between two moments."""
        return self.energy_j(end_ns) - self.energy_j(start_ns)


@dataclass(frozen=True)
class Sensor:
    """A counter in millijoules that ticks every ``latch_ns``, up to ``jitter_ns`` late.

    With ``window_ns`` it samples only the end of each tick and extrapolates. With ``latch_ns`` 0 the counter
    moves continuously.
    """

    wave: Wave
    latch_ns: int
    phase_ns: int = 0
    jitter_ns: int = 0
    window_ns: int = 0
    _ticks: list[tuple[int, float]] = field(default_factory=list, init=False, repr=False)

    def counter_j(self, time_ns: int) -> float:
        """Return the counter's value at a moment."""
        if self.latch_ns == 0:
            return int(self.wave.energy_j(time_ns) * 1000) / 1000
        if not self._ticks:
            self._ticks.append((self._moment(self.wave.steps[0][0] // self.latch_ns), 0.0))
        while self._ticks[-1][0] <= time_ns:
            self._ticks.append(self._next(*self._ticks[-1]))
        index = bisect_right(self._ticks, time_ns, key=lambda tick: tick[0]) - 1
        return int(self._ticks[max(0, index)][1] * 1000) / 1000

    def last_ns(self, time_ns: int) -> int:
        """Return the time of the last tick."""
        self.counter_j(time_ns)
        return max(tick_ns for tick_ns, _ in self._ticks if tick_ns <= time_ns)

    def watts(self, time_ns: int) -> float:
        """Return the power reading: the mean power between the last two ticks."""
        self.counter_j(time_ns)
        last = bisect_right(self._ticks, time_ns, key=lambda tick: tick[0]) - 1
        if last < 1:
            return 0.0
        (before_ns, before_j), (tick_ns, tick_j) = self._ticks[last - 1], self._ticks[last]
        return round((tick_j - before_j) / ((tick_ns - before_ns) / S), 3)

    def _moment(self, k: int) -> int:
        late_ns = Random(f"{k} {self.phase_ns}").randrange(self.jitter_ns) if self.jitter_ns else 0
        return k * self.latch_ns + self.phase_ns + late_ns

    def _next(self, last_ns: int, energy_j: float) -> tuple[int, float]:
        tick_ns = self._moment((last_ns - self.phase_ns) // self.latch_ns + 1)
        seen_ns = self.window_ns or tick_ns - last_ns
        return tick_ns, energy_j + self.wave.joules(tick_ns - seen_ns, tick_ns) * (
            tick_ns - last_ns
        ) / seen_ns


def domain(
    name: str = "gpu:GPU-a",
    period_s: float | None = None,
    coverage: float = 1.0,
    highest_w: float | None = None,
    max_age_s: float | None = None,
    smear_s: float = 0.0,
) -> Domain:
    return Domain(
        name=name,
        kind="measured",
        source="wave",
        scope="board",
        update_period_s=period_s,
        max_age_s=max_age_s,
        resolution_j=0.001,
        accuracy="within 5%",
        limits=within(0.05),
        coverage=coverage,
        highest_w=highest_w,
        smear_s=smear_s,
    )


def read_at(sensor: Sensor, moments: Iterable[int], meter_domain: Domain | None = None) -> Series:
    """Return the series of a reader that reads the counter at these moments."""
    series = Series("nvml", meter_domain or domain())
    for moment in sorted(moments):
        series.add(moment, moment, sensor.counter_j(moment))
    return series


def steps(rng: Random, start_ns: int, end_ns: int) -> list[tuple[int, float]]:
    """Change power up to ten times at random moments."""
    moments = sorted({start_ns, *(rng.randrange(start_ns, end_ns) for _ in range(rng.randrange(10)))})
    return [(moment, rng.uniform(120, 700)) for moment in moments]


def bursts(rng: Random, start_ns: int, end_ns: int) -> list[tuple[int, float]]:
    """Draw a square wave with a period of 2 to 500 ms."""
    low_w, high_w = sorted((rng.uniform(80, 700), rng.uniform(80, 700)))
    period_ns = rng.randrange(2 * MS, 500 * MS)
    high_ns = round(period_ns * rng.uniform(0.1, 0.9))
    found: list[tuple[int, float]] = []
    for moment in range(start_ns, end_ns, period_ns):
        found += [(moment, high_w), (moment + high_ns, low_w)]
    return [(moment, watts) for moment, watts in found if moment < end_ns]


def noise(rng: Random, start_ns: int, end_ns: int) -> list[tuple[int, float]]:
    """Draw a new power every 1 to 50 ms."""
    period_ns, middle_w = rng.randrange(MS, 50 * MS), rng.uniform(200, 500)
    width_w = middle_w * rng.uniform(0.05, 0.5)
    moments = range(start_ns, end_ns, period_ns)
    return [(moment, rng.uniform(middle_w - width_w, middle_w + width_w)) for moment in moments]


def ramp(rng: Random, start_ns: int, end_ns: int) -> list[tuple[int, float]]:
    """Change from one power to another in steps of a millisecond."""
    from_w, to_w = rng.uniform(120, 700), rng.uniform(120, 700)
    n = max(1, (end_ns - start_ns) // MS)
    return [(start_ns + index * MS, from_w + (to_w - from_w) * index / n) for index in range(n)]


SHAPES = (steps, bursts, noise, ramp)
