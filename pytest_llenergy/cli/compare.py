# SPDX-License-Identifier: Apache-2.0
"""``llenergy compare``: compare the tests of two reports."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_llenergy.cli.console import add_output, print_message
from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.table import option_row
from pytest_llenergy.record.defaults import HISTORY as DEFAULT_HISTORY

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.record.comparison import ComparedReports
    from pytest_llenergy.record.defaults import Inconclusive
    from pytest_llenergy.record.report import PairedReport, Report


Format = Literal["text", "markdown", "json", "html"]

FORMATS: tuple[Format, ...] = ("text", "markdown", "json", "html")


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands that compare."""
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="METRIC",
        help="compare this metric (default: energy_per_output_token_j, energy_per_input_token_j of tests "
        "that only read their prompts, or energy_j of tests without tokens; repeatable)",
    )
    for name in ("fail_on", "floor", "inconclusive"):
        option_row(name).add_argument(parser)


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison and its reports. ``pairs`` are the stages if the sides were measured alternately."""

    compared: ComparedReports
    reports: tuple[Report, Report]
    pairs: str | None = None

    @classmethod
    def from_paired(cls, paired: PairedReport) -> ComparisonResult:
        """Return the comparison in a file of ``llenergy ab``."""
        return cls(paired.compared, (paired.base, paired.head), paired.pairs)


def render_comparison(result: ComparisonResult, form: Format, width: int = 80, *, color: bool = False) -> str:
    """Render a comparison without the last line break. ``width`` and ``color`` apply to ``text``.

    Raises:
        ReportError: If a library of the format is not installed.
    """
    return _render(result, form, width, color=color).removesuffix("\n")


def _render(result: ComparisonResult, form: Format, width: int, *, color: bool) -> str:
    compared = result.compared
    if form == "html":
        from pytest_llenergy.report.html.page import render_compared

        return render_compared(*result.reports, compared, pairs=result.pairs)
    if form == "json":
        from pytest_llenergy.cli.console import encode_json

        return encode_json(compared)
    if form == "markdown":
        from pytest_llenergy.report.forges import find_run
        from pytest_llenergy.report.pr_comment import CommentContext, render_comment

        run = find_run(os.environ)
        context = CommentContext(result.pairs, run.url, run.artifacts_url)
        return render_comment(compared, context)
    from pytest_llenergy.record.text import one_line
    from pytest_llenergy.report.verdicts import render_verdicts

    table = render_verdicts(compared.comparisons, width, color=color)
    return "\n".join([table, *map(one_line, [*compared.devices, *compared.notes])])


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "compare",
        help="compare the tests of two reports",
        description="Compare two reports. Exit codes: 0 no regression, 1 regression, 2 usage error or "
        "unreadable report, 3 not comparable, 4 inconclusive (with --inconclusive=fail), 5 no valid "
        "measurement.",
    )
    parser.add_argument(
        "base",
        metavar="BASE",
        help="the baseline: a report or journal, as a name given to --energy-save, or a file; the JSON of "
        "pytest-benchmark, or a folder with one of each session; or a file of llenergy ab",
    )
    parser.add_argument("head", nargs="?", metavar="HEAD", help="the report to check, likewise")
    add_comparison_options(parser)
    parser.add_argument(
        "--history",
        metavar="AT",
        help="directory of the history that shows how much sessions differ (default: "
        f"{DEFAULT_HISTORY} if it exists)",
    )
    parser.add_argument(
        "--across",
        action="store_true",
        help="compare workloads that differ, such as two dtypes, and list the differences",
    )
    parser.add_argument(
        "--between",
        metavar="PARAMETER",
        help="compare the values of a parameter within one report, such as dtype; dtype=float32 compares "
        "with this value instead of the first one",
    )
    add_output(parser, FORMATS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare two reports and print the result. Returns the exit code of ``compare.gate.exit_code``."""
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import check_not_overwritten

    if args.output is not None:
        check_not_overwritten(
            args.output, [locate(text) for text in (args.base, args.head) if text is not None]
        )
    result = _compare(args)
    return print_comparison(result, args.format, "compare", args.output)


