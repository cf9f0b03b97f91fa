# SPDX-License-Identifier: Apache-2.0
"""Watts made into joules, against power known by hand."""

from __future__ import annotations

import math
from random import Random

import pytest

from pytest_llenergy.meters.power_readings import IntegratedPower

#: A load of 400 W over 100 W of idle power, from and to (seconds).
LOAD_S = (5.03, 5.33)


def refreshed(time_s: float, period_s: float, phase_s: float) -> float:
    """What a sensor says that tells at each refresh the mean power since the one before."""
    end_s = math.floor((time_s - phase_s) / period_s) * period_s + phase_s
    busy_s = max(0.0, min(end_s, LOAD_S[1]) - max(end_s - period_s, LOAD_S[0]))
    return 100 + 400 * busy_s / period_s


@pytest.mark.parametrize("phase_s", [0.0, 0.033, 0.071])
def test_the_joules_are_those_of_a_refresh_before(phase_s: float) -> None:
    power, rng, time_s, told_j, moved = IntegratedPower(0.1), Random(1), 0.0, 0.0, []
    while time_s < 10:
        before_j, told_j = told_j, power.add(time_s, refreshed(time_s, 0.1, phase_s))
        if told_j > before_j:
            moved.append((time_s - 0.1, told_j))
        time_s += 0.001 + rng.random() * 0.002
    for moment_s, energy_j in moved[2:]:
        busy_s = min(max(moment_s - LOAD_S[0], 0.0), LOAD_S[1] - LOAD_S[0])
        # To the reading: it comes up to 3 ms after the refresh, and the first was of idle power.
        assert energy_j == pytest.approx(100 * (moment_s + 0.1) + 400 * busy_s, abs=500 * 0.003 * 2)


def test_a_reading_that_changes_did_so_in_the_middle_of_two() -> None:
    power = IntegratedPower(1.0)
    told = [power.add(time_s, watts) for time_s, watts in ((0.0, 10), (0.5, 10), (0.9, 20), (2.0, 20))]
    assert told == pytest.approx([0, 0, 10 * 0.7, 10 * 0.7 + 20 * (0.2 + 0.55)])


def test_it_never_runs_backwards() -> None:
    power, rng, last = IntegratedPower(0.1), Random(2), 0.0
    for index in range(5000):
        told = power.add(index * 0.01, rng.choice([50.0, 50.0, 50.0, 400.0]))
        assert told >= last
        last = told


def test_without_a_period_it_is_the_trapezoid() -> None:
    power = IntegratedPower()
    assert [power.add(time_s, watts) for time_s, watts in ((0, 10), (1, 20), (3, 20))] == [0, 15, 55]
