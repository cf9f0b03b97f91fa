# SPDX-License-Identifier: Apache-2.0
"""The statistical rule: verdict, interval and power for two samples of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, expm1, inf, log, log1p, pi, sqrt
from operator import truediv
from statistics import NormalDist
from typing import Literal

from pytest_llenergy.compare.metrics import Direction
from pytest_llenergy.compare.rank_statistics import (
    confidence_limit_rank,
    middle,
    one_sided_p_values,
    pairwise_differences,
    rank_trend,
    theil_sen_slope,
)
from pytest_llenergy.errors import PlanError

# Is it more: the rule, and the verdict on two samples of rounds. Pure functions over plain numbers.
#
# The estimate is the Hodges-Lehmann shift of the logarithms, so a ratio; its limits are the exact order
# statistics of the Mann-Whitney test. Why these and not means, medians, t or a bootstrap: see
# ``docs/gating.md``.

Verdict = Literal["regressed", "improved", "unchanged", "inconclusive", "invalid"]

#: Rounds a side below which there is no verdict. The limits of three a side are just the extremes.
MIN_ROUNDS = 4
#: Scatter above which limits are held to ``NOISY_ALPHA``: outliers and drift are then as large as what is
#: looked for.
NOISY_ABOVE = 0.03
NOISY_ALPHA = 0.01
#: Scatter of a normal law over its median absolute deviation: 1 / Phi^-1(3/4).
MAD_TO_SIGMA = 1.4826
#: Expanded uncertainty over standard uncertainty, for about 95 % (GUM 6.3.3).
COVERAGE_FACTOR = 2.0
#: With which chance the minimum detectable change is found.
POWER = 0.9
#: What two logarithms may be off by: a change of exactly the threshold reaches it.
LOG_ROUNDING = 1e-12
#: Values that differ by more than this, on the logarithm (1e43), are no rounds of one piece of work.
MAX_LOG_RANGE = 100.0
#: A trend over the rounds is taken for real from so many standard deviations of Spearman's coefficient.
TREND_SIGMAS = 3.0
#: With such a coefficient most of the scatter is the trend.
STRONG_CORRELATION = 0.8


@dataclass(frozen=True)
class Rule:
    """When a change counts. All but ``threshold_absolute`` are relative changes or chances.

    ``threshold_absolute`` is in the metric's base unit; both thresholds must be reached (``3%+2J``). A change
    is taken on the logarithm: the mirror image of +3 % is 1/1.03, which makes the verdict the same whichever
    side is called base.
    """

    threshold: float = 0.03  # relative change from which a regression counts
    threshold_absolute: float = 0.0  # and at least so much, in the metric's base unit
    floor: float = 0.01  # the lower limit must be above it (1 %, or the measured A/A floor)
    tolerance: float = 0.05  # unchanged: the upper limit is below it
    alpha: float = 0.05  # one-sided, of each limit

    def __post_init__(self) -> None:
        """Raises ``PlanError`` for what is no rule."""
        for name in ("threshold", "threshold_absolute", "floor", "tolerance"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise PlanError(f"{name} of a rule must be a number that is not negative, not {value:g}")
        if not 0 < self.alpha < 0.5:
            raise PlanError(f"alpha of a rule must be a chance between 0 and 0.5, not {self.alpha:g}")


#: The one that counts where nobody asks for another.
DEFAULT_RULE = Rule()


@dataclass(frozen=True)
class Sample:
    """Rounds of one side, in the order in which they were measured.

    ``uncertainties`` are the meter's standard uncertainty of each, in the same unit: as many as values, or
    none where the metric has none.
    """

    values: tuple[float, ...]
    uncertainties: tuple[float, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """What is known of one comparison."""

    ratio: float | None  # head / base; None where invalid
    low: float | None  # one-sided 1-alpha limits of the ratio
    high: float | None
    p: float | None  # rank p against "not worse"
    noise: float | None  # robust relative scatter of rounds within a side
    detectable: float | None  # minimum detectable relative change with this n and noise
    n_base: int
    n_head: int
    verdict: Verdict
    reason: str  # one clause for a person: why this verdict
    p_improved: float | None = None  # rank p against "not better"
    drift: float | None = None  # relative change of the level over the rounds, where it has a clear trend
    alpha: float | None = None  # what the limits were held to
    meter: float = 0.0  # relative change that the meters cannot tell from none, whatever the rounds say


def compare_samples(
    base: Sample, head: Sample, rule: Rule = DEFAULT_RULE, better: Direction = "less"
) -> Estimate:
    """The verdict on ``head`` against ``base``.

    Never raises for what was measured: what cannot be compared is ``invalid``, with the reason.
    """
    wrong = _find_fault("base", base) or _find_fault("head", head)
    if wrong:
        return _estimate_without_limits(base, head, "invalid", wrong)
    base_logs = [log(value) for value in base.values]
    head_logs = [log(value) for value in head.values]
    n, m = len(base_logs), len(head_logs)
    ordered = sorted(base_logs), sorted(head_logs)
    shifts = pairwise_differences(*ordered)
    shift = middle(shifts)
    if max(shifts[-1], -shifts[0]) > MAX_LOG_RANGE:
        least, most = min(*base.values, *head.values), max(*base.values, *head.values)
        return _estimate_without_limits(
            base, head, "invalid", f"values from {least:g} to {most:g} are no rounds of one work"
        )
    if min(n, m) < MIN_ROUNDS:
        found = f"{n} base and {m} head rounds: a verdict needs {MIN_ROUNDS} a side"
        return _estimate_without_limits(base, head, "invalid", found, ratio=exp(shift))
    noise = relative_spread(*ordered)
    noisy = noise > NOISY_ABOVE
    alpha = min(rule.alpha, NOISY_ALPHA) if noisy else rule.alpha
    notes = [f"noise {noise:.1%} is above {NOISY_ABOVE:.0%}, so limits at α {alpha:g}"] if noisy else []
    drift = _detect_drift(base_logs, head_logs)
    if drift is not None:
        notes.append(f"drift {drift.change:+.1%} over the rounds")
    k = confidence_limit_rank(n, m, alpha)
    low, high = (shifts[k - 1], shifts[-k]) if k else (None, None)
    worse = better == "less"
    p_more, p_less = one_sided_p_values(shifts, n, m)
    u = _meter_uncertainty(base, head)
    verdict, reason = _decide_verdict(
        shift if worse else -shift,
        (low if worse else _negative(high)),
        (high if worse else _negative(low)),
        rule,
        absolute=_absolute_change(base, head, k, worse) if rule.threshold_absolute and k else None,
        meter=COVERAGE_FACTOR * u,
        drift=drift,
    )
    return Estimate(
        ratio=exp(shift),
        low=None if low is None else exp(low),
        high=None if high is None else exp(high),
        p=p_more if worse else p_less,
        noise=noise,
        detectable=minimum_detectable_change(
            n, m, noise, _as_relative_rule(rule, base), alpha=alpha, meter=u
        ),
        n_base=n,
        n_head=m,
        verdict=verdict,
        reason="; ".join([reason, *notes]),
        p_improved=p_less if worse else p_more,
        drift=None if drift is None else drift.change,
        alpha=alpha,
        meter=expm1(COVERAGE_FACTOR * u),
    )


def relative_spread(*ordered: Sequence[float]) -> float:
    """Robust relative scatter within the sides, each given as its ordered logarithms.

    The median absolute deviation, each from its own side's median, pooled, and scaled to the standard
    deviation of a normal law.
    """
    residuals = []
    for side in ordered:
        centre = middle(side)
        residuals += [abs(one - centre) for one in side]
    residuals.sort()
    return MAD_TO_SIGMA * middle(residuals)


def minimum_detectable_change(
    n: int, m: int, noise: float, rule: Rule, *, alpha: float, meter: float = 0.0
) -> float:
    """The relative change that is found to have regressed in nine of ten comparisons.

    The estimate must reach the threshold and the lower limit the floor, each with the chance ``POWER``; the
    standard error is that of a rank test, sqrt(pi/3) times that of a mean for normal scatter (Lehmann,
    "Nonparametrics", 1975). ``meter`` is the standard uncertainty of the ratio from the meters alone.
    """
    error = noise * sqrt(pi / 3 * (1 / n + 1 / m))
    to_find, to_be_sure = _normal_quantile(POWER), _normal_quantile(1 - alpha)
    by_threshold = max(log1p(rule.threshold), COVERAGE_FACTOR * meter) + to_find * error
    return expm1(max(by_threshold, log1p(rule.floor) + (to_be_sure + to_find) * error))


def _as_relative_rule(rule: Rule, base: Sample) -> Rule:
    if not rule.threshold_absolute:
        return rule
    absolute = min(rule.threshold_absolute / middle(sorted(base.values)), exp(MAX_LOG_RANGE))
    return replace(rule, threshold=max(rule.threshold, absolute))


@lru_cache(maxsize=64)
def _normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def _find_fault(name: str, side: Sample) -> str | None:
    if not side.values:
        return f"{name} has no valid round"
    for value in side.values if not _are_positive(side.values) else ():
        if not 0 < value < inf:
            return f"{name} has a value of {value:g}: a ratio needs finite values above zero"
    if not side.uncertainties:
        return None
    if len(side.uncertainties) != len(side.values):
        return f"{name} has {len(side.values)} values but {len(side.uncertainties)} uncertainties"
    for u in side.uncertainties if not _are_positive(side.uncertainties) else ():
        if not 0 <= u < inf:
            return f"{name} has a meter uncertainty of {u:g}: it must be finite and not negative"
    return None


def _are_positive(values: Sequence[float]) -> bool:
    """Whether all are finite and above zero, quickly. min() may miss a NaN; a sum does not."""
    return 0 < sum(values) < inf and min(values) > 0


def _estimate_without_limits(
    base: Sample, head: Sample, verdict: Verdict, reason: str, *, ratio: float | None = None
) -> Estimate:
    n, m = len(base.values), len(head.values)
    return Estimate(ratio, None, None, None, None, None, n, m, verdict, reason)


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


@dataclass(frozen=True)
class Drift:
    """Relative change of the level from the first round to the last; ``strong``: most of the scatter."""

    change: float
    strong: bool


def _detect_drift(*logs: Sequence[float]) -> Drift | None:
    """None without a clear trend."""
    totals, variances = zip(*map(rank_trend, logs), strict=True)
    total, variance = sum(totals), sum(variances)
    if not variance or abs(total) < TREND_SIGMAS * sqrt(variance):
        return None
    change = expm1(theil_sen_slope(logs) * (max(len(side) for side in logs) - 1))
    perfect = sum(sqrt(one * (len(side) - 1)) for one, side in zip(variances, logs, strict=True))
    return Drift(change, abs(total) >= STRONG_CORRELATION * perfect)


def _meter_uncertainty(base: Sample, head: Sample) -> float:
    """Standard uncertainty of the logarithm of the ratio, from what the meters themselves cannot know.

    Rounds of a side are taken as fully correlated, so their uncertainty does not fall with their number (GUM
    5.2.2, note 1): which part differs from round to round is not known here, and that part is in the scatter
    as well. The two sides are taken as independent, although what is wrong on both alike cancels. Both err on
    the side of no verdict.
    """
    relative = [
        sum(map(truediv, side.uncertainties, side.values)) / len(side.values) if side.uncertainties else 0.0
        for side in (base, head)
    ]
    return min(sqrt(sum(one * one for one in relative)), MAX_LOG_RANGE)


@dataclass(frozen=True)
class AbsoluteChange:
    """In the metric's own unit: the difference, the upper limit of how much worse it is, and the level."""

    size: float
    worst: float
    level: float


