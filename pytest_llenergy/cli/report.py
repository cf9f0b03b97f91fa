# SPDX-License-Identifier: Apache-2.0
"""``llenergy report``: a report as a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.cli.parsers import Commands


def add(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("report", help="print the table of a report or journal")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it. Returns 0."""
    import shutil

    from pytest_llenergy.report.file import read_report
    from pytest_llenergy.report.terminal import render

    report = read_report(args.file)
    width = shutil.get_terminal_size().columns
    print(render(report.records, width, color=sys.stdout.isatty()))
    if not report.run.complete:
        print("incomplete: the run did not come to its end")
    return 0
