# SPDX-License-Identifier: Apache-2.0
"""The pytest command after ``--``: what may be in it, and what ``llenergy ab`` says itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import PlanError

#: Options of pytest that each session is given by ``ab``, or that compare, with what to say instead.
RESERVED_OPTIONS = {
    "--energy-report": "ab writes the reports; -o FILE.json names the one of both sides",
    "--energy-rounds": "use --pairs and --rounds-per-session of ab",
    "--energy-save": "use -o FILE.json of ab",
    "--energy-compare": "ab compares the two sides",
    "--energy-fail-on": "use --fail-on or --metric of ab",
    "--energy-inconclusive": "use --inconclusive of ab",
}

#: Options by which the sessions would run different tests.
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

#: Options by which a session would end before its tests do.
STOPPING_OPTIONS = ("-x", "--exitfirst", "--maxfail")

GPUS_OPTION = "--energy-gpus"

EXAMPLE = "such as: llenergy ab --base origin/main -- pytest benchmarks"


@dataclass(frozen=True)
class Command:
    """``python -X dev -m pytest benchmarks -k x`` without its interpreter.

    ``interpreter`` are the options of Python, ``args`` those of pytest. ``gpus`` is whether the user has
    chosen GPUs.
    """

    interpreter: tuple[str, ...]
    args: tuple[str, ...]
    gpus: bool = False

    def __str__(self) -> str:
        return shlex.join(["pytest", *self.args])


def parse_command(words: Sequence[str]) -> Command:
    """Read ``pytest …`` or ``python -m pytest …``. Raises ``PlanError`` for what is none or cannot be."""
    if not words:
        raise PlanError(f"no command to run; write it after --, {EXAMPLE}")
    program = Path(words[0]).name
    interpreter: tuple[str, ...] = ()
    if program in ("pytest", "py.test"):
        args = tuple(words[1:])
    elif re.fullmatch(r"(python|pypy)[\d.]*", program) and _runs_pytest(words):
        place = words.index("-m")
        interpreter, args = tuple(words[1:place]), tuple(words[place + 2 :])
    else:
        raise PlanError(f"{shlex.join(words[:3])!r} is no pytest command; write it after --, {EXAMPLE}")
    check_options(args, "")
    return Command(interpreter, args, gpus=_has_option(args, GPUS_OPTION))


def parse_options(text: str, name: str) -> tuple[str, ...]:
    """The options of one side, as a shell would split them. Raises ``PlanError``."""
    try:
        options = tuple(shlex.split(text))
    except ValueError as error:
        raise PlanError(f"--{name}={text}: {error}") from None
    check_options(options, f"--{name}: ")
    return options


def check_environment(environment: Mapping[str, str]) -> None:
    """The same of ``PYTEST_ADDOPTS``, which sessions inherit. Raises ``PlanError``."""
    try:
        check_options(shlex.split(environment.get("PYTEST_ADDOPTS", "")), "PYTEST_ADDOPTS: ")
    except ValueError as error:
        raise PlanError(f"PYTEST_ADDOPTS: {error}") from None


def check_options(args: Sequence[str], where: str) -> None:
    """Raises ``PlanError`` for the first option that a session cannot have."""
    for name, instead in RESERVED_OPTIONS.items():
        if _has_option(args, name):
            raise PlanError(f"{where}{name} cannot be in the pytest command: {instead}")
    for name in (*SELECTING_OPTIONS, *STOPPING_OPTIONS):
        if _has_option(args, name):
            raise PlanError(
                f"{where}{name} cannot be in the pytest command: every session runs the same tests"
            )


def _runs_pytest(words: Sequence[str]) -> bool:
    return "-m" in words and words[words.index("-m") + 1 :][:1] in (["pytest"], ["py.test"])


def _has_option(args: Sequence[str], name: str) -> bool:
    return any(each == name or each.startswith(f"{name}=") for each in args)
