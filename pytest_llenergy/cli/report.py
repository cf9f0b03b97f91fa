# SPDX-License-Identifier: Apache-2.0
"""``llenergy report``: show a report as a table or an HTML page."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.table import option_row

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.model.report import Report
    from pytest_llenergy.report.columns import Layout
    from pytest_llenergy.report.html.comparison_charts import Trend


#: Fields of ``Layout`` that options set.
LAYOUT_OPTIONS = ("columns", "sort", "group_by")


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        help="print the table of a report or journal",
        description="Print the table that pytest printed at the end of the run, or write an HTML page.",
    )
    parser.add_argument("file", metavar="FILE", help="a report or a journal: a file or a URL")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT.html",
        help="write a page with plots instead (needs the extra html)",
    )
    parser.add_argument(
        "--history",
        metavar="PLACE",
        help="show trends from llenergy history on the page",
    )
    for name in LAYOUT_OPTIONS:
        option_row(name).add_argument(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        dest="verbosity",
        action="count",
        default=0,
        help="show rounds; -vv: also flags and uncertainty",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table or write the page. Returns 0."""
    import shutil

    from pytest_llenergy.report.store import check_not_overwritten, parse_location, read_report

    if args.history is not None and args.html is None:
        raise PlanError("--history shows trends on a page; give --html=OUT.html too")
    location = parse_location(args.file)
    if args.html is not None:
        check_not_overwritten(args.html, [location])
    report = read_report(location)
    if args.html is not None:
        return _write_page(report, args.html, args.history)
    from pytest_llenergy.cli.console import print_encodable, wants_color
    from pytest_llenergy.report.terminal import render_summary

    width = shutil.get_terminal_size().columns
    summary = render_summary(
        report.records, width, color=wants_color(), layout=_parse_layout(args), verbosity=args.verbosity
    )
    print_encodable(summary)
    if not report.run.complete:
        print("incomplete: the run was interrupted")
    return 0


def _parse_layout(args: argparse.Namespace) -> Layout:
    from pytest_llenergy.report.columns import DEFAULT_LAYOUT

    given = {name: getattr(args, name) for name in LAYOUT_OPTIONS}
    layout = {name: option_row(name).read_argument(text) for name, text in given.items() if text is not None}
    return replace(DEFAULT_LAYOUT, **layout)


def _write_page(report: Report, path: Path, history: str | None) -> int:
    from pytest_llenergy.report.html.page import render_report
    from pytest_llenergy.report.store import replace_file

    trends = _load_report_trends(report, history) if history is not None else []
    replace_file(path, render_report(report, trends).encode())
    print(f"{path}: {len(report.records)} records")
    return 0


def _load_report_trends(report: Report, location: str) -> list[Trend]:
    """Load the trend of each test in the report, on the devices of its last session."""
    from pytest_llenergy.history.store import open_store
    from pytest_llenergy.history.trend import load_trends
    from pytest_llenergy.report.html.comparison_charts import Trend, TrendPoint

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
        for series, points in load_trends(open_store(location))
        if series.last.id in names
    ]
