# SPDX-License-Identifier: Apache-2.0
"""``llenergy export``: write a report as CSV."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import add_output, print_data, write_output

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "export",
        help="write a report as CSV",
        description="Write a report as CSV, a line for each metric of each test.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="a report, a journal or a file of llenergy ab: a saved name or a file"
    )
    add_output(parser, ("csv",), default="csv")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert the report and write it. Returns 0."""
    from pytest_llenergy.record.report import PairedReport
    from pytest_llenergy.report.export import render_csv
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import check_not_overwritten, read_report_or_paired

    path = locate(args.file)
    if args.output is not None:
        check_not_overwritten(args.output, [path])
    found = read_report_or_paired(path)
    text = render_csv(
        {"base": found.base, "head": found.head} if isinstance(found, PairedReport) else {"": found}
    )
    if args.output is None:
        print_data(text, end="")
    else:
        write_output(args.output, text)
    return 0
