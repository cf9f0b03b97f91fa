# SPDX-License-Identifier: Apache-2.0
"""When a change counts: the thresholds, and the verdict on an estimate and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, log, log1p, sqrt
from typing import Literal

from pytest_llenergy.compare.drift import Drift
from pytest_llenergy.compare.limits import SecondLevel, normal_quantile
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.defaults import FLOOR

RuleVerdict = Literal["regressed", "worse", "improved", "unchanged", "inconclusive", "invalid"]

#: Tolerance for rounding errors of logarithms, so that a change of exactly the threshold reaches it.
LOG_ROUNDING = 1e-12
#: Largest change that reasons name as what the meters cannot resolve.
MAX_RESOLUTION = 10.0
#: Part of the reason if the meters are what prevents a verdict.
BY_METERS = "the meters can"
#: Part of the reason if rounds were disturbed, so that a verdict is held back.
HELD_BACK = "by itself, but"
#: Part of the reason if a relative threshold cannot decide, before an example.
NEEDS_ABSOLUTE = "add an absolute threshold, such as"


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
class AbsoluteChange:
    """A difference in the metric's unit: its size, the upper limit of how much worse it is, and the level."""

    size: float
    worst: float
    level: float


def decide_verdict(
    shift: float,
    low: float | None,
    high: float | None,
    rule: Rule,
    *,
    absolute: AbsoluteChange | None,
    meter: float,
    drift: Drift | None,
    level: SecondLevel | None,
    better: Direction,
) -> tuple[RuleVerdict, str]:
    """Return the verdict by the rule, and its reason.

    ``shift``, the limits and ``meter``, which is what the meters can resolve, are logarithms; positive means
    worse.
    """
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
    if level is not None and changed != "regressed" and level.mean >= log1p(rule.threshold):
        return ("regressed" if level.p <= rule.alpha else "inconclusive"), describe_far(level, better)
    if changed and (absolute is None or absolute.size >= rule.threshold_absolute):
        if abs(shift) < meter:
            return (
                "inconclusive",
                f"{changed} by less than {BY_METERS} resolve ({_describe_resolution(meter)})",
            )
        least = low if changed == "regressed" else high
        return changed, f"{expm1(sign * shift):+.1%}, at least {expm1(sign * least):+.1%}"
    negligible = absolute is not None and absolute.worst < rule.threshold_absolute
    if low > log1p(rule.floor) and high < log1p(rule.tolerance) and shift >= meter and not negligible:
        change = f"{expm1(sign * shift):+.1%}, at least {expm1(sign * low):+.1%}"
        return "worse", f"{change}; below the threshold of {rule.threshold:.1%}"
    if high < log1p(rule.tolerance):
        if meter >= log1p(rule.tolerance):
            return "inconclusive", f"{BY_METERS}not resolve changes below {_describe_resolution(meter)}"
        return "unchanged", f"at most {rule.tolerance:.1%} worse"
    if absolute is not None and absolute.worst < rule.threshold_absolute:
        if expm1(meter) * absolute.level >= rule.threshold_absolute:
            return "inconclusive", f"{BY_METERS}not resolve changes below {_describe_resolution(meter)}"
        return "unchanged", f"at most {rule.threshold_absolute:g} worse, in absolute terms"
    if absolute is not None and changed:
        reason = f"below the absolute threshold of {rule.threshold_absolute:g}, but possibly"
        return "inconclusive", f"{changed} by {absolute.size:.3g}, {reason} {absolute.worst:.3g} worse"
    first, last = sorted((expm1(sign * low), expm1(sign * high)))
    return "inconclusive", f"change between {first:+.1%} and {last:+.1%}; threshold {rule.threshold:.1%}"


def describe_far(level: SecondLevel, better: Direction) -> str:
    side = "higher" if better == "less" else "lower"
    factor = f"by a factor of {exp(level.factor):.2g} on average"
    return f"{level.count} rounds of the head are {side} than every round of the base, {factor}"


def _is_change(shift: float, low: float, rule: Rule) -> bool:
    return shift >= log1p(rule.threshold) - LOG_ROUNDING and low > log1p(rule.floor)


def rounds_can_decide(
    ratio: float, limits: tuple[float, float], rule: Rule, better: Direction, *, alpha: float, spread: float
) -> bool:
    """Return whether more rounds may decide on an inconclusive comparison with a stored baseline.

    They may if most of the width of its limits is due to the rounds, or if limits that allow only for the
    difference of sessions would give a verdict.

    Args:
        ratio: Head over base.
        limits: Limits of the ratio.
        rule: When a change counts.
        better: Direction that is better.
        alpha: One-sided error probability of each limit.
        spread: Standard deviation of the level between sessions.
    """
    by_sessions = normal_quantile(1 - alpha) * sqrt(2) * spread
    if log(limits[1] / limits[0]) / 2 > sqrt(2) * by_sessions:
        return True
    worse = log(ratio) if better == "less" else -log(ratio)
    verdict, _ = decide_verdict(
        worse,
        worse - by_sessions,
        worse + by_sessions,
        rule,
        absolute=None,
        meter=0.0,
        drift=None,
        level=None,
        better=better,
    )
    return verdict != "inconclusive"


def _describe_resolution(meter: float) -> str:
    return f"{min(expm1(meter), MAX_RESOLUTION):.1%}"
