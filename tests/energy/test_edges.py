# SPDX-License-Identifier: Apache-2.0
"""Energy at the edges of windows, on waves whose energy is known by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.energy.quiet_gaps import Quiet, energy_beside, quiet_power
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.window_arithmetic import energy_between, require_resolvable

from .watching import Spell, simulate_reader
from .waves import EPOCH, MS, S, Sensor, Wave, domain, read_at

START, END = EPOCH + 530 * MS, EPOCH + 870 * MS
WAVE = Wave(((EPOCH - 4 * S, 50.0), (START, 400.0), (END, 60.0), (EPOCH + 9 * S, 60.0)))
TICK = 100 * MS


def fine(start_ns: int = EPOCH - S // 2, end_ns: int = EPOCH + 2 * S) -> Iterable[int]:
    return range(start_ns, end_ns, 100_000)


def quiet(series: Series, start_ns: int, end_ns: int) -> Quiet:
    found = quiet_power(series, start_ns, end_ns)
    assert found is not None
    return found


class TestQuietEdges:
    def test_idle_power_extrapolates_the_counter_to_the_edge(self) -> None:
        series = read_at(Sensor(WAVE, TICK), fine())
        before, after = quiet(series, EPOCH, START), quiet(series, END, EPOCH + 3 * S // 2)
        assert (before.watts, after.watts) == pytest.approx((50, 60), rel=0.01)
        start, end = (
            energy_beside(series, START, before, starts=True),
            energy_beside(series, END, after, starts=False),
        )
        assert start is not None
        assert end is not None
        # 340 ms at 400 W. The readings are 0.1 ms apart, and idle power is 60 W at most.
        assert end.energy_j - start.energy_j == pytest.approx(136, abs=0.02)

    def test_an_unknown_constant_delay_costs_the_difference_of_the_idle_powers(self) -> None:
        """The delay is known only to lie between 0 and 200 ms; it is 200 ms."""
        exact = read_at(Sensor(WAVE, 0), fine(EPOCH - S, EPOCH + 3 * S), domain(max_age_s=0.001))
        late = Series("nvml", domain(max_age_s=0.001)._replace(late_s=(0.0, 0.2)))
        for moment in fine(EPOCH - S, EPOCH + 3 * S):
            late.add(moment, moment, WAVE.energy_j(moment - 200 * MS))
        found = []
        for series in (exact, late):
            before, after = quiet(series, EPOCH - S // 2, START), quiet(series, END, EPOCH + 2 * S)
            found.append(energy_between(series, START, END, before, after))
        true_j = WAVE.joules(START, END)
        assert found[0].energy_j == pytest.approx(true_j, abs=0.1)
        # It is assumed to be 100 ms, so 100 ms at 50 W take the place of 60 W.
        assert found[1].energy_j == pytest.approx(true_j - 10 * 0.1, abs=0.1)
        assert found[1].variances.outside == pytest.approx((10 * 0.2) ** 2 / 12, rel=0.1)

    def test_a_gap_with_one_tick_gives_no_idle_power(self) -> None:
        series = read_at(Sensor(WAVE, TICK), fine())
        assert quiet_power(series, START - 120 * MS, START) is None

    def test_fluctuating_idle_power_is_more_uncertain(self) -> None:
        steps = [(EPOCH - S + index * TICK, 50.0 + 20 * (index % 2)) for index in range(30)]
        series = read_at(Sensor(Wave(tuple(steps)), TICK), fine())
        # Nine steps, a standard deviation of 10.5 W, and Student's factor for eight degrees of freedom.
        expected_w = 1.19 * math.sqrt(10.5**2 * (1 + 1 / 9))
        assert quiet(series, EPOCH, EPOCH + S).fluctuation_w == pytest.approx(expected_w, rel=0.05)
        steady = read_at(Sensor(WAVE, TICK), fine())
        assert quiet(steady, EPOCH - S // 2, START).fluctuation_w == pytest.approx(0, abs=0.1)

    def test_a_running_average_is_read_until_it_has_settled(self) -> None:
        """The readings lag: energy used before the end arrives up to a second later."""
        series = Series("nvml", domain(smear_s=1.0, period_s=0.1))
        for moment in range(EPOCH - 2 * S, EPOCH + 6 * S, TICK):
            averaged = sum(WAVE.energy_j(moment - late * TICK) for late in range(10)) / 10
            series.add(moment, moment, averaged)
        before, after = quiet(series, EPOCH - S, START), quiet(series, END, EPOCH + 5 * S)
        assert after.watts == pytest.approx(60, rel=0.01)
        end, start = (
            energy_beside(series, END, after, starts=False),
            energy_beside(series, START, before, starts=True),
        )
        assert end is not None
        assert start is not None
        # The averaged counter lags by 0.45 s, at 50 W before and 60 W after.
        assert end.energy_j - start.energy_j == pytest.approx(136, abs=0.45 * 10 + 1)

    def test_power_averaged_over_a_second_cannot_resolve_a_window_of_a_tenth(self) -> None:
        series = read_at(Sensor(WAVE, TICK), fine(), domain(smear_s=1.0, period_s=0.1))
        energy = energy_between(series, START, START + 120 * MS)
        assert energy.energy_j is None
        reason = "not resolvable: 120 ms window, power averaged over 1000 ms and not steady after the window"
        assert energy.reason == reason


def scores(outside_w: float, inside_w: float, length_ms: int, load_ms: int | None = None) -> list[float]:
    """Return errors in units of u of windows at random phases; the load lasts ``load_ms`` or the window."""
    rng, found = Random(length_ms), []
    for _ in range(150):
        start_ns = EPOCH + rng.randrange(TICK)
        end_ns = start_ns + length_ms * MS
        until_ns = start_ns + (load_ms or length_ms) * MS
        wave = Wave(((EPOCH - 4 * S, outside_w), (start_ns, inside_w), (until_ns, outside_w)))
        spells = [Spell(start_ns, end_ns, at_work=True), Spell(end_ns, end_ns + S, at_work=False)]
        series = simulate_reader(
            [Sensor(wave, TICK)],
            rng,
            start_ns - 2 * S,
            end_ns + S,
            domain(period_s=0.1, highest_w=700),
            spells,
        )
        energy = require_resolvable(energy_between(series, start_ns, end_ns), series, start_ns, end_ns)
        if energy.energy_j is not None and energy.u_j is not None:
            found.append(abs(energy.energy_j - wave.joules(start_ns, end_ns)) / energy.u_j)
    return found


@pytest.mark.parametrize("length_ms", [10, 30, 80, 130, 180])
def test_a_short_load_alone_is_not_told_from_a_burst_around_it(length_ms: int) -> None:
    """The same ticks would show a longer burst at less power, of which the window is a part."""
    found = scores(100, 500, length_ms)
    # It has an energy all the same, with a wide uncertainty: the ticks and the power limit bound it.
    assert len(found) == 150
    assert all(score <= 2.5 for score in found)
    assert fmean(score <= 2 for score in found) >= 0.95


@pytest.mark.parametrize("length_ms", [30, 80, 130])
def test_a_window_in_steady_load_gets_its_share_of_the_energy(length_ms: int) -> None:
    found = scores(400, 400, length_ms)
    assert len(found) >= 0.5 * 150
    assert fmean(score <= 2 for score in found) >= 0.95


def test_load_after_the_window_is_not_counted() -> None:
    """The load ends 400 ms after the window, so the power after it differs from the power before."""
    found = scores(100, 500, 80, load_ms=480)
    assert len(found) >= 20
    assert fmean(score <= 2 for score in found) >= 0.95
