# SPDX-License-Identifier: Apache-2.0
"""The statistical rule: known answers, invalid input, invariances, and error rates."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, nan, pi
from random import Random
from statistics import median

import pytest
from msgspec.structs import replace

from pytest_llenergy.compare.limits import standard_error
from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.statistics import (
    Estimate,
    Sample,
    compare_samples,
    correct_multiple_comparisons,
    minimum_detectable_change,
)
from pytest_llenergy.record.base import Direction

#: Six rounds around 100 J with a scatter of about 0.7 %.
CALM = (100.0, 101.0, 99.0, 100.5, 99.5, 100.2)
MIRROR = {"regressed": "improved", "improved": "regressed"}


def times(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)


def verdict(base: Sequence[float], head: Sequence[float], rule: Rule = Rule()) -> str:  # noqa: B008
    return compare_samples(Sample(tuple(base)), Sample(tuple(head)), rule).verdict


def noisy(random: Random, rounds: int, noise: float, level: float = 100.0) -> Sample:
    """Log-normal rounds, one in twenty too high by about five times the noise."""
    logs = [random.gauss(0, noise) for _ in range(rounds)]
    high = [random.expovariate(1 / (5 * noise)) if random.random() < 0.05 else 0.0 for _ in range(rounds)]
    return Sample(tuple(level * exp(log + more) for log, more in zip(logs, high, strict=True)))


def test_estimate_matches_a_hand_calculation() -> None:
    base, head = (100.0, 101.0, 102.0, 103.0), (110.0, 111.0, 112.0, 113.0)
    estimate = compare_samples(Sample(base), Sample(head))
    ratios = sorted(h / b for h in head for b in base)
    # Four a side at 5 %: U = 1 is critical, so the second of the 16 ordered ratios from either end.
    assert estimate.low == pytest.approx(ratios[1])
    assert estimate.high == pytest.approx(ratios[-2])
    assert estimate.ratio == pytest.approx((ratios[7] * ratios[8]) ** 0.5)
    assert estimate.p == pytest.approx(1 / 70)
    assert estimate.p_improved == 1.0
    assert (estimate.n_base, estimate.n_head) == (4, 4)
    # Residuals of the logarithms about their medians are close to 1.5, 0.5, 0.5, 1.5 % on the noisier side.
    residuals = sorted(abs(log(v) - (log(base[1]) + log(base[2])) / 2) for v in base)
    assert estimate.noise == pytest.approx(1.363 * 1.4826 * (residuals[1] + residuals[2]) / 2)
    assert estimate.verdict == "regressed"


@pytest.mark.parametrize(
    ("factor", "expected", "reason"),
    [
        (1.05, "regressed", "+5.0%, at least +4.2%"),
        (1 / 1.05, "improved", "-4.8%, at least -4.0%"),
        (1.0, "unchanged", "at most 5.0% worse"),
        (1.01, "unchanged", "at most 5.0% worse"),
        (1.02, "worse", "+2.0%, at least +1.2%; below the threshold of 3.0%"),
        (0.98, "unchanged", "at most 5.0% worse"),
    ],
)
def test_each_verdict_states_its_reason(factor: float, expected: str, reason: str) -> None:
    estimate = compare_samples(Sample(CALM), Sample(times(CALM, factor)))
    assert (estimate.verdict, estimate.reason) == (expected, reason)


def test_change_of_exactly_the_threshold_counts() -> None:
    assert verdict((100.0,) * 6, (103.0,) * 6) == "regressed"
    assert verdict((100.0,) * 6, (102.999,) * 6) == "worse"
    assert verdict((103.0,) * 6, (100.0,) * 6) == "improved"


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_fewer_than_four_rounds_are_invalid(rounds: int) -> None:
    few, many = Sample(CALM[:rounds]), Sample(times(CALM, 2.0))
    for base, head in ((few, many), (many, few), (few, few)):
        estimate = compare_samples(base, head)
        assert (estimate.verdict, estimate.low, estimate.high, estimate.p) == (
            "invalid",
            None,
            None,
            None,
        )
        assert estimate.reason.endswith("a verdict needs at least 4 of each")
        assert estimate.ratio is not None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((), "has no valid round"),
        ((0.0,) * 3, "has a value of 0; a ratio needs finite values above zero"),
        ((*CALM[:5], 0.0), "has a value of 0; a ratio needs finite values above zero"),
        ((*CALM[:5], -1.5), "has a value of -1.5; a ratio needs finite values above zero"),
        ((*CALM[:5], nan), "has a value of nan; a ratio needs finite values above zero"),
        ((inf, *CALM[:5]), "has a value of inf; a ratio needs finite values above zero"),
        ((-inf,), "has a value of -inf; a ratio needs finite values above zero"),
    ],
)
@pytest.mark.parametrize("better", ["less", "more"])
def test_unusable_values_are_invalid(values: tuple[float, ...], reason: str, better: Direction) -> None:
    for name, base, head in (("base", Sample(values), Sample(CALM)), ("head", Sample(CALM), Sample(values))):
        estimate = compare_samples(base, head, better=better)
        assert (estimate.verdict, estimate.reason) == ("invalid", f"{name} {reason}")
        assert (estimate.ratio, estimate.low, estimate.high, estimate.p) == (None, None, None, None)


def test_swapping_baseline_and_head_mirrors_the_verdict() -> None:
    random = Random(1)
    seen = set()
    for _ in range(300):
        base = noisy(random, random.randint(4, 12), random.choice((0.005, 0.02, 0.05)))
        head = noisy(
            random, random.randint(4, 12), 0.02, level=100 * random.choice((0.9, 0.97, 1.0, 1.04, 1.1))
        )
        there, back = compare_samples(base, head), compare_samples(head, base)
        seen.add(there.verdict)
        assert back.ratio == pytest.approx(1 / there.ratio)  # type: ignore[operator]
        if None not in (there.p, back.p):
            assert (back.p, back.p_improved) == (there.p_improved, there.p)
        if there.low is not None and there.high is not None:
            assert back.low == pytest.approx(1 / there.high)
            assert back.high == pytest.approx(1 / there.low)
        # "unchanged" is bounded on its worse side only, so it alone may have no mirror.
        for one, other in ((there, back), (back, there)):
            if one.verdict in MIRROR:
                assert other.verdict == MIRROR[one.verdict]
    assert seen >= {"regressed", "improved", "unchanged", "inconclusive"}


def test_more_is_better_mirrors_the_verdict_and_not_the_ratio() -> None:
    joules = compare_samples(Sample(CALM), Sample(times(CALM, 1.05)))
    tokens = compare_samples(Sample(CALM), Sample(times(CALM, 1.05)), better="more")
    assert (joules.verdict, tokens.verdict) == ("regressed", "improved")
    assert (joules.ratio, joules.low, joules.high) == (tokens.ratio, tokens.low, tokens.high)
    assert (joules.p, joules.p_improved) == (tokens.p_improved, tokens.p)
    assert compare_samples(Sample(CALM), Sample(times(CALM, 0.95)), better="more").verdict == "regressed"


def test_both_parts_of_a_threshold_must_be_reached() -> None:
    base, head = (10.0, 10.1, 9.9, 10.05, 9.95, 10.02), (11.0, 11.1, 10.9, 11.05, 10.95, 11.02)
    assert verdict(base, head, Rule(threshold_absolute=0.9)) == "regressed"
    assert verdict(head, base, Rule(threshold_absolute=0.9)) == "improved"
    doubtful = compare_samples(Sample(base), Sample(head), Rule(threshold_absolute=1.02))
    assert doubtful.verdict == "inconclusive"
    assert doubtful.reason.endswith("; threshold 10.2%")


def test_change_below_the_absolute_threshold_passes_for_any_ratio() -> None:
    tiny, double = times(CALM, 0.01), times(CALM, 0.02)
    rule = Rule(threshold_absolute=2.0)
    assert verdict(tiny, double) == "regressed"
    estimate = compare_samples(Sample(tiny), Sample(double), rule)
    assert estimate.verdict == "worse"
    assert estimate.reason.endswith("; below the threshold of 199.8%")


@pytest.mark.parametrize(
    ("better", "to", "expected"),
    [
        ("more", 6.4, "worse"),
        ("more", 4.9, "regressed"),
        ("more", 14.0, "unchanged"),
        ("more", 15.5, "improved"),
        ("less", 6.4, "unchanged"),
        ("less", 4.9, "improved"),
        ("less", 14.0, "worse"),
        ("less", 15.5, "regressed"),
    ],
)
def test_a_fall_reaches_an_absolute_threshold_as_a_rise_does(
    better: Direction, to: float, expected: str
) -> None:
    base, head = times(CALM, 10 / median(CALM)), times(CALM, to / median(CALM))
    found = compare_samples(Sample(base), Sample(head), Rule(threshold_absolute=5.0), better)
    assert found.verdict == expected


def test_lower_limit_must_exceed_the_floor() -> None:
    head = times(CALM, 1.05)
    assert verdict(CALM, head, Rule(floor=0.03)) == "regressed"
    assert verdict(CALM, head, Rule(floor=0.045)) == "inconclusive"


def test_change_below_the_meters_resolution_is_inconclusive() -> None:
    for factor in (1.05, 1 / 1.05):
        head = times(CALM, factor)
        sure = compare_samples(Sample(CALM, shared=(1.0,) * 6), Sample(head, shared=(1.0,) * 6))
        assert sure.verdict in MIRROR
        unsure = compare_samples(Sample(CALM, shared=(2.0,) * 6), Sample(head, shared=(2.0,) * 6))
        assert unsure.verdict == "inconclusive"
        assert "by less than can be resolved" in unsure.reason


def test_more_rounds_reduce_only_meter_uncertainty_that_differs_between_rounds() -> None:
    base, head = CALM * 8, times(CALM, 1.05) * 8
    shared = compare_samples(Sample(base, shared=(2.0,) * 48), Sample(head, shared=(2.0,) * 48))
    assert (shared.verdict, shared.meter) == ("inconclusive", shared.meter_limit)
    single = compare_samples(Sample(base, (2.0,) * 48), Sample(head, (2.0,) * 48))
    # 2 J of 100 J and of 105 J, for a median of 48 rounds.
    expected = 2 * (0.02**2 + (0.02 / 1.05) ** 2) ** 0.5 * (pi / 2 / 48) ** 0.5
    assert single.verdict == "regressed"
    assert log(1 + single.meter) == pytest.approx(expected, rel=1e-3)
    assert single.meter_limit == 0


def test_meter_coarser_than_the_tolerance_cannot_give_unchanged() -> None:
    one, two = ((each,) * 6 for each in (1.0, 2.0))
    assert compare_samples(Sample(CALM, shared=one), Sample(CALM, shared=one)).verdict == "unchanged"
    estimate = compare_samples(Sample(CALM, shared=two), Sample(CALM, shared=two))
    assert (estimate.verdict, estimate.reason) == (
        "inconclusive", "changes below 5.8% cannot be resolved",
    )  # fmt: skip


def test_high_noise_lowers_alpha_and_is_reported() -> None:
    loud = (100.0, 105.0, 95.0, 104.0, 96.0, 102.0)
    estimate = compare_samples(Sample(loud), Sample(times(loud, 1.08)))
    assert estimate.noise is not None
    assert estimate.noise > 0.03
    assert f"noise {estimate.noise:.1%} exceeds 3%, so the limits use α 0.01" in estimate.reason
    calm = compare_samples(Sample(CALM), Sample(times(CALM, 1.08)))
    assert "noise" not in calm.reason
    assert "α 0.001" in compare_samples(Sample(loud), Sample(loud), Rule(alpha=0.001)).reason


def test_detectable_change_is_found_in_nine_of_ten_comparisons() -> None:
    random = Random(6)
    for rounds, noise in ((12, 0.01), (12, 0.02), (24, 0.02)):
        change = minimum_detectable_change(standard_error(noise, rounds, rounds), Rule(), alpha=0.05)
        found = 0
        for _ in range(600):
            base = Sample(tuple(exp(random.gauss(0, noise)) for _ in range(rounds)))
            head = Sample(tuple((1 + change) * exp(random.gauss(0, noise)) for _ in range(rounds)))
            found += compare_samples(base, head).verdict == "regressed"
        assert found / 600 == pytest.approx(0.9, abs=0.06)


def test_suites_without_changes_raise_no_alarm_and_five_percent_is_found() -> None:
    random = Random(7)
    alarms = missed = 0
    for _ in range(10):
        for _ in range(50):
            base, head = noisy(random, 12, 0.01), noisy(random, 12, 0.01)
            alarms += compare_samples(base, head).verdict in MIRROR
            missed += compare_samples(base, Sample(times(head.values, 1.05))).verdict != "regressed"
    assert (alarms, missed) == (0, 0)


def known(p: float, verdict: str = "regressed") -> Estimate:
    estimate = compare_samples(Sample(CALM), Sample(times(CALM, 1.05 if verdict == "regressed" else 1.0)))
    return replace(estimate, p=p, verdict=verdict)


def test_only_significant_changes_survive_the_correction() -> None:
    # Benjamini and Hochberg at q = .1 over 20: the first must be below .005, the second below .01 ...
    suite = [known(0.004), known(0.009), known(0.03), *[known(0.5, "unchanged")] * 17]
    result = correct_multiple_comparisons(suite)
    assert [one.verdict for one in result[:3]] == ["regressed", "regressed", "inconclusive"]
    assert result[2].reason.startswith(
        "regressed by itself, but p 0.03 is not significant among 20 comparisons (q 0.1); "
    )
    assert result[3:] == suite[3:]


def test_small_suites_are_not_corrected() -> None:
    suite = [known(0.04)] + [known(0.5, "unchanged")] * 8
    assert correct_multiple_comparisons(suite) == suite
    assert correct_multiple_comparisons([*suite, known(0.5, "unchanged")])[0].verdict == "inconclusive"


def test_improvements_are_corrected_separately() -> None:
    lucky = replace(known(0.5, "unchanged"), verdict="improved", p_improved=0.03)
    sure = replace(lucky, p_improved=0.0001)
    result = correct_multiple_comparisons(
        [lucky, sure] + [replace(known(0.5, "unchanged"), p_improved=0.5)] * 18
    )
    assert [one.verdict for one in result[:2]] == ["inconclusive", "improved"]
