# SPDX-License-Identifier: Apache-2.0
"""``llenergy report``: a report as a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.cli.parsers import Commands
    from pytest_llenergy.model.report import Report
    from pytest_llenergy.report.html.trend import Trend


def add(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("report", help="print the table of a report or journal")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT.html",
        help="write a page with figures instead (needs the extra html)",
    )
    parser.add_argument(
        "--history",
        metavar="PLACE",
        help="show on the page how its tests have done so far, from llenergy history",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it, or write its page. Returns 0."""
    import shutil

    from pytest_llenergy.report.file import check_apart, read_report

    if args.html is not None:
        check_apart(args.html, [args.file])
    report = read_report(args.file)
    if args.html is not None:
        return _write_page(report, args.html, args.history)
    from pytest_llenergy.report.terminal import render

    width = shutil.get_terminal_size().columns
    print(render(report.records, width, color=sys.stdout.isatty()))
    if not report.run.complete:
        print("incomplete: the run did not come to its end")
    return 0


def _write_page(report: Report, path: Path, history: str | None) -> int:
    from pytest_llenergy.report.file import replace_file
    from pytest_llenergy.report.html.page import render_report

    trends = _trends(report, history) if history is not None else []
    replace_file(path, render_report(report, trends).encode())
    print(f"{path}: {len(report.records)} records")
    return 0


def _trends(report: Report, place: str) -> list[Trend]:
    """Of each test of the report that the history has, on the devices of its last session there."""
    from pytest_llenergy.history.place import place_at
    from pytest_llenergy.history.standing import trends
    from pytest_llenergy.report.html.trend import Trend, TrendPoint

    names = {record.id for record in report.records}
    return [
        Trend(
            series.last.id,
            series.last.metric,
            series.last.unit,
            [
                TrendPoint(each.time, each.commit, each.value, each.low, each.high, changed=each.change)
                for each in points
            ],
        )
        for series, points in trends(place_at(place))
        if series.last.id in names
    ]
