# SPDX-License-Identifier: Apache-2.0
"""The command line of ``llenergy ab``, and the commands of both sides: pytest, or any other."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_llenergy.ab.measured_command import MeasuredCommand, parse_measured
from pytest_llenergy.compare.stages import DEFAULT_STAGES
from pytest_llenergy.errors import PlanError

#: Value of ``--head`` for the working tree with its uncommitted changes.
WORKING_TREE = "."

#: Options of pytest that ``ab`` sets itself, or that compare.
RESERVED_OPTIONS = tuple(
    f"--energy-{name}" for name in ("report", "rounds", "save", "compare", "fail-on", "inconclusive")
)


@dataclass(frozen=True)
class Request:
    """The command line; ``command`` is what follows ``--``.

    ``ab`` are the texts of ``--a`` and ``--b``; ``values``, ``per``, ``better`` and ``meters`` are for
    commands other than pytest. With ``comparisons``, the head is compared with itself so many times.
    """

    command: Sequence[str]
    base: str | None = None
    head: str | None = None
    setup: str | None = None
    ab: tuple[str | None, str | None] = (None, None)
    values: Sequence[str] = ()
    per: Sequence[str] = ()
    better: Sequence[str] = ()
    meters: Sequence[str] = ()
    pairs: str = str(DEFAULT_STAGES)
    rounds: int = 1
    metrics: Sequence[str] = ()
    fail_on: Sequence[str] = ()
    floor: float | None = None
    across: bool = False
    fresh: bool = False
    comparisons: int | None = None

    @property
    def by_options(self) -> bool:
        """Whether the sides have the same code, and commands or options of their own."""
        return self.ab != (None, None) or (self.comparisons is not None and self.head is None)

    def with_both_sides(self) -> Request:
        """Return the request with the sides of ``--aa``, which are both the head or the working tree."""
        request = self
        if self.comparisons is not None:
            if self.comparisons < 1:
                raise PlanError(f"--aa={self.comparisons} must be 1 or more")
            if self.base is not None or self.ab != (None, None):
                raise PlanError(
                    "--aa compares the head with itself; it allows neither --base nor --a and --b"
                )
            head = self.head or "HEAD"
            request = (
                replace(self, head=None) if head == WORKING_TREE else replace(self, base=head, head=head)
            )
        if request.by_options and (request.base, request.head, request.setup) != (None, None, None):
            raise PlanError(
                "--base, --head and --setup compare commits, --a and --b commands or option sets, and --aa "
                "--head . this environment; use only one kind"
            )
        return request


@dataclass(frozen=True)
class Command:
    """What a session of one side runs: ``args`` of pytest, or with ``measured`` the words of any command.

    ``python`` is the interpreter of pytest with its options.
    """

    args: tuple[str, ...]
    python: tuple[str, ...] = ()
    measured: MeasuredCommand | None = None

    def describe(self) -> str:
        """Return the words, for progress lines."""
        return f"{'pytest ' if self.python else ''}{shlex.join(self.args)}"


def parse_commands(request: Request) -> tuple[Command, Command]:
    """Return the commands of both sides."""
    words, (a, b) = tuple(request.command), request.ab
    sides = (*words, *_split(a or "", "--a")), (*words, *_split(b or "", "--b"))
    if not all(sides):
        raise PlanError(
            "no command; write it after --, such as: llenergy ab --base origin/main -- pytest benchmarks"
        )
    base, head = parse_pytest(sides[0], "--a: " if a else ""), parse_pytest(sides[1], "--b: " if b else "")
    if base is not None and head is not None:
        if any((request.values, request.per, request.better, request.meters)):
            raise PlanError(
                "--value, --per, --better, --meter, --gpus and --require are for commands other than pytest"
            )
        _check_options(_split(os.environ.get("PYTEST_ADDOPTS", ""), "PYTEST_ADDOPTS"), "PYTEST_ADDOPTS: ")
        return base, head
    if request.rounds > 1:
        raise PlanError("--rounds-per-session needs pytest; a session of another command is one round")
    name = Path(words[0]).name if words else "command"
    measured = parse_measured(name, request.values, request.per, request.better, request.meters)
    if not words:
        sides = ("sh", "-c", str(a)), ("sh", "-c", str(b))
    return Command(sides[0], measured=measured), Command(sides[1], measured=measured)


def parse_pytest(words: tuple[str, ...], where: str = "") -> Command | None:
    """Parse ``pytest …`` or ``python -m pytest …``; ``None`` if it is another command."""
    program, place = Path(words[0]).name, words.index("-m") if "-m" in words else len(words)
    if program in ("pytest", "py.test"):
        found = Command(words[1:], (sys.executable,))
    elif re.fullmatch(r"(python|pypy)[\d.]*", program) and words[place + 1 : place + 2] == ("pytest",):
        python = words[0] if "/" in words[0] else sys.executable
        found = Command(words[place + 2 :], (python, *words[1:place]))
    else:
        return None
    _check_options(found.args, where)
    return found


def _check_options(args: Sequence[str], where: str) -> None:
    for name in (each.partition("=")[0] for each in args):
        if name in RESERVED_OPTIONS:
            instead = "-o, --pairs, --rounds-per-session, --fail-on and --inconclusive"
            raise PlanError(
                f"{where}{name} is not allowed in the pytest command; use {instead} of llenergy ab"
            )


def _split(text: str, name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise PlanError(f"{name}={text}: {error}") from None
