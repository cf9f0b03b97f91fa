# SPDX-License-Identifier: Apache-2.0
"""The tests of a page: the records of one or both sides, and their verdicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import VERDICTS, ComparedReports, Comparison
from pytest_llenergy.record.metrics import ROUND_METRICS, is_prefill_only
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record, Round
from pytest_llenergy.record.report import Report, SideName
from pytest_llenergy.record.round_metric import CLOCK_RESOLUTION_S, is_valid
from pytest_llenergy.record.round_statistics import RoundValue
from pytest_llenergy.record.text import one_line

PER_TOKEN, PER_ITERATION = "energy_per_output_token_j", "energy_j"


@dataclass(frozen=True)
class LabelledReport:
    """One report. ``label`` is empty if there is only one."""

    name: SideName
    label: str
    report: Report


@dataclass(frozen=True)
class TestSection:
    """One test. ``anchor`` is its id in the page; ``records`` hold the sides that have the test."""

    anchor: str
    id: str
    records: Mapping[SideName, Record]
    comparisons: Sequence[Comparison] = ()

    @property
    def worst(self) -> Comparison | None:
        """The most urgent comparison of the test."""
        return min(self.comparisons, key=lambda each: VERDICTS.index(each.verdict), default=None)

    @property
    def state(self) -> str:
        """The most urgent verdict, or the status of the record; with a result, the kind of its energy."""
        if self.worst is not None:
            return self.worst.verdict
        record = next(iter(self.records.values()), None)
        if record is None:
            return "invalid"
        return record.kind or record.status if record.status == "measured" else record.status

    @property
    def metric(self) -> str:
        """The metric to plot: the compared one, else that of ``metric_of_all``."""
        worst = self.worst
        if worst is not None and worst.verdict != "no value" and worst.metric in ROUND_METRICS:
            return worst.metric
        return metric_of_all(self.records.values())


@dataclass(frozen=True)
class OrderedRound:
    """A round and its position: ``place`` counts from 1 over both sides, ``number`` within its side."""

    place: int
    number: int
    side: SideName
    round: Round

    @property
    def valid(self) -> bool:
        """Whether the round counts."""
        return is_valid(self.round)

    def value(self, metric: str) -> RoundValue | None:
        """Return the round's value of ``metric``, or None if it has none."""
        return ROUND_METRICS[metric].value_of(self.round)


def order_rounds(case: TestSection, *, interleaved: bool) -> list[OrderedRound]:
    """Return the rounds of a test by start time, with those of the base first unless ``interleaved``.

    Raises:
        ReportError: If a round has no iterations or no duration.
    """
    numbered = [
        (round_.start_s, number, side, round_)
        for side, record in case.records.items()
        for number, round_ in enumerate(record.rounds, 1)
    ]
    for _, number, side, round_ in numbered:
        if round_.iterations < 1 or round_.duration_s < CLOCK_RESOLUTION_S:
            raise ReportError(
                f"{one_line(case.id)}: round {number} of {side} has {round_.iterations} iterations in "
                f"{round_.duration_s:g} s; no report of pytest --energy-report has such a round"
            )
    numbered.sort(key=lambda each: each[0] if interleaved else (each[2] == "head", each[0]))
    return [
        OrderedRound(place, number, side, round_)
        for place, (_, number, side, round_) in enumerate(numbered, 1)
    ]


def report_cases(report: Report) -> list[TestSection]:
    """Return the last attempt of each test, most urgent verdicts first."""
    last = {record.id: record for record in report.records}
    return _number_cases([(name, {"head": record}, record.comparisons) for name, record in last.items()])


def compared_cases(base: Report, head: Report, compared: ComparedReports) -> list[TestSection]:
    """Return the tests of two reports, most urgent verdicts first.

    Args:
        base: The report of the baseline.
        head: The report of the head.
        compared: Their comparison.
    """
    old = {record.id: record for record in base.records}
    new = {record.id: record for record in head.records}
    verdicts: dict[str, list[Comparison]] = {}
    for each in compared.comparisons:
        verdicts.setdefault(each.id, []).append(each)
    cases = []
    for name in dict.fromkeys([*verdicts, *new, *old]):
        records: dict[SideName, Record] = {}
        if name in old:
            records["base"] = old[name]
        if name in new:
            records["head"] = new[name]
        cases.append((name, records, verdicts.get(name, [])))
    return _number_cases(cases)


def _number_cases(
    cases: Sequence[tuple[str, Mapping[SideName, Record], Sequence[Comparison]]],
) -> list[TestSection]:
    def rank(each: tuple[str, Mapping[SideName, Record], Sequence[Comparison]]) -> int:
        return min((VERDICTS.index(comparison.verdict) for comparison in each[2]), default=len(VERDICTS))

    ordered = sorted(cases, key=rank)
    return [TestSection(f"t{number}", *each) for number, each in enumerate(ordered, 1)]


def metric_of_all(records: Collection[Record]) -> str:
    """Return energy per token, or energy unless all records write tokens: a prefill only reads them."""
    writes = (each.value_of(PER_TOKEN) is not None and not is_prefill_only(each.rounds) for each in records)
    return PER_TOKEN if records and all(writes) else PER_ITERATION


def value_and_u(record: Record | None, name: str) -> tuple[float, float] | None:
    """Return a positive value of a metric and its standard uncertainty, or None."""
    metric = record.metrics.get(name) if record is not None else None
    if metric is None or not metric.value or metric.value < 0:
        return None
    return metric.value, metric.uncertainty_absolute or metric.uncertainty or 0.0


def format_metric_of(record: Record, name: str) -> str:
    """Format a metric with its uncertainty and unit, or return ``-``."""
    metric = record.metrics.get(name)
    if metric is None or metric.value is None:
        return "-"
    return format_quantity(metric.value, metric.uncertainty_absolute, metric.unit)
