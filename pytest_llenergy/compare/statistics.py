# SPDX-License-Identifier: Apache-2.0
"""The statistical rule: verdict, confidence limits and detectable change of two samples of rounds.

Pure functions over plain numbers. The estimate is the Hodges-Lehmann shift of the logarithms, so a ratio; its
limits are the exact order statistics of the Mann-Whitney test. ``docs/gating.md`` explains why these and not
means, medians, a t-test or a bootstrap. The correction for multiple comparisons is at the end of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, expm1, inf, log, log1p, pi, sqrt
from operator import truediv
from statistics import NormalDist, median
from typing import Literal

from pytest_llenergy.compare.metrics import Direction
from pytest_llenergy.compare.rank_statistics import (
    confidence_limit_rank,
    one_sided_p_values,
    pairwise_differences,
    rank_trend,
    theil_sen_slope,
)
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.defaults import FLOOR

RuleVerdict = Literal["regressed", "improved", "unchanged", "inconclusive", "invalid"]

#: Fewest rounds of each side for a verdict. With three of each the limits are just the extremes.
MIN_ROUNDS = 4
#: Noise above which the limits use ``NOISY_ALPHA``: outliers and drift are then as large as the changes to
#: find.
NOISY_ABOVE = 0.03
NOISY_ALPHA = 0.01
#: Standard deviation of a normal distribution over its median absolute deviation: 1 / Phi^-1(3/4).
MAD_TO_SIGMA = 1.4826
#: Expanded uncertainty over standard uncertainty, for about 95 % (GUM 6.3.3).
COVERAGE_FACTOR = 2.0
#: Probability with which the minimum detectable change is found.
POWER = 0.9
#: Tolerance for rounding errors of logarithms, so that a change of exactly the threshold reaches it.
LOG_ROUNDING = 1e-12
#: Values whose logarithms differ by more than this (a factor of 1e43) are not rounds of one workload.
MAX_LOG_RANGE = 100.0
#: A trend over the rounds counts from this many standard deviations of Spearman's coefficient.
TREND_SIGMAS = 3.0
#: Spearman's coefficient from which the trend makes up most of the scatter.
STRONG_CORRELATION = 0.8
#: Suites with fewer comparisons are not corrected, since they have few chances for false alarms.
MIN_TESTS_TO_CORRECT = 10


@dataclass(frozen=True)
class Rule:
    """When a change counts.

    All fields but ``threshold_absolute`` are relative changes or probabilities. If ``threshold_absolute`` is
    not 0, a change must reach both thresholds (``3%+2J``). Changes are taken on the logarithm: the mirror
    image of +3 % is 1/1.03, so that the verdict does not depend on which side is called the baseline.
    """

    threshold: float = 0.03  # smallest relative change that counts as a regression
    threshold_absolute: float = 0.0  # smallest absolute change, in the metric's base unit
    floor: float = FLOOR  # the lower limit of a regression must exceed it (1 %, or the measured A/A floor)
    tolerance: float = 0.05  # the upper limit of "unchanged" must be below it
    alpha: float = 0.05  # one-sided error probability of each limit

    def __post_init__(self) -> None:
        """Raise ``PlanError`` for values out of range."""
        for name in ("threshold", "threshold_absolute", "floor", "tolerance"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise PlanError(f"{name} of a rule must be zero or a positive number, not {value:g}")
        if not 0 < self.alpha < 0.5:
            raise PlanError(f"alpha of a rule must be between 0 and 0.5, not {self.alpha:g}")


#: The rule for metrics without a threshold.
DEFAULT_RULE = Rule()


@dataclass(frozen=True)
class Sample:
    """Rounds of one side, in the order of measurement.

    ``uncertainties`` are the meter's standard uncertainties of the values, in the same unit: one for each
    value, or empty if the metric has none. ``unit`` is for messages.
    """

    values: tuple[float, ...]
    uncertainties: tuple[float, ...] = ()
    unit: str = ""

    def describe(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{value:g} {self.unit}".rstrip()


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
    meter: float = 0.0  # smallest relative change that the meters can resolve, for any number of rounds


def compare_samples(
    base: Sample, head: Sample, rule: Rule = DEFAULT_RULE, better: Direction = "less"
) -> Estimate:
    """Compare the rounds of ``head`` with those of ``base``.

    Measured values never raise: samples that cannot be compared have the verdict ``invalid`` and a reason.

    Args:
        base: Rounds of the baseline.
        head: Rounds of the head.
        rule: When a change counts.
        better: Direction that is better.
    """
    fault = _find_fault("base", base) or _find_fault("head", head)
    if fault:
        return _invalid(base, head, fault)
    base_logs = [log(value) for value in base.values]
    head_logs = [log(value) for value in head.values]
    n, m = len(base_logs), len(head_logs)
    ordered = sorted(base_logs), sorted(head_logs)
    shifts = pairwise_differences(*ordered)
    shift = median(shifts)
    if max(shifts[-1], -shifts[0]) > MAX_LOG_RANGE:
        least, most = min(*base.values, *head.values), max(*base.values, *head.values)
        return _invalid(
            base, head, f"values from {least:g} to {base.describe(most)} cannot be rounds of one workload"
        )
    if min(n, m) < MIN_ROUNDS:
        fault = f"{n} base and {m} head rounds; a verdict needs at least {MIN_ROUNDS} of each"
        return _invalid(base, head, fault, ratio=exp(shift))
    noise = relative_spread(*ordered)
    noisy = noise > NOISY_ABOVE
    alpha = min(rule.alpha, NOISY_ALPHA) if noisy else rule.alpha
    notes = [f"noise {noise:.1%} exceeds {NOISY_ABOVE:.0%}, so the limits use α {alpha:g}"] if noisy else []
    drift = _detect_drift(base_logs, head_logs)
    if drift is not None:
        notes.append(f"drift {drift.change:+.1%} over the rounds")
    k = confidence_limit_rank(n, m, alpha)
    low, high = (shifts[k - 1], shifts[-k]) if k else (None, None)
    less_is_better = better == "less"
    p_more, p_less = one_sided_p_values(shifts, n, m)
    u = _meter_uncertainty(base, head)
    verdict, reason = _decide_verdict(
        shift if less_is_better else -shift,
        low if less_is_better else _negate(high),
        high if less_is_better else _negate(low),
        rule,
        absolute=_absolute_change(base, head, k, less_is_better) if rule.threshold_absolute and k else None,
        meter=COVERAGE_FACTOR * u,
        drift=drift,
        better=better,
    )
    relative_rule = _with_relative_threshold(rule, base)
    return Estimate(
        ratio=exp(shift),
        low=None if low is None else exp(low),
        high=None if high is None else exp(high),
        p=p_more if less_is_better else p_less,
        noise=noise,
        detectable=minimum_detectable_change(n, m, noise, relative_rule, alpha=alpha, meter=u),
        n_base=n,
        n_head=m,
        verdict=verdict,
        reason="; ".join([reason, *notes]),
        p_improved=p_less if less_is_better else p_more,
        drift=None if drift is None else drift.change,
        alpha=alpha,
        meter=expm1(COVERAGE_FACTOR * u),
    )


def relative_spread(*sides: Sequence[float]) -> float:
    """Return the robust relative scatter of values within their sides, given as logarithms.

    This is the median absolute deviation of all values, each from the median of its own side, scaled to the
    standard deviation of a normal distribution.
    """
    deviations = []
    for logs in sides:
        centre = median(logs)
        deviations += [abs(value - centre) for value in logs]
    return MAD_TO_SIGMA * median(deviations)


def minimum_detectable_change(
    n: int, m: int, noise: float, rule: Rule, *, alpha: float, meter: float = 0.0
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
    """
    error = noise * sqrt(pi / 3 * (1 / n + 1 / m))
    z_power, z_limit = _normal_quantile(POWER), _normal_quantile(1 - alpha)
    by_threshold = max(log1p(rule.threshold), COVERAGE_FACTOR * meter) + z_power * error
    return expm1(max(by_threshold, log1p(rule.floor) + (z_limit + z_power) * error))


