# SPDX-License-Identifier: Apache-2.0
"""``llenergy merge``: one report of several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.cli.parsers import Commands


def add(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("merge", help="make one report of journals and reports")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports (.json) and journals")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.json", help="the report to write"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merge. Returns 0."""
    from pytest_llenergy.report.file import merge, read_report, write_report

    report = merge([read_report(file) for file in args.files])
    write_report(report, args.output)
    state = "complete" if report.run.complete else "incomplete"
    print(f"{args.output}: {len(report.records)} records, {state}")
    return 0
