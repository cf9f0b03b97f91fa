# SPDX-License-Identifier: Apache-2.0
"""Loads of one test in the terminal, in Markdown and in the report; test_html.py has the page."""

from __future__ import annotations

import re

import msgspec

from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint
from pytest_llenergy.record.record import Record
from pytest_llenergy.report.html.page import render_report
from pytest_llenergy.report.layout import Layout
from pytest_llenergy.report.loads import describe_failure, load_columns
from pytest_llenergy.report.markdown import render_run_markdown
from pytest_llenergy.report.terminal import render_summary

from ..compare.runs import record_of, report_of
from .pages import load_curve

TITLE = "maximum load 9.8 request/s (10.1 exceeds it); SLO: TTFT <= 0.5 s, TPOT <= 0.05 s for 99 %"


def loaded(curve: LoadCurve | None = None) -> Record:
    return msgspec.structs.replace(record_of("test_serving.py::test_it"), load_curve=curve or load_curve())


def rows_of(curve: LoadCurve) -> list[dict[str, str]]:
    columns = load_columns(curve)
    return [{column.head: column.cell(point) for column in columns} for point in curve.by_rate()]


def test_every_point_is_a_row_by_rate() -> None:
    rows = rows_of(load_curve())
    assert [row["n"] for row in rows[1:4]] == ["1", "3", "6"]
    assert rows[0]["per token ± u"] == "450 mJ"
    assert rows[3]["per token ± u"] == "302 ± 20 mJ"
    # The full measurement at the maximum is the later of the two at its rate.
    results = [*["within"] * 3, "maximum", *["exceeds"] * 3, "saturated"]
    assert [row["result"] for row in rows] == results
    assert rows[4]["good"] == "98.0%"


def test_a_search_without_an_upper_bound_found_no_maximum() -> None:
    open_ended = msgspec.structs.replace(load_curve(), exceeded_at_requests_per_s=None)
    results = [row["result"] for row in rows_of(open_ended)]
    assert results[3] == "≥ 9.8"
    assert "maximum" not in results
    assert "≥ 9.8" in render_report(report_of(loaded(open_ended)))


def test_the_terminal_shows_the_loads_in_one_table_of_eighty_columns() -> None:
    lines = render_summary([loaded()], 80, color=False).splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("sent/s")]
    assert "result" in lines[place]
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines[place:] if re.match(r"[\d.]+ ", line)]) == 8
    # Nothing limits it.
    assert "E2E" not in lines[place]
    assert "no room for E2E p99 s, done/s (-v)" in lines
    assert TITLE in " ".join(lines)


def test_the_reason_of_a_refused_load_is_below_the_table() -> None:
    """Rather than that of one without a result; a load that ended early needs none."""
    points = [
        LoadPoint(request_rate=2.0, within_slo=False, reason="ended-early: soon"),
        LoadPoint(request_rate=3.0, reason="ServerError: it died"),
        LoadPoint(request_rate=5.0, within_slo=False, refused=True, reason="refused: 503: queue full"),
        LoadPoint(request_rate=4.0, within_slo=False, refused=True, reason="refused: 429: slow down"),
    ]
    curve = LoadCurve(points=points, between=(2.0, 5.0), reason="even 2 request/s")
    assert [row["result"] for row in rows_of(curve)] == ["exceeds", "no result", "refused", "refused"]
    assert describe_failure(curve) == "4 request/s: refused: 429: slow down"
    assert describe_failure(msgspec.structs.replace(curve, points=points[:1])) is None
    died = msgspec.structs.replace(curve, points=points[:2])
    for failed, reason in ((curve, "refused: 429: slow down"), (died, "ServerError: it died")):
        record = loaded(failed)
        *_, last = [line for line in render_summary([record], 80, color=False).splitlines() if reason in line]
        assert last.endswith(f" request/s: {reason}")
        assert f"request/s: {reason}" in render_run_markdown([record], Layout(), 20_000, complete=True)
        assert f"request/s: {reason}" in render_report(report_of(record))


def test_markdown_shows_the_loads() -> None:
    text = render_run_markdown([loaded()], Layout(), 20_000, complete=True)
    assert "TTFT &#60;= 0.5 s" in text
    (head,) = [line for line in text.splitlines() if line.startswith("| sent/s | n |")]
    assert len([line for line in text.splitlines() if line.count("|") == head.count("|")]) == 2 + 8
