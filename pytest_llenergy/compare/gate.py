# SPDX-License-Identifier: Apache-2.0
"""Gates: thresholds, budgets, and the exit status of a comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from pytest_llenergy.compare.comparison import Criterion
from pytest_llenergy.compare.metrics import METRICS, UNIT_PREFIXES, Direction
from pytest_llenergy.compare.statistics import DEFAULT_RULE, Rule
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.metrics import FIGURES
from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.model.record import Metric, Record
from pytest_llenergy.model.report import Report

# A threshold as a person writes it: ``energy_j:3%``, ``energy_per_output_token_j:2.5%+0.1J``.

#: A plain decimal number, without a sign: ``3``, ``2.5``, ``.5``, ``1e-3``.
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


#: A change that no gate needs to allow: ten times as much more.
MAX_THRESHOLD = 10.0


@dataclass(frozen=True)
class Threshold:
    """From when on ``metric`` counts as changed: by ``relative``, and by ``absolute`` in its base unit."""

    metric: str
    relative: float
    absolute: float
    text: str

    @property
    def better(self) -> Direction:
        """Which way the metric is better."""
        return METRICS[self.metric].better

    def rule(self, common: Rule = DEFAULT_RULE) -> Rule:
        """``common`` with this threshold.

        A tolerance below the threshold is raised to it: otherwise what lies between the two could never be
        told, by however many rounds.
        """
        return replace(
            common,
            threshold=self.relative,
            threshold_absolute=self.absolute,
            tolerance=max(common.tolerance, self.relative),
        )


def rule_with_floor(floor: float) -> Rule:
    """The common rule where changes up to ``floor`` have no reason, as two runs of the same code show.

    A threshold or tolerance below the floor is raised to it: what lies between could never be told.
    """
    return replace(
        DEFAULT_RULE,
        floor=floor,
        threshold=max(DEFAULT_RULE.threshold, floor),
        tolerance=max(DEFAULT_RULE.tolerance, floor),
    )


def check_floor(thresholds: Iterable[Threshold], floor: float) -> None:
    """Raises ``PlanError`` for a threshold below the floor, which no change between the two would reach."""
    for each in thresholds:
        if each.relative < floor:
            raise PlanError(
                f"threshold {each.text!r} of {each.metric} is below the floor of {floor:.3g}: changes up "
                "to it are none; raise the one or lower the other"
            )


def parse_floor(text: str) -> Rule:
    """Read ``"1.5%"``. Raises ``PlanError`` for what is no percentage from 0 to 100."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*%\s*", text)
    floor = float(match.group(1)) / 100 if match else -1.0
    if not 0 <= floor < 1:
        raise PlanError(f"floor {text!r} is no percentage below 100%, such as '1%'")
    return rule_with_floor(floor)


def parse_fail_on(text: str) -> Threshold:
    """Read ``METRIC:PERCENT%`` or ``METRIC:PERCENT%+QUANTITY``. Raises ``PlanError`` for what is none."""
    metric, colon, expression = str(text).partition(":")
    if not colon:
        raise PlanError(
            f"{text!r} is no METRIC:PERCENT%, such as 'energy_j:3%' or 'energy_per_output_token_j:2.5%+0.1J'"
        )
    return parse_threshold(metric.strip(), expression)


def parse_threshold(metric: str | None, text: str) -> Threshold:
    """Read ``"3%"``, ``"2.5%+0.1J"``, ``"5 % + 300 mJ"`` of ``metric`` (``energy_j``, if ``None``).

    Raises ``PlanError`` for an unknown metric, and for what is no positive percentage with, if given, a
    positive quantity in the unit of the metric.
    """
    name = "energy_j" if metric is None else metric
    if name not in METRICS:
        raise PlanError(f"unknown metric {name!r}; a gate can compare: {', '.join(FIGURES)}")
    unit = METRICS[name].unit
    written = re.escape(unit).replace("token", "tokens?")
    match = re.fullmatch(
        rf"\s*({NUMBER})\s*%\s*(?:\+\s*({NUMBER})\s*([umkMG]?){written}(?:/(?:token|request))?\s*)?",
        str(text),
    )
    relative = float(match.group(1)) / 100 if match else 0.0
    absolute = float(match.group(2)) * UNIT_PREFIXES[match.group(3)] if match and match.group(2) else 0.0
    if match is None or relative <= 0 or not isfinite(absolute):
        raise PlanError(
            f"threshold {text!r} of {name} is no percentage above zero, such as '3%' or '3%+2{unit}'"
        )
    if relative > MAX_THRESHOLD:
        raise PlanError(
            f"threshold {text!r} of {name} would let everything pass; {MAX_THRESHOLD:.0%} is the most"
        )
    if match.group(2) and absolute <= 0:
        raise PlanError(f"threshold {text!r} of {name} adds nothing: write '{match.group(1)}%' alone")
    return Threshold(name, relative, absolute, str(text).strip())


