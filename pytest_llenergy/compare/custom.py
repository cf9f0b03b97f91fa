# SPDX-License-Identifier: Apache-2.0
"""Compare a custom metric: two values with their uncertainties, or values of rounds or items in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, hypot, log, sqrt
from statistics import stdev

from pytest_llenergy.compare.case import Case, finite_or_none
from pytest_llenergy.compare.limits import normal_quantile
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.rule import NEEDS_ABSOLUTE, AbsoluteChange, Rule, RuleVerdict, decide_verdict
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import OTHER_WORKLOAD, Comparison
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_statistics import half_student

#: Smallest share of the larger value for which a ratio is computed: below, it is a change to or from zero.
SMALLEST = 1e-9


@dataclass(frozen=True)
class Value:
    """A custom metric of one side.

    Attributes:
        value: The value.
        uncertainty: Its standard uncertainty; None if unknown.
        values: Values of single rounds or items; may be empty.
    """

    value: float
    uncertainty: float | None = None
    values: Sequence[float] = ()


@dataclass(frozen=True)
class ValueChange:
    """The verdict on two values, with head over base and its limits; None without a ratio."""

    verdict: RuleVerdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare_custom(case: Case, differences: Sequence[str]) -> Comparison:
    """Compare a custom metric that the baseline has.

    Args:
        case: The metric and both records.
        differences: How the workloads differ, for notes.
    """
    metric, base, head = case.metric, case.base, case.head
    assert base is not None
    assert head is not None
    for side, record in (("base", base), ("head", head)):
        if record.value_of(metric) is None:
            found = record.metrics.get(metric)
            why = f": {found.reason}" if found is not None and found.reason else ""
            return case.without_estimate("invalid", f"{side} has no {metric}{why}")
    better = [record.custom[metric].better for record in (base, head) if metric in record.custom]
    if len(set(better)) > 1:
        reason = f"{metric}: {better[0]} is better in the baseline, {better[1]} on the head"
        return case.without_estimate("not comparable", reason)
    values = _value_of(base, metric), _value_of(head, metric)
    change = compare_values(values[0], values[1], case.criterion.rule, direction_of(metric, head, base))
    limits = {name: finite_or_none(getattr(change, name)) for name in ("ratio", "low", "high")}
    counts = [max(1, len(each.values)) for each in values]
    notes = [f"{OTHER_WORKLOAD}{line}" for line in differences]
    return case.with_values(change.verdict, change.reason, counts, notes, limits)


def _value_of(record: Record, metric: str) -> Value:
    found = record.metrics[metric]
    values = record.custom[metric].values if metric in record.custom else ()
    return Value(found.value or 0.0, found.uncertainty, values)


def compare_values(base: Value, head: Value, rule: Rule, better: Direction) -> ValueChange:
    """Compare two values of a custom metric.

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
    width = normal_quantile(1 - rule.alpha) * _standard_error(base, head)
    if change == width == 0:
        return ValueChange("unchanged", "both sides have the same value", 1.0 if base.value > 0 else None)
    if head.value < 0 or base.value <= max(width, SMALLEST * largest):
        return _compare_differences(base.value, head.value, sign * change, width, rule)
    ratio = head.value / base.value
    logs = [log(max(each, SMALLEST * largest) / base.value) for each in _around(head.value, width)]
    low, middle, high = logs if sign > 0 else [-each for each in reversed(logs)]
    absolute = None
    if rule.threshold_absolute:
        absolute = AbsoluteChange(abs(change), sign * change + width, base.value)
    verdict, reason = decide_verdict(
        middle, low, high, rule, absolute=absolute, meter=0.0, drift=None, level=None, better=better
    )
    if not width:
        paired = _is_paired(base, head)
        source = "with the same difference in every pair" if paired else "from values without an uncertainty"
        reason = f"{expm1(logs[1]):+.1%}, {source}"
    # Neither side is negative, so that the ratio is not either, however wide its limits are.
    low_ratio = max(head.value - width, 0.0) / base.value
    return ValueChange(verdict, reason, ratio, low_ratio, (head.value + width) / base.value)


def _around(value: float, width: float) -> tuple[float, float, float]:
    return value - width, value, value + width


def _compare_differences(base: float, head: float, worse: float, width: float, rule: Rule) -> ValueChange:
    """Decide on a change that has no ratio; ``worse`` is negative if the head is better."""
    example = f"{NEEDS_ABSOLUTE} {rule.threshold * 100:.3g}%+"
    if base < -width and not rule.threshold_absolute:
        reason = f"values below zero have no relative change; {example}{rule.threshold * -base:.1g}"
        return ValueChange("invalid", reason)
    # The relative part counts too between values above zero, however uncertain they are.
    least = max(rule.threshold_absolute, rule.threshold * max(0.0, min(base, head)))
    size = f"{'worse' if worse > 0 else 'better'} by {abs(worse):.3g}" if worse else "no change"
    amount = f"from {base:g}, {size}"
    if worse >= least and worse > width:
        return ValueChange("regressed", amount)
    if -worse >= least and -worse > width:
        return ValueChange("improved", amount)
    if worse + width < least:
        return ValueChange("unchanged", f"{amount}, at most {least:g} worse")
    reason = f"{amount}, known to {width:.3g}"
    if not rule.threshold_absolute:
        reason += f": too near zero for a relative threshold; {example}{2 * (max(worse, 0.0) + width):.1g}"
    return ValueChange("inconclusive", reason)


def _is_paired(base: Value, head: Value) -> bool:
    return len(base.values) == len(head.values) > 1


def _standard_error(base: Value, head: Value) -> float:
    """Return the standard uncertainty of the difference."""
    if _is_paired(base, head):
        n = len(head.values)
        differences = [after - before for before, after in zip(base.values, head.values, strict=True)]
        return stdev(differences) / sqrt(n) * half_student(n - 1)
    return hypot(base.uncertainty or 0.0, head.uncertainty or 0.0)
