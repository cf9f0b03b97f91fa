# SPDX-License-Identifier: Apache-2.0
"""Compare two values with their uncertainties: a custom metric, or the maximum load of few sessions."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, hypot, log, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from pytest_llenergy.compare.case import Case
from pytest_llenergy.compare.limits import normal_quantile
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.rule import NEEDS_ABSOLUTE, AbsoluteChange, Rule, RuleVerdict, decide_verdict
from pytest_llenergy.compare.statistics import Sample
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import OTHER_WORKLOAD, Comparison
from pytest_llenergy.record.quantity import format_number
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.round_statistics import half_student

#: The maximum load of a server: each session has one value, which its rounds repeat.
MAX_LOAD = "max_load_requests_per_s"

#: Smallest share of the larger value for which a ratio is computed: below, it is a change to or from zero.
SMALLEST = 1e-9


class Value(NamedTuple):
    """A metric of one side."""

    value: float
    uncertainty: float | None = None  # standard uncertainty
    values: Sequence[float] = ()  # of single rounds or items, if there are any
    results: int = 1  # that it is the mean of


class ValueChange(NamedTuple):
    """The verdict on two values, with head over base and its limits; None without a ratio."""

    verdict: RuleVerdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare_custom(case: Case, differences: Sequence[str]) -> Comparison:
    """Compare a custom metric that the baseline has; ``differences`` of the workloads become notes."""
    metric, values, directions = case.metric, [], set[Direction]()
    for side, record in (("base", case.base), ("head", case.head)):
        found = record.metrics.get(metric) if record is not None else None
        if record is None or found is None or found.value is None:
            why = f": {found.reason}" if found is not None and found.reason else ""
            return case.decide("invalid", f"{side} has no {metric}{why}")
        custom = record.custom.get(metric)
        directions |= {custom.better} if custom is not None else set()
        values.append(Value(found.value, found.uncertainty, custom.values if custom is not None else ()))
    if len(directions) > 1:
        return case.decide("not comparable", f"{metric}: the sides disagree on which direction is better")
    return decide_values(case, values[0], values[1], differences)


def decide_values(case: Case, base: Value, head: Value, differences: Sequence[str]) -> Comparison:
    """Return the comparison of two values of a metric."""
    better = direction_of(case.metric, case.head, case.base)
    change = compare_values(base, head, case.criterion.rule, better)
    return case.decide(
        **change._asdict(),
        n_base=len(base.values) or base.results,
        n_head=len(head.values) or head.results,
        notes=[f"{OTHER_WORKLOAD}{line}" for line in differences],
    )


def compare_values(base: Value, head: Value, rule: Rule, better: Direction) -> ValueChange:
    """Compare two values.

    As many values on both sides are taken as pairs: the same rounds, or the same items, such as prompts.
    Without an uncertainty, the values themselves are compared. A change is relative if the baseline is above
    its limits, ``1 - alpha`` of a normal distribution, and the head is not negative. Otherwise a change
    counts that is certain and reaches the absolute threshold.
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


def sample_searches(record: Record) -> Sample:
    """Return the maximum load of each session, which all its rounds repeat."""
    searches = dict.fromkeys((each.session or 1, each.max_load) for each in record.rounds if is_valid(each))
    found = [
        (session, each.requests_per_s, each.below_requests_per_s or each.requests_per_s)
        for session, each in searches
        if each is not None and each.requests_per_s is not None
    ]
    return Sample(
        values=[value for _, value, _ in found],
        # The scatter of sessions shows all but the bracket, of which both sides may have the same.
        shared=[max(below - value, 0.0) / sqrt(3) for _, value, below in found],
        # Sessions are numbered over both sides.
        pairs=[(session - 1) // 2 for session, _, _ in found],
    )


def mean_of_searches(sample: Sample, record: Record, spread: float) -> Value:
    """Return the mean of few searches; what each does not know may be the same in all of them."""
    own = [each.max_load.u_requests_per_s or 0.0 for each in record.rounds if each.max_load is not None]
    n, mean = len(sample.values), fmean(sample.values)
    # Sessions that scatter more than usual count as they are.
    seen = stdev(sample.values) * half_student(n - 1) if n > 1 else 0.0
    u = hypot(fmean(own), max(spread * mean, seen) / sqrt(n))
    return Value(mean, u, results=n)
