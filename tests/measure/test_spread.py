# SPDX-License-Identifier: Apache-2.0
"""The uncertainty of a mean, against the table of the GUM and against simulation."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.measure import metrics
from pytest_llenergy.meters.uncertainty import student_factor


def test_few_values_are_widened_by_student() -> None:
    assert metrics.uncertainty_of_mean([1.0, 3.0]) == pytest.approx(1.84)
    assert metrics.uncertainty_of_mean([1.0, 2.0, 3.0]) == pytest.approx(1.32 / math.sqrt(3))
    assert student_factor(30) == pytest.approx(1.0167, abs=1e-3)


@pytest.mark.parametrize("n", [3, 6, 20])
def test_the_mean_lies_within_one_u_in_68_of_100_cases(n: int) -> None:
    rng = Random(n)
    inside = []
    for _ in range(4000):
        values = [rng.gauss(10, 1) for _ in range(n)]
        inside.append(abs(fmean(values) - 10) <= metrics.uncertainty_of_mean(values))
    assert fmean(inside) == pytest.approx(0.683, abs=0.03)


@pytest.mark.parametrize("n", [8, 16, 32])
def test_dithering_beats_chance_and_its_uncertainty_is_true(n: int) -> None:
    """A 20 ms load under a sensor that sees 25 ms of every 100 ms."""

    def seen(phase: float) -> float:
        start = (phase * 100) % 100
        overlap = max(0.0, min(start + 20, 100) - max(start, 75)) + max(0.0, min(start + 20 - 100, 25) - 25)
        return overlap * 4

    rng = Random(n)
    errors, claims = [], []
    for _ in range(500):
        phases = [(index + rng.random()) / n for index in range(n)]
        values = [seen(phase) for phase in phases]
        errors.append(abs(fmean(values) - 20))
        claims.append(metrics.uncertainty_of_dithered_mean(values, phases))
    assert fmean(error <= 2 * claim for error, claim in zip(errors, claims, strict=True)) >= 0.95
    by_chance = math.sqrt(fmean((seen(rng.random()) - 20) ** 2 for _ in range(2000)) / n)
    assert math.sqrt(fmean(error**2 for error in errors)) < by_chance / 2


def test_dithered_values_without_a_trend_scatter_as_any_others() -> None:
    rng = Random(1)
    phases = [index / 16 for index in range(16)]
    drawn = [[rng.gauss(10, 1) for _ in phases] for _ in range(500)]
    claimed = fmean(metrics.uncertainty_of_dithered_mean(values, phases) for values in drawn)
    assert claimed == pytest.approx(1 / math.sqrt(16), rel=0.1)


@pytest.mark.parametrize(
    ("phases", "covers"),
    [
        ([0.1, 0.3, 0.6, 0.9], True),
        ([0.1, 0.2, 0.3, 0.35], False),
        ([0.05, 0.4, 0.6, 0.9], False),
        ([0.1, 0.3, 0.6, None], False),
        ([], False),
    ],
)
def test_phases_that_leave_a_hole_do_not_cover_a_tick(phases: list[float | None], covers: bool) -> None:
    assert metrics.phases_cover_tick(phases, 0.35) is covers


def test_a_drift_is_the_change_along_a_straight_line() -> None:
    found = metrics.linear_drift([10.0, 10.2, 10.4, 10.6, 10.8])
    assert found is not None
    assert found[0] == pytest.approx(0.8 / 10.4)
    assert found[1] > 1000
    assert metrics.linear_drift([1.0, 2.0, 3.0]) is None
    assert metrics.linear_drift([5.0] * 5) == (0.0, 0.0)


def test_chance_is_seldom_called_a_drift() -> None:
    rng = Random(3)
    found = [metrics.linear_drift([rng.gauss(10, 1) for _ in range(6)]) for _ in range(2000)]
    assert fmean(abs(each[1]) >= 4 for each in found if each) < 0.03