def _with_relative_threshold(rule: Rule, base: Sample) -> Rule:
    """Express the absolute threshold as a change relative to the baseline."""
    if not rule.threshold_absolute:
        return rule
    absolute = min(rule.threshold_absolute / median(base.values), exp(MAX_LOG_RANGE))
    return replace(rule, threshold=max(rule.threshold, absolute))


@lru_cache(maxsize=64)
def _normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def _find_fault(name: str, side: Sample) -> str | None:
    if not side.values:
        return f"{name} has no valid round"
    for value in side.values if not _all_positive(side.values) else ():
        if not 0 < value < inf:
            return f"{name} has a value of {side.describe(value)}; a ratio needs finite values above zero"
    if not side.uncertainties:
        return None
    if len(side.uncertainties) != len(side.values):
        return f"{name} has {len(side.values)} values but {len(side.uncertainties)} uncertainties"
    for u in side.uncertainties if not _all_positive(side.uncertainties) else ():
        if not 0 <= u < inf:
            return f"{name} has a meter uncertainty of {side.describe(u)}; it must be finite and not negative"
    return None


def _all_positive(values: Sequence[float]) -> bool:
    """A quick test for finite values above zero. min() may miss a NaN; a sum does not."""
    return 0 < sum(values) < inf and min(values) > 0


