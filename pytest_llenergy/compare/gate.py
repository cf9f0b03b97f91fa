# SPDX-License-Identifier: Apache-2.0
"""Gates: parse thresholds and budgets, decide which tests fail, and choose exit codes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf, isfinite

from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.rule import (
    DEFAULT_RULE,
    HELD_BACK,
    NEEDS_ABSOLUTE,
    NEEDS_SESSIONS,
    UNRESOLVED,
    Rule,
)
from pytest_llenergy.compare.statistics import NOISY_ABOVE, STORED_ROUNDS
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.comparison import ComparedReports, Comparison
from pytest_llenergy.record.custom_metrics import custom_metrics_of, is_custom_name
from pytest_llenergy.record.defaults import Inconclusive
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.quantity import format_number, format_pair, scale_of
from pytest_llenergy.record.record import Metric, Record
from pytest_llenergy.record.text import count_tests, did_you_mean

#: A plain decimal number without a sign: ``3``, ``2.5``, ``.5``, ``1e-3``.
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"

#: Factors of unit prefixes. Metrics are stored in base units.
UNIT_PREFIXES = {"": 1.0, "p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}

#: What can decide where rounds cannot, by a part of the reason; nothing can if only the meters limit.
QUIET, AB, PRECISE = "a quieter machine", "llenergy ab", "a smaller uncertainty of your metric"
REMEDIES = {
    NEEDS_ABSOLUTE: "an absolute threshold",
    NEEDS_SESSIONS: "folders with several sessions a side, --floor or llenergy history",
    HELD_BACK: QUIET,
    UNRESOLVED: "",
}

#: Exit codes of ``llenergy compare`` and ``llenergy ab``.
PASSED, REGRESSED, USAGE, NOT_COMPARABLE, INCONCLUSIVE, NOTHING_VALID = range(6)


@dataclass(frozen=True)
class Threshold:
    """A change of ``metric`` that counts: ``relative``, and ``absolute`` in the metric's base unit."""

    metric: str
    relative: float
    absolute: float
    text: str

    def rule(self, common: Rule = DEFAULT_RULE) -> Rule:
        """Return ``common`` with this threshold.

        A tolerance below the threshold is raised to it. Otherwise no number of rounds could decide on changes
        between the two.
        """
        return replace(
            common,
            threshold=self.relative,
            threshold_absolute=self.absolute,
            tolerance=max(common.tolerance, self.relative),
        )


def parse_fail_on(text: str) -> Threshold:
    """Parse ``METRIC:PERCENT%`` or ``METRIC:PERCENT%+QUANTITY``, such as ``energy_j:2.5%+0.1J``."""
    metric, colon, expression = str(text).partition(":")
    if not colon:
        raise PlanError(
            f"{text!r} is not METRIC:PERCENT%, such as 'energy_j:3%' or 'energy_per_output_token_j:2.5%+0.1J'"
        )
    return parse_threshold(metric.strip(), expression)


def parse_threshold(metric: str | None, text: str) -> Threshold:
    """Parse ``"3%"``, ``"2.5%+0.1J"`` or ``"5 % + 300 mJ"`` for a metric (``None``: ``energy_j``)."""
    name = check_metric("energy_j" if metric is None else metric)
    relative_text, plus, absolute_text = str(text).partition("+")
    match = re.fullmatch(rf"\s*({NUMBER})\s*%\s*", relative_text)
    relative = float(match[1]) / 100 if match else 0.0
    # The unit of a custom metric is known when a test has it.
    unit = _base_unit(name) if name in METRICS else ""
    absolute = _parse_quantity(absolute_text, unit) if plus else 0.0
    if not 0 < relative < inf or absolute is None:
        raise PlanError(
            f"invalid threshold {text!r} of {name}; expected a percentage, such as '3%' or '3%+2{unit}'"
        )
    return Threshold(name, relative, absolute, str(text).strip())


