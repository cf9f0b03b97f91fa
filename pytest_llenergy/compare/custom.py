# SPDX-License-Identifier: Apache-2.0
"""Compare two values with their uncertainties: a custom metric, or the maximum load of a server."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, hypot, log, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from pytest_llenergy.compare.case import Case
from pytest_llenergy.compare.limits import normal_quantile
from pytest_llenergy.compare.metrics import direction_of
from pytest_llenergy.compare.rule import NEEDS_ABSOLUTE, Rule, RuleVerdict, decide_verdict
from pytest_llenergy.compare.statistics import SESSION_SPREAD
from pytest_llenergy.record.base import Direction
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.quantity import format_number
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.round_statistics import half_student

#: The maximum load of a server: each session has one value, which its rounds repeat.
MAX_LOAD = "max_load_requests_per_s"

#: Smallest share of the larger value for which a ratio is computed: below, it is a change to or from zero.
SMALLEST = 1e-9


class Value(NamedTuple):
    """A metric of one side; ``values`` are those of single rounds, items or sessions, if there are any."""

    value: float
    uncertainty: float | None = None  # standard uncertainty
    values: Sequence[float] = ()


class ValueChange(NamedTuple):
    """The verdict on two values, with head over base and its limits; None without a ratio."""

    verdict: RuleVerdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare_custom(case: Case, notes: Sequence[str]) -> Comparison:
    """Compare a metric that the baseline has and that has one value a side."""
    metric, values, directions = case.metric, [], set[Direction]()
    for side, record in (("base", case.base), ("head", case.head)):
        assert record is not None
        if metric == MAX_LOAD:
            values.append(_mean_of_searches(record))
            continue
        found, custom = record.metrics.get(metric), record.custom.get(metric)
        if found is None or found.value is None:
            why = f": {found.reason}" if found is not None and found.reason else ""
            return case.decide("invalid", f"{side} has no {metric}{why}")
        directions |= {custom.better} if custom is not None else set()
        values.append(Value(found.value, found.uncertainty, custom.values if custom is not None else ()))
    if len(directions) > 1:
        return case.decide("not comparable", f"{metric}: the sides disagree on which direction is better")
    better = direction_of(metric, case.head, case.base)
    change = compare_values(values[0], values[1], case.criterion.rule, better)
    n_base, n_head = (max(1, len(each.values)) for each in values)
    return case.decide(**change._asdict(), n_base=n_base, n_head=n_head, notes=list(notes))


def _mean_of_searches(record: Record) -> Value:
    """Return the mean of the searches of a record; a single one may be as far off as sessions differ."""
    rounds = [each for each in record.rounds if is_valid(each) and each.max_load is not None]
    found = [each for each in {each.session: each.max_load for each in rounds}.values() if each is not None]
    values = [each.requests_per_s for each in found if each.requests_per_s is not None]
    mean, own = fmean(values), fmean(each.u_requests_per_s or 0.0 for each in found)
    return Value(mean, hypot(own, SESSION_SPREAD * mean), values if len(values) > 1 else ())


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
        return ValueChange("unchanged", "both sides have the same value")
    if head.value < 0 or base.value <= max(width, SMALLEST * largest):
        return _compare_differences(base.value, head.value, sign * change, width, rule)
    around = (head.value - sign * width, head.value, head.value + sign * width)
    low, middle, high = (sign * log(max(each, SMALLEST * largest) / base.value) for each in around)
    verdict, reason = decide_verdict(middle, low, high, rule.at_level(base.value, better), better=better)
    if not width:
        source = "with the same difference in every pair" if paired else "from values without an uncertainty"
        reason = f"{expm1(sign * middle):+.1%}, {source}"
    # Neither side is negative, so that the ratio is not either, however wide its limits are.
    limits = max(head.value - width, 0.0) / base.value, (head.value + width) / base.value
    return ValueChange(verdict, reason, head.value / base.value, *limits)


def _compare_differences(base: float, head: float, worse: float, width: float, rule: Rule) -> ValueChange:
    """Decide on a change that has no ratio, by the absolute threshold; ``worse`` is negative if better."""
    least = rule.threshold_absolute
    amount = f"from {base:g} to {head:g}, known to {format_number(width)}"
    example = f"{NEEDS_ABSOLUTE} {rule.threshold * 100:.3g}%+"
    if base < -width and not least:
        reason = f"values below zero have no relative change; {example}{rule.threshold * -base:.1g}"
        return ValueChange("invalid", reason)
    if abs(worse) >= least and abs(worse) > width:
        return ValueChange("regressed" if worse > 0 else "improved", amount)
    if worse + width < least:
        return ValueChange("unchanged", f"{amount}, at most {least:g} worse")
    if not least:
        amount += f": too near zero for a relative threshold; {example}{2 * (max(worse, 0.0) + width):.1g}"
    return ValueChange("inconclusive", amount)


def _standard_error(base: Value, head: Value, *, paired: bool) -> float:
    """Return the standard uncertainty of the difference."""
    if paired:
        n = len(head.values)
        differences = [after - before for before, after in zip(base.values, head.values, strict=True)]
        return stdev(differences) / sqrt(n) * half_student(n - 1)
    return hypot(base.uncertainty or 0.0, head.uncertainty or 0.0)
