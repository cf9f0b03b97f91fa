# SPDX-License-Identifier: Apache-2.0
"""The command ``llenergy``: what can be done with reports, and what is here to measure with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pytest_llenergy
from pytest_llenergy.cli import ab, comment, compare, doctor, export, history, merge, report
from pytest_llenergy.errors import LLEnergyError

#: Each has ``add``, which gives it a parser, and ``run``.
COMMANDS = (ab, compare, comment, report, merge, export, history, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code, or 2 with one line on standard error."""
    from pytest_llenergy.compare.gate import USAGE

    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LLEnergyError as error:
        print(f"llenergy: {error}", file=sys.stderr)
        return USAGE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser(prog="llenergy", description="Energy reports of pytest --energy-report.")
    made.add_argument("--version", action="version", version=f"pytest-llenergy {pytest_llenergy.__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return made