# A budget: an upper limit for one metric of one test.

#: Metrics that a budget can bound: those of which less is better, with their base unit.
BUDGET_UNITS = {name: kind.unit for name, kind in METRICS.items() if kind.better == "less"}


@dataclass(frozen=True)
class Budget:
    """``metric`` may be at most ``limit``, in its base unit."""

    metric: str
    limit: float
    text: str

    def judge(self, metrics: Mapping[str, Metric], *, estimated: bool = False) -> str | None:
        """Why the test fails; ``None`` within budget. A metric without a value is no pass.

        ``estimated`` says that the joules are those of a model, which the reason then says too.
        """
        metric = metrics.get(self.metric)
        if metric is None or metric.value is None:
            reason = metric.reason if metric is not None else "nothing was measured"
            return f"energy_gate: {self.metric} has no value ({reason}), so its budget cannot be checked"
        if metric.value <= self.limit:
            return None
        u = metric.uncertainty_absolute
        shown = f"{metric.value:.4g} ± {u:.2g}" if u else f"{metric.value:.4g}"
        kind = " (estimated)" if estimated else ""
        return f"energy_gate: {self.metric} is {shown} {metric.unit}{kind}, over the budget of {self.text}"


def parse_budget(metric: str | None, text: str) -> Budget:
    """Read ``"5 J"``, ``"300 mJ"``, ``"1.5 kW"``. Raises ``PlanError`` for what is none."""
    name = metric or "energy_j"
    if name not in BUDGET_UNITS:
        raise PlanError(f"unknown metric {name!r}; a budget can bound: {', '.join(BUDGET_UNITS)}")
    unit = BUDGET_UNITS[name]
    match = re.fullmatch(rf"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([pnumkMG]?){unit}(?:/\w+)?\s*", str(text))
    try:
        if match is None:
            raise ValueError
        limit = float(match.group(1)) * UNIT_PREFIXES[match.group(2)]
        if not math.isfinite(limit):
            raise ValueError
        return Budget(name, limit, str(text))
    except ValueError:
        raise PlanError(f"budget {text!r} of {name} is no quantity in {unit}, such as '5 {unit}'") from None


# What fails a test: its budget, or what became of it against a baseline.

#: What to do about a comparison that is inconclusive.
Inconclusive = Literal["warn", "fail", "pass"]


@dataclass(frozen=True)
class Gate:
    """The mark ``energy_gate`` as data: an upper limit, a limit for the change from a baseline, or both."""

    budget: Budget | None = None
    threshold: Threshold | None = None


def parse_gate(metric: str | None, budget: str | None, threshold: str | None) -> Gate:
    """The gate with these, as they are written. Raises ``PlanError``."""
    if budget is None and threshold is None:
        raise PlanError('needs a budget, such as budget="5 J", a threshold, such as threshold="3%", or both')
    return Gate(
        parse_budget(metric, budget) if budget is not None else None,
        read_threshold(metric, threshold) if threshold is not None else None,
    )


def read_fail_on(text: str) -> Threshold:
    """Read ``METRIC:3%`` of a metric that can be compared. Raises ``PlanError``."""
    return _comparable(parse_fail_on(text))


def read_threshold(metric: str | None, text: str) -> Threshold:
    """Read ``3%`` or ``3%+2J`` of a metric that can be compared. Raises ``PlanError``."""
    return _comparable(parse_threshold(metric, text))


def check_metric(name: str) -> str:
    """A metric that can be compared. Raises ``PlanError`` for others."""
    if name not in METRICS:
        raise PlanError(f"unknown metric {name!r}; what can be compared: {', '.join(FIGURES)}")
    if name not in FIGURES:
        raise PlanError(f"{name} is one value a test, and rounds are compared; bound it with a budget")
    return name


