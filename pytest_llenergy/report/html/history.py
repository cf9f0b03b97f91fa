# SPDX-License-Identifier: Apache-2.0
"""Render a history as an HTML page: a chart for each test."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.compare.history.store import Series
from pytest_llenergy.compare.history.trend import Standing, build_trend, build_view
from pytest_llenergy.record.text import count_tests, short_test_name
from pytest_llenergy.report.history import COLUMNS, list_notes, standing_cells
from pytest_llenergy.report.html.figures import trend_chart
from pytest_llenergy.report.html.page import MAX_SECTIONS, Section, render_template
from pytest_llenergy.report.html.tables import Cell, Cells, table, text_cell


def render_page(place: str, series: Sequence[Series]) -> str:
    """Render the page.

    Args:
        place: Name of the history.
        series: The series to show.

    Raises:
        ReportError: If the extra ``html`` is not installed.
    """
    view = build_view(place, series)
    entries = [entry for each in series for entry in each.entries]
    times = sorted(entry.time for entry in entries)
    devices = sorted({f"{each.device} ({each.device_key})" for each in view.standings})
    changed = sum(bool(each.changes) for each in view.standings)
    tests = len({each.id for each in view.standings})
    *notes, footer = list_notes(view)
    rows: list[Cells] = [
        [
            Cell(short_test_name(each.id), "name", f"t{number}" * (number <= MAX_SECTIONS)),
            each.metric,
            f"{each.device} ({each.device_key})" if len(devices) > 1 else "",
            *standing_cells(each)[:-1],
            text_cell(standing_cells(each)[-1]),
        ]
        for number, each in enumerate(view.standings, 1)
    ]
    heads = ["test", "metric", "devices", *(f"#{name}" for name in COLUMNS[:-1]), COLUMNS[-1]]
    shown = zip(series[:MAX_SECTIONS], view.standings, strict=False)
    return render_template(
        title=f"Energy history: {count_tests(tests)}, {changed} changed",
        counts=[("tests" if tests != 1 else "test", tests), ("changed", changed)],
        facts=[
            ("Place", place),
            ("Sessions", str(len({entry.run_id for entry in entries}))),
            ("Period", f"{times[0]} to {times[-1]}"),
            ("Devices", "; ".join(devices)),
        ],
        notes=notes,
        charts=[],
        row_charts=[],
        overview=table("Tests", heads, rows),
        sections=[_section(number, *each) for number, each in enumerate(shown, 1)],
        left_out=max(0, len(series) - MAX_SECTIONS),
        closing=[],
        footer=f"Values are medians over the valid rounds of a session, with their quartiles. {footer}",
    )


def _section(number: int, series: Series, standing: Standing) -> Section:
    _, usual, change, _, _, changed = standing_cells(standing)
    return Section(
        f"t{number}",
        standing.id,
        "changed" if standing.changes else "",
        f"{standing.metric}: {change} from the usual {usual}"
        + f", changed {changed}" * bool(standing.changes),
        [],
        trend_chart(build_trend(series)),
        [],
        [],
    )