def print_comparison(
    result: ComparisonResult,
    form: Format,
    command: str,
    output: Path | None = None,
) -> int:
    """Print or write a comparison, with its outcome unless it passes, and return the exit code.

    Args:
        result: The comparison.
        form: The format.
        command: Name of the command, for messages.
        output: File to write; None prints to standard output.

    Raises:
        ReportError: If the output cannot be written.
    """
    import shutil

    from pytest_llenergy.cli.console import print_data, wants_color, write_output
    from pytest_llenergy.compare.gate import exit_code, list_void_gates
    from pytest_llenergy.report.outcome import describe_outcome

    width = shutil.get_terminal_size().columns
    text = render_comparison(result, form, width, color=output is None and wants_color())
    if output is None and form == "text":
        print(text)
    elif output is None:
        print_data(text)
    else:
        write_output(output, f"{text}\n")
    compared = result.compared
    state, reasons = describe_outcome(compared, paired=result.pairs is not None)
    if reasons and state != "no gate":
        print_message(command, ", ".join([state, *reasons]))
    for line in list_void_gates(compared.comparisons):
        print_message(command, line)
    return exit_code(compared)


def _compare(args: argparse.Namespace) -> ComparisonResult:
    import msgspec

    from pytest_llenergy.compare.comparison import compare_reports
    from pytest_llenergy.compare.gate import check_custom_metrics, note_unchecked_marks, parse_criteria
    from pytest_llenergy.compare.history import StoredEstimator
    from pytest_llenergy.compare.pairing import split_by_parameter
    from pytest_llenergy.compare.timings import SECONDS, TOOL, TimingsEstimator
    from pytest_llenergy.report.saved import locate
    from pytest_llenergy.report.store import read_paired_report, read_report

    base, lean = locate(args.base), args.format != "html"
    if args.between is not None:
        if args.head is not None:
            raise PlanError("--between compares tests of one report; name only one")
        reports = split_by_parameter(read_report(base, lean=lean), str(base), args.between)
        head = base
    elif args.head is None:
        named = args.metric or args.fail_on or args.across
        if named or args.floor is not None:
            raise PlanError(
                "a file of llenergy ab has verdicts already; --metric, --fail-on, --floor, --across need two"
            )
        paired = read_paired_report(base)
        return ComparisonResult.from_paired(paired.with_policy(_read_policy(args, paired.compared)))
    else:
        head = locate(args.head)
        reports = read_report(base, lean=lean), read_report(head, lean=lean)
        if reports[0].run.id == reports[1].run.id:
            raise PlanError(
                f"{base} and {head} are the same run, {reports[0].run.id}, so nothing can differ; "
                "name two runs"
            )
        if base.is_dir() and head.is_dir():
            known = {each.read_bytes() for each in base.glob("*.json")}
            if both := [str(each) for each in sorted(head.glob("*.json")) if each.read_bytes() in known]:
                raise PlanError(f"{both[0]} is a session of {base}, too; each must be of one side only")
    origins = str(base), str(head)
    floor = option_row("floor").read_argument(args.floor)
    timed = all(each.tool.name == TOOL for each in reports)
    if timed and base.is_dir() != head.is_dir():
        raise PlanError("one side is a folder of sessions and the other a single file; name two folders")
    metrics = [SECONDS] if timed and not (args.metric or args.fail_on) else args.metric
    criteria = parse_criteria(args.fail_on, metrics, floor)
    if args.between is not None and not args.fail_on:
        # Which value is better is a finding, not a fault.
        criteria = [replace(each, gated=False) for each in criteria]
    check_custom_metrics(criteria, [*reports[0].records, *reports[1].records])
    kind = TimingsEstimator if timed else StoredEstimator
    history = Path(args.history or DEFAULT_HISTORY)
    estimator = kind(history, assumes=args.floor is not None or not timed)
    within = args.between is not None
    compared = compare_reports(
        *reports,
        origins,
        criteria,
        across=args.across or within,
        judge_outputs=not within,
        estimator=estimator,
    )
    inconclusive = _read_policy(args, compared)
    notes = [*compared.notes, *note_unchecked_marks([*reports[0].records, *reports[1].records], criteria)]
    compared = msgspec.structs.replace(compared, notes=notes, inconclusive=inconclusive)
    return ComparisonResult(compared, reports)


def _read_policy(args: argparse.Namespace, compared: ComparedReports) -> Inconclusive:
    """Return how to treat tests that could not be judged; without the option it stays as it is."""
    if args.inconclusive is None:
        return compared.inconclusive
    policy: Inconclusive = option_row("inconclusive").read_argument(args.inconclusive)
    return policy
