# SPDX-License-Identifier: Apache-2.0
"""When a change counts: the thresholds, and the verdict on an estimate and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import expm1, log1p
from typing import Literal

from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.defaults import FLOOR

RuleVerdict = Literal["regressed", "worse", "improved", "unchanged", "inconclusive", "invalid"]

#: Tolerance for rounding errors of logarithms, so that a change of exactly the threshold reaches it.
LOG_ROUNDING = 1e-12
#: What is left of a baseline that falls by an absolute threshold, at least.
MIN_REST = 0.01
#: Largest change that reasons name as what the meters cannot resolve.
MAX_RESOLUTION = 10.0
#: Part of the reason if the measurement is too uncertain for a verdict, however many rounds there are.
UNRESOLVED = "be resolved"
#: Part of the reason if rounds were disturbed, so that a verdict is held back.
HELD_BACK = "by itself, but"
#: Part of the reason if a relative threshold cannot decide, before an example.
NEEDS_ABSOLUTE = "add an absolute threshold, such as"
#: Beginning of the reason if only more sessions of each side can decide.
NEEDS_SESSIONS = "more sessions are needed"


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

    #: Smallest relative change that counts as an improvement, if it is another one.
    improvement: float | None = None

    def at_level(self, level: float, better: Direction) -> Rule:
        """Return the rule with both thresholds as one relative change of a baseline of this level."""
        rise = self.threshold_absolute / level
        # A fall by as much is a larger change on the logarithm, and may be more than all.
        fall = 1 / max(1 - rise, MIN_REST) - 1
        worse, gain = (rise, fall) if better == "less" else (fall, rise)
        if max(worse, gain) <= self.threshold:
            return self
        threshold = max(self.threshold, worse)
        tolerance = max(self.tolerance, threshold)
        return replace(self, threshold=threshold, tolerance=tolerance, improvement=max(self.threshold, gain))


#: The rule for metrics without a threshold.
DEFAULT_RULE = Rule()


def decide_verdict(
    shift: float,
    low: float | None,
    high: float | None,
    rule: Rule,
    *,
    meter: float = 0.0,
    better: Direction = "less",
) -> tuple[RuleVerdict, str]:
    """Return the verdict by the relative part of the rule, and its reason.

    ``shift``, the limits and ``meter``, which is what the meters can resolve, are logarithms; positive means
    worse.
    """
    if low is None or high is None:
        return "inconclusive", "too few rounds for limits at this confidence"
    sign = 1 if better == "less" else -1  # reasons state changes of the metric, as tables do
    resolution = f"{min(expm1(meter), MAX_RESOLUTION):.1%}"
    sides: list[tuple[RuleVerdict, float, float]] = [("regressed", shift, low), ("improved", -shift, -high)]
    for verdict, size, least in sides:
        gain = rule.improvement if verdict == "improved" else None
        if size >= log1p(rule.threshold if gain is None else gain) - LOG_ROUNDING and least > log1p(
            rule.floor
        ):
            if size < meter:
                return "inconclusive", f"{verdict} by less than can {UNRESOLVED} ({resolution})"
            return verdict, _describe_change(sign, shift, low if verdict == "regressed" else high)
    if high < log1p(rule.tolerance):
        if low > log1p(rule.floor) and shift >= meter:
            return (
                "worse",
                f"{_describe_change(sign, shift, low)}; below the threshold of {rule.threshold:.1%}",
            )
        if meter >= log1p(rule.tolerance):
            return "inconclusive", f"changes below {resolution} cannot {UNRESOLVED}"
        return "unchanged", f"at most {rule.tolerance:.1%} worse"
    first, last = sorted((expm1(sign * low), expm1(sign * high)))
    return "inconclusive", f"change between {first:+.1%} and {last:+.1%}; threshold {rule.threshold:.1%}"


def _describe_change(sign: int, shift: float, least: float) -> str:
    return f"{expm1(sign * shift):+.1%}, at least {expm1(sign * least):+.1%}"
