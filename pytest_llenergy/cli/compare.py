# SPDX-License-Identifier: Apache-2.0
"""``llenergy compare``: each test of two reports, before and after."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.cli.asking import add_questions
from pytest_llenergy.errors import LLEnergyError, PlanError
from pytest_llenergy.report.formats import FORMATS

if TYPE_CHECKING:
    from pytest_llenergy.cli.parsers import Commands
    from pytest_llenergy.compare.gate import Inconclusive
    from pytest_llenergy.report.formats import Format, Found


def add(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "compare",
        help="say of each test whether it is worse than before",
        description="Compare two reports. Exit codes: 0 no test is worse, 1 one is, 2 usage or a file that "
        "is no report, 3 not comparable, 4 inconclusive (with --inconclusive=fail), 5 no valid measurement.",
    )
    parser.add_argument(
        "base",
        metavar="BASE",
        help="the report or journal of before, a file or an address; or one of llenergy ab",
    )
    parser.add_argument("head", nargs="?", metavar="HEAD", help="that of now")
    add_questions(parser)
    parser.add_argument(
        "--across",
        action="store_true",
        help="compare workloads that differ, such as two dtypes, and say in what",
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="(default: text)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write to this file instead of the standard output"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print. Returns the exit code of ``compare.outcome``."""
    from pytest_llenergy.compare.outcome import USAGE
    from pytest_llenergy.report.file import check_apart, place_of

    try:
        if args.output is not None:
            check_apart(args.output, [place_of(text) for text in (args.base, args.head) if text is not None])
        found = _found(args)
        return told(found, args.format, args.inconclusive, "compare", args.output)
    except LLEnergyError as error:
        print(f"llenergy compare: {error}", file=sys.stderr)
        return USAGE


def told(
    found: Found, form: Format, inconclusive: Inconclusive, command: str, output: Path | None = None
) -> int:
    """Print it or write it, warn of what could not be told, and return the exit code.

    Raises ``ReportError`` for what cannot be shown or written.
    """
    import shutil

    from pytest_llenergy.cli.color import wants_color
    from pytest_llenergy.cli.printing import show
    from pytest_llenergy.compare.outcome import REGRESSED, exit_code, over_budget
    from pytest_llenergy.model.text import visible
    from pytest_llenergy.report.file import replace_file
    from pytest_llenergy.report.formats import render

    width = shutil.get_terminal_size().columns
    text = render(found, form, width, color=output is None and wants_color())
    if output is None and form == "text":
        show(text)
    elif output is None:
        print(text)
    else:
        replace_file(output, f"{text}\n".encode())
    comparisons = found.compared.comparisons
    warned = sum(each.verdict == "inconclusive" and each.gated for each in comparisons)
    if warned and inconclusive == "warn":
        print(f"llenergy {command}: warning: {warned} inconclusive, more rounds can tell", file=sys.stderr)
    # Of sides that were measured in turn; a run by itself has failed by its own budgets.
    broken = over_budget(*found.reports) if found.pairs is not None else []
    if broken:
        names = ", ".join(visible(record.id) for record in broken)
        print(f"llenergy {command}: over budget on the head alone: {names}", file=sys.stderr)
        return REGRESSED
    return exit_code(comparisons, inconclusive)


def _found(args: argparse.Namespace) -> Found:
    from pytest_llenergy.compare.comparison import compare_reports
    from pytest_llenergy.compare.gate import asked_for
    from pytest_llenergy.report.file import origin, place_of, read_report, read_sides
    from pytest_llenergy.report.formats import Found

    base = place_of(args.base)
    if args.head is None:
        if args.metric or args.fail_on or args.across or args.floor is not None:
            raise PlanError(
                "one file of llenergy ab has its verdicts; --metric, --fail-on, --floor and --across need two"
            )
        return Found.of(read_sides(base))
    head = place_of(args.head)
    # A page shows what comparisons do not look at.
    lean = args.format != "html"
    reports = read_report(base, lean=lean), read_report(head, lean=lean)
    origins = origin(base), origin(head)
    asked = asked_for(args.fail_on, args.metric, args.floor)
    return Found(compare_reports(*reports, origins, asked, across=args.across), reports)