def _invalid(base: Sample, head: Sample, reason: str, *, ratio: float | None = None) -> Estimate:
    n, m = len(base.values), len(head.values)
    return Estimate(ratio, None, None, None, None, None, n, m, "invalid", reason)


def _negate(value: float | None) -> float | None:
    return None if value is None else -value


@dataclass(frozen=True)
class Drift:
    """The relative change of a trend from first to last round, and whether it dominates the scatter."""

    change: float
    strong: bool


def _detect_drift(*logs: Sequence[float]) -> Drift | None:
    totals, variances = zip(*map(rank_trend, logs), strict=True)
    total, variance = sum(totals), sum(variances)
    if not variance or abs(total) < TREND_SIGMAS * sqrt(variance):
        return None
    change = expm1(theil_sen_slope(logs) * (max(len(side) for side in logs) - 1))
    perfect = sum(sqrt(one * (len(side) - 1)) for one, side in zip(variances, logs, strict=True))
    return Drift(change, abs(total) >= STRONG_CORRELATION * perfect)


def _meter_uncertainty(base: Sample, head: Sample) -> float:
    """Return the standard uncertainty of the logarithm of the ratio that is due to the meters.

    Rounds of a side are treated as fully correlated, so that more rounds do not reduce their uncertainty (GUM
    5.2.2, note 1): the part that differs from round to round is unknown here, and it also shows in the
    scatter. The two sides are treated as independent, although errors that they share cancel. Both choices
    avoid unjustified verdicts.
    """
    relative = [
        sum(map(truediv, side.uncertainties, side.values)) / len(side.values) if side.uncertainties else 0.0
        for side in (base, head)
    ]
    return min(sqrt(sum(one * one for one in relative)), MAX_LOG_RANGE)


@dataclass(frozen=True)
class AbsoluteChange:
    """A difference in the metric's unit: its size, the upper limit of how much worse it is, and the level."""

    size: float
    worst: float
    level: float


def _absolute_change(base: Sample, head: Sample, k: int, less_is_better: bool) -> AbsoluteChange:
    """Return the median and the k-th of all ordered differences, as for the ratio but of the values."""
    values = sorted(base.values)
    ordered = pairwise_differences(values, sorted(head.values))
    worst = ordered[-k] if less_is_better else -ordered[k - 1]
    return AbsoluteChange(abs(median(ordered)), worst, median(values))


