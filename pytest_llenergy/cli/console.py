# SPDX-License-Identifier: Apache-2.0
"""What the commands share: help texts, formats and output."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_llenergy.record.text import escape_surrogates, one_line

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


class HelpFormatter(argparse.HelpFormatter):
    """Wraps descriptions at the width of the terminal, and keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


def add_format(parser: argparse.ArgumentParser, formats: Sequence[str], default: str | None = "text") -> None:
    """Add the option ``--format``, which every command with several formats has.

    Args:
        parser: The parser of the command.
        formats: Names of the formats.
        default: Format without the option; None makes it required.
    """
    # Without a name for the value, argparse would write all formats where lines cannot be broken.
    parser.add_argument(
        "--format",
        choices=formats,
        default=default,
        required=default is None,
        metavar="FORMAT",
        help=f"{', '.join(formats)}{f' (default: {default})' if default else ''}",
    )


def add_output(
    parser: argparse.ArgumentParser,
    formats: Sequence[str],
    default: str | None = "text",
    where: str = "standard output",
) -> None:
    """Add ``--format`` as ``add_format`` does, and ``--output``. Without it, the output goes ``where``."""
    add_format(parser, formats, default)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"write to this file (default: {where})"
    )


def wants_color() -> bool:
    """Whether to print colours: on a colour terminal or with ``FORCE_COLOR``, never with ``NO_COLOR``."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def print_line(text: str) -> None:
    """Print one line, whatever names it contains."""
    print(one_line(text))


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print_data(encode_json(value))


def encode_json(value: Any) -> str:
    """Return indented JSON in ASCII, so that a terminal shows no invisible characters."""
    import json

    import msgspec

    # Names of files may contain surrogates; msgspec turns NaN and infinity into null.
    primitives = escape_surrogates(msgspec.to_builtins(value))
    return json.dumps(msgspec.json.decode(msgspec.json.encode(primitives)), indent=2)


def write_output(path: Path, text: str) -> None:
    """Replace a file by text in UTF-8. Raises ``ReportError`` if it cannot be written."""
    from pytest_llenergy.record.files import replace_file

    replace_file(path, text.encode("utf-8", "backslashreplace"))


def print_message(command: str, text: object) -> None:
    """Print ``llenergy <command>: <text>`` on standard error, as one line whatever the text contains."""
    print(f"llenergy {command}: {one_line(str(text))}", file=sys.stderr)


def print_data(text: str, end: str = "\n") -> None:
    """Print machine output. If the encoding lacks a character, it is written as UTF-8, as to a file."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        sys.stdout.flush()
        sys.stdout.buffer.write(f"{text}{end}".encode(errors="backslashreplace"))
    else:
        print(text, end=end)


def use_encodable_streams() -> None:
    """Print characters that the encoding lacks as escapes, in place of a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