def _absolute_change(base: Sample, head: Sample, k: int, less_is_better: bool) -> AbsoluteChange:
    """As with the ratio: the middle and the k-th of all ordered differences, of the values themselves."""
    values = sorted(base.values)
    ordered = pairwise_differences(values, sorted(head.values))
    worst = ordered[-k] if less_is_better else -ordered[k - 1]
    return AbsoluteChange(abs(middle(ordered)), worst, middle(values))


def _decide_verdict(
    shift: float,
    low: float | None,
    high: float | None,
    rule: Rule,
    *,
    absolute: AbsoluteChange | None,
    meter: float,
    drift: Drift | None,
) -> tuple[Verdict, str]:
    """``shift``, limits and ``meter`` are logarithms, positive for worse."""
    if drift is not None and drift.strong and abs(log1p(drift.change)) >= log1p(rule.tolerance):
        moved = f"the level moved by {drift.change:+.1%} over the rounds"
        return "invalid", f"{moved}: let it settle, measure again"
    if low is None or high is None:
        return "inconclusive", "too few rounds for limits that are so sure"
    changed: Verdict | None = None
    if _is_change(shift, low, rule):
        changed = "regressed"
    elif _is_change(-shift, -high, rule):
        changed = "improved"
    if changed and (absolute is None or absolute.size >= rule.threshold_absolute):
        if abs(shift) < meter:
            return "inconclusive", f"{changed} by less than the {expm1(meter):.1%} that the meters can tell"
        surely = expm1(low if changed == "regressed" else -high)
        return changed, f"{expm1(abs(shift)):.1%}, surely more than {surely:.1%}"
    if high < log1p(rule.tolerance):
        if meter >= log1p(rule.tolerance):
            return "inconclusive", f"the meters cannot tell changes below {expm1(meter):.1%}"
        return "unchanged", f"surely not worse by {rule.tolerance:.1%}"
    if absolute is not None and absolute.worst < rule.threshold_absolute:
        if expm1(meter) * absolute.level >= rule.threshold_absolute:
            return "inconclusive", f"the meters cannot tell changes below {expm1(meter):.1%}"
        return "unchanged", f"surely not worse by {rule.threshold_absolute:g}"
    if absolute is not None and changed:
        small = f"{changed} by {absolute.size:.3g}, less than the {rule.threshold_absolute:g} that count"
        return "inconclusive", f"{small}, and may be worse by {absolute.worst:.3g}"
    if low > log1p(rule.floor):
        return "inconclusive", f"worse by less than {rule.threshold:.1%}, and may be so by {expm1(high):.1%}"
    return "inconclusive", f"may be worse by {expm1(high):.1%}, and is not surely so by {rule.floor:.1%}"


