# SPDX-License-Identifier: Apache-2.0
"""``llenergy import``: experiments of LLenergyMeasure as tests."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llenergy.cli.parsers import Commands


def add(commands: Commands) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "import",
        help="write tests that do what an experiment of LLenergyMeasure does",
        description="Read an experiment or a study, and write a file of tests, one case an experiment. What "
        "cannot be carried over is named on standard error and in the file.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="an experiment, or a study with a sweep")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="TEST.py", help="the file (default: standard output)"
    )
    parser.add_argument(
        "--fallback",
        choices=("cpu",),
        help="run on the CPU where there are too few GPUs, instead of skipping",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import. Returns 0. Raises ``ExperimentError`` for what is no experiment."""
    from pytest_llenergy.errors import ExperimentError
    from pytest_llenergy.model.text import one_line
    from pytest_llenergy.peers.conversion import converted
    from pytest_llenergy.report.file import replace_file

    if args.output is not None and args.output.exists():
        raise ExperimentError(f"{args.output} is there already; remove it, or name another file with -o")
    made = converted(args.file, args.fallback)
    name = args.output.name if args.output is not None else f"test_{args.file.stem}.py"
    text = made.text(name)
    for note in made.notes:
        print(f"llenergy import: not carried over: {one_line(note)}", file=sys.stderr)
    if args.output is None:
        sys.stdout.write(text)
    else:
        replace_file(args.output, text.encode())
    number = len(made.cases)
    print(f"llenergy import: {number} case{'s' if number > 1 else ''}", file=sys.stderr)
    return 0
