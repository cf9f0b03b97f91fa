# SPDX-License-Identifier: Apache-2.0
"""The command ``llenergy``: measure commands, compare and render reports, and check the machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import pytest_llenergy
from pytest_llenergy.cli import (
    ab,
    comment,
    compare,
    doctor,
    export,
    history,
    merge,
    report,
    run,
    watch,
)
from pytest_llenergy.cli.console import print_message, use_encodable_streams
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.record.text import one_line

#: Exit code of a command whose reader has gone: that of a process ended by SIGPIPE.
BROKEN_PIPE = 128 + 13

#: That of a process ended by SIGINT.
INTERRUPTED = 128 + 2

#: Modules with ``add_parser``, which sets the default ``run``.
COMMANDS = (
    run,
    watch,
    ab,
    compare,
    report,
    merge,
    export,
    history,
    comment,
    doctor,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2, with a line on standard error, for a usage error."""
    from pytest_llenergy.compare.gate import USAGE

    _replace_closed_streams()
    use_encodable_streams()
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit:
        # Help and version are printed already, unless their reader has gone.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _discard(sys.stdout)
        raise
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except LLEnergyError as error:
        print_message(args.subcommand, error)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has gone.
        _discard(sys.stdout)
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        elif isinstance(error, FileNotFoundError):
            text = "the current directory no longer exists; change to another"
        else:
            text = f"could not write the output ({error.strerror or error})"
            _discard(sys.stdout)
        try:
            print_message(args.subcommand, text)
        except OSError:
            _discard(sys.stderr)
        return USAGE


def _discard(stream: TextIO) -> None:
    # Python flushes the rest at exit, and would exit with 120 if that fails.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_closed_streams() -> None:
    # With >&- or 2>&-, Python has None in place of a stream.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


class _Parser(argparse.ArgumentParser):
    """Parser of the command line and, since subparsers have its class, of each command."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = _Parser(prog="llenergy", description="Measure commands, and use reports of pytest.")
    version = f"pytest-llenergy {pytest_llenergy.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
