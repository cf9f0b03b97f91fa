# SPDX-License-Identifier: Apache-2.0
"""When a change counts: the thresholds, and the verdict on an estimate and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log1p
from typing import Literal

from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.defaults import FLOOR
from pytest_llenergy.record.quantity import format_number

RuleVerdict = Literal["regressed", "worse", "improved", "unchanged", "inconclusive", "invalid"]

#: Tolerance for rounding errors of logarithms, so that a change of exactly the threshold reaches it.
LOG_ROUNDING = 1e-12
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
    absolute: AbsoluteChange | None = None,
    meter: float = 0.0,
    better: Direction = "less",
) -> tuple[RuleVerdict, str]:
    """Return the verdict by the rule, and its reason.

    ``shift``, the limits and ``meter``, which is what the meters can resolve, are logarithms; positive means
    worse.
    """
    if low is None or high is None:
        return "inconclusive", "too few rounds for limits at this confidence"
    sign = 1 if better == "less" else -1  # reasons state changes of the metric, as tables do
    resolution = f"{min(expm1(meter), MAX_RESOLUTION):.1%}"
    unresolved = f"changes below {resolution} cannot {UNRESOLVED}"
    changed: RuleVerdict | None = None
    if _is_change(shift, low, rule):
        changed = "regressed"
    elif _is_change(-shift, -high, rule):
        changed = "improved"
    if changed and (absolute is None or absolute.size >= rule.threshold_absolute):
        if abs(shift) < meter:
            return "inconclusive", f"{changed} by less than can {UNRESOLVED} ({resolution})"
        least = low if changed == "regressed" else high
        return changed, f"{expm1(sign * shift):+.1%}, at least {expm1(sign * least):+.1%}"
    negligible = absolute is not None and absolute.worst < rule.threshold_absolute
    if high < log1p(rule.tolerance):
        if low > log1p(rule.floor) and shift >= meter and not negligible:
            change = f"{expm1(sign * shift):+.1%}, at least {expm1(sign * low):+.1%}"
            return "worse", f"{change}; below the threshold of {rule.threshold:.1%}"
        if meter >= log1p(rule.tolerance):
            return "inconclusive", unresolved
        return "unchanged", f"at most {rule.tolerance:.1%} worse"
    if absolute is not None and negligible:
        if expm1(meter) * absolute.level >= rule.threshold_absolute:
            return "inconclusive", unresolved
        return "unchanged", f"at most {rule.threshold_absolute:g} worse, in absolute terms"
    if absolute is not None and changed:
        reason = f"below the absolute threshold of {rule.threshold_absolute:g}, but possibly"
        return (
            "inconclusive",
            f"{changed} by {format_number(absolute.size)}, {reason} {format_number(absolute.worst)} worse",
        )
    first, last = sorted((expm1(sign * low), expm1(sign * high)))
    return "inconclusive", f"change between {first:+.1%} and {last:+.1%}; threshold {rule.threshold:.1%}"


def _is_change(shift: float, low: float, rule: Rule) -> bool:
    return shift >= log1p(rule.threshold) - LOG_ROUNDING and low > log1p(rule.floor)
