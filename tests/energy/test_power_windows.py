# SPDX-License-Identifier: Apache-2.0
"""Windows over integrated power whose refresh is unknown, or whose readings are running averages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.energy.power_readings import (
    PowerWatch,
    Refresh,
    refresh_from_check,
    refresh_with_period,
)
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import WindowEnergy
from pytest_llenergy.energy.window_arithmetic import energy_between, require_resolvable

from . import watching
from .watching import simulate_reader
from .waves import EPOCH, MS, S, Sensor, Wave, domain

TICK = 100 * MS
WINDOWS = 60
UNKNOWN = refresh_from_check(None, slowest_s=0.1)

Course = Callable[[Random, int, int], Wave]


class Averaging(Sensor):
    """A sensor whose reading is the mean power of the last second, refreshed every tick."""

    def watts(self, time_ns: int) -> float:
        tick_ns = time_ns // self.latch_ns * self.latch_ns
        return self.wave.joules(tick_ns - S, tick_ns)


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    rng: Random,
    sensor: Sensor,
    refresh: Refresh,
    window: tuple[int, int],
    watch: PowerWatch | None = None,
) -> WindowEnergy:
    """Return the energy of a window that a reader observed, from up to 50 ms (or s) before it."""
    monkeypatch.setattr(watching, "IntegratedPower", lambda _: refresh.integral(watch))
    smear_s = 1.0 if watch is not None or isinstance(sensor, Averaging) else 0.0
    meter_domain = domain(period_s=refresh.period_s, max_age_s=refresh.max_age_s, smear_s=smear_s)
    meter_domain = meter_domain._replace(integrated=True, late_s=refresh.late_s, watch=watch)
    begin_ns = window[0] - rng.randrange(50 * MS) - 2 * round(smear_s * S)
    until_ns = window[1] + S + 2 * round(smear_s * S)
    series: Series = simulate_reader([sensor], rng, begin_ns, until_ns, meter_domain)
    energy = energy_between(series, *window)
    return require_resolvable(energy, series, *window)


def test_constant_power_of_unknown_refresh_is_not_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that begin right after the first reading were up to 20 % too high."""
    rng, errors = Random(0), []
    sensor = Sensor(Wave(((EPOCH - 20 * S, 12.0),)), TICK)
    for _ in range(WINDOWS):
        window = (EPOCH, EPOCH + rng.randrange(300 * MS, S))
        energy = simulate(monkeypatch, rng, sensor, UNKNOWN, window)
        true_j = sensor.wave.joules(*window)
        errors += [energy.energy_j / true_j - 1] if energy.energy_j is not None else []
    assert len(errors) > WINDOWS / 2
    assert max(abs(error) for error in errors) < 1e-3


def step(rng: Random, start_ns: int, end_ns: int) -> Wave:
    """Draw steady power before, in and after the window."""
    before_w, after_w = rng.uniform(60, 300), rng.uniform(60, 300)
    return Wave(((EPOCH - 20 * S, before_w), (start_ns, 400.0), (end_ns, after_w)))


def loop(rng: Random, start_ns: int, end_ns: int) -> Wave:
    """Draw a window of a loop with a period of 50 to 900 ms."""
    period_ns = rng.randrange(50 * MS, 900 * MS)
    moments = range(start_ns - 4 * S, end_ns + 4 * S, period_ns)
    return Wave(tuple(each for at in moments for each in ((at, 400.0), (at + period_ns // 2, 150.0))))


@pytest.mark.parametrize("refresh", [refresh_with_period(0.1), UNKNOWN], ids=["refresh known", "unknown"])
@pytest.mark.parametrize("shortest_ms", [100, 400, 1000])
@pytest.mark.parametrize("course", [step, loop])
@pytest.mark.slow
def test_one_second_averages_give_the_energy_of_a_window_or_a_reason(
    monkeypatch: pytest.MonkeyPatch, course: Course, shortest_ms: int, refresh: Refresh
) -> None:
    """Between steps of power, windows of 0.1 to 3 s were 49 to 6 % too low."""
    rng, found_j, true_j, scores = Random(shortest_ms), 0.0, 0.0, []
    for _ in range(WINDOWS):
        start_ns = EPOCH + rng.randrange(S)
        window = (start_ns, start_ns + rng.randrange(shortest_ms * MS, 3 * shortest_ms * MS))
        wave = course(rng, *window)
        energy = simulate(monkeypatch, rng, Averaging(wave, TICK), refresh, window)
        if energy.energy_j is None or energy.u_j is None:
            assert energy.reason is not None
            assert energy.reason.startswith("not resolvable: ")
            continue
        found_j, true_j = found_j + energy.energy_j, true_j + wave.joules(*window)
        scores.append(abs(energy.energy_j - wave.joules(*window)) / energy.u_j)
    assert len(scores) > (0.5 * WINDOWS if course is step or shortest_ms == 1000 else 0)
    assert found_j == pytest.approx(true_j, rel=0.06)
    assert fmean(score <= 2 for score in scores) >= 0.9


@pytest.mark.parametrize("sensor", [Sensor, Averaging], ids=["plain", "average"])
def test_readings_that_move_faster_than_averages_are_plain(
    monkeypatch: pytest.MonkeyPatch, sensor: type[Sensor]
) -> None:
    """Plain power that was taken for an average gave a third of the energy."""
    rng, known, scores = Random(0), 0, []
    for _ in range(WINDOWS):
        window = (EPOCH, EPOCH + rng.randrange(300 * MS, 2 * S))
        wave, watch = step(rng, *window), PowerWatch(1.0, 450.0, 0.1)
        energy = simulate(monkeypatch, rng, sensor(wave, TICK), refresh_with_period(0.1), window, watch)
        known += watch.averages is False
        if energy.energy_j is not None and energy.u_j is not None:
            scores.append(abs(energy.energy_j - wave.joules(*window)) / energy.u_j)
    assert known == 0 if sensor is Averaging else known > WINDOWS / 3
    assert len(scores) > WINDOWS / 2
    assert fmean(score <= 2 for score in scores) >= 0.95


@pytest.mark.parametrize("until_s", [5.9, 8.0], ids=["it still stands", "it has moved"])
def test_a_reading_that_stands_still_after_work_is_doubted(until_s: float) -> None:
    """A board that draws 120 W until 5.05 s, and then refreshes its reading of 69 W a second later."""
    watch, refresh = PowerWatch(0.0, 130.0, 0.1), refresh_with_period(0.1, 1.0)
    power, series = refresh.integral(watch), Series("nvml", domain(period_s=0.1))
    series.domain = series.domain._replace(integrated=True, late_s=refresh.late_s, watch=watch)
    busy = [(n / 10, 120 + n % 2 / 100) for n in range(11, 51)]
    refreshes = [(0.0, 18.0), *busy, (5.1, 69.0), (6.1, 18.0), (7.1, 18.01)]
    for n in range(round(until_s * 100)):
        watts = [watts for at_s, watts in refreshes if at_s <= n / 100][-1]
        moment = EPOCH + n * 10 * MS
        series.add(moment, moment, power.add(moment / S, watts))
    energy = energy_between(series, EPOCH + 4 * S, EPOCH + 5500 * MS)
    assert energy.energy_j is not None
    assert energy.u_j is not None
    assert abs(energy.energy_j - (120 * 1.05 + 18 * 0.45)) <= 2 * energy.u_j
