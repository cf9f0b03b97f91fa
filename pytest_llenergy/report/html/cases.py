# SPDX-License-Identifier: Apache-2.0
"""The tests of a page, each with the records of one side or two, and its verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_llenergy.errors import ReportError
from pytest_llenergy.measure.metrics import ROUND_METRICS, RoundValue, is_valid
from pytest_llenergy.model.comparison import VERDICTS, ComparedReports, Comparison
from pytest_llenergy.model.record import Record, Round
from pytest_llenergy.model.report import Report
from pytest_llenergy.model.text import one_line

PER_TOKEN, PER_ITERATION = "energy_per_output_token_j", "energy_j"

SideName = Literal["base", "head"]


@dataclass(frozen=True)
class Side:
    """One report. ``label`` is empty if there is only one."""

    name: SideName
    label: str
    report: Report


@dataclass(frozen=True)
class Case:
    """One test. ``anchor`` is its id in the page; ``records`` hold the sides that have the test."""

    anchor: str
    id: str
    records: Mapping[SideName, Record]
    comparisons: Sequence[Comparison] = ()

    @property
    def worst(self) -> Comparison | None:
        """Its most urgent comparison."""
        return min(self.comparisons, key=lambda each: VERDICTS.index(each.verdict), default=None)

    @property
    def state(self) -> str:
        """Its most urgent verdict, or the status of its record."""
        if self.worst is not None:
            return self.worst.verdict
        return next((record.status for record in self.records.values()), "invalid")

    @property
    def metric(self) -> str:
        """The metric of its plots: the compared one, or else energy per token if it counts tokens."""
        if self.worst is not None and self.worst.metric in ROUND_METRICS:
            return self.worst.metric
        found = [record.metrics.get(PER_TOKEN) for record in self.records.values()]
        known = [each for each in found if each is not None and each.value is not None]
        return PER_TOKEN if known and len(known) == len(self.records) else PER_ITERATION


@dataclass(frozen=True)
class OrderedRound:
    """A round in its order: ``place`` counts from 1 over both sides, ``number`` within its side."""

    place: int
    number: int
    side: SideName
    round: Round

    @property
    def valid(self) -> bool:
        """Whether the round counts."""
        return is_valid(self.round)

    def value(self, metric: str) -> RoundValue | None:
        """Return its value of a metric."""
        return ROUND_METRICS[metric].of(self.round)


def order_rounds(case: Case, *, interleaved: bool) -> list[OrderedRound]:
    """Return the rounds in the order in which they ran, or those of the base first unless ``interleaved``.

    Raises ``ReportError`` for an impossible round.
    """
    found = [
        (round_.start_s, number, side, round_)
        for side, record in case.records.items()
        for number, round_ in enumerate(record.rounds, 1)
    ]
    for _, number, side, round_ in found:
        if round_.iterations < 1 or round_.duration_s <= 0:
            raise ReportError(
                f"{one_line(case.id)}: round {number} of {side} has {round_.iterations} iterations in "
                f"{round_.duration_s:g} s; no report of pytest --energy-report has such a round"
            )
    found.sort(key=lambda each: each[0] if interleaved else (each[2] == "head", each[0]))
    return [
        OrderedRound(place, number, side, round_) for place, (_, number, side, round_) in enumerate(found, 1)
    ]


def report_cases(report: Report) -> list[Case]:
    """Return the last attempt of each test, most urgent verdicts first."""
    last = {record.id: record for record in report.records}
    return _number_cases([(name, {"head": record}, record.comparisons) for name, record in last.items()])


def compared_cases(base: Report, head: Report, compared: ComparedReports) -> list[Case]:
    """Return the tests of two reports, most urgent verdicts first."""
    old = {record.id: record for record in base.records}
    new = {record.id: record for record in head.records}
    verdicts: dict[str, list[Comparison]] = {}
    for each in compared.comparisons:
        verdicts.setdefault(each.id, []).append(each)
    found = []
    for name in dict.fromkeys([*verdicts, *new, *old]):
        records: dict[SideName, Record] = {}
        if name in old:
            records["base"] = old[name]
        if name in new:
            records["head"] = new[name]
        found.append((name, records, verdicts.get(name, [])))
    return _number_cases(found)


def _number_cases(
    found: Sequence[tuple[str, Mapping[SideName, Record], Sequence[Comparison]]],
) -> list[Case]:
    def rank(each: tuple[str, Mapping[SideName, Record], Sequence[Comparison]]) -> int:
        return min((VERDICTS.index(comparison.verdict) for comparison in each[2]), default=len(VERDICTS))

    ordered = sorted(found, key=rank)
    return [Case(f"t{number}", *each) for number, each in enumerate(ordered, 1)]
