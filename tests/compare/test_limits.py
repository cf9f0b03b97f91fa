# SPDX-License-Identifier: Apache-2.0
"""Limits of a shift: pairs, unequal spread, separate sessions, and a second level of the head."""

from __future__ import annotations

from math import comb, log
from random import Random
from statistics import NormalDist

import pytest

from pytest_llenergy.compare.limits import (
    differences_of_pairs,
    find_second_level,
    shift_of_pairs,
    student_quantile,
)
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.statistics import ONE_SESSION, PAIRS, STORED, Design, Sample, compare_samples
from pytest_llenergy.record.base import Direction

LEVEL = (10.0, 10.02, 9.97, 10.01, 9.98, 10.02, 10.03, 9.99, 10.0, 10.01, 9.98, 10.02)


def times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in values)


def test_limits_of_pairs_match_a_hand_calculation() -> None:
    """Six differences at 5 %: W = 2 is critical, so the third of the 21 Walsh averages from either end."""
    shift = shift_of_pairs([1.0, 2.0, 3.0, 4.0, 5.0, 9.0], 0.05)
    assert (shift.value, shift.low, shift.high) == (3.5, 2.0, 6.5)
    assert shift.p_more == pytest.approx(1 / 64)
    assert shift.paired


def test_pairs_are_matched_by_number_if_rounds_are_missing() -> None:
    assert differences_of_pairs({0: 1.0, 2: 3.0, 3: 4.0}, {0: 2.0, 1: 9.0, 3: 4.5}) == [1.0, 0.5]


def test_common_changes_cancel_within_pairs() -> None:
    """The level wanders by 30 %; the head is 5 % above in each pair, give or take 0.5 %."""
    random = Random(1)
    levels = [10 * (1 + 0.3 * random.random()) for _ in range(12)]
    pairs = tuple(range(12))
    base = Sample(tuple(levels), pairs=pairs)
    head = Sample(tuple(level * 1.05 * (1 + random.gauss(0, 0.005)) for level in levels), pairs=pairs)
    found = compare_samples(base, head, design=PAIRS)
    assert (found.verdict, found.paired) == ("regressed", True)
    assert found.ratio == pytest.approx(1.05, abs=0.003)
    assert compare_samples(base, head, design=ONE_SESSION).verdict in ("inconclusive", "invalid")
    shuffled = Sample(head.values, pairs=tuple(random.sample(pairs, 12)))
    assert not compare_samples(base, shuffled, design=PAIRS).paired


@pytest.mark.parametrize("spread", [0.005, 0.015, 0.03])
def test_limits_of_a_stored_baseline_contain_the_difference_of_sessions(spread: float) -> None:
    """Rounds hardly scatter, so the limits are those of the sessions alone: 1.645 times sqrt(2) spreads."""
    found = compare_samples(Sample(LEVEL), Sample(LEVEL), design=Design(session_spread=spread))
    assert found.high is not None
    assert log(found.high) == pytest.approx(NormalDist().inv_cdf(0.95) * 2**0.5 * spread, rel=0.05)
    assert found.detectable is not None
    assert found.detectable > 2 * spread


def test_another_day_is_no_regression() -> None:
    """The head's session is 1.5 % higher although the code is the same."""
    random = Random(2)
    alarms = 0
    for _ in range(1000):
        base, head = (
            Sample(tuple(level * (1 + random.gauss(0, 0.02)) for _ in range(12))) for level in (10.0, 10.15)
        )
        alarms += compare_samples(base, head, design=STORED).verdict == "regressed"
    assert alarms <= 2


def test_few_rounds_against_a_stored_baseline_ask_for_more() -> None:
    text = "6 rounds; measure 12 of each side against a stored baseline"
    six, head = Sample(LEVEL[:6]), Sample(times(LEVEL, 1.025))
    assert text in compare_samples(six, head, design=STORED).reason
    assert "rounds; measure" not in compare_samples(Sample(LEVEL), head, design=STORED).reason
    assert "rounds; measure" not in compare_samples(six, head, design=PAIRS).reason


