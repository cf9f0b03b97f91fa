# SPDX-License-Identifier: Apache-2.0
"""``llenergy compare``: each test of two reports, before and after."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.cli.asking import add_questions, asked
from pytest_llenergy.errors import LLEnergyError

if TYPE_CHECKING:
    from pytest_llenergy.cli.parsers import Commands
    from pytest_llenergy.model.comparison import ComparedReports


def add(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "compare",
        help="say of each test whether it is worse than before",
        description="Compare two reports. Exit codes: 0 no test is worse, 1 one is, 2 usage or a file that "
        "is no report, 3 not comparable, 4 inconclusive (with --inconclusive=fail), 5 no valid measurement.",
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the report or journal of before")
    parser.add_argument("head", type=Path, metavar="HEAD", help="that of now")
    add_questions(parser)
    parser.add_argument(
        "--across",
        action="store_true",
        help="compare workloads that differ, such as two dtypes, and say in what",
    )
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print. Returns the exit code of ``compare.outcome``."""
    from pytest_llenergy.compare.outcome import USAGE, exit_code

    try:
        compared = _compared(args)
    except LLEnergyError as error:
        print(f"llenergy compare: {error}", file=sys.stderr)
        return USAGE
    if args.format == "json":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(compared)).decode())
    elif args.format == "markdown":
        from pytest_llenergy.report.comment import render_comment

        print(render_comment(compared), end="")
    else:
        import shutil

        from pytest_llenergy.report.verdicts import render_verdicts

        width = shutil.get_terminal_size().columns
        print(render_verdicts(compared.comparisons, width, color=sys.stdout.isatty()))
        for line in [*compared.devices, *compared.notes]:
            print(line)
    warned = sum(each.verdict == "inconclusive" and each.gated for each in compared.comparisons)
    if warned and args.inconclusive == "warn":
        print(f"llenergy compare: warning: {warned} inconclusive, more rounds can tell", file=sys.stderr)
    return exit_code(compared.comparisons, args.inconclusive)


def _compared(args: argparse.Namespace) -> ComparedReports:
    from pytest_llenergy.compare.comparison import compare_reports
    from pytest_llenergy.report.file import read_report

    return compare_reports(
        read_report(args.base),
        read_report(args.head),
        (str(args.base), str(args.head)),
        asked(args),
        across=args.across,
    )
