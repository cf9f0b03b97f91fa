# SPDX-License-Identifier: Apache-2.0
"""Compare two values with their uncertainties: a custom metric, or the result of one session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, hypot, log, sqrt
from statistics import stdev

from pytest_llenergy.compare.case import Case
from pytest_llenergy.compare.limits import normal_quantile
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.rule import NEEDS_ABSOLUTE, AbsoluteChange, Rule, RuleVerdict, decide_verdict
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import OTHER_WORKLOAD, Comparison
from pytest_llenergy.record.quantity import format_number
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_statistics import half_student

#: Smallest share of the larger value for which a ratio is computed: below, it is a change to or from zero.
SMALLEST = 1e-9


@dataclass(frozen=True)
class Value:
    """A metric of one side.

    Attributes:
        value: The value.
        uncertainty: Its standard uncertainty; None if unknown.
        values: Values of single rounds or items; may be empty.
        results: Number of results that it is the mean of.
    """

    value: float
    uncertainty: float | None = None
    values: Sequence[float] = ()
    results: int = 1


@dataclass(frozen=True)
class ValueChange:
    """The verdict on two values, with head over base and its limits; None without a ratio."""

    verdict: RuleVerdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare_custom(case: Case, differences: Sequence[str]) -> Comparison:
    """Compare a custom metric that the baseline has; ``differences`` of the workloads become notes."""
    metric, base, head = case.metric, case.base, case.head
    assert base is not None
    assert head is not None
    for side, record in (("base", base), ("head", head)):
        if record.value_of(metric) is None:
            found = record.metrics.get(metric)
            why = f": {found.reason}" if found is not None and found.reason else ""
            return case.decide("invalid", f"{side} has no {metric}{why}")
    better = [record.custom[metric].better for record in (base, head) if metric in record.custom]
    if len(set(better)) > 1:
        reason = f"{metric}: {better[0]} is better in the baseline, {better[1]} on the head"
        return case.decide("not comparable", reason)
    return decide_values(case, _value_of(base, metric), _value_of(head, metric), differences)


def decide_values(case: Case, base: Value, head: Value, differences: Sequence[str]) -> Comparison:
    """Return the comparison of two values of a metric."""
    better = direction_of(case.metric, case.head, case.base)
    change = compare_values(base, head, case.criterion.rule, better)
    return case.decide(
        change.verdict,
        change.reason,
        ratio=change.ratio,
        low=change.low,
        high=change.high,
        n_base=len(base.values) or base.results,
        n_head=len(head.values) or head.results,
        notes=[f"{OTHER_WORKLOAD}{line}" for line in differences],
    )


def _value_of(record: Record, metric: str) -> Value:
    found = record.metrics[metric]
    values = record.custom[metric].values if metric in record.custom else ()
    return Value(found.value or 0.0, found.uncertainty, values)


def compare_values(base: Value, head: Value, rule: Rule, better: Direction) -> ValueChange:
    """Compare two values.

    As many values on both sides are taken as pairs: the same rounds, or the same items, such as prompts.
    Without an uncertainty, the values themselves are compared. A change is relative if the baseline is above
    its limits, ``1 - alpha`` of a normal distribution, and the head is not negative. Otherwise a change
    counts that is certain and reaches the absolute threshold.

    Args:
        base: The baseline.
        head: The value to compare with it.
        rule: When a change counts.
        better: Direction that is better.
    """
    sign = 1 if better == "less" else -1
    change, largest = head.value - base.value, max(base.value, head.value)
    paired = len(base.values) == len(head.values) > 1
    width = normal_quantile(1 - rule.alpha) * _standard_error(base, head, paired=paired)
    if change == width == 0:
        return ValueChange("unchanged", "both sides have the same value", 1.0 if base.value > 0 else None)
    if head.value < 0 or base.value <= max(width, SMALLEST * largest):
        return _compare_differences(base.value, head.value, sign * change, width, rule)
    around = (head.value - sign * width, head.value, head.value + sign * width)
    low, middle, high = (sign * log(max(each, SMALLEST * largest) / base.value) for each in around)
    absolute = None
    if rule.threshold_absolute:
        absolute = AbsoluteChange(abs(change), sign * change + width, base.value)
    verdict, reason = decide_verdict(middle, low, high, rule, absolute=absolute, better=better)
    if not width:
        source = "with the same difference in every pair" if paired else "from values without an uncertainty"
        reason = f"{expm1(sign * middle):+.1%}, {source}"
    # Neither side is negative, so that the ratio is not either, however wide its limits are.
    limits = max(head.value - width, 0.0) / base.value, (head.value + width) / base.value
    return ValueChange(verdict, reason, head.value / base.value, *limits)


def _compare_differences(base: float, head: float, worse: float, width: float, rule: Rule) -> ValueChange:
    """Decide on a change that has no ratio; ``worse`` is negative if the head is better."""
    example = f"{NEEDS_ABSOLUTE} {rule.threshold * 100:.3g}%+"
    if base < -width and not rule.threshold_absolute:
        reason = f"values below zero have no relative change; {example}{rule.threshold * -base:.1g}"
        return ValueChange("invalid", reason)
    # The relative part counts too between values above zero, however uncertain they are.
    least = max(rule.threshold_absolute, rule.threshold * max(0.0, min(base, head)))
    size = f"{'worse' if worse > 0 else 'better'} by {format_number(abs(worse))}" if worse else "no change"
    amount = f"from {base:g}, {size}"
    if abs(worse) >= least and abs(worse) > width:
        return ValueChange("regressed" if worse > 0 else "improved", amount)
    if worse + width < least:
        return ValueChange("unchanged", f"{amount}, at most {least:g} worse")
    reason = f"{amount}, known to {format_number(width)}"
    if not rule.threshold_absolute:
        reason += f": too near zero for a relative threshold; {example}{2 * (max(worse, 0.0) + width):.1g}"
    return ValueChange("inconclusive", reason)


def _standard_error(base: Value, head: Value, *, paired: bool) -> float:
    """Return the standard uncertainty of the difference."""
    if paired:
        n = len(head.values)
        differences = [after - before for before, after in zip(base.values, head.values, strict=True)]
        return stdev(differences) / sqrt(n) * half_student(n - 1)
    return hypot(base.uncertainty or 0.0, head.uncertainty or 0.0)
