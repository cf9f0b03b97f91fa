# SPDX-License-Identifier: Apache-2.0
"""The command after ``--``: pytest, with the options that it must not contain, or any other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import PlanError

#: Options that ``ab`` sets itself or that compare, with what to use instead.
RESERVED_OPTIONS = {
    "--energy-report": "ab writes the reports; -o FILE.json names the one of both sides",
    "--energy-rounds": "use --pairs and --rounds-per-session of ab",
    "--energy-save": "use -o FILE.json of ab",
    "--energy-compare": "ab compares the two sides",
    "--energy-fail-on": "use --fail-on or --metric of ab",
    "--energy-inconclusive": "use --inconclusive of ab",
}

#: Options that depend on earlier runs, or end a session before all of its tests have run.
SELECTING_OPTIONS = (
    *("--lf", "--last-failed", "--ff", "--failed-first", "--nf", "--new-first", "--sw", "--stepwise"),
    *("-x", "--exitfirst", "--maxfail"),
)

EXAMPLE = "such as: llenergy ab --base origin/main -- pytest benchmarks"


@dataclass(frozen=True)
class PytestCommand:
    """A command such as ``python -X dev -m pytest benchmarks -k x``.

    Attributes:
        program: ``python``, or a path of one; empty for ``pytest``.
        interpreter: Options of Python.
        args: Arguments of pytest.
    """

    program: str
    interpreter: tuple[str, ...]
    args: tuple[str, ...]


def parse_pytest(words: tuple[str, ...], where: str = "") -> PytestCommand | None:
    """Parse ``pytest …`` or ``python -m pytest …``; ``None`` if it is another command.

    Raises:
        PlanError: If it has an option that sessions cannot have. ``where`` names it in the message.
    """
    program = Path(words[0]).name
    if program in ("pytest", "py.test"):
        found = PytestCommand("", (), tuple(words[1:]))
    elif re.fullmatch(r"(python|pypy)[\d.]*", program) and _runs_pytest(words):
        place = words.index("-m")
        found = PytestCommand(words[0], tuple(words[1:place]), tuple(words[place + 2 :]))
    else:
        return None
    check_options(found.args, where)
    return found


def split(text: str, name: str) -> tuple[str, ...]:
    """Split a text like a shell; ``name`` names it in messages.

    Raises:
        PlanError: If a quote is open.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise PlanError(f"{name}={text}: {error}") from None


def check_options(args: Sequence[str], where: str) -> None:
    """Raise ``PlanError`` for the first option that a session of pytest cannot have."""
    for name, instead in RESERVED_OPTIONS.items():
        if _has_option(args, name):
            raise PlanError(f"{where}{name} is not allowed in the pytest command: {instead}")
    for name in SELECTING_OPTIONS:
        if _has_option(args, name):
            raise PlanError(
                f"{where}{name} is not allowed in the pytest command: every session must run the same tests"
            )


def _runs_pytest(words: tuple[str, ...]) -> bool:
    return "-m" in words and words[words.index("-m") + 1 :][:1] in (("pytest",), ("py.test",))


def _has_option(args: Sequence[str], name: str) -> bool:
    return any(each == name or each.startswith(f"{name}=") for each in args)