def _is_change(shift: float, low: float, rule: Rule) -> bool:
    return shift >= log1p(rule.threshold) - LOG_ROUNDING and low > log1p(rule.floor)


# Many benchmarks, many chances of a false alarm: the correction for a suite.

#: Suites below it are not corrected: a handful of benchmarks has a handful of chances.
MIN_TESTS_TO_CORRECT = 10


def correct_multiple_comparisons(estimates: Sequence[Estimate], q: float = 0.10) -> list[Estimate]:
    """Keep of all changes those that hold among so many comparisons; the others become ``inconclusive``.

    At most the share ``q`` of the changes that are kept is expected to be false: Y. Benjamini, Y. Hochberg,
    "Controlling the false discovery rate", J. R. Stat. Soc. B 57 (1995). Regressions and improvements are two
    families, each over all benchmarks that have a p. In the order given.
    """
    known = [one for one in estimates if one.p is not None]
    if len(known) < MIN_TESTS_TO_CORRECT:
        return list(estimates)
    bounds = {
        "regressed": _largest_kept_p([one.p for one in known if one.p is not None], q),
        "improved": _largest_kept_p([one.p_improved for one in known if one.p_improved is not None], q),
    }
    return [_correct_one(one, bounds, len(known), q) for one in estimates]


def _largest_kept_p(chances: Sequence[float], q: float) -> float:
    """The largest p that is kept; -1.0 where none is."""
    ordered = sorted(chances)
    return max((p for i, p in enumerate(ordered, 1) if p <= q * i / len(ordered)), default=-1.0)


def _correct_one(one: Estimate, bounds: dict[str, float], count: int, q: float) -> Estimate:
    p = one.p if one.verdict == "regressed" else one.p_improved
    if one.verdict not in bounds or p is None or p <= bounds[one.verdict]:
        return one
    reason = (
        f"{one.verdict} alone, but p {p:.2g} is no discovery among {count} benchmarks (q {q:g}); {one.reason}"
    )
    return replace(one, verdict="inconclusive", reason=reason)
