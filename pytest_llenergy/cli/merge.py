# SPDX-License-Identifier: Apache-2.0
"""``llenergy merge``: one report of several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands


def add_parser(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "merge",
        help="make one report of journals and reports",
        description="One report of shards, killed runs, hosts: of one commit and one kind of machine.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="reports (.json), journals and addresses")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.json", help="the report to write"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge. Returns 0."""
    from pytest_llenergy.report.merge import NamedReport, merge_reports
    from pytest_llenergy.report.store import (
        check_not_overwritten,
        location_name,
        parse_location,
        read_report,
        write_report,
    )

    places = [parse_location(text) for text in args.files]
    check_not_overwritten(args.output, places)
    report = merge_reports([NamedReport(location_name(place), read_report(place)) for place in places])
    write_report(report, args.output)
    state = "complete" if report.run.complete else "incomplete"
    print(f"{args.output}: {len(report.records)} records, {state}")
    return 0
