# SPDX-License-Identifier: Apache-2.0
"""What fails a test: its budget, or what became of it against a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_llenergy.compare.budget import Budget, parse_budget
from pytest_llenergy.compare.comparison import Asked
from pytest_llenergy.compare.metrics import METRICS
from pytest_llenergy.compare.statistics import COMMON, Rule
from pytest_llenergy.compare.threshold import (
    Threshold,
    check_floor,
    parse_fail_on,
    parse_floor,
    parse_threshold,
)
from pytest_llenergy.errors import PlanError
from pytest_llenergy.measure.metrics import FIGURES
from pytest_llenergy.model.comparison import Comparison

#: What to do about a comparison that is inconclusive.
Inconclusive = Literal["warn", "fail", "pass"]


@dataclass(frozen=True)
class Gate:
    """The mark ``energy_gate`` as data: an upper limit, a limit for the change from a baseline, or both."""

    budget: Budget | None = None
    threshold: Threshold | None = None


def read_gate(metric: str | None, budget: str | None, threshold: str | None) -> Gate:
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


def known_metric(name: str) -> str:
    """A metric that can be compared. Raises ``PlanError`` for others."""
    if name not in METRICS:
        raise PlanError(f"unknown metric {name!r}; what can be compared: {', '.join(FIGURES)}")
    if name not in FIGURES:
        raise PlanError(f"{name} is one value a test, and rounds are compared; bound it with a budget")
    return name


def asked_of(
    fail_on: Sequence[Threshold], own: Threshold | None = None, common: Rule = COMMON
) -> list[Asked]:
    """What to compare of a test: what fails it or, where nothing does, its usual metric, to be seen.

    What the test's own mark says of a metric goes before what is said of all tests.
    """
    asked = [
        Asked(each.metric, each.rule(common), gated=True)
        for each in fail_on
        if own is None or each.metric != own.metric
    ]
    if own is not None:
        asked.insert(0, Asked(own.metric, own.rule(common), gated=True, own=True))
    return asked or [Asked(rule=common)]


def asked_for(fail_on: Sequence[str], metrics: Sequence[str], floor: str | None = None) -> list[Asked]:
    """What a command line asks for: every metric once, with a threshold of its own or the common rule.

    Raises ``PlanError`` for what is no metric, no threshold or no floor.
    """
    common = COMMON if floor is None else parse_floor(floor)
    thresholds = [read_fail_on(text) for text in fail_on]
    names = [known_metric(name) for name in metrics]
    check_floor(thresholds, common.floor)
    asked = {each.metric: Asked(each.metric, each.rule(common), gated=True) for each in thresholds}
    asked.update({name: Asked(name, common, gated=True) for name in names if name not in asked})
    return list(asked.values()) or [Asked(rule=common, gated=True)]


def failures(comparisons: Iterable[Comparison], inconclusive: Inconclusive) -> list[str]:
    """One line for each gate that a test has not passed.

    A gate that could not run is no pass. A test that is new has nothing to be compared with, which is none
    either, but no fault of the test: it is told in the summary.
    """
    lines = (failure(each, inconclusive) for each in comparisons if each.gated)
    return [line for line in lines if line is not None]


def failure(found: Comparison, inconclusive: Inconclusive) -> str | None:
    """Why a gate was not passed; ``None`` if it was, or has nothing to say."""
    if found.verdict == "regressed":
        estimated = " (estimated)" if found.kind == "estimated" else ""
        return (
            f"energy_gate: {found.metric} regressed, {shown(found.base)} -> {shown(found.head)} {found.unit}"
            f"{estimated}: {found.reason}"
        )
    if found.verdict in ("not comparable", "invalid"):
        return f"energy_gate: {found.metric} could not be judged, {found.verdict}: {found.reason}"
    if found.verdict == "inconclusive" and inconclusive == "fail":
        return f"energy_gate: {found.metric} is inconclusive (--energy-inconclusive=fail): {found.reason}"
    return None


def shown(value: float | None) -> str:
    """A value for people, four digits of it."""
    return "?" if value is None else f"{value:.4g}"


def _comparable(threshold: Threshold) -> Threshold:
    known_metric(threshold.metric)
    return threshold
