# SPDX-License-Identifier: Apache-2.0
"""The HTML page of one report, of two compared reports, or of a paired report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest_llenergy
from pytest_llenergy.compare.history.trend import Trend
from pytest_llenergy.record.comparison import ComparedReports, Comparison
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.html import details, header, tables
from pytest_llenergy.report.html.bars import energy_bars, windows_plot
from pytest_llenergy.report.html.cases import (
    PER_TOKEN,
    LabelledReport,
    TestSection,
    compared_cases,
    order_rounds,
    report_cases,
)
from pytest_llenergy.report.html.comparison_charts import detectability_plot, forest_plot
from pytest_llenergy.report.html.load_chart import load_plot, load_table
from pytest_llenergy.report.html.overview_charts import energy_speed_plot, parameter_plots
from pytest_llenergy.report.html.parts import Plot, Reason, Table
from pytest_llenergy.report.html.round_charts import energy_time_plot, power_curves, power_plot, rounds_plot
from pytest_llenergy.report.html.svg import Sheet, open_sheet, plot_label, require_html_extra
from pytest_llenergy.report.html.template import render_template
from pytest_llenergy.report.html.trends import trend_plot, trend_table
from pytest_llenergy.report.layout import has_values
from pytest_llenergy.report.load_curves import describe_failure
from pytest_llenergy.report.verdicts import describe_noise, format_change_and_limits

#: Most tests with a section; the others are in the tables only.
MAX_SECTIONS = 100

#: Up to so many sections start open; of more only those of tests that need attention.
MAX_OPEN_SECTIONS = 3

#: Notes that are shown at once; the others are folded.
MAX_NOTES = 3

QUIET_STATES = frozenset({"unchanged", "measured", "attributed", "estimated", "skipped", "new", "removed"})


@dataclass(frozen=True)
class Section:
    """One test of the page."""

    case: TestSection
    title: str
    summary: str
    is_open: bool
    plots: Sequence[Plot]
    main: Sequence[Table]
    missing: Table
    more: Sequence[Table]
    notes: Sequence[str]


@dataclass(frozen=True)
class Page:
    """The variables of the template, in the order of the page."""

    title: str
    counts: Sequence[tuple[str, int]]
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    further_notes: Sequence[str]
    values: Sequence[tuple[str, str]]
    plots: Sequence[Plot]
    reasons: Sequence[Reason]
    overview: Sequence[Table]
    compares: bool
    more_plots: Sequence[Plot]
    sections: Sequence[Section]
    left_out: int
    closing: Sequence[Table]
    version: str


def render_report(report: Report, trends: Sequence[Trend] = ()) -> str:
    """Render one report as a page, with the trends of its tests.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
    require_html_extra()
    cases = report_cases(report)
    comparisons = [each for case in cases for each in case.comparisons]
    states = Counter(case.state for case in cases)
    notes = [] if report.run.complete else ["The run did not finish; its remaining tests are missing."]
    if report.baseline is not None and report.baseline.absent:
        notes.append(f"In the baseline but not in this run: {', '.join(report.baseline.absent)}")
    facts = header.run_facts(report)
    if report.baseline is not None:
        facts.append(("Baseline", report.baseline.side.origin))
    facts.append(("Noise", _describe_noise(comparisons)))
    notes += header.run_notes(cases)
    reports = [LabelledReport("head", "", report)]
    return _render(reports, cases, "Energy report", states, facts, notes, trends, interleaved=False)


