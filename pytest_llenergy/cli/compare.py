# SPDX-License-Identifier: Apache-2.0
"""``llenergy compare``: compare the tests of two reports."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_llenergy.errors import LLEnergyError, PlanError

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.compare.gate import Inconclusive
    from pytest_llenergy.model.comparison import ComparedReports
    from pytest_llenergy.model.report import PairedReport, Report


# What is asked of a comparison: metrics, thresholds, and what to do where neither can be told.


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that compares."""
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="METRIC",
        help="compare this metric (default: energy_per_output_token_j, or energy_j of tests without tokens; "
        "repeatable)",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="METRIC:EXPR",
        help="compare this metric with a threshold of its own, such as energy_j:3%% or energy_j:3%%+2J "
        "(repeatable)",
    )
    parser.add_argument(
        "--floor",
        metavar="PERCENT",
        help="what two runs of the same code differ by here; what may be less is no change (default: 1%%)",
    )
    parser.add_argument(
        "--inconclusive",
        choices=("warn", "fail", "pass"),
        default="warn",
        help="what to do where neither can be told (default: warn)",
    )


# Comparisons in every form that they can be shown in.

#: For a terminal, a pull request, a program, GitHub's log, GitLab's widget, and whatever reads JUnit.
Format = Literal["text", "markdown", "json", "github", "gitlab", "junit", "html"]

FORMATS: tuple[Format, ...] = ("text", "markdown", "json", "github", "gitlab", "junit", "html")


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison, and the two reports that it is of; ``pairs`` where they were measured in turn."""

    compared: ComparedReports
    reports: tuple[Report, Report]
    pairs: str | None = None

    @classmethod
    def of(cls, paired: PairedReport) -> ComparisonResult:
        """What ``llenergy ab`` wrote."""
        return cls(paired.compared, (paired.base, paired.head), paired.pairs)


def render_comparison(found: ComparisonResult, form: Format, width: int = 80, *, color: bool = False) -> str:
    """What to print, without its last line break. ``width`` and ``color`` are for ``text``.

    ``github`` also appends the Markdown to the file that ``GITHUB_STEP_SUMMARY`` names. Raises
    ``ReportError`` where that cannot be written.
    """
    return _rendered(found, form, width, color=color).removesuffix("\n")


def _rendered(found: ComparisonResult, form: Format, width: int, *, color: bool) -> str:
    compared = found.compared
    if form == "html":
        from pytest_llenergy.report.html.page import render_compared

        return render_compared(*found.reports, compared, pairs=found.pairs)
    if form == "json":
        import msgspec

        return msgspec.json.format(msgspec.json.encode(compared)).decode()
    if form == "markdown":
        from pytest_llenergy.report.pr_comment import render_comment

        return render_comment(compared)
    if form == "github":
        from pytest_llenergy.report.ci import append_comparison_summary, render_workflow_commands

        append_comparison_summary(compared)
        return render_workflow_commands(compared)
    if form == "gitlab":
        from pytest_llenergy.report.ci import render_gitlab_metrics

        return render_gitlab_metrics(compared)
    if form == "junit":
        from pytest_llenergy.report.ci import render_junit

        return render_junit(compared)
    from pytest_llenergy.model.text import one_line
    from pytest_llenergy.report.verdicts import render_verdicts

    table = render_verdicts(compared.comparisons, width, color=color)
    return "\n".join([table, *map(one_line, [*compared.devices, *compared.notes])])


# ``llenergy compare``: each test of two reports, before and after.


def add_parser(commands: Commands) -> None:
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
    add_comparison_options(parser)
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
    from pytest_llenergy.compare.gate import USAGE
    from pytest_llenergy.report.store import check_not_overwritten, parse_location

    try:
        if args.output is not None:
            check_not_overwritten(
                args.output, [parse_location(text) for text in (args.base, args.head) if text is not None]
            )
        found = _found(args)
        return print_comparison(found, args.format, args.inconclusive, "compare", args.output)
    except LLEnergyError as error:
        print(f"llenergy compare: {error}", file=sys.stderr)
        return USAGE


def print_comparison(
    found: ComparisonResult,
    form: Format,
    inconclusive: Inconclusive,
    command: str,
    output: Path | None = None,
) -> int:
    """Print it or write it, warn of what could not be told, and return the exit code.

    Raises ``ReportError`` for what cannot be shown or written.
    """
    import shutil

    from pytest_llenergy.cli.console import print_encodable, wants_color
    from pytest_llenergy.compare.gate import REGRESSED, exit_code, list_over_budget
    from pytest_llenergy.model.text import escape_invisible
    from pytest_llenergy.report.store import replace_file

    width = shutil.get_terminal_size().columns
    text = render_comparison(found, form, width, color=output is None and wants_color())
    if output is None and form == "text":
        print_encodable(text)
    elif output is None:
        print(text)
    else:
        replace_file(output, f"{text}\n".encode())
    comparisons = found.compared.comparisons
    warned = sum(each.verdict == "inconclusive" and each.gated for each in comparisons)
    if warned and inconclusive == "warn":
        print(f"llenergy {command}: warning: {warned} inconclusive, more rounds can tell", file=sys.stderr)
    # Of sides that were measured in turn; a run by itself has failed by its own budgets.
    broken = list_over_budget(*found.reports) if found.pairs is not None else []
    if broken:
        names = ", ".join(escape_invisible(record.id) for record in broken)
        print(f"llenergy {command}: over budget on the head alone: {names}", file=sys.stderr)
        return REGRESSED
    return exit_code(comparisons, inconclusive)


def _found(args: argparse.Namespace) -> ComparisonResult:
    from pytest_llenergy.compare.comparison import compare_reports
    from pytest_llenergy.compare.gate import parse_criteria
    from pytest_llenergy.report.store import location_name, parse_location, read_paired_report, read_report

    base = parse_location(args.base)
    if args.head is None:
        if args.metric or args.fail_on or args.across or args.floor is not None:
            raise PlanError(
                "one file of llenergy ab has its verdicts; --metric, --fail-on, --floor and --across need two"
            )
        return ComparisonResult.of(read_paired_report(base))
    head = parse_location(args.head)
    # A page shows what comparisons do not look at.
    lean = args.format != "html"
    reports = read_report(base, lean=lean), read_report(head, lean=lean)
    origins = location_name(base), location_name(head)
    asked = parse_criteria(args.fail_on, args.metric, args.floor)
    return ComparisonResult(compare_reports(*reports, origins, asked, across=args.across), reports)