def _decide_verdict(
    shift: float,
    low: float | None,
    high: float | None,
    rule: Rule,
    *,
    absolute: AbsoluteChange | None,
    meter: float,
    drift: Drift | None,
    better: Direction,
) -> tuple[RuleVerdict, str]:
    """Apply the rule. ``shift``, the limits and ``meter`` are logarithms; positive means worse."""
    sign = 1 if better == "less" else -1  # reasons state changes of the metric, as tables do
    if drift is not None and drift.strong and abs(log1p(drift.change)) >= log1p(rule.tolerance):
        fault = f"the level drifted by {drift.change:+.1%} over the rounds"
        return "invalid", f"{fault}; let the machine settle and measure again"
    if low is None or high is None:
        return "inconclusive", "too few rounds for limits at this confidence"
    changed: RuleVerdict | None = None
    if _is_change(shift, low, rule):
        changed = "regressed"
    elif _is_change(-shift, -high, rule):
        changed = "improved"
    if changed and (absolute is None or absolute.size >= rule.threshold_absolute):
        if abs(shift) < meter:
            return "inconclusive", f"{changed} by less than the meters can resolve ({expm1(meter):.1%})"
        least = low if changed == "regressed" else high
        return changed, f"{expm1(sign * shift):+.1%}, at least {expm1(sign * least):+.1%}"
    if high < log1p(rule.tolerance):
        if meter >= log1p(rule.tolerance):
            return "inconclusive", f"the meters cannot resolve changes below {expm1(meter):.1%}"
        return "unchanged", f"at most {rule.tolerance:.1%} worse"
    if absolute is not None and absolute.worst < rule.threshold_absolute:
        if expm1(meter) * absolute.level >= rule.threshold_absolute:
            return "inconclusive", f"the meters cannot resolve changes below {expm1(meter):.1%}"
        return "unchanged", f"at most {rule.threshold_absolute:g} worse, in absolute terms"
    if absolute is not None and changed:
        reason = f"below the absolute threshold of {rule.threshold_absolute:g}, but possibly"
        return "inconclusive", f"{changed} by {absolute.size:.3g}, {reason} {absolute.worst:.3g} worse"
    first, last = sorted((expm1(sign * low), expm1(sign * high)))
    return "inconclusive", f"change between {first:+.1%} and {last:+.1%}; threshold {rule.threshold:.1%}"


def _is_change(shift: float, low: float, rule: Rule) -> bool:
    return shift >= log1p(rule.threshold) - LOG_ROUNDING and low > log1p(rule.floor)


def correct_multiple_comparisons(estimates: Sequence[Estimate], q: float = 0.10) -> list[Estimate]:
    """Correct the verdicts of a suite for the number of comparisons.

    Changes that are not significant among so many comparisons become ``inconclusive``. At most the share
    ``q`` of the changes that remain is expected to be false: Y. Benjamini, Y. Hochberg, "Controlling the
    false discovery rate", J. R. Stat. Soc. B 57 (1995). Regressions and improvements are two families, each
    over all comparisons that have a p-value.

    Returns:
        The estimates in the order given.
    """
    known = [each for each in estimates if each.p is not None]
    if len(known) < MIN_TESTS_TO_CORRECT:
        return list(estimates)
    bounds = {
        "regressed": _largest_significant([each.p for each in known if each.p is not None], q),
        "improved": _largest_significant(
            [each.p_improved for each in known if each.p_improved is not None], q
        ),
    }
    return [_correct(each, bounds, len(known), q) for each in estimates]


def _largest_significant(p_values: Sequence[float], q: float) -> float:
    """Return the largest p-value that is still significant, or -1.0 if none is."""
    ordered = sorted(p_values)
    return max((p for i, p in enumerate(ordered, 1) if p <= q * i / len(ordered)), default=-1.0)


def _correct(estimate: Estimate, bounds: dict[str, float], count: int, q: float) -> Estimate:
    verdict = estimate.verdict
    p = estimate.p if verdict == "regressed" else estimate.p_improved
    if verdict not in bounds or p is None or p <= bounds[verdict]:
        return estimate
    reason = f"{verdict} by itself, but p {p:.2g} is not significant among {count} comparisons (q {q:g})"
    return replace(estimate, verdict="inconclusive", reason=f"{reason}; {estimate.reason}")