def _base_unit(metric: str) -> str:
    """Return the unit as users write it after a number: the name of the metric says per what."""
    unit = METRICS[metric].unit
    return "J" if unit.startswith("J/") else unit


def _parse_quantity(text: str, unit: str) -> float | None:
    """Return a quantity in base units, such as that of ``300 mJ``; None if it is malformed."""
    pattern = re.escape(unit).replace("token", "tokens?")
    match = re.fullmatch(rf"\s*({NUMBER})\s*([pnumkMG]?){pattern}(?:/\w+)?\s*", text)
    found = float(match[1]) * UNIT_PREFIXES[match[2]] if match else inf
    return found if isfinite(found) else None


def check_metric(name: str) -> str:
    """Return the name of a metric that can be compared, built in or possibly custom."""
    if is_custom_name(name):
        return name
    if name not in METRICS:
        raise _unknown_metric(name, METRICS)
    if name not in ROUND_METRICS:
        raise PlanError(f"{name} has one value per test and cannot be compared; limit it with a budget")
    return name


def check_custom_metrics(criteria: Iterable[Criterion], records: Iterable[Record]) -> None:
    """Raise ``PlanError`` for a metric that is neither built in nor in any of the records."""
    known = custom_metrics_of(records)
    for each in criteria:
        if each.metric is not None and each.metric not in METRICS and each.metric not in known:
            raise _unknown_metric(each.metric, [*METRICS, *known])


def _unknown_metric(name: str, known: Collection[str]) -> PlanError:
    nearest = get_close_matches(name, known, n=3, cutoff=0)
    hint = did_you_mean([name], known) or f"the nearest names are {', '.join(nearest)}"
    return PlanError(f"unknown metric {name!r}; {hint}")


def rule_with_floor(floor: float | None, rule: Rule = DEFAULT_RULE) -> Rule:
    """Return a rule for a machine on which two runs of the same code differ by up to ``floor``.

    A tolerance below the floor is raised to it: changes up to the floor are not significant.
    """
    return rule if floor is None else replace(rule, floor=floor, tolerance=max(rule.tolerance, floor))


def check_named_once(thresholds: Sequence[Threshold]) -> None:
    """Raise ``PlanError`` for a metric with two thresholds: one of them would have no effect."""
    metrics = [each.metric for each in thresholds]
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise PlanError(f"{metric} is named twice; keep one of them")


@dataclass(frozen=True)
class Budget:
    """An upper limit of ``metric``, in its base unit."""

    metric: str
    limit: float
    text: str

    def check(self, metrics: Mapping[str, Metric], *, estimated: bool = False) -> str | None:
        """Return why a test fails, or ``None`` if it is within budget.

        A metric without a value fails. If ``estimated``, the message states that the joules are estimated.
        """
        metric = metrics.get(self.metric)
        if metric is None or metric.value is None:
            reason = metric.reason if metric is not None else "nothing was measured"
            return f"energy_gate: {self.metric} has no value ({reason}), so its budget cannot be checked"
        if metric.value <= self.limit:
            return None
        u = metric.uncertainty_absolute
        # Four digits, to tell a value from a budget that it just exceeds.
        power, prefix = scale_of(metric.unit, metric.value)
        value = format_number(metric.value / 10**power, 4) + (
            f" ± {format_number(u / 10**power)}" if u else ""
        )
        # Times and counts are measured even if the joules are estimated.
        kind = " (estimated)" if estimated and ("J" in metric.unit or metric.unit == "W") else ""
        shown = f"{value} {prefix}{metric.unit}{kind}"
        return f"energy_gate: {self.metric} is {shown}, over the budget of {self.text}"


