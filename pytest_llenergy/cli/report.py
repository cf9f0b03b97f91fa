# SPDX-License-Identifier: Apache-2.0
"""``llenergy report``: show a report as a table, Markdown or an HTML page."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Literal, get_args

from pytest_llenergy.cli.console import add_output
from pytest_llenergy.options.table import option_row

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.record.report import Report


Format = Literal["text", "markdown", "html"]


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        help="print the table of a report or journal",
        description="Print the table that pytest printed at the end of the run, also as Markdown or as an "
        "HTML page with figures (needs the extra html).",
    )
    parser.add_argument("file", metavar="FILE", help="a report or a journal: a saved name or a file")
    add_output(parser, get_args(Format))
    option_row("columns").add_argument(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="show rounds, all notes and times")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print or write the table or the page. Returns 0."""
    from pytest_llenergy.cli.console import print_data, write_output
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import check_not_overwritten, read_report

    path = locate(args.file)
    if args.output is not None:
        check_not_overwritten(args.output, [path])
    text = _render(read_report(path), args)
    if args.output is not None:
        write_output(args.output, f"{text}\n")
    elif args.format == "text":
        print(text)
    else:
        print_data(text)
    return 0


def _render(report: Report, args: argparse.Namespace) -> str:
    if args.format == "html":
        from pytest_llenergy.report.html.page import render_report

        return render_report(report).removesuffix("\n")
    from pytest_llenergy.report.layout import Layout

    layout = Layout(option_row("columns").read_argument(args.columns) or ())
    if args.format == "markdown":
        from pytest_llenergy.report.markdown import render_run_markdown

        text = render_run_markdown(report.records, layout, sys.maxsize, complete=report.run.complete)
        return text.strip("\n")
    import shutil

    from pytest_llenergy.cli.console import wants_color
    from pytest_llenergy.report.terminal import render_summary

    width = shutil.get_terminal_size().columns
    color = args.output is None and wants_color()
    text = render_summary(
        report.records, width, color=color, layout=layout, verbose=args.verbose, with_failures=True
    )
    return text if report.run.complete else f"{text}\nincomplete: the run did not finish"
