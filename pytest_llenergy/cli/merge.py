# SPDX-License-Identifier: Apache-2.0
"""``llenergy merge``: merge several reports into one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.cli.console import print_line
from pytest_llenergy.errors import PlanError

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "merge",
        help="merge reports and journals into one report",
        description="Merge reports of shards, interrupted runs or several hosts, all of one commit and one "
        "kind of machine.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="reports or journals: saved names or files")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.json", help="the report to write"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge the reports and write the result. Returns 0."""
    from pytest_llenergy.report.merge import NamedReport, merge_reports
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import check_not_overwritten, read_report, write_report

    if args.output.suffix != ".json" and not args.output.is_dir():
        raise PlanError(
            f"--output={args.output}: the report's name must end in .json; did you mean {args.output}.json?"
        )
    paths = [locate(text) for text in args.files]
    check_not_overwritten(args.output, paths)
    report = merge_reports([NamedReport(str(path), read_report(path)) for path in paths])
    write_report(report, args.output)
    state = "complete" if report.run.complete else "incomplete"
    print_line(f"{args.output}: {len(report.records)} records, {state}")
    return 0
