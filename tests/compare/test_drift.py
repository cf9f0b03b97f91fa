# SPDX-License-Identifier: Apache-2.0
"""Trends over the rounds: checked by enumeration and by hand."""

from __future__ import annotations

from itertools import permutations

import pytest

from pytest_llenergy.compare.drift import rank_trend, theil_sen_slope


def test_trend_variance_matches_all_permutations() -> None:
    totals = [rank_trend(order)[0] for order in permutations([1.0, 2.0, 3.0, 4.0, 5.0])]
    _, variance = rank_trend([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sum(totals) == pytest.approx(0.0, abs=1e-9)
    assert sum(total**2 for total in totals) / len(totals) == pytest.approx(variance)


def test_trend_variance_with_ties_matches_all_permutations() -> None:
    totals = [rank_trend(order)[0] for order in permutations([1.0, 2.0, 2.0, 2.0, 5.0])]
    _, variance = rank_trend([1.0, 2.0, 2.0, 2.0, 5.0])
    assert sum(total**2 for total in totals) / len(totals) == pytest.approx(variance)


def test_perfect_trend_has_a_coefficient_of_one() -> None:
    total, variance = rank_trend([3.0, 4.0, 8.0, 9.0])
    assert total / (variance * 3) ** 0.5 == pytest.approx(1.0)
    assert rank_trend([1.0, 1.0, 1.0]) == (0.0, 0.0)
    assert rank_trend([1.0]) == (0.0, 0.0)


def test_slope_is_within_samples_and_robust_to_outliers() -> None:
    assert theil_sen_slope([[0.0, 1.0, 2.0, 3.0], [100.0, 101.0, 102.0]]) == 1.0
    assert theil_sen_slope([[0.0, 1.0, 2.0, 3.0, 4.0, 50.0, 6.0]]) == 1.0
    assert theil_sen_slope([[1.0]]) == 0.0
