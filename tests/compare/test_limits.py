# SPDX-License-Identifier: Apache-2.0
"""Limits of a shift: checked against printed tables and by simulation; pairs, and separate sessions."""

from __future__ import annotations

from math import log
from random import Random
from statistics import NormalDist

import pytest

from pytest_llenergy.compare.limits import limit_rank, rank_cdf, shift_of_pairs, shift_of_samples
from pytest_llenergy.compare.statistics import ONE_SESSION, PAIRS, Design, Sample, compare_samples

LEVEL = (10.0, 10.02, 9.97, 10.01, 9.98, 10.02, 10.03, 9.99, 10.0, 10.01, 9.98, 10.02)


def times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in values)


# Critical values of U, one-sided, as printed in tables of the test (Mann and Whitney 1947; Milton 1964).
@pytest.mark.parametrize(
    ("n", "m", "alpha", "critical"),
    [
        (4, 4, 0.05, 1),
        (5, 5, 0.05, 4),
        (6, 6, 0.05, 7),
        (6, 6, 0.025, 5),
        (6, 8, 0.05, 10),
        (8, 8, 0.025, 13),
        (10, 10, 0.05, 27),
        (12, 12, 0.025, 37),
        (20, 20, 0.05, 138),
        (20, 20, 0.025, 127),
    ],
)
def test_limits_of_samples_are_those_of_printed_tables(n: int, m: int, alpha: float, critical: int) -> None:
    assert limit_rank(alpha, n, m) == limit_rank(alpha, m, n) == critical + 1


# Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bull. 1 (1945), and later tables: the
# largest sum of ranks that is significant, one-sided.
@pytest.mark.parametrize(
    ("n", "alpha", "critical"), [(5, 0.05, 0), (6, 0.05, 2), (10, 0.05, 10), (20, 0.01, 43), (4, 0.05, -1)]
)
def test_limits_of_pairs_are_those_of_printed_tables(n: int, alpha: float, critical: int) -> None:
    assert limit_rank(alpha, n) == critical + 1


def test_the_normal_distribution_continues_the_exact_one() -> None:
    for n, m in ((50, 50), (50, None)):
        mean = 50 * 50 / 2 if m else 50 * 51 / 4
        for place in (0.6, 0.8, 1.0):
            at, next_at = (
                round(place * mean),
                round(place * mean * (51 * (51 if m else 52)) / (50 * (50 if m else 51))),
            )
            assert rank_cdf(at, n, m) == pytest.approx(rank_cdf(next_at, 51, m and 51), abs=0.01)


@pytest.mark.parametrize(("n", "alpha"), [(4, 0.05), (6, 0.05), (6, 0.01), (12, 0.01)])
def test_limits_miss_the_true_shift_at_most_as_often_as_promised(n: int, alpha: float) -> None:
    random, trials = Random(n), 4000
    missed = [0, 0]
    for _ in range(trials):
        # Skewed on purpose: the limits hold for any shape that both sides share.
        base = [random.expovariate(1.0) for _ in range(n)]
        head = [0.3 + random.expovariate(1.0) for _ in range(n)]
        shift = shift_of_samples(base, head, alpha, 1.0)
        assert shift.low is not None
        assert shift.high is not None
        missed[0] += shift.low > 0.3
        missed[1] += shift.high < 0.3
    margin = 4 * (alpha * (1 - alpha) / trials) ** 0.5
    assert max(missed) / trials < alpha + margin
    assert min(missed) > 0


def test_limits_of_pairs_match_a_hand_calculation() -> None:
    """Six differences at 5 %: W = 2 is critical, so the third of the 21 Walsh averages from either end."""
    shift = shift_of_pairs([1.0, 2.0, 3.0, 4.0, 5.0, 9.0], 0.05)
    assert (shift.value, shift.low, shift.high) == (3.5, 2.0, 6.5)
    assert shift.p_more == pytest.approx(1 / 64)


def test_common_changes_cancel_within_pairs() -> None:
    """The level wanders by 30 %; the head is 5 % above in each pair, give or take 0.5 %."""
    random = Random(1)
    levels = [10 * (1 + 0.3 * random.random()) for _ in range(12)]
    pairs = tuple(range(12))
    base = Sample(tuple(levels), pairs=pairs)
    head = Sample(tuple(level * 1.05 * (1 + random.gauss(0, 0.005)) for level in levels), pairs=pairs)
    found = compare_samples(base, head, design=PAIRS)
    assert found.verdict == "regressed"
    assert found.ratio == pytest.approx(1.05, abs=0.003)
    assert compare_samples(base, head, design=ONE_SESSION).verdict == "inconclusive"
    shuffled = Sample(head.values, pairs=tuple(random.sample(pairs, 12)))
    assert compare_samples(base, shuffled, design=PAIRS).verdict == "inconclusive"
    # A pair of which one round is not valid is left out.
    without = Sample(head.values[1:], pairs=pairs[1:])
    assert compare_samples(base, without, design=PAIRS).ratio == pytest.approx(1.05, abs=0.003)


@pytest.mark.parametrize("spread", [0.005, 0.015, 0.03])
def test_limits_of_a_stored_baseline_contain_the_difference_of_sessions(spread: float) -> None:
    """Rounds hardly scatter, so the limits are those of the sessions alone: 1.645 times sqrt(2) spreads."""
    found = compare_samples(Sample(LEVEL), Sample(LEVEL), design=Design(session_spread=spread))
    assert found.high is not None
    assert log(found.high) == pytest.approx(NormalDist().inv_cdf(0.95) * 2**0.5 * spread, rel=0.05)
    assert found.detectable is not None
    assert found.detectable > 2 * spread
