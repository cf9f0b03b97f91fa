# SPDX-License-Identifier: Apache-2.0
"""Rank statistics: checked against printed tables, by enumeration and by simulation."""

from __future__ import annotations

from itertools import combinations, product
from math import comb
from random import Random
from statistics import NormalDist, median

import pytest

from pytest_llenergy.compare.rank_statistics import (
    EXACT_UP_TO,
    confidence_limit_rank,
    mann_whitney_cdf,
    one_sided_p_values,
    pairwise_differences,
    signed_rank_cdf,
    signed_rank_limit,
    walsh_averages,
)


def enumerate_u(n: int, m: int) -> list[int]:
    """Count the orderings of n and m values that have U = 0, 1, ..."""
    counts = [0] * (n * m + 1)
    for places in combinations(range(n + m), n):
        counts[sum(place - i for i, place in enumerate(places))] += 1
    return counts


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (3, 4), (4, 3), (5, 5), (6, 6), (4, 9)])
def test_distribution_matches_enumeration_of_every_ordering(n: int, m: int) -> None:
    counts = enumerate_u(n, m)
    for u in range(-1, n * m + 2):
        assert mann_whitney_cdf(u, n, m) == pytest.approx(
            sum(counts[: max(0, u + 1)]) / comb(n + m, n), abs=1e-15
        )


# Critical values of U, one-sided, as printed in tables of the test (Mann and Whitney 1947; Milton 1964).
@pytest.mark.parametrize(
    ("n", "m", "alpha", "critical"),
    [
        (3, 3, 0.05, 0),
        (4, 4, 0.05, 1),
        (4, 4, 0.025, 0),
        (5, 5, 0.05, 4),
        (6, 6, 0.05, 7),
        (6, 6, 0.025, 5),
        (6, 6, 0.01, 3),
        (6, 8, 0.05, 10),
        (8, 8, 0.05, 15),
        (8, 8, 0.025, 13),
        (10, 10, 0.05, 27),
        (10, 10, 0.025, 23),
        (12, 12, 0.05, 42),
        (12, 12, 0.025, 37),
        (20, 20, 0.05, 138),
        (20, 20, 0.025, 127),
    ],
)
def test_limit_ranks_match_printed_tables(n: int, m: int, alpha: float, critical: int) -> None:
    assert confidence_limit_rank(n, m, alpha) == critical + 1
    assert confidence_limit_rank(m, n, alpha) == critical + 1


@pytest.mark.parametrize(("n", "m", "alpha"), [(2, 2, 0.05), (3, 3, 0.01), (4, 4, 0.01), (1, 18, 0.05)])
def test_too_few_values_have_no_limit(n: int, m: int, alpha: float) -> None:
    assert confidence_limit_rank(n, m, alpha) == 0


def test_normal_approximation_continues_the_exact_distribution() -> None:
    n = EXACT_UP_TO
    normal = NormalDist(n * n / 2, (n * n * (2 * n + 1) / 12) ** 0.5)
    for u in range(n * n):
        assert mann_whitney_cdf(u, n, n) == pytest.approx(normal.cdf(u + 0.5), abs=1e-3)
    normal = NormalDist(n * (n + 1) / 2, (n * (n + 1) * (2 * n + 2) / 12) ** 0.5)
    for u in range(0, n * (n + 1), 7):
        assert mann_whitney_cdf(u, n, n + 1) == pytest.approx(normal.cdf(u + 0.5), abs=1e-9)
    assert confidence_limit_rank(n + 1, n + 1, 0.05) - confidence_limit_rank(n, n, 0.05) in range(40, 50)


def test_median_of_pairwise_differences_is_the_shift() -> None:
    ordered = pairwise_differences([1.0, 2.0, 4.0], [3.0, 5.0, 9.0])
    assert ordered == [-1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0]
    assert median(ordered) == 3.0


def test_p_values_of_a_clean_shift_are_exact() -> None:
    base, head = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    assert one_sided_p_values(pairwise_differences(base, head), 4, 4) == pytest.approx((1 / 70, 1.0))
    assert one_sided_p_values(pairwise_differences(head, base), 4, 4) == pytest.approx((1.0, 1 / 70))


def test_ties_never_make_p_smaller() -> None:
    apart, _ = one_sided_p_values(pairwise_differences([1.0, 2.0, 3.0, 4.0], [2.5, 3.5, 5.0, 6.0]), 4, 4)
    tied, _ = one_sided_p_values(pairwise_differences([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 5.0, 6.0]), 4, 4)
    assert tied > apart
    assert one_sided_p_values(pairwise_differences([1.0] * 6, [1.0] * 6), 6, 6) == (1.0, 1.0)


@pytest.mark.parametrize(("n", "alpha"), [(4, 0.05), (6, 0.05), (6, 0.01), (12, 0.05)])
def test_limits_miss_the_true_shift_as_often_as_promised(n: int, alpha: float) -> None:
    random = Random(n)
    k = confidence_limit_rank(n, n, alpha)
    promised, trials = mann_whitney_cdf(k - 1, n, n), 4000
    missed = [0, 0]
    for _ in range(trials):
        # Skewed on purpose: the limits are exact for any shape that both sides share.
        base = [random.expovariate(1.0) for _ in range(n)]
        head = [0.3 + random.expovariate(1.0) for _ in range(n)]
        ordered = pairwise_differences(base, head)
        missed[0] += ordered[k - 1] > 0.3
        missed[1] += ordered[-k] < 0.3
    margin = 4 * (promised * (1 - promised) / trials) ** 0.5
    assert missed[0] / trials == pytest.approx(promised, abs=margin)
    assert missed[1] / trials == pytest.approx(promised, abs=margin)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_signed_rank_distribution_matches_enumeration_of_all_signs(n: int) -> None:
    sums = [
        sum(rank for rank, sign in zip(range(1, n + 1), signs, strict=True) if sign)
        for signs in product((0, 1), repeat=n)
    ]
    for w in range(-1, n * (n + 1) // 2 + 2):
        assert signed_rank_cdf(w, n) == pytest.approx(sum(each <= w for each in sums) / 2**n)


# Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bull. 1 (1945), and later tables: the
# largest sum of ranks that is significant, one-sided.
@pytest.mark.parametrize(
    ("n", "alpha", "critical"),
    [(5, 0.05, 0), (6, 0.05, 2), (8, 0.01, 1), (10, 0.05, 10), (10, 0.005, 3), (20, 0.01, 43)],
)
def test_critical_values_of_signed_ranks_match_printed_tables(n: int, alpha: float, critical: int) -> None:
    assert signed_rank_limit(n, alpha) == critical + 1


def test_too_few_pairs_have_no_limit() -> None:
    assert signed_rank_limit(4, 0.05) == 0


def test_walsh_averages_of_three_differences() -> None:
    assert walsh_averages([4.0, 0.0, 1.0]) == [0.0, 0.5, 1.0, 2.0, 2.5, 4.0]


def test_normal_approximation_of_signed_ranks_continues_the_exact_distribution() -> None:
    exact = signed_rank_cdf(450, EXACT_UP_TO)
    scale = (EXACT_UP_TO * (EXACT_UP_TO + 1) * (2 * EXACT_UP_TO + 1) / 24) ** 0.5
    assert NormalDist().cdf((450.5 - EXACT_UP_TO * (EXACT_UP_TO + 1) / 4) / scale) == pytest.approx(
        exact, abs=1e-3
    )
    assert signed_rank_cdf(450, EXACT_UP_TO + 1) < exact