def parse_budget(metric: str | None, text: str) -> Budget:
    """Parse ``"5 J"``, ``"300 mJ"`` or ``"1.5 kW"`` for a metric (``None``: ``energy_j``)."""
    name = metric or "energy_j"
    if name not in METRICS and is_custom_name(name):
        raise PlanError(
            f"{name} is not built in, and a budget cannot limit a custom metric; use assert in the test"
        )
    if name not in METRICS:
        raise _unknown_metric(name, METRICS)
    if METRICS[name].better == "more":
        raise PlanError(f"more is better for {name}, so a budget cannot limit it; use a threshold or assert")
    unit = _base_unit(name)
    limit = _parse_quantity(str(text), unit)
    if limit is None:
        raise PlanError(
            f"invalid budget {text!r} of {name}; expected a quantity in {unit}, such as '5 {unit}'"
        )
    return Budget(name, limit, str(text))


@dataclass(frozen=True)
class Gate:
    """The mark ``energy_gate``: a budget, a threshold for the change from a baseline, or both."""

    budget: Budget | None = None
    threshold: Threshold | None = None


def parse_gate(metric: str | None, budget: str | None, threshold: str | None) -> Gate:
    """Parse the arguments of the mark."""
    if metric is not None and not isinstance(metric, str):
        raise PlanError(f'metric is {metric!r}, needs one metric name, such as metric="energy_j"')
    if budget is None and threshold is None:
        raise PlanError('needs a budget, such as budget="5 J", a threshold, such as threshold="3%", or both')
    return Gate(
        parse_budget(metric, budget) if budget is not None else None,
        parse_threshold(metric, threshold) if threshold is not None else None,
    )


def select_criteria(
    fail_on: Sequence[Threshold], mark: Threshold | None = None, common: Rule = DEFAULT_RULE
) -> list[Criterion]:
    """Return the criteria of a test: its gates or, without any, its default metric for display."""
    criteria = [
        Criterion(each.metric, each.rule(common), gated=True)
        for each in fail_on
        if mark is None or each.metric != mark.metric
    ]
    if mark is not None:
        criteria.insert(0, Criterion(mark.metric, mark.rule(common), gated=True, from_mark=True))
    return criteria or [Criterion(rule=common)]


def parse_criteria(
    fail_on: Sequence[str],
    metrics: Sequence[str],
    floor: float | None = None,
) -> list[Criterion]:
    """Parse a command line: each metric once, with its threshold or the common rule."""
    common = rule_with_floor(floor)
    thresholds = [parse_fail_on(text) for text in fail_on]
    names = [check_metric(name) for name in metrics]
    check_named_once(thresholds)
    criteria = {each.metric: Criterion(each.metric, each.rule(common), gated=True) for each in thresholds}
    criteria.update({name: Criterion(name, common, gated=True) for name in names if name not in criteria})
    return list(criteria.values()) or [Criterion(rule=common, gated=True)]


def list_failures(comparisons: Iterable[Comparison], inconclusive: Inconclusive) -> list[str]:
    """Return a line for each gate that a test fails.

    A gate that could not be checked fails. A new test, which has no baseline, does not fail; the summary
    reports it.
    """
    found = [(each, explain_failure(each, inconclusive)) for each in comparisons if each.gated]
    return [f"energy_gate: {each.metric} {why}" for each, why in found if why is not None]


def explain_failure(comparison: Comparison, inconclusive: Inconclusive) -> str | None:
    """Return what follows the metric in the message of a gate that fails, or ``None`` if it does not."""
    verdict, reason = comparison.verdict, comparison.reason
    if verdict == "regressed":
        change = " -> ".join(format_pair(comparison.base, comparison.estimated_head, comparison.unit))
        # Bounds of a maximum load may decide without a value on both sides.
        shown = f", {change}{comparison.kind_label}" if None not in (comparison.base, comparison.head) else ""
        return f"regressed{shown}: {reason}"
    if verdict in ("not comparable", "invalid"):
        return f"is {verdict}: {reason}"
    if verdict == "inconclusive" and inconclusive == "fail":
        return f"is inconclusive; {suggest_remedy([comparison])} (--energy-inconclusive=fail): {reason}"
    return None


