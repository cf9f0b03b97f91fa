# SPDX-License-Identifier: Apache-2.0
"""Compare two samples of rounds: estimate, limits, verdict and detectable change.

Pure functions over plain numbers. The estimate is a Hodges-Lehmann shift of the logarithms, so a ratio; its
limits are exact order statistics of a rank test (``limits``). ``docs/gating.md`` explains why these and not
means, medians, a t-test or a bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, expm1, hypot, inf, log, log1p, pi, sqrt
from operator import truediv
from statistics import median
from typing import NamedTuple

import msgspec

from pytest_llenergy.compare.disturbance import Correction, correct_for_load
from pytest_llenergy.compare.limits import (
    NORMAL,
    Shift,
    normal_quantile,
    prefer_pairs,
    relative_spread,
    shift_of_samples,
)
from pytest_llenergy.compare.rule import (
    DEFAULT_RULE,
    HELD_BACK,
    Rule,
    RuleVerdict,
    decide_verdict,
)
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.quantity import shown_unit

#: Fewest rounds of each side for a verdict. With three of each the limits are just the extremes.
MIN_ROUNDS = 4
#: Noise above which the limits use ``NOISY_ALPHA``: outliers and drift are then as large as the changes to
#: find.
NOISY_ABOVE = 0.03
NOISY_ALPHA = 0.01
#: Standard error of a median over that of a mean if the scatter is normal.
MEDIAN_TO_MEAN = sqrt(pi / 2)
#: Expanded uncertainty over standard uncertainty, for about 95 % (GUM 6.3.3).
COVERAGE_FACTOR = 2.0
#: Probability with which the minimum detectable change is found.
POWER = 0.9
#: Largest uncertainty of a logarithm, a factor of 1e43: the exponential of larger ones may overflow.
MAX_LOG_RANGE = 100.0
#: Standard deviation of the level between sessions of the same code if no history tells: a stored baseline
#: was measured at another temperature, at another time of day, often after a restart.
SESSION_SPREAD = 0.015
#: Rounds of each side to ask for if the baseline is stored.
STORED_ROUNDS = 12
#: Suites with fewer comparisons are not corrected, since they have few chances for false alarms.
MIN_TESTS_TO_CORRECT = 10


class Design(NamedTuple):
    """How the rounds of the two sides were measured."""

    interleaved: bool = False  # whether they alternate in pairs, so that slow changes affect both alike
    session_spread: float = 0.0  # standard deviation of the relative level between separate sessions


#: Rounds of one session that do not alternate; pairs of rounds (``llenergy ab``); a stored baseline.
ONE_SESSION, PAIRS, STORED = Design(), Design(interleaved=True), Design(session_spread=SESSION_SPREAD)


class Sample(NamedTuple):
    """Rounds of one side, in the order of measurement. Other fields than ``values`` are empty if unknown."""

    values: Sequence[float]
    uncertainties: Sequence[float] = ()  # the meter's standard uncertainties that differ between rounds
    unit: str = ""  # for messages
    shared: Sequence[float] = ()  # the meter's standard uncertainties that all rounds share
    pairs: Sequence[int] = ()  # the number of the pair of each value, if the rounds alternate
    load: Sequence[float] = ()  # cores that other processes used in each round


class Estimate(msgspec.Struct, frozen=True):
    """Result of one comparison. Fields are ``None`` if there was nothing to compute them from."""

    verdict: RuleVerdict
    reason: str  # explanation of the verdict in one clause
    n_base: int
    n_head: int
    ratio: float | None = None  # head / base
    low: float | None = None  # one-sided 1 - alpha limits of the ratio
    high: float | None = None
    p: float | None = None  # rank p-value against "not worse"
    p_improved: float | None = None  # rank p-value against "not better"
    noise: float | None = None  # robust relative scatter of the rounds of a side
    detectable: float | None = None  # minimum detectable relative change with these rounds and this noise
    meter: float = 0.0  # smallest relative change that the meters can resolve with these rounds
    meter_limit: float = 0.0  # the same for any number of rounds
    design: Design = ONE_SESSION  # how the rounds were measured
    corrections: tuple[str, ...] = ()  # what was corrected, in words

    def changed_to(self, verdict: RuleVerdict, reason: str) -> Estimate:
        """Return the estimate with another verdict."""
        return msgspec.structs.replace(self, verdict=verdict, reason=reason)


def compare_samples(
    base: Sample,
    head: Sample,
    rule: Rule = DEFAULT_RULE,
    better: Direction = "less",
    design: Design = ONE_SESSION,
) -> Estimate:
    """Compare the rounds of ``head`` with those of ``base``.

    Measured values never raise: samples that cannot be compared have the verdict ``invalid`` and a reason.
    """
    n, m = len(base.values), len(head.values)
    invalid = Estimate("invalid", "", n, m, design=design)
    fault = _find_fault("base", base) or _find_fault("head", head)
    if fault is not None:
        return invalid.changed_to("invalid", fault)
    # Positive is worse until the estimate is made.
    sign = 1 if better == "less" else -1
    logs = [[sign * log(value) for value in side.values] for side in (base, head)]
    if min(n, m) < MIN_ROUNDS:
        ratio = exp(sign * median(after - before for before in logs[0] for after in logs[1]))
        fault = f"{n} base and {m} head rounds; a verdict needs at least {MIN_ROUNDS} of each"
        return msgspec.structs.replace(invalid, ratio=ratio, reason=fault)
    rule = rule.at_level(median(base.values), better)
    rounds = correct_for_load(logs[0], logs[1], base.load, head.load)
    # The side that scatters more decides how well a change can be told.
    noise = max(relative_spread(rounds.base), relative_spread(rounds.head))
    alpha = min(rule.alpha, NOISY_ALPHA) if noise > NOISY_ABOVE else rule.alpha
    shift = _estimate_shift(base, head, rounds, alpha, noise, design)
    meter, meter_limit = _meter_uncertainties(base, head)
    verdict, reason = decide_verdict(
        shift.value,
        shift.low,
        shift.high,
        rule,
        meter=COVERAGE_FACTOR * meter,
        better=better,
    )
    if design.session_spread and verdict == "inconclusive" and min(n, m) < STORED_ROUNDS:
        reason += f"; {min(n, m)} rounds; measure {STORED_ROUNDS} of each side against a stored baseline"
    if noise > NOISY_ABOVE:
        reason += f"; noise {noise:.1%} exceeds {NOISY_ABOVE:.0%}, so the limits use α {alpha:g}"
    if rounds.apart and verdict != "inconclusive":
        reason = f"{verdict} {HELD_BACK} the sides differ in the CPU use of other processes; {reason}"
        verdict = "inconclusive"
    p_worse, p_better = _p_values(shift, design)
    limits = [None if each is None else exp(sign * each) for each in (shift.low, shift.high)][::sign]
    return Estimate(
        verdict,
        reason,
        n,
        m,
        ratio=exp(sign * shift.value),
        low=limits[0],
        high=limits[1],
        p=p_worse,
        p_improved=p_better,
        noise=noise,
        # As large as these rounds or pairs make it.
        detectable=minimum_detectable_change(
            hypot(shift.error, sqrt(2) * design.session_spread), rule, alpha=alpha, meter=meter
        ),
        meter=expm1(COVERAGE_FACTOR * meter),
        meter_limit=expm1(COVERAGE_FACTOR * meter_limit),
        design=design,
        corrections=(rounds.note,) if rounds.note else (),
    )


def _estimate_shift(
    base: Sample, head: Sample, rounds: Correction, alpha: float, noise: float, design: Design
) -> Shift:
    shift = shift_of_samples(rounds.base, rounds.head, alpha, noise)
    if design.interleaved:
        before = dict(zip(base.pairs, rounds.base, strict=False))
        after = zip(head.pairs, rounds.head, strict=False)
        shift = prefer_pairs(shift, [value - before[pair] for pair, value in after if pair in before], alpha)
    spread = hypot(rounds.error, sqrt(2) * design.session_spread)
    return shift.widen_in_quadrature(normal_quantile(1 - alpha) * spread)


def _p_values(shift: Shift, design: Design) -> tuple[float, float]:
    """Return the p-values against "not larger" and "not smaller", which sessions that differ raise."""
    if not design.session_spread:
        return shift.p_more, shift.p_less
    z = shift.value / hypot(shift.error, sqrt(2) * design.session_spread)
    return max(shift.p_more, NORMAL.cdf(-z)), max(shift.p_less, NORMAL.cdf(z))


def minimum_detectable_change(error: float, rule: Rule, *, alpha: float, meter: float = 0.0) -> float:
    """Return the relative change that nine of ten comparisons call a regression.

    The estimate must reach the threshold and the lower limit the floor, each with the probability ``POWER``.
    """
    z_power, z_limit = normal_quantile(POWER), normal_quantile(1 - alpha)
    by_threshold = max(log1p(rule.threshold), COVERAGE_FACTOR * meter) + z_power * error
    return expm1(min(MAX_LOG_RANGE, max(by_threshold, log1p(rule.floor) + (z_limit + z_power) * error)))


def _find_fault(name: str, side: Sample) -> str | None:
    if not side.values:
        return f"{name} has no valid round"
    # A quick test for finite values above zero. min() may miss a NaN; a sum does not.
    if not (0 < sum(side.values) < inf and min(side.values) > 0):
        bad = next(each for each in side.values if not 0 < each < inf)
        shown = f"{bad:g} {shown_unit(side.unit)}".rstrip()
        return f"{name} has a value of {shown}; a ratio needs finite values above zero"
    return None


def _meter_uncertainties(base: Sample, head: Sample) -> tuple[float, float]:
    """Return the standard uncertainty of the logarithm of the ratio due to the meters, and its lower bound.

    As in the uncertainty of a metric (``record.round_statistics``): the part that differs from round to
    round shrinks with their number, the part that rounds share, the bound, does not (GUM 5.2.2). The two
    sides are treated as independent, although errors that they share cancel.
    """
    single, shared = [], []
    for side in (base, head):
        n = len(side.values)
        if side.uncertainties:
            relative = map(truediv, side.uncertainties, side.values)
            single.append(MEDIAN_TO_MEAN * hypot(*relative) / n)
        if side.shared:
            shared.append(sum(map(truediv, side.shared, side.values)) / n)
    limit = min(hypot(*shared), MAX_LOG_RANGE)
    return min(hypot(limit, *single), MAX_LOG_RANGE), limit


def correct_multiple_comparisons(estimates: Sequence[Estimate], q: float = 0.10) -> list[Estimate]:
    """Correct the verdicts of a suite for the number of comparisons.

    Changes that are not significant among so many comparisons become ``inconclusive``. At most the share
    ``q`` of the changes that remain is expected to be false: Y. Benjamini, Y. Hochberg, "Controlling the
    false discovery rate", J. R. Stat. Soc. B 57 (1995). Regressions and improvements are two families, each
    over all comparisons that have a p-value.

    Returns:
        The estimates in the order given.
    """
    families = {
        "regressed": [each.p for each in estimates if each.p is not None],
        "improved": [each.p_improved for each in estimates if each.p_improved is not None],
    }
    count = len(families["regressed"])
    if count < MIN_TESTS_TO_CORRECT:
        return list(estimates)
    largest = {
        verdict: max((p for i, p in enumerate(sorted(found), 1) if p <= q * i / len(found)), default=-1.0)
        for verdict, found in families.items()
    }
    corrected = []
    for each in estimates:
        p = each.p if each.verdict == "regressed" else each.p_improved
        if each.verdict in largest and p is not None and p > largest[each.verdict]:
            reason = f"{each.verdict} by itself, but p {p:.2g} is not significant among {count} comparisons"
            each = each.changed_to("inconclusive", f"{reason} (q {q:g}); {each.reason}")
        corrected.append(each)
    return corrected
