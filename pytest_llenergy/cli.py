# SPDX-License-Identifier: Apache-2.0
"""The command ``llenergy``: what can be done with reports, and what is here to measure with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest_llenergy
from pytest_llenergy.errors import LLEnergyError


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