def select_criteria(
    fail_on: Sequence[Threshold], own: Threshold | None = None, common: Rule = DEFAULT_RULE
) -> list[Criterion]:
    """What to compare of a test: what fails it or, where nothing does, its usual metric, to be seen.

    What the test's own mark says of a metric goes before what is said of all tests.
    """
    asked = [
        Criterion(each.metric, each.rule(common), gated=True)
        for each in fail_on
        if own is None or each.metric != own.metric
    ]
    if own is not None:
        asked.insert(0, Criterion(own.metric, own.rule(common), gated=True, own=True))
    return asked or [Criterion(rule=common)]


def parse_criteria(
    fail_on: Sequence[str], metrics: Sequence[str], floor: str | None = None
) -> list[Criterion]:
    """What a command line asks for: every metric once, with a threshold of its own or the common rule.

    Raises ``PlanError`` for what is no metric, no threshold or no floor.
    """
    common = DEFAULT_RULE if floor is None else parse_floor(floor)
    thresholds = [read_fail_on(text) for text in fail_on]
    names = [check_metric(name) for name in metrics]
    check_floor(thresholds, common.floor)
    asked = {each.metric: Criterion(each.metric, each.rule(common), gated=True) for each in thresholds}
    asked.update({name: Criterion(name, common, gated=True) for name in names if name not in asked})
    return list(asked.values()) or [Criterion(rule=common, gated=True)]


def list_failures(comparisons: Iterable[Comparison], inconclusive: Inconclusive) -> list[str]:
    """One line for each gate that a test has not passed.

    A gate that could not run is no pass. A test that is new has nothing to be compared with, which is none
    either, but no fault of the test: it is told in the summary.
    """
    lines = (explain_failure(each, inconclusive) for each in comparisons if each.gated)
    return [line for line in lines if line is not None]


def explain_failure(found: Comparison, inconclusive: Inconclusive) -> str | None:
    """Why a gate was not passed; ``None`` if it was, or has nothing to say."""
    if found.verdict == "regressed":
        estimated = " (estimated)" if found.kind == "estimated" else ""
        return (
            f"energy_gate: {found.metric} regressed, {format_value(found.base)} -> {format_value(found.head)}"
            f" {found.unit}{estimated}: {found.reason}"
        )
    if found.verdict in ("not comparable", "invalid"):
        return f"energy_gate: {found.metric} could not be judged, {found.verdict}: {found.reason}"
    if found.verdict == "inconclusive" and inconclusive == "fail":
        return f"energy_gate: {found.metric} is inconclusive (--energy-inconclusive=fail): {found.reason}"
    return None


def format_value(value: float | None) -> str:
    """A value for people, four digits of it."""
    return "?" if value is None else f"{value:.4g}"


def _comparable(threshold: Threshold) -> Threshold:
    check_metric(threshold.metric)
    return threshold


# What a comparison comes to for a program that asks: its exit code.

PASSED, REGRESSED, USAGE, NOT_COMPARABLE, INCONCLUSIVE, NOTHING_VALID = range(6)


def exit_code(comparisons: Iterable[Comparison], inconclusive: Inconclusive) -> int:
    """The code of the worst that was found.

    What could not be judged is no pass: 3 where a test is not comparable, 5 where one has no valid
    measurement, or where nothing was judged at all. New and removed tests are told and nothing else.
    """
    found = list(comparisons)
    verdicts = {each.verdict for each in found if each.gated}
    if "regressed" in verdicts:
        return REGRESSED
    if "not comparable" in verdicts:
        return NOT_COMPARABLE
    if "invalid" in verdicts or not any(each.rule_applied for each in found):
        return NOTHING_VALID
    if "inconclusive" in verdicts and inconclusive == "fail":
        return INCONCLUSIVE
    return PASSED


def list_over_budget(base: Report, head: Report) -> list[Record]:
    """Tests of the head that are over their budget and on the base are not."""
    before: Mapping[str, Record] = {record.id: record for record in base.records}
    return [
        record
        for record in head.records
        if record.failed_gate and not (record.id in before and before[record.id].failed_gate)
    ]
