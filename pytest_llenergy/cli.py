# SPDX-License-Identifier: Apache-2.0
"""The command ``llenergy``: what can be done with reports, and what is here to measure with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest_llenergy
from pytest_llenergy.errors import LLEnergyError

if TYPE_CHECKING:
    from pytest_llenergy.model.comparison import ComparedReports


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 with one line on standard error."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LLEnergyError as error:
        print(f"llenergy: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llenergy", description="Energy reports of pytest --energy-report.")
    parser.add_argument(
        "--version", action="version", version=f"pytest-llenergy {pytest_llenergy.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="make one report of journals and reports")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports (.json) and journals")
    merge.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.json", help="the report to write"
    )
    merge.set_defaults(run=_merge)
    show = commands.add_parser("report", help="print the table of a report or journal")
    show.add_argument("file", type=Path, metavar="FILE")
    show.set_defaults(run=_show)
    compare = commands.add_parser(
        "compare",
        help="say of each test whether it is worse than before",
        description="Compare two reports. Exit codes: 0 no test is worse, 1 one is, 2 usage or a file that "
        "is no report, 3 not comparable, 4 inconclusive (with --inconclusive=fail), 5 no valid measurement.",
    )
    compare.add_argument("base", type=Path, metavar="BASE", help="the report or journal of before")
    compare.add_argument("head", type=Path, metavar="HEAD", help="that of now")
    compare.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="METRIC",
        help="compare this metric (default: energy_per_output_token_j, or energy_j of tests without tokens; "
        "repeatable)",
    )
    compare.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="METRIC:EXPR",
        help="compare this metric with a threshold of its own, such as energy_j:3%% or energy_j:3%%+2J "
        "(repeatable)",
    )
    compare.add_argument(
        "--inconclusive",
        choices=("warn", "fail", "pass"),
        default="warn",
        help="what to do where neither can be told (default: warn)",
    )
    compare.add_argument(
        "--across",
        action="store_true",
        help="compare workloads that differ, such as two dtypes, and say in what",
    )
    compare.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    compare.set_defaults(run=_compare)
    doctor = commands.add_parser(
        "doctor", help="say what is here to run and to measure with, what is wrong and what to do"
    )
    doctor.add_argument(
        "--json", action="store_true", help="the same as data; misconfigured findings exit with 1"
    )
    doctor.add_argument(
        "--no-steps",
        action="store_true",
        help="leave out the steps that run on the devices, each in a fresh process: allocate, multiply, "
        "convolve, two ranks",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _merge(args: argparse.Namespace) -> int:
    from pytest_llenergy.report.file import merge, read_report, write_report

    report = merge([read_report(file) for file in args.files])
    write_report(report, args.output)
    state = "complete" if report.run.complete else "incomplete"
    print(f"{args.output}: {len(report.records)} records, {state}")
    return 0


def _show(args: argparse.Namespace) -> int:
    import shutil

    from pytest_llenergy.report.file import read_report
    from pytest_llenergy.report.terminal import render

    report = read_report(args.file)
    width = shutil.get_terminal_size().columns
    print(render(report.records, width, color=sys.stdout.isatty()))
    if not report.run.complete:
        print("incomplete: the run did not come to its end")
    return 0


def _compare(args: argparse.Namespace) -> int:
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
    from pytest_llenergy.compare.comparison import Asked, compare_reports
    from pytest_llenergy.compare.gate import known_metric, read_fail_on
    from pytest_llenergy.report.file import read_report

    thresholds = [read_fail_on(text) for text in args.fail_on]
    metrics = [known_metric(name) for name in args.metric]
    asked = {each.metric: Asked(each.metric, each.rule(), gated=True) for each in thresholds}
    asked.update({name: Asked(name, gated=True) for name in metrics if name not in asked})
    return compare_reports(
        read_report(args.base),
        read_report(args.head),
        (str(args.base), str(args.head)),
        list(asked.values()) or [Asked(gated=True)],
        across=args.across,
    )


def _doctor(args: argparse.Namespace) -> int:
    from pytest_llenergy.doctor.checkup import check
    from pytest_llenergy.doctor.text import lines

    def say(line: str) -> None:
        # Steps take seconds, and one that hangs minutes: what is known is not kept back.
        if not args.json:
            print(line, flush=True)

    checkup = check()
    for line in lines(checkup):
        say(line)
    if not args.no_steps:
        from pytest_llenergy.doctor.tour import toured

        checkup = toured(checkup, say)
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(checkup)).decode())
    return 1 if checkup.misconfigured else 0


if __name__ == "__main__":
    raise SystemExit(main())
