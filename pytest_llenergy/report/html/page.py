# SPDX-License-Identifier: Apache-2.0
"""The HTML page of one report, of two compared reports, or of a paired report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest_llenergy
from pytest_llenergy.model.comparison import VERDICTS, ComparedReports, Comparison, ReportSource
from pytest_llenergy.model.report import Report
from pytest_llenergy.model.text import one_line
from pytest_llenergy.report.html import details, tables
from pytest_llenergy.report.html.cases import Case, LabelledReport, compared_cases, order_rounds, report_cases
from pytest_llenergy.report.html.comparison_charts import (
    Trend,
    detectability_plot,
    energy_speed_plot,
    forest_plot,
    trend_plot,
)
from pytest_llenergy.report.html.round_charts import energy_time_plot, power_curves, power_plot, rounds_plot
from pytest_llenergy.report.html.svg import Plot, Sheet, open_sheet, plot_label, require_html_extra
from pytest_llenergy.report.html.tables import Table
from pytest_llenergy.report.verdicts import describe_noise, format_change, format_interval, format_value

if TYPE_CHECKING:
    from jinja2 import Environment

#: Most tests with a section; the others are in the tables only.
MAX_SECTIONS = 100

#: First sections that start open; those of tests that need attention always do.
MAX_OPEN_SECTIONS = 3

QUIET_STATES = frozenset({"unchanged", "measured", "skipped", "new", "removed"})


@dataclass(frozen=True)
class Section:
    """One test of the page."""

    case: Case
    title: str
    summary: str
    is_open: bool
    plots: Sequence[Plot]
    main: Sequence[Table]
    more: Sequence[Table]
    notes: Sequence[str]


@dataclass(frozen=True)
class Page:
    """The variables of the template, in the order of the page."""

    title: str
    counts: Sequence[tuple[str, int]]
    about: Sequence[str]
    notes: Sequence[str]
    plots: Sequence[Plot]
    overview: Sequence[Table]
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
    notes = [] if report.run.complete else ["The run was interrupted; the tests after that are missing."]
    if report.baseline is not None and report.baseline.absent:
        notes.append(f"In the baseline but not in this run: {', '.join(report.baseline.absent)}")
    about = [
        _describe_commit(report.source.commit, report.source.dirty),
        report.run.started_at,
        describe_noise(comparisons),
    ]
    if report.baseline is not None:
        about.insert(1, f"against {report.baseline.side.origin}")
    reports = [LabelledReport("head", "", report)]
    return _render(reports, cases, "Energy report", states, about, notes, trends, interleaved=False)


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
    about = [f"{_describe_side(compared.head)} against {_describe_side(compared.base)}"]
    about += [f"{pairs} pairs, measured alternately"] if pairs is not None else []
    about += [*compared.devices, describe_noise(compared.comparisons)]
    sides = [LabelledReport("base", "base", base), LabelledReport("head", "head", head)]
    return _render(
        sides, cases, "Energy", states, about, compared.notes, trends, interleaved=pairs is not None
    )


def _render(
    sides: Sequence[LabelledReport],
    cases: Sequence[Case],
    title: str,
    states: Mapping[str, int],
    about: Sequence[str],
    notes: Sequence[str],
    trends: Sequence[Trend],
    *,
    interleaved: bool,
) -> str:
    comparisons = [each for case in cases for each in case.comparisons]
    shown = cases[:MAX_SECTIONS]
    order = [*VERDICTS, *(state for state in states if state not in VERDICTS)]
    counts = [(state, states[state]) for state in order if states.get(state)]
    with open_sheet() as sheet:
        plots = [
            forest_plot(sheet, comparisons, "verdicts"),
            energy_speed_plot(sheet, cases, "speed"),
            detectability_plot(sheet, comparisons, "detectable"),
        ]
        sections = [
            _build_section(
                sheet, case, [each for each in trends if each.id == case.id], place, interleaved=interleaved
            )
            for place, case in enumerate(shown)
        ]
    overview = [tables.verdicts(cases, len(shown))] if comparisons else []
    overview += [tables.measured(cases, len(shown))] if len(sides) == 1 else []
    closing = [
        tables.speeds(cases),
        tables.invalid_rounds(cases, interleaved=interleaved),
        tables.rules(comparisons),
        tables.meters(sides),
        tables.machine(sides),
    ]
    page = Page(
        title=f"{title}: {', '.join(f'{count} {state}' for state, count in counts) or 'nothing to show'}",
        counts=counts,
        about=[each for each in about if each],
        notes=notes,
        plots=[each for each in plots if each is not None],
        overview=overview,
        sections=sections,
        left_out=len(cases) - len(shown),
        closing=[each for each in closing if each.rows],
        version=pytest_llenergy.__version__,
    )
    return _create_environment().get_template("page.html.j2").render(page=page, **_style(sheet))


def _build_section(
    sheet: Sheet, case: Case, trends: Sequence[Trend], place: int, *, interleaved: bool
) -> Section:
    ordered = order_rounds(case, interleaved=interleaved)
    curves = power_curves(case)
    plots = [
        rounds_plot(sheet, case, ordered, f"{case.anchor}-rounds"),
        energy_time_plot(sheet, case, ordered, f"{case.anchor}-time"),
        power_plot(sheet, case, curves, f"{case.anchor}-power"),
    ]
    plots += [trend_plot(sheet, each, f"{case.anchor}-trend{number}") for number, each in enumerate(trends)]
    main = [details.metrics(case), details.rounds(case, ordered), details.flags(case), details.windows(case)]
    more = [
        details.phases(case, ordered),
        details.spans(case),
        *(details.steps(each) for each in curves),
    ]
    more += [*(details.trend_points(each) for each in trends), details.settings(case)]
    records = case.records.values()
    notes = [f"{each.metric}: {each.reason}" for each in case.comparisons]
    notes += [note for each in case.comparisons for note in [*each.notes, *each.differences]]
    notes += [f"{record.status}: {record.reason}" for record in records if record.reason]
    return Section(
        case=case,
        title=plot_label(case.id, 120),
        summary=_summarize(case),
        is_open=place < MAX_OPEN_SECTIONS or (case.state not in QUIET_STATES and place < MAX_SECTIONS // 4),
        plots=[each for each in plots if each is not None],
        main=[each for each in main if each.rows],
        more=[each for each in more if each.rows],
        notes=list(dict.fromkeys(notes)),
    )


def _summarize(case: Case) -> str:
    """Return the main value of a test, shown next to its name."""
    worst: Comparison | None = case.worst
    if worst is not None:
        return f"{format_change(worst)} ({format_interval(worst)})" if worst.ratio is not None else ""
    record = next(iter(case.records.values()))
    metric = record.metrics.get(case.metric)
    return format_value(metric.value, metric.unit) if metric is not None and metric.value is not None else ""


def _describe_side(side: ReportSource) -> str:
    return _describe_commit(side.commit, side.dirty) or side.origin


def _describe_commit(commit: str | None, dirty: bool | None) -> str:
    return "" if commit is None else f"{commit[:10]}{' (with changes)' if dirty else ''}"


def _create_environment() -> Environment:
    """Create the template environment, which escapes every value and puts it on one line.

    Only markup that this package generates is left as it is.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def finalize(text: Any) -> Any:
        return one_line(text) if type(text) is str else text

    return Environment(
        loader=PackageLoader("pytest_llenergy.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _style(sheet: Sheet) -> dict[str, str]:
    """Return the style sheet, and a content security policy that allows nothing else."""
    import base64
    import hashlib
    from importlib.resources import files

    from markupsafe import Markup

    sheet_text = files("pytest_llenergy.report.html").joinpath("templates/page.css").read_text("utf-8")
    style = f"\n{sheet_text}{sheet.css}"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {"style": Markup(style), "policy": policy}
