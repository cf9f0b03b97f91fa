# SPDX-License-Identifier: Apache-2.0
"""The truth lies within twice the uncertainty of a metric in 19 of 20 tests, however many rounds they have.

``benchmarks/plugin/coverage/rounds_run.py`` runs the same tests, and more.
"""

from __future__ import annotations

import math
from random import Random
from statistics import fmean

import pytest

from pytest_llenergy.record import round_statistics

from ..measure.simulated_rounds import cold_start, delays, normal, repeat

REPEATS = 1000

#: Two standard deviations below 19 of 20, for so many tests.
LEAST = 0.95 - 2 * math.sqrt(0.95 * 0.05 / REPEATS)

#: For fewer than one in forty outside, uncertainties would be padded.
MOST = 0.975


@pytest.mark.parametrize("rounds", range(2, 13))
def test_a_given_number_of_rounds_covers_the_truth(rounds: int) -> None:
    assert LEAST <= repeat(normal(0.05), rounds, added=False, repeats=REPEATS).within <= MOST


@pytest.mark.parametrize("rounds", [25, 50])
def test_many_rounds_cover_the_truth(rounds: int) -> None:
    assert LEAST <= repeat(normal(0.05), rounds, added=False, repeats=REPEATS).within <= MOST


@pytest.mark.parametrize("rounds", [2, 4, 6])
@pytest.mark.parametrize("percent", [1, 3, 5])
def test_rounds_that_are_added_to_meet_the_target_cover_the_truth(rounds: int, percent: int) -> None:
    found = repeat(normal(percent / 100), rounds, added=True, repeats=REPEATS)
    assert found.within >= LEAST
    assert found.rounds >= rounds


@pytest.mark.parametrize("rounds", [2, 6])
def test_rounds_that_end_with_the_budget_cover_the_truth(rounds: int) -> None:
    found = repeat(normal(0.2), rounds, added=True, repeats=REPEATS // 4)
    assert found.within >= 0.95
    assert found.met < 0.05


def test_a_heavy_tail_and_a_cold_start_hardly_matter() -> None:
    assert repeat(delays, 6, added=True, repeats=REPEATS).within >= 0.92
    assert repeat(cold_start, 6, added=True, repeats=REPEATS).within >= LEAST


@pytest.mark.parametrize("n", [4, 6, 8, 16, 32])
def test_twice_the_uncertainty_of_a_dithered_mean_covers_the_truth(n: int) -> None:
    rng, phases = Random(n), [index / n for index in range(n)]
    inside = []
    for _ in range(2 * REPEATS):
        values = [rng.gauss(10, 1) for _ in range(n)]
        u = round_statistics.uncertainty_of_dithered_mean(values, phases)
        inside.append(abs(fmean(values) - 10) <= 2 * u)
    assert fmean(inside) >= LEAST
