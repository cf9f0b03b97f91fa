# SPDX-License-Identifier: Apache-2.0
"""Integration of power readings, on power known by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from pytest_llenergy.energy.power_readings import (
    IntegratedPower,
    Refresh,
    refresh_from_check,
    refresh_with_period,
)
from pytest_llenergy.energy.selfcheck import CheckResult, Reading, evaluate_readings

#: Start and end (seconds) of a load that adds 400 W to 100 W of idle power.
LOAD_S = (5.03, 5.33)


def mean_power_reading(time_s: float, period_s: float, phase_s: float) -> float:
    """Return the reading of a sensor that reports at each refresh the mean power since the previous one."""
    end_s = math.floor((time_s - phase_s) / period_s) * period_s + phase_s
    busy_s = max(0.0, min(end_s, LOAD_S[1]) - max(end_s - period_s, LOAD_S[0]))
    return 100 + 400 * busy_s / period_s


@pytest.mark.parametrize("phase_s", [0.0, 0.033, 0.071])
def test_integrated_energy_lags_by_one_refresh(phase_s: float) -> None:
    power, rng, time_s, energy_read_j, moved = IntegratedPower(0.1), Random(1), 0.0, 0.0, []
    while time_s < 10:
        before_j, energy_read_j = energy_read_j, power.add(time_s, mean_power_reading(time_s, 0.1, phase_s))
        if energy_read_j > before_j:
            moved.append((time_s - 0.1, energy_read_j))
        time_s += 0.001 + rng.random() * 0.002
    for moment_s, energy_j in moved[2:]:
        busy_s = min(max(moment_s - LOAD_S[0], 0.0), LOAD_S[1] - LOAD_S[0])
        # Tolerance: a reading comes up to 3 ms after the refresh, and the first was of idle power.
        assert energy_j == pytest.approx(100 * (moment_s + 0.1) + 400 * busy_s, abs=500 * 0.003 * 2)


def test_without_a_period_power_is_integrated_by_trapezoids() -> None:
    power = IntegratedPower()
    assert [power.add(time_s, watts) for time_s, watts in ((0, 10), (1, 20), (3, 20))] == [0, 15, 55]


UNKNOWN = Refresh(0.1, 0.1, (0.0, 0.2), known=False)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # Slow enough that polling looks for each refresh, which reports power up to one refresh old.
        (CheckResult(1.0, power_period_s=0.1, power_changes=8), Refresh(0.1, late_s=(0.05, 0.1))),
        # The reading moves continuously, so it is instantaneous.
        (CheckResult(1.0, power_period_s=0.002, power_continuous=True), Refresh(0.002, 0.002)),
        # Refreshed too often for polling to look for each refresh.
        (CheckResult(1.0, power_period_s=0.01, power_changes=99), Refresh(0.01, 0.01, (0.0, 0.02))),
        # The power did not change, or there was no check.
        (CheckResult(1.0), UNKNOWN),
        (None, UNKNOWN),
        # Few changes, or slower than the sensor refreshes: these were changes of the power itself.
        (CheckResult(1.0, power_period_s=0.1, power_changes=7), UNKNOWN),
        (CheckResult(1.0, power_period_s=0.2, power_changes=8), UNKNOWN),
    ],
)
def test_a_refresh_period_is_the_observed_one_or_unknown(
    result: CheckResult | None, expected: Refresh
) -> None:
    assert refresh_from_check(result, slowest_s=0.1) == expected


@pytest.mark.parametrize(("share", "late_s"), [(1.0, 0.1), (0.25, 0.0625), (0.0, 0.05)])
def test_a_mean_is_as_late_as_the_middle_of_its_interval(share: float, late_s: float) -> None:
    """A reading is used for the 100 ms after it, and averages the end of the 100 ms before it."""
    assert refresh_with_period(0.1, share).late_s == pytest.approx((late_s, late_s))


def check_power(watts: Callable[[float], float]) -> CheckResult:
    moments = [index * 0.0015 for index in range(1000)]
    return evaluate_readings(
        [Reading(round(t * 1e9), round(t * 1e9) + 50_000, None, watts(t)) for t in moments]
    )


def test_a_fluctuating_load_is_not_mistaken_for_the_refresh() -> None:
    assert refresh_from_check(check_power(lambda t: 400.0 if t % 0.4 < 0.2 else 100.0), 0.1) == UNKNOWN


def test_a_refresh_that_rarely_changes_the_reading_is_unknown() -> None:
    assert refresh_from_check(check_power(lambda t: 100.0 + 0.2 * (t // 0.3)), 0.1) == UNKNOWN


def test_a_refresh_that_always_changes_the_reading_is_found() -> None:
    found = refresh_from_check(check_power(lambda t: 100.0 + t // 0.1 % 7), 0.1)
    assert found.period_s == pytest.approx(0.1, rel=0.02)
    assert found.known