def test_noisier_side_with_few_rounds_raises_no_alarms() -> None:
    """24 rounds at 0.5 % against 6 rounds at 4 %."""
    random = Random(3)
    alarms = 0
    for _ in range(2000):
        base = Sample(tuple(10 * (1 + random.gauss(0, 0.005)) for _ in range(24)))
        head = Sample(tuple(10 * (1 + random.gauss(0, 0.04)) for _ in range(6)))
        alarms += compare_samples(base, head, design=Design(session_spread=0.001)).verdict == "regressed"
    # Two in a hundred by the rank test alone; with the default spread of sessions, hardly any.
    assert alarms <= 16


@pytest.mark.parametrize(
    ("p", "degrees", "table"), [(0.95, 5, 2.015), (0.99, 10, 2.764), (0.99, 30, 2.457), (0.975, 20, 2.086)]
)
def test_student_quantiles_match_printed_tables(p: float, degrees: float, table: float) -> None:
    assert student_quantile(p, degrees) == pytest.approx(table, rel=0.01)


def test_five_of_twelve_rounds_three_times_as_high_are_a_regression() -> None:
    head = times(LEVEL[:5], 3.0) + LEVEL[5:]
    found = compare_samples(Sample(LEVEL), Sample(head), design=STORED)
    assert found.verdict == "regressed"
    assert (
        "5 rounds of the head are higher than every round of the base, by a factor of 3 on average"
        in found.reason
    )
    assert compare_samples(Sample(head), Sample(LEVEL), design=STORED).verdict != "regressed"
    level = find_second_level(sorted(map(log, LEVEL)), sorted(map(log, head)))
    assert level is not None
    assert level.p == pytest.approx(comb(12, 5) / comb(24, 5))


@pytest.mark.parametrize(("count", "said"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("better", ["less", "more"])
def test_a_few_far_rounds_are_named(count: int, said: bool, better: Direction) -> None:
    head = times(LEVEL[:count], 9.0 if better == "less" else 1 / 9) + LEVEL[count:]
    found = compare_samples(Sample(LEVEL), Sample(head), better=better, design=STORED)
    side = "higher" if better == "less" else "lower"
    note = f"a few rounds are far off: {count} rounds of the head are {side} than every round of the base, "
    note += "by a factor of 9 on average; the estimate leaves them out"
    assert found.corrections == ((note,) if said else ())
    assert found.verdict != "regressed"
    assert compare_samples(Sample(head), Sample(LEVEL), better=better, design=STORED).corrections == ()


def test_second_level_is_not_hidden_by_a_better_rest() -> None:
    head = times(LEVEL[:5], 3.0) + times(LEVEL[5:], 0.94)
    found = compare_samples(Sample(LEVEL), Sample(head), design=PAIRS)
    assert found.verdict == "regressed"
    assert any("5 rounds of the head are higher" in note for note in found.corrections)


def test_shift_with_a_wide_scatter_is_no_second_level() -> None:
    random = Random(4)
    red = 0
    for _ in range(300):
        base, head = (
            Sample(tuple(level * (1 + random.gauss(0, 0.05)) for _ in range(12))) for level in (10.0, 11.7)
        )
        red += (
            compare_samples(base, head, Rule(threshold=0.3, tolerance=0.3), design=PAIRS).verdict
            == "regressed"
        )
    assert red == 0


def test_second_level_of_both_sides_or_of_few_rounds_is_none() -> None:
    both = times(LEVEL[:5], 3.0) + LEVEL[5:]
    few = times(LEVEL[:4], 3.0) + LEVEL[4:]
    assert find_second_level(sorted(map(log, both)), sorted(map(log, both))) is None
    rare = find_second_level(sorted(map(log, LEVEL)), sorted(map(log, few)))
    assert rare is not None
    assert rare.rare
