# SPDX-License-Identifier: Apache-2.0
"""``llenergy ab``: measure two commits, or two commands, alternately and compare them."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_llenergy.cli.compare import FORMATS, add_comparison_options
from pytest_llenergy.cli.console import HelpFormatter, add_format, print_line
from pytest_llenergy.cli.run import METER_OPTIONS, check_output
from pytest_llenergy.errors import PlanError
from pytest_llenergy.options.table import option_row
from pytest_llenergy.record.text import escape_invisible

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands

DEFAULT_OUTPUT = Path(".llenergy", "ab", "ab.json")

#: Exit codes of a shell for SIGINT and SIGTERM.
INTERRUPTED, TERMINATED = 130, 143

EXAMPLES = """\
  llenergy ab --base origin/main... \\
      --setup 'pip install -e .[bench]' -- pytest benchmarks
  llenergy ab --a=--energy-backend=transformers \\
      --b=--energy-backend=openvino -- pytest benchmarks
  llenergy ab --base main \\
      --value tokens=out.json:total_output_tokens \\
      --per tokens -- ./serve-and-bench.sh
"""


def add_parser(commands: Commands) -> None:
    """Register the command."""
    from pytest_llenergy.compare.stages import DEFAULT_STAGES

    parser = commands.add_parser(
        "ab",
        help="measure two commits, or two commands, alternately and compare them",
        description="Measure both sides alternately (base, head, head, base), each time in a new process, "
        "and compare every test of pytest, or the energy of any other command. Exit codes are those of "
        "llenergy compare.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=HelpFormatter,
    )
    sides = parser.add_argument_group("two commits")
    sides.add_argument(
        "--base",
        metavar="REF",
        help="the baseline commit; A...B is a merge base (default: merge base of head and default branch)",
    )
    sides.add_argument(
        "--head", metavar="REF", help="the commit to check (default: HEAD); . is the working tree"
    )
    sides.add_argument(
        "--setup",
        metavar="CMD",
        help="give each side a fresh virtual environment, and run this command in its checkout to install it",
    )
    sides.add_argument(
        "--across", action="store_true", help="compare workloads that differ, and list the differences"
    )
    sets = parser.add_argument_group("two commands, or two sets of options")
    for letter in "ab":
        sets.add_argument(
            f"--{letter}",
            metavar="CMD",
            help=f"command of side {letter} for the shell, quoted as one argument; with a command after --, "
            "options to append to it",
        )
    other = parser.add_argument_group("any command but pytest")
    other.add_argument(
        "--value",
        action="append",
        default=[],
        metavar="NAME=FILE:PATH",
        help="read a number from a JSON file that the command writes, such as tokens=out.json:total.output; "
        "work_s tells the seconds of the work without start-up (repeatable)",
    )
    other.add_argument(
        "--per",
        action="append",
        default=[],
        metavar="NAME",
        help="judge the energy divided by this value (repeatable)",
    )
    other.add_argument(
        "--better",
        action="append",
        default=[],
        metavar="NAME=WORD",
        help="judge this value itself: higher or lower is better (repeatable)",
    )
    for name in METER_OPTIONS:
        option_row(name).add_argument(other)
    parser.add_argument(
        "--aa",
        type=int,
        metavar="N",
        help="compare the head N times with itself: how often this machine raises false alarms, the smallest "
        "change that it finds, and its floor for --floor",
    )
    parser.add_argument(
        "--pairs",
        default=str(DEFAULT_STAGES),
        metavar="N+N",
        help=f"pairs of rounds in each stage (default: {DEFAULT_STAGES})",
    )
    parser.add_argument(
        "--rounds-per-session",
        type=int,
        default=1,
        metavar="K",
        help="rounds of each test per session (default: 1); more are faster but less independent",
    )
    add_comparison_options(parser)
    add_format(parser, FORMATS)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.json",
        help=f"file for the reports of both sides (default: {DEFAULT_OUTPUT})",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="discard the measurements of unfinished comparisons"
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="measure nothing; remove all that stopped comparisons of this project have left: checkouts, "
        "environments, logs and measurements",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the output of the sessions")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the command to run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and compare both sides. Returns the exit code of ``compare.gate.exit_code``."""
    # CI systems send SIGTERM to stop a job; the sessions must then end too.
    before = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        return _run(args)
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, _Terminated)
        how = "terminated" if terminated else "interrupted"
        _print_line(f"llenergy ab: {how}; run the same command again to continue")
        return TERMINATED if terminated else INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    from pytest_llenergy.ab.campaign import Callbacks, Campaign
    from pytest_llenergy.ab.commands import Request
    from pytest_llenergy.ab.self_comparison import compare_with_itself
    from pytest_llenergy.ab.sides import prepare
    from pytest_llenergy.cli.compare import ComparisonResult, print_comparison
    from pytest_llenergy.compare.gate import PASSED
    from pytest_llenergy.errors import ReportError
    from pytest_llenergy.record.files import replace_file
    from pytest_llenergy.record.report import encode_paired_report

    if args.clean:
        return _clean(args.command)
    if args.output is not None:
        check_output(args.output)
    inconclusive = option_row("inconclusive").read_argument(args.inconclusive)
    request = Request(
        command=args.command[1:] if args.command[:1] == ["--"] else args.command,
        base=args.base,
        head=args.head,
        setup=args.setup,
        ab=(args.a, args.b),
        values=args.value,
        per=args.per,
        better=args.better,
        meters=[f"--{name}={getattr(args, name)}" for name in METER_OPTIONS if getattr(args, name)],
        pairs=args.pairs,
        rounds=args.rounds_per_session,
        metrics=args.metric,
        fail_on=args.fail_on,
        floor=None if args.floor is None else option_row("floor").read_argument(args.floor),
        across=args.across,
        fresh=args.fresh,
        comparisons=args.aa,
    )
    if args.aa is not None and (args.format != "text" or args.output is not None):
        raise PlanError("--aa prints lines; it allows neither --format nor --output")
    prepared = prepare(request, Path.cwd(), _print_line)
    callbacks = Callbacks(_print_line, _print_output if args.verbose else None)
    if args.aa is not None:
        for line in compare_with_itself(prepared, args.aa, callbacks):
            print_line(line)
        prepared.state.finish(prepared.repository)
        return PASSED
    paired = Campaign(prepared, prepared.state, callbacks).run().with_policy(inconclusive)
    output = args.output or prepared.root / DEFAULT_OUTPUT
    try:
        replace_file(output, encode_paired_report(paired))
    except ReportError as error:
        raise ReportError(
            f"{error}; the same command, with another -o, writes the measurements without measuring again"
        ) from None
    prepared.state.finish(prepared.repository)
    _print_line(f"both sides, all rounds: {output}")
    return print_comparison(ComparisonResult.from_paired(paired), args.format, "ab")


def _clean(command: Sequence[str]) -> int:
    from pytest_llenergy.ab.repository import find_repository
    from pytest_llenergy.ab.state import clean

    if command:
        raise PlanError("--clean only removes what comparisons have left; give it no command")
    repository = find_repository(Path.cwd())
    for line in clean(Path.cwd() if repository is None else repository.root, repository):
        print_line(line)
    return 0


class _Terminated(KeyboardInterrupt):
    """Interrupted by SIGTERM."""


def _as_interrupt(_: int, __: FrameType | None) -> None:
    raise _Terminated


def _print_line(line: str) -> None:
    print(escape_invisible(line), file=sys.stderr, flush=True)


def _print_output(text: str) -> None:
    if text:
        print(text, end="", file=sys.stderr, flush=True)
