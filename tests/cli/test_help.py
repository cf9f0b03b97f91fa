# SPDX-License-Identifier: Apache-2.0
"""Help that fits the terminal."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pytest_llenergy.cli import build_parser


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_of_every_command_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for parser in parsers(build_parser()):
        text = parser.format_help()
        assert [line for line in text.splitlines() if len(line) > width] == []
        assert len(text.splitlines()) < 150


def test_help_can_be_written_in_every_encoding() -> None:
    assert [parser.prog for parser in parsers(build_parser()) if not parser.format_help().isascii()] == []


def test_help_keeps_the_capitals_of_abbreviations() -> None:
    assert not [parser.prog for parser in parsers(build_parser()) if "gPU" in parser.format_help()]


def test_a_choice_of_formats_is_called_format_everywhere() -> None:
    options = {name for parser in parsers(build_parser()) for name in parser._option_string_actions}
    assert "--format" in options
    assert not options & {"--json", "--html", "--markdown", "--to", "--output-format"}


@pytest.mark.parametrize("words", [["--help"], ["compare", "--help"], ["--version"]])
def test_a_reader_that_has_gone_gets_no_traceback(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pytest_llenergy.cli", *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert ended.stderr == b""
