# SPDX-License-Identifier: Apache-2.0
"""Watts made into joules, against power known by hand."""

from __future__ import annotations

import math
from random import Random

import pytest

from pytest_llenergy.meters.power import IntegratedPower


def test_a_sensor_of_100_ms_over_a_load_with_long_constant_stretches() -> None:
    """100 W, and 500 W from 5.03 to 5.33 s; each refresh tells the mean of the 100 ms before it."""
    truth = 100 * 10 + 400 * 0.3
    for phase in (0.0, 0.033, 0.071):
        power, rng, time_s, told = IntegratedPower(0.1), Random(1), 0.0, 0.0
        while time_s < 10:
            refresh = math.floor((time_s - phase) / 0.1) * 0.1 + phase
            busy_s = max(0.0, min(refresh, 5.33) - max(refresh - 0.1, 5.03))
            told = power.add(time_s, 100 + 400 * busy_s / 0.1)
            time_s += 0.001 + rng.random() * 0.002
        assert told == pytest.approx(truth, abs=100 * 0.1 + 1)
        # What the load added, without the idle power of the last refresh that is still to come.
        power = IntegratedPower(0.1)


def test_a_period_that_is_a_little_off_costs_no_more_than_a_refresh() -> None:
    power, told = IntegratedPower(0.1), 0.0
    for index in range(10_000):
        time_s = index * 0.01
        # The real sensor refreshes every 101 ms, and says the same for 50 s.
        refresh = math.floor(time_s / 0.101) * 0.101
        told = power.add(time_s, 100.0 if refresh < 50 else 300.0)
    assert told == pytest.approx(100 * 50 + 300 * 50, abs=300 * 0.1 + 200 * 0.1)


def test_it_never_runs_backwards() -> None:
    power, rng, last = IntegratedPower(0.1), Random(2), 0.0
    for index in range(5000):
        told = power.add(index * 0.01, rng.choice([50.0, 50.0, 50.0, 400.0]))
        assert told >= last
        last = told


def test_without_a_period_it_is_the_trapezoid() -> None:
    power = IntegratedPower()
    assert [power.add(time_s, watts) for time_s, watts in ((0, 10), (1, 20), (3, 20))] == [0, 15, 55]


def test_means_since_the_reading_before_hold_backwards() -> None:
    power = IntegratedPower(math.inf)
    assert [power.add(time_s, watts) for time_s, watts in ((0, 10), (1, 20), (3, 20), (4, 5))] == [
        0,
        20,
        60,
        65,
    ]
