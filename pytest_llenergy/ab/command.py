# SPDX-License-Identifier: Apache-2.0
"""The pytest command after ``--``: parsing, and the options that it must not contain."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
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

#: Options that depend on earlier runs, so that sessions would run different tests.
SELECTING_OPTIONS = (
    "--lf",
    "--last-failed",
    "--ff",
    "--failed-first",
    "--nf",
    "--new-first",
    "--sw",
    "--stepwise",
)

#: Options that end a session before all of its tests have run.
STOPPING_OPTIONS = ("-x", "--exitfirst", "--maxfail")

GPUS_OPTION = "--energy-gpus"

EXAMPLE = "such as: llenergy ab --base origin/main -- pytest benchmarks"


@dataclass(frozen=True)
class Command:
    """A command such as ``python -X dev -m pytest benchmarks -k x``, without its interpreter.

    Attributes:
        interpreter: Options of Python.
        args: Arguments of pytest.
        gpus: Whether the user chose GPUs.
    """

    interpreter: tuple[str, ...]
    args: tuple[str, ...]
    gpus: bool = False

    def __str__(self) -> str:
        return shlex.join(["pytest", *self.args])


def parse_command(words: Sequence[str]) -> Command:
    """Parse ``pytest …`` or ``python -m pytest …``.

    Raises:
        PlanError: If it is another command, or has an option that sessions cannot have.
    """
    if not words:
        raise PlanError(f"no command; write it after --, {EXAMPLE}")
    program = Path(words[0]).name
    interpreter: tuple[str, ...] = ()
    if program in ("pytest", "py.test"):
        args = tuple(words[1:])
    elif re.fullmatch(r"(python|pypy)[\d.]*", program) and _runs_pytest(words):
        place = words.index("-m")
        interpreter, args = tuple(words[1:place]), tuple(words[place + 2 :])
    else:
        raise PlanError(f"{shlex.join(words[:3])!r} is not a pytest command; write one after --, {EXAMPLE}")
    check_options(args, "")
    return Command(interpreter, args, gpus=_has_option(args, GPUS_OPTION))


def parse_options(text: str, name: str) -> tuple[str, ...]:
    """Split the options of one side like a shell.

    Raises:
        PlanError: If an option is invalid.
    """
    try:
        options = tuple(shlex.split(text))
    except ValueError as error:
        raise PlanError(f"--{name}={text}: {error}") from None
    check_options(options, f"--{name}: ")
    return options


def check_environment(environment: Mapping[str, str]) -> None:
    """Check ``PYTEST_ADDOPTS``, which sessions inherit.

    Raises:
        PlanError: If an option is invalid.
    """
    try:
        check_options(shlex.split(environment.get("PYTEST_ADDOPTS", "")), "PYTEST_ADDOPTS: ")
    except ValueError as error:
        raise PlanError(f"PYTEST_ADDOPTS: {error}") from None


def check_options(args: Sequence[str], where: str) -> None:
    """Raise ``PlanError`` for the first option that a session cannot have."""
    for name, instead in RESERVED_OPTIONS.items():
        if _has_option(args, name):
            raise PlanError(f"{where}{name} is not allowed in the pytest command: {instead}")
    for name in (*SELECTING_OPTIONS, *STOPPING_OPTIONS):
        if _has_option(args, name):
            raise PlanError(
                f"{where}{name} is not allowed in the pytest command: every session must run the same tests"
            )


def _runs_pytest(words: Sequence[str]) -> bool:
    return "-m" in words and words[words.index("-m") + 1 :][:1] in (["pytest"], ["py.test"])


def _has_option(args: Sequence[str], name: str) -> bool:
    return any(each == name or each.startswith(f"{name}=") for each in args)