def suggest_remedy(comparisons: Sequence[Comparison], rounds: str = "more rounds") -> str:
    """Return what can decide on inconclusive comparisons, such as ``more rounds can decide``."""
    found = set[str]()
    for each in comparisons:
        told = [remedy for part, remedy in REMEDIES.items() if part in each.reason]
        # More rounds do not tell how sessions differ.
        enough = each.session_spread is not None and min(each.n_base, each.n_head) >= STORED_ROUNDS
        if each.detectable is None and each.metric not in ROUND_METRICS and not told:
            # What a test states does not depend on its rounds.
            told = [PRECISE]
        found |= {*told} or {AB if enough else rounds}
        if UNRESOLVED not in each.reason and (each.noise or 0.0) > NOISY_ABOVE:
            found.add(QUIET)
    named = dict.fromkeys((QUIET, *REMEDIES.values(), rounds, AB, PRECISE))
    remedies = [each for each in named if each and each in found]
    return f"{' or '.join(remedies)} can decide" if remedies else "the meters cannot resolve smaller changes"


def list_void_gates(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a line for each metric by which no test could fail: none has it, or none reaches its limit."""
    asked: dict[str, list[Comparison]] = {}
    for each in comparisons:
        if each.verdict not in ("new", "removed"):
            asked.setdefault(each.metric, []).append(each)
    lines = []
    for metric, found in asked.items():
        decided = [each for each in found if each.gated and each.rule_applied]
        if not any(each.gated or each.rule_applied for each in found):
            lines.append(f"nothing was gated by {metric}: no test has it ({found[0].reason})")
        elif decided and all(map(_is_below_limit, decided)):
            lines.append(
                f"nothing was gated by {metric}: the absolute part of its threshold is above every value"
            )
    return lines


def _is_below_limit(comparison: Comparison) -> bool:
    """Whether both values are below the absolute threshold; near zero, without a ratio, it decides alone."""
    limit = comparison.rule.threshold_absolute if comparison.rule is not None else 0.0
    largest = max(abs(comparison.base or 0.0), abs(comparison.head or 0.0))
    return comparison.ratio is not None and largest < limit


def note_unchecked_marks(records: Iterable[Record], criteria: Iterable[Criterion]) -> list[str]:
    """Return a note for each metric that marks of the tests gate, and the criteria do not."""
    named = {each.metric for each in criteria}
    unchecked: dict[str, dict[str, float]] = {}
    for record in records:
        for each in record.comparisons:
            if each.gated and each.metric not in named and each.rule is not None:
                unchecked.setdefault(each.metric, {})[record.id] = each.rule.threshold
    return [
        f"the gate of {count_tests(len(found))} on {metric} is not checked here; "
        f"add --fail-on={metric}:{min(found.values()) * 100:.3g}%"
        for metric, found in unchecked.items()
    ]


def exit_code(compared: ComparedReports) -> int:
    """Return the exit code for the worst verdict, with the policy of the comparison.

    A comparison without a verdict is not a pass: the status is 3 if a test is not comparable, and 5 if one
    has no valid measurement or nothing was compared. New tests do not count, and tests without any baseline
    pass.
    """
    found = [each for each in compared.comparisons if each.verdict != "no value"]
    verdicts = {each.verdict for each in found if each.gated}
    if "regressed" in verdicts:
        return REGRESSED
    if "not comparable" in verdicts:
        return NOT_COMPARABLE
    # Not if the baseline has the tests, and all failed there.
    if found and all(each.verdict == "new" and each.gated for each in found):
        return PASSED
    if (
        "invalid" in verdicts
        or not any(each.rule_applied for each in found)
        or list_void_gates(compared.comparisons)
    ):
        return NOTHING_VALID
    if verdicts & {"inconclusive", "removed"} and compared.inconclusive == "fail":
        return INCONCLUSIVE
    return PASSED
