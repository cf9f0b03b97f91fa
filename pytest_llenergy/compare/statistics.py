# SPDX-License-Identifier: Apache-2.0
"""Compare two samples, of rounds or of results of sessions: estimate, limits, verdict and detectable change.

Pure functions over plain numbers. The estimate is a Hodges-Lehmann shift of the logarithms, so a ratio; its
limits are exact order statistics of a rank test (``limits``). ``docs/gating.md`` explains why these and not
means, medians, a t-test or a bootstrap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, expm1, hypot, inf, log, log1p, pi, sqrt
from operator import truediv
from statistics import fmean, median

from pytest_llenergy.compare.covariates import Adjustment, adjust_rounds
from pytest_llenergy.compare.drift import detect_drift
from pytest_llenergy.compare.limits import (
    Shift,
    differences_of_pairs,
    find_second_level,
    normal_cdf,
    normal_quantile,
    prefer_pairs,
    relative_spread,
    shift_of_samples,
    standard_error,
    widen_for_unequal_spread,
)
from pytest_llenergy.compare.rank_statistics import pairwise_differences
from pytest_llenergy.compare.rule import (
    DEFAULT_RULE,
    HELD_BACK,
    AbsoluteChange,
    Rule,
    RuleVerdict,
    decide_verdict,
    describe_far,
)
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import FEW_ROUNDS_OFF
from pytest_llenergy.record.quantity import shown_unit
from pytest_llenergy.record.round_statistics import half_student

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
#: Values whose logarithms differ by more than this (a factor of 1e43) are not rounds of one workload.
MAX_LOG_RANGE = 100.0
#: Standard deviation of the level between sessions of the same code if no history tells: a stored baseline
#: was measured at another temperature, at another time of day, often after a restart.
SESSION_SPREAD = 0.015
#: Rounds of each side to ask for if the baseline is stored.
STORED_ROUNDS = 12


@dataclass(frozen=True)
class Design:
    """How the rounds of the two sides were measured.

    Attributes:
        interleaved: Whether they alternate in pairs, so that slow changes affect both alike.
        session_spread: Standard deviation of the relative level between sessions, if the sides are from
            separate ones.
    """

    interleaved: bool = False
    session_spread: float = 0.0


#: Rounds of one session that do not alternate; pairs of rounds (``llenergy ab``); a stored baseline.
ONE_SESSION, PAIRS, STORED = Design(), Design(interleaved=True), Design(session_spread=SESSION_SPREAD)


@dataclass(frozen=True)
class Sample:
    """Rounds of one side, in the order of measurement.

    Attributes:
        values: The values.
        uncertainties: The meter's standard uncertainties that differ from round to round, in the same unit:
            one for each value, or empty if the metric has none.
        unit: The unit, for messages.
        shared: The meter's standard uncertainties that all rounds share, likewise.
        pairs: The number of the pair of each value; empty if the rounds do not alternate.
        covariates: What may have disturbed each round (``covariates``).
        results_u: Standard uncertainties of values that are each the result of a session, in the same unit;
            empty for values of rounds. Results decide even if they are few.
    """

    values: tuple[float, ...]
    uncertainties: tuple[float, ...] = ()
    unit: str = ""
    shared: tuple[float, ...] = ()
    pairs: tuple[int, ...] = ()
    covariates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    results_u: tuple[float, ...] = ()

    def describe(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{value:g} {shown_unit(self.unit)}".rstrip()


@dataclass(frozen=True)
class Estimate:
    """Result of one comparison. Fields are ``None`` if there was nothing to compute them from."""

    ratio: float | None  # head / base
    low: float | None  # one-sided 1 - alpha limits of the ratio
    high: float | None
    p: float | None  # rank p-value against "not worse"
    noise: float | None  # robust relative scatter of the rounds of a side
    detectable: float | None  # minimum detectable relative change with these rounds and this noise
    n_base: int
    n_head: int
    verdict: RuleVerdict
    reason: str  # explanation of the verdict in one clause
    p_improved: float | None = None  # rank p-value against "not better"
    drift: float | None = None  # relative change of the level over the rounds, if they have a clear trend
    alpha: float | None = None  # the alpha that the limits used
    meter: float = 0.0  # smallest relative change that the meters can resolve with these rounds
    meter_limit: float = 0.0  # the same for any number of rounds
    session_spread: float = 0.0  # standard deviation of the level between sessions that the limits include
    interleaved: bool = False  # whether the rounds of both sides alternate
    paired: bool = False  # whether the limits are those of the differences within pairs
    adjusted: tuple[str, ...] = ()  # covariates that were regressed out
    corrections: tuple[str, ...] = ()  # what was corrected or left out, in words


def compare_samples(
    base: Sample,
    head: Sample,
    rule: Rule = DEFAULT_RULE,
    better: Direction = "less",
    design: Design = ONE_SESSION,
) -> Estimate:
    """Compare the rounds of ``head`` with those of ``base``.

    Measured values never raise: samples that cannot be compared have the verdict ``invalid`` and a reason.

    Args:
        base: Rounds of the baseline.
        head: Rounds of the head.
        rule: When a change counts.
        better: Direction that is better.
        design: How the rounds were measured.
    """
    fault = _find_fault("base", base)
    if fault:
        return _invalid(base, head, fault)
    if better == "more" and _is_total_loss(base, head, rule):
        return replace(_invalid(base, head, "every round of head has 0", ratio=0.0), verdict="regressed")
    fault = _find_fault("head", head)
    if fault:
        return _invalid(base, head, fault)
    least, most = min(*base.values, *head.values), max(*base.values, *head.values)
    if log(most) - log(least) > MAX_LOG_RANGE:
        return _invalid(
            base, head, f"values from {least:g} to {base.describe(most)} cannot be rounds of one workload"
        )
    n, m = len(base.values), len(head.values)
    logs = [log(value) for value in base.values], [log(value) for value in head.values]
    if min(n, m) < MIN_ROUNDS and base.results_u and head.results_u:
        return _compare_results(base, head, rule, better, design)
    if min(n, m) < MIN_ROUNDS:
        fault = f"{n} base and {m} head rounds; a verdict needs at least {MIN_ROUNDS} of each"
        return _invalid(base, head, fault, ratio=exp(median(pairwise_differences(*map(sorted, logs)))))
    rounds = adjust_rounds(*logs, base.covariates, head.covariates)
    ordered = sorted(rounds.base), sorted(rounds.head)
    # The side that scatters more decides how well a change can be told.
    noise = max(map(relative_spread, ordered))
    noisy = noise > NOISY_ABOVE
    alpha = min(rule.alpha, NOISY_ALPHA) if noisy else rule.alpha
    notes = [f"noise {noise:.1%} exceeds {NOISY_ABOVE:.0%}, so the limits use α {alpha:g}"] if noisy else []
    drift = detect_drift(rounds.base, rounds.head)
    if drift is not None:
        notes.append(f"drift {drift.change:+.1%} over the rounds")
    shift = _estimate_shift(base, head, rounds, ordered, alpha, noise, design)
    less_is_better = better == "less"
    meter, meter_limit = _meter_uncertainties(base, head)
    meter *= COVERAGE_FACTOR
    far = find_second_level(*_worse_last(ordered, less_is_better))
    level = None if far is None or far.rare else far
    worse = shift.value if less_is_better else -shift.value
    high = shift.high if less_is_better else _negate(shift.low)
    verdict, reason = decide_verdict(
        worse,
        shift.low if less_is_better else _negate(shift.high),
        high,
        rule,
        absolute=_absolute_change(base, worse, high, better) if rule.threshold_absolute else None,
        meter=meter,
        # Rounds that alternate drift alike.
        drift=None if design.interleaved else drift,
        level=level,
        better=better,
    )
    if design.session_spread and verdict == "inconclusive" and min(n, m) < STORED_ROUNDS:
        notes.insert(0, f"{min(n, m)} rounds; measure {STORED_ROUNDS} of each side against a stored baseline")
    corrections = [*rounds.notes, *([reason] if level is not None and verdict == "regressed" else [])]
    if far is not None and far.rare and far.mean >= log1p(rule.threshold) and verdict != "regressed":
        corrections.append(f"{FEW_ROUNDS_OFF}{describe_far(far, better)}; the estimate leaves them out")
    if verdict == "inconclusive" and meter >= log1p(rule.tolerance):
        notes += _uncertain_rounds(base, head)
    if rounds.apart and verdict != "invalid":
        reason = f"{verdict} {HELD_BACK} the sides differ in the {' and the '.join(rounds.apart)}; {reason}"
        verdict = "inconclusive"
    # The scatter of independent rounds at which the error is that of the pairs or samples used.
    equivalent_noise = shift.error / standard_error(1.0, n, m)
    p_more, p_less = _p_values(shift, design)
    p_worse, p_better = (p_more, p_less) if less_is_better else (p_less, p_more)
    return Estimate(
        ratio=exp(shift.value),
        low=None if shift.low is None else exp(shift.low),
        high=None if shift.high is None else exp(shift.high),
        # A second level is no shift, which the p-value of ranks is for.
        p=None if level is not None else p_worse,
        noise=noise,
        detectable=minimum_detectable_change(
            n,
            m,
            equivalent_noise,
            _with_relative_threshold(rule, base),
            alpha=alpha,
            meter=meter / COVERAGE_FACTOR,
            session_spread=design.session_spread,
        ),
        n_base=n,
        n_head=m,
        verdict=verdict,
        reason="; ".join([reason, *notes]),
        p_improved=p_better,
        drift=None if drift is None else drift.change,
        alpha=alpha,
        meter=expm1(meter),
        meter_limit=expm1(COVERAGE_FACTOR * meter_limit),
        session_spread=design.session_spread,
        interleaved=design.interleaved,
        paired=shift.paired,
        adjusted=rounds.names,
        corrections=tuple(corrections),
    )


def _compare_results(base: Sample, head: Sample, rule: Rule, better: Direction, design: Design) -> Estimate:
    """Compare the results of few sessions by the uncertainties of the results and the spread of sessions."""
    n, m = len(base.values), len(head.values)
    logs = [[log(value) for value in side.values] for side in (base, head)]
    spread = design.session_spread or SESSION_SPREAD
    if n + m > 2:
        # Few sessions may scatter less than usual by chance; if they scatter more, that counts.
        seen = sqrt(sum((each - fmean(side)) ** 2 for side in logs for each in side) / (n + m - 2))
        spread = max(spread, seen * half_student(n + m - 2))
    # What a result does not know may be the same in all sessions.
    squares = [fmean(map(truediv, side.results_u, side.values)) ** 2 for side in (base, head)]
    error = sqrt(sum(squares) + spread**2 * (1 / n + 1 / m))
    shift = fmean(logs[1]) - fmean(logs[0])
    width = normal_quantile(1 - rule.alpha) * error
    worse = shift if better == "less" else -shift
    verdict, reason = decide_verdict(
        worse,
        worse - width,
        worse + width,
        rule,
        absolute=_absolute_change(base, worse, worse + width, better) if rule.threshold_absolute else None,
        meter=0.0,
        drift=None,
        level=None,
        better=better,
    )
    return Estimate(
        ratio=exp(shift),
        low=exp(shift - width),
        high=exp(shift + width),
        p=normal_cdf(-worse / error),
        noise=None,
        detectable=minimum_detectable_change(
            n,
            m,
            0.0,
            _with_relative_threshold(rule, base),
            alpha=rule.alpha,
            session_spread=error / sqrt(2),
        ),
        n_base=n,
        n_head=m,
        verdict=verdict,
        reason=reason,
        p_improved=normal_cdf(worse / error),
        alpha=rule.alpha,
        session_spread=design.session_spread,
    )


def _estimate_shift(
    base: Sample,
    head: Sample,
    rounds: Adjustment,
    ordered: tuple[list[float], list[float]],
    alpha: float,
    noise: float,
    design: Design,
) -> Shift:
    shift = shift_of_samples(*ordered, alpha, noise)
    if design.interleaved:
        differences = differences_of_pairs(
            dict(zip(base.pairs, rounds.base, strict=False)), dict(zip(head.pairs, rounds.head, strict=False))
        )
        shift = prefer_pairs(shift, differences, alpha)
    if design.session_spread:
        shift = widen_for_unequal_spread(shift, rounds.base, rounds.head, alpha)
    error = hypot(rounds.error, sqrt(2) * design.session_spread)
    return shift.widen_in_quadrature(normal_quantile(1 - alpha) * error)


def _p_values(shift: Shift, design: Design) -> tuple[float, float]:
    """Return the p-values against "not larger" and "not smaller", which sessions that differ raise."""
    if not design.session_spread:
        return shift.p_more, shift.p_less
    z = shift.value / hypot(shift.error, sqrt(2) * design.session_spread)
    return max(shift.p_more, normal_cdf(-z)), max(shift.p_less, normal_cdf(z))


def _worse_last(ordered: tuple[list[float], list[float]], less_is_better: bool) -> tuple[list[float], ...]:
    """Return both sides on a scale on which higher is worse."""
    return ordered if less_is_better else tuple([-value for value in side] for side in ordered)


def minimum_detectable_change(
    n: int,
    m: int,
    noise: float,
    rule: Rule,
    *,
    alpha: float,
    meter: float = 0.0,
    session_spread: float = 0.0,
) -> float:
    """Return the relative change that nine of ten comparisons call a regression.

    The estimate must reach the threshold and the lower limit the floor, each with the probability ``POWER``.
    The standard error is that of a rank test: sqrt(pi/3) times that of a mean if the scatter is normal
    (Lehmann, "Nonparametrics", 1975).

    Args:
        n: Rounds of the baseline.
        m: Rounds of the head.
        noise: Relative scatter of the rounds.
        rule: The rule; its absolute threshold is ignored.
        alpha: One-sided error probability of the limits.
        meter: Standard uncertainty of the ratio due to the meters alone.
        session_spread: Standard deviation of the level between sessions.
    """
    error = hypot(standard_error(noise, n, m), sqrt(2) * session_spread)
    z_power, z_limit = normal_quantile(POWER), normal_quantile(1 - alpha)
    by_threshold = max(log1p(rule.threshold), COVERAGE_FACTOR * meter) + z_power * error
    return expm1(max(by_threshold, log1p(rule.floor) + (z_limit + z_power) * error))


def _with_relative_threshold(rule: Rule, base: Sample) -> Rule:
    """Express the absolute threshold as a change relative to the baseline."""
    if not rule.threshold_absolute:
        return rule
    absolute = min(rule.threshold_absolute / median(base.values), exp(MAX_LOG_RANGE))
    return replace(rule, threshold=max(rule.threshold, absolute))


def _find_fault(name: str, side: Sample) -> str | None:
    if not side.values:
        return f"{name} has no valid round"
    for value in side.values if not _all_positive(side.values) else ():
        if not 0 < value < inf:
            return f"{name} has a value of {side.describe(value)}; a ratio needs finite values above zero"
    for each in (side.uncertainties, side.shared):
        if each and len(each) != len(side.values):
            return f"{name} has {len(side.values)} values but {len(each)} uncertainties"
        for u in each if not _all_positive(each) else ():
            if not 0 <= u < inf:
                fault = f"{name} has a meter uncertainty of {side.describe(u)}"
                return f"{fault}; it must be finite and not negative"
    return None


def _is_total_loss(base: Sample, head: Sample, rule: Rule) -> bool:
    """Return whether nothing is left on the head of what every round of the baseline has."""
    enough = min(len(base.values), len(head.values)) >= MIN_ROUNDS
    return enough and not any(head.values) and median(base.values) >= rule.threshold_absolute


def _all_positive(values: Sequence[float]) -> bool:
    """A quick test for finite values above zero. min() may miss a NaN; a sum does not."""
    return 0 < sum(values) < inf and min(values) > 0


def _invalid(base: Sample, head: Sample, reason: str, *, ratio: float | None = None) -> Estimate:
    n, m = len(base.values), len(head.values)
    return Estimate(ratio, None, None, None, None, None, n, m, "invalid", reason)


def _negate(value: float | None) -> float | None:
    return None if value is None else -value


def _meter_uncertainties(base: Sample, head: Sample) -> tuple[float, float]:
    """Return the standard uncertainty of the logarithm of the ratio due to the meters, and its lower bound.

    As in the uncertainty of a metric (``measure.round_statistics``): the part that differs from round to
    round shrinks with their number, the part that rounds share, the bound, does not (GUM 5.2.2). The two
    sides are treated as independent, although errors that they share cancel.
    """
    single, shared = [], []
    for side in (base, head):
        if side.uncertainties:
            squares = [(u / value) ** 2 for u, value in zip(side.uncertainties, side.values, strict=True)]
            single.append(MEDIAN_TO_MEAN * sqrt(fmean(squares) / len(squares)))
        if side.shared:
            shared.append(fmean(map(truediv, side.shared, side.values)))
    limit = min(hypot(*shared), MAX_LOG_RANGE)
    return min(hypot(limit, *single), MAX_LOG_RANGE), limit


def _uncertain_rounds(base: Sample, head: Sample) -> list[str]:
    """Name the round of either side whose uncertainty exceeds its value the most."""
    found = [
        (u / value, f"{name} has a round of {value:g} ± {side.describe(u)}")
        for name, side in (("base", base), ("head", head))
        for each in (side.uncertainties, side.shared)
        for u, value in zip(each, side.values, strict=False)
        if u > value
    ]
    return [max(found)[1]] if found else []


def _absolute_change(base: Sample, shift: float, high: float | None, better: Direction) -> AbsoluteChange:
    """Return the change at the level of the baseline. ``shift`` and ``high`` are positive if worse."""
    level = median(base.values)
    sign = 1 if better == "less" else -1
    size, worst = (
        sign * level * expm1(min(sign * each, MAX_LOG_RANGE))
        for each in (shift, shift if high is None else high)
    )
    return AbsoluteChange(abs(size), worst, level)