def render_compared(
    base: Report,
    head: Report,
    compared: ComparedReports,
    trends: Sequence[Trend] = (),
    *,
    pairs: str | None = None,
) -> str:
    """Render two reports and their comparison as a page.

    Args:
        pairs: Stages of a run that measured both sides alternately, such as ``6+6``. The rounds of both sides
            are then shown in the order in which they ran.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
    require_html_extra()
    cases = compared_cases(base, head, compared)
    states = Counter[str](each.verdict for each in compared.comparisons)
    facts = [("Head", header.describe_side(compared.head)), ("Base", header.describe_side(compared.base))]
    facts += [("Order", f"{pairs} pairs, measured alternately")] if pairs is not None else []
    facts += [("Devices", "; ".join(compared.devices)), ("Noise", _describe_noise(compared.comparisons))]
    sides = [LabelledReport("base", "base", base), LabelledReport("head", "head", head)]
    return _render(
        sides,
        cases,
        "Energy comparison",
        states,
        facts,
        compared.notes,
        trends,
        interleaved=pairs is not None,
    )


def _render(
    sides: Sequence[LabelledReport],
    cases: Sequence[TestSection],
    title: str,
    states: Mapping[str, int],
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    trends: Sequence[Trend],
    *,
    interleaved: bool,
) -> str:
    comparisons = [each for case in cases for each in case.comparisons]
    shown = cases[:MAX_SECTIONS]
    counts = [(state, states[state]) for state in header.ORDER if states.get(state)]
    with open_sheet() as sheet:
        plots: Sequence[Plot | None]
        more_plots: Sequence[Plot | None]
        if comparisons:
            plots = [forest_plot(sheet, comparisons, "verdicts")]
            more_plots = [
                energy_speed_plot(sheet, cases, "speed"),
                detectability_plot(sheet, comparisons, "detectable"),
            ]
        else:
            plots, more_plots = _plot_run(sheet, cases) if len(sides) == 1 else ([], [])
        sections = [
            _build_section(
                sheet,
                case,
                [each for each in trends if each.id == case.id],
                may_open=len(shown) <= MAX_OPEN_SECTIONS or place < MAX_SECTIONS // 4,
                is_open=len(shown) <= MAX_OPEN_SECTIONS,
                interleaved=interleaved,
            )
            for place, case in enumerate(shown)
        ]
    overview = [tables.verdicts(cases, len(shown))] if comparisons else []
    single = _find_single(cases) if len(sides) == 1 and not comparisons else None
    overview += [tables.measured(cases, len(shown))] if len(sides) == 1 and single is None else []
    closing = [
        tables.invalid_rounds(cases, interleaved=interleaved),
        tables.rules(comparisons),
        tables.meters(sides),
        tables.machine(sides),
    ]
    page = Page(
        title=f"{title}: {', '.join(f'{count} {state}' for state, count in counts) or 'nothing to show'}",
        counts=counts,
        facts=[each for each in facts if each[1]],
        notes=notes[:MAX_NOTES],
        further_notes=notes[MAX_NOTES:],
        values=header.single_values(single) if single is not None else [],
        plots=[each for each in plots if each is not None],
        reasons=header.reasons(cases, len(shown)),
        overview=[each for each in overview if each.rows],
        compares=bool(comparisons),
        more_plots=[each for each in more_plots if each is not None],
        sections=sections,
        left_out=len(cases) - len(shown),
        closing=[each for each in closing if each.rows],
        version=pytest_llenergy.__version__,
    )
    return render_template("page.html.j2", sheet, page=page, most_tests=header.MAX_TESTS)


def _find_single(cases: Sequence[TestSection]) -> Record | None:
    """Return the only record with values, which is shown as numbers, unless it has windows."""
    measured = [case.records["head"] for case in cases if _has_energy(case)]
    return measured[0] if len(measured) == 1 and not measured[0].windows else None


def _has_energy(case: TestSection) -> bool:
    record = case.records["head"]
    return has_values(record) or any(window.energy_j is not None for window in record.windows)


def _plot_run(
    sheet: Sheet, cases: Sequence[TestSection]
) -> tuple[Sequence[Plot | None], Sequence[Plot | None]]:
    """Return the charts of all tests, and those of parameters."""
    measured = [case for case in cases if _has_energy(case)]
    speed = energy_speed_plot(sheet, measured, "speed")
    others = [case for case in measured if speed is None or case.metric != PER_TOKEN]
    energies = energy_bars(sheet, others, "energy") if len(measured) > 1 else None
    return [speed, energies], parameter_plots(sheet, measured, "parameter")


def _describe_noise(comparisons: Sequence[Comparison]) -> str:
    return describe_noise(comparisons).removeprefix("noise ")


def _build_section(
    sheet: Sheet,
    case: TestSection,
    trends: Sequence[Trend],
    *,
    may_open: bool,
    is_open: bool,
    interleaved: bool,
) -> Section:
    ordered = order_rounds(case, interleaved=interleaved)
    curves = power_curves(case)
    plots = [
        rounds_plot(sheet, case, ordered, f"{case.anchor}-rounds"),
        energy_time_plot(sheet, case, ordered, f"{case.anchor}-time"),
        power_plot(sheet, case, curves, f"{case.anchor}-power"),
    ]
    plots += [
        windows_plot(sheet, record, f"{case.anchor}-windows-{side}") for side, record in case.records.items()
    ]
    loads = {side: each.load_curve for side, each in case.records.items() if each.load_curve is not None}
    titles = {side: side if len(case.records) > 1 else "" for side in loads}
    load_plots = {
        side: load_plot(sheet, curve, f"{case.anchor}-load-{side}", titles[side])
        for side, curve in loads.items()
    }
    plots += load_plots.values()
    plots += [trend_plot(sheet, each, f"{case.anchor}-trend{number}") for number, each in enumerate(trends)]
    main = [details.metrics(case), details.flags(case), details.windows(case), details.rounds(case, ordered)]
    # Otherwise the table is below the plot.
    main += [load_table(loads[side], titles[side]) for side, plot in load_plots.items() if plot is None]
    more = [
        details.hosts(case, ordered),
        details.phases(case, ordered),
        details.spans(case),
        *(details.steps(each) for each in curves),
    ]
    more += [*(trend_table(each) for each in trends), details.settings(case)]
    records = case.records.values()
    notes = [f"{each.metric}: {each.reason}" for each in case.comparisons]
    notes += [note for each in case.comparisons for note in [*each.notes, *each.differences]]
    notes += [f"{record.status}: {record.reason}" for record in records if record.reason]
    notes += [
        f"{f'{side}, ' if len(case.records) > 1 else ''}{failure}"
        for side, curve in loads.items()
        if (failure := describe_failure(curve)) is not None
    ]
    needs_attention = case.state not in QUIET_STATES and any(each.rounds for each in records)
    return Section(
        case=case,
        title=plot_label(case.id, 120),
        summary=_summarize(case),
        is_open=is_open or (may_open and needs_attention),
        plots=[each for each in plots if each is not None],
        main=[each for each in main if each.rows],
        missing=details.missing_metrics(case),
        more=[each for each in more if each.rows],
        notes=list(dict.fromkeys(notes)),
    )


def _summarize(case: TestSection) -> str:
    """Return the main value of a test, shown next to its name."""
    worst: Comparison | None = case.worst
    if worst is not None:
        return format_change_and_limits(worst) if worst.ratio is not None else ""
    record = next(iter(case.records.values()))
    metric = record.metrics.get(case.metric)
    if metric is None or metric.value is None:
        return ""
    return format_quantity(metric.value, metric.uncertainty_absolute, metric.unit)
