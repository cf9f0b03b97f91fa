# SPDX-License-Identifier: Apache-2.0
"""``llenergy history``: track tests over sessions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import add_output
from pytest_llenergy.record.defaults import HISTORY

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "history",
        help="track tests over sessions, and show where they changed",
        description="Keep the results of runs, and find the commit at which a test changed.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    adding = actions.add_parser("add", help="add runs; those already added are skipped")
    adding.add_argument("reports", nargs="+", metavar="REPORT", help="reports: saved names or files")
    adding.add_argument(
        "--allow-dirty", action="store_true", help="accept uncommitted changes and unknown commits"
    )
    adding.set_defaults(run=_add)
    showing = actions.add_parser("show", help="compare the last session of each test with earlier ones")
    showing.add_argument("test", nargs="?", metavar="ID", help="one test: its id, or the part after ::")
    showing.add_argument(
        "--metric",
        metavar="METRIC",
        help="the metric (default: energy per token, or energy of tests without tokens)",
    )
    showing.add_argument("--device", metavar="KEY", help="one kind of device")
    add_output(showing, ("text", "html", "json"))
    showing.set_defaults(run=_show)
    for action in (adding, showing):
        action.add_argument(
            "--at",
            type=Path,
            default=Path(HISTORY),
            metavar="DIR",
            help=f"the directory of the history (default: {HISTORY})",
        )


def _add(args: argparse.Namespace) -> int:
    from pytest_llenergy.cli.console import print_line, print_message
    from pytest_llenergy.compare.gate import USAGE
    from pytest_llenergy.compare.history import add_run
    from pytest_llenergy.errors import ReportError
    from pytest_llenergy.record.text import count_tests
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import read_report

    refused = 0
    for text in args.reports:
        try:
            path = locate(text)
            added = add_run(read_report(path), str(path), args.at, allow_dirty=args.allow_dirty)
        except ReportError as error:
            print_message("history", error)
            refused += 1
            continue
        print_line(f"{path}: {'already' if added is None else f'{count_tests(added)} added'} in {args.at}")
    return USAGE if refused else 0


def _show(args: argparse.Namespace) -> int:
    import shutil

    from pytest_llenergy.cli.console import (
        encode_json,
        print_data,
        wants_color,
        write_output,
    )
    from pytest_llenergy.compare.gate import check_metric
    from pytest_llenergy.compare.history import build_view, select_series

    metric = check_metric(args.metric) if args.metric is not None else None
    series = select_series(args.at, test=args.test, metric=metric, device_key=args.device)
    shown = str(args.at), series
    if args.format == "html":
        from pytest_llenergy.report.html.history import render_page

        text = f"{render_page(*shown)}\n"
    elif args.format == "json":
        text = f"{encode_json(build_view(*shown))}\n"
    else:
        from pytest_llenergy.report.history import render_text

        color = args.output is None and wants_color()
        text = render_text(build_view(*shown), shutil.get_terminal_size().columns, color=color)
    if args.output is not None:
        write_output(args.output, text)
    elif args.format == "text":
        print(text, end="")
    else:
        print_data(text, end="")
    return 0
