# SPDX-License-Identifier: Apache-2.0
"""Render a history as an HTML page: a chart for each test."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.compare.history import Series, Standing, build_view
from pytest_llenergy.record.text import count_tests
from pytest_llenergy.report.history import COLUMNS, EXPLANATION
from pytest_llenergy.report.html.figures import trend_chart
from pytest_llenergy.report.html.page import MAX_SECTIONS, Section, render_template
from pytest_llenergy.report.html.tables import Cell, column_table
from pytest_llenergy.report.names import list_names


def render_page(place: str, series: Sequence[Series]) -> str:
    """Render the page of the history ``place``."""
    view = build_view(place, series)
    entries = [entry for each in series for entry in each]
    times = sorted(entry.time for entry in entries)
    devices = sorted({f"{each.device} ({each.device_key})" for each in view.standings})
    changed = sum(bool(each.changes) for each in view.standings)
    tests = len({each.id for each in view.standings})
    # What all tests have in common is above.
    facts: list[list[str | Cell]] = [
        [each.metric, f"{each.device} ({each.device_key})"] for each in view.standings
    ]
    differ = [place for place, each in enumerate(zip(*facts, strict=True)) if len(set(each)) > 1]
    names = list_names([each.id for each in view.standings])
    leads = [
        [Cell(name, "name", f"t{number}" * (number <= MAX_SECTIONS)), *(fact[place] for place in differ)]
        for number, (name, fact) in enumerate(zip(names, facts, strict=True), 1)
    ]
    heads = ("test", *(("metric", "devices")[place] for place in differ))
    metrics = ", ".join(dict.fromkeys(each.metric for each in view.standings))
    shown = zip(series[:MAX_SECTIONS], view.standings, strict=False)
    return render_template(
        title=f"Energy history: {count_tests(tests)}, {changed} changed",
        counts=[("tests" if tests != 1 else "test", tests), ("changed", changed)],
        facts=[
            ("Place", place),
            ("Sessions", str(len({entry.run_id for entry in entries}))),
            ("Period", f"{times[0][:10]} to {times[-1][:10]}"),
            ("Devices", "; ".join(devices)),
        ],
        notes=[],
        overview=column_table(f"Tests, {metrics}", heads, leads, COLUMNS, view.standings),
        sections=[_section(number, *each) for number, each in enumerate(shown, 1)],
        left_out=max(0, len(series) - MAX_SECTIONS),
        footer=f"Values are medians over the valid rounds of a session. {EXPLANATION}",
    )


def _section(number: int, series: Series, standing: Standing) -> Section:
    facts = {column.head: column.cell(standing) for column in COLUMNS}
    summary = f"{standing.metric}: {facts['change']} from the usual {facts['usual']}"
    if standing.changes:
        summary += f", changed {facts['changed']}"
    state = "changed" if standing.changes else ""
    return Section(f"t{number}", standing.id, state, summary, charts=trend_chart(series))
