# SPDX-License-Identifier: Apache-2.0
"""Render a history as an HTML page: a chart for each test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest_llenergy
from pytest_llenergy.compare.history.store import Acceptance, Series
from pytest_llenergy.compare.history.trend import Standing, build_trend, build_view
from pytest_llenergy.record.text import count_tests, short_test_name
from pytest_llenergy.report.history import COLUMNS, list_notes, standing_cells
from pytest_llenergy.report.html.page import MAX_OPEN_SECTIONS, MAX_SECTIONS
from pytest_llenergy.report.html.parts import Cell, Plot, Row, Table, table
from pytest_llenergy.report.html.svg import Sheet, open_sheet, plot_label, require_html_extra
from pytest_llenergy.report.html.template import render_template
from pytest_llenergy.report.html.trends import trend_plot, trend_table


@dataclass(frozen=True)
class Section:
    """One test on one kind of devices."""

    anchor: str
    id: str
    title: str
    summary: str
    is_open: bool
    notes: Sequence[str]
    plot: Plot
    runs: Table


@dataclass(frozen=True)
class Page:
    """The variables of the template, in the order of the page."""

    title: str
    counts: Sequence[tuple[str, int]]
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    further_notes: Sequence[str]
    overview: Sequence[Table]
    sections: Sequence[Section]
    left_out: int
    version: str


def render_page(place: str, series: Sequence[Series], steps: Sequence[Acceptance]) -> str:
    """Render the page.

    Args:
        place: Name of the history.
        series: The series to show.
        steps: All accepted steps.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
    require_html_extra()
    view = build_view(place, series, steps)
    entries = [entry for each in series for entry in each.entries]
    times = sorted(entry.time for entry in entries)
    shown = list(zip(series, view.standings, strict=True))[:MAX_SECTIONS]
    with open_sheet() as sheet:
        sections = [
            _build_section(sheet, number, each, standing, steps, is_open=len(shown) <= MAX_OPEN_SECTIONS)
            for number, (each, standing) in enumerate(shown)
        ]
    changed = sum(bool(each.changes) for each in view.standings)
    tests = len({each.id for each in view.standings})
    page = Page(
        title=f"Energy history: {count_tests(tests)}, {changed} changed",
        counts=[("tests" if tests != 1 else "test", tests), ("changed", changed)],
        facts=[
            ("Place", place),
            ("Sessions", str(len({entry.run_id for entry in entries}))),
            ("Period", f"{times[0]} to {times[-1]}"),
            ("Devices", "; ".join(sorted({each.device for each in view.standings}))),
        ],
        notes=list_notes(view)[:-1],
        further_notes=[],
        overview=[_build_overview(view.standings, len(shown))],
        sections=sections,
        left_out=len(series) - len(shown),
        version=pytest_llenergy.__version__,
    )
    return render_template("history.html.j2", sheet, page=page)


def _build_overview(standings: Sequence[Standing], shown: int) -> Table:
    several = len({each.device_key for each in standings}) > 1
    rows: list[Row] = [
        [
            Cell(short_test_name(each.id), "name", f"test{number}" if number < shown else ""),
            each.metric,
            f"{each.device} ({each.device_key})" if several else "",
            *standing_cells(each)[:-1],
            Cell(standing_cells(each)[-1], "text"),
        ]
        for number, each in enumerate(standings)
    ]
    return table(
        "Tests", ("test", "metric", "devices", *(f"#{name}" for name in COLUMNS[:-1]), COLUMNS[-1]), rows
    )


def _build_section(
    sheet: Sheet,
    number: int,
    series: Series,
    standing: Standing,
    steps: Sequence[Acceptance],
    *,
    is_open: bool,
) -> Section:
    trend = build_trend(series, steps)
    plot = trend_plot(sheet, trend, f"test{number}-trend")
    assert plot is not None, "a series has an entry"
    notes = [
        f"accepted {step.commit[:10]} ({step.time[:10]}): {step.reason}"
        for step in series.find_accepted(steps).values()
    ]
    _, rolling, fixed, _, changed = standing_cells(standing)
    return Section(
        anchor=f"test{number}",
        id=standing.id,
        title=plot_label(standing.id, 120),
        summary=f"{standing.metric}: rolling {rolling}, fixed {fixed}"
        + (f", changed {changed}" if standing.changes else ""),
        is_open=is_open or bool(standing.changes),
        notes=[f"{standing.device} ({standing.device_key})", *notes],
        plot=plot,
        runs=trend_table(trend),
    )
