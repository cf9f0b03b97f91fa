# SPDX-License-Identifier: Apache-2.0
"""Turn the command line of ``llenergy ab`` into two sides that are ready to run.

Everything that can be checked is checked here, before anything is measured; only what each side imports is
checked after its first session. If the project is installed from the user's checkout, or from anywhere else,
both sides import the same code no matter what was checked out for them, and nothing can differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest_llenergy
from pytest_llenergy.ab.commands import WORKING_TREE, Command, Request, parse_commands
from pytest_llenergy.ab.repository import (
    WITHOUT_QUESTIONS,
    Repository,
    find_repository,
    inherited_environment,
)
from pytest_llenergy.ab.session import Side, Turn, run_step, show_failure
from pytest_llenergy.ab.state import SIDES, State
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.gate import parse_criteria
from pytest_llenergy.compare.stages import Stages, parse_pairs
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import SideName, Source

#: Where a checkout may have the modules that it installs, besides its projects in subfolders.
SOURCE_ROOTS = (".", "src", "python", "lib")

#: Suffixes of the files whose change begins another comparison. Other files may be output of the command.
SCRIPTS = (".py", ".sh")

#: End of the message.
SAME_CODE = (
    "so both sides would measure the same code; create an environment for each: --setup 'pip install -e .'"
)

#: Names of the directories of installed packages.
INSTALL_DIRECTORIES = {"site-packages", "dist-packages"}

#: Arguments of Python that create a virtual environment.
VENV_COMMAND = ("-m", "venv")


@dataclass(frozen=True)
class Schedule:
    """Pairs of sessions for each stage, with ``rounds`` of each test in a session."""

    pairs: tuple[int, ...]
    rounds: int

    @property
    def stages(self) -> Stages:
        """Pairs of rounds of each stage, as they are measured."""
        return Stages(tuple(count * self.rounds for count in self.pairs))

    def turns(self, stage: int) -> Iterator[tuple[Turn, Turn]]:
        """Yield the pairs of a stage (from 1): base head, head base, … Drift affects both sides alike."""
        first = sum(self.pairs[: stage - 1])
        for pair in range(first, first + self.pairs[stage - 1]):
            sides: tuple[SideName, SideName] = ("base", "head") if pair % 2 == 0 else ("head", "base")
            yield Turn(2 * pair + 1, sides[0]), Turn(2 * pair + 2, sides[1])


def plan_schedule(stages: Stages, rounds: int) -> Schedule:
    """Return the sessions for each stage; a stage that ``rounds`` do not divide is rounded up."""
    return Schedule(tuple(math.ceil(count / rounds) for count in stages.pairs), rounds)


def format_duration(seconds: float) -> str:
    """Format a duration roughly: ``45 s`` or ``12 minutes``."""
    return f"{max(1.0, seconds):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


@dataclass(frozen=True)
class Prepared:
    """A comparison that is ready to run."""

    sides: Mapping[SideName, Side]
    schedule: Schedule
    criteria: Sequence[Criterion]
    state: State
    root: Path
    across: bool  # whether the workloads differ on purpose
    by_options: bool  # whether the sides have their own commands, which may change the ids of tests
    repository: Repository | None
    tree: str  # hash of the working tree, if a side measures it
    notes: Sequence[str]

    def check_before(self, side: Side) -> None:
        """Raise ``PlanError`` if the working tree that a side measures has changed."""
        if self.repository is None or not self.tree or side.root != self.repository.root:
            return
        if self.repository.hash_working_tree() != self.tree:
            raise PlanError(
                "the working tree has changed since the comparison began; the same command starts a new one"
            )

    def checks_imports(self, side: Side) -> bool:
        """Return whether a side must import the code of its own checkout."""
        return not self.by_options and side.measured is None


class _Code(NamedTuple):
    """What one side measures: a commit or, in place, the working tree."""

    origin: str
    short: str
    source: Source
    in_place: bool = True


def prepare(request: Request, directory: Path, say: Callable[[str], None]) -> Prepared:
    """Resolve commits, check everything, check out and set up. Nothing is measured."""
    if request.rounds < 1:
        raise PlanError(f"--rounds-per-session={request.rounds} must be 1 or more")
    request = request.with_both_sides()
    commands = parse_commands(request)
    measured, metrics = commands[0].measured, list(request.metrics)
    if measured is not None:
        metrics = measured.choose_metrics(request.metrics, request.fail_on)
    criteria = parse_criteria(request.fail_on, metrics, request.floor)
    schedule = plan_schedule(parse_pairs(request.pairs), request.rounds)
    repository = find_repository(directory)
    if request.by_options and repository is not None and not repository.has_commits():
        repository = None
    root = directory if repository is None else repository.root
    if request.by_options:
        codes, notes = _list_option_sets(request, commands, repository)
        say("; ".join(f"{code.short}: {each.describe()}" for code, each in zip(codes, commands, strict=True)))
    elif repository is None:
        raise PlanError(
            f"{directory} is not in a git checkout, or git is not installed; compare two commands or option "
            "sets: --a='…' --b='…'"
        )
    else:
        _check_paths(commands[0].args, root)
        codes, notes = _find_commits(request, repository)
        say(
            ", ".join(
                f"{name} {(code.source.commit or '')[:10]} ({code.origin})"
                for name, code in zip(SIDES, codes, strict=True)
            )
        )
    in_place = any(code.in_place for code in codes)
    tree = repository.hash_working_tree() if repository is not None and in_place else ""
    scripts = [_hash_scripts(command, directory) for command in commands]
    # If any of it differs, it is another comparison; of one side with itself there may be more the next time.
    repeated = request.comparisons is not None
    asked = replace(request, fresh=False, comparisons=None)
    commits = [code.source.commit for code in codes]
    inputs = [pytest_llenergy.__version__, str(directory), commits, tree, scripts, repeated, asked]
    state = State(root, inputs, fresh=request.fresh)
    below = directory.resolve().relative_to(root.resolve())
    sides: dict[SideName, Side] = {}
    for name, code, command in zip(SIDES, codes, commands, strict=True):
        place, python = root, command.python
        if repository is not None and not code.in_place:
            place = state.checkouts / name
            repository.check_out(str(code.source.commit), place)
            # A commit without this directory has no tests there, which its first session finds.
            (place / below).mkdir(parents=True, exist_ok=True)
        if not request.by_options and python:
            # Of the environment of llenergy, or the one that --setup makes, whatever the command names.
            python = (sys.executable, *python[1:])
        side = Side(
            name=name,
            origin=code.origin,
            short=code.short,
            root=place,
            directory=place / below,
            args=command.args,
            python=python,
            measured=command.measured,
            environment=inherited_environment(),
            source=code.source,
        )
        if request.setup is not None:
            side = _set_up(side, request.setup, f"{code.source.commit}{tree * code.in_place}", state, say)
        sides[name] = side
    for line in notes:
        say(line)
    finished = len(list(state.directory.glob("sessions*/*/end")))
    if finished:
        say(f"resuming a stopped comparison: {finished} sessions are finished")
        notes = [*notes, f"{finished} sessions were measured before a stop"]
    else:
        say(f"{schedule.stages} pairs of rounds: at most {sum(schedule.pairs)} pairs of sessions")
    return Prepared(
        sides=sides,
        schedule=schedule,
        criteria=criteria,
        state=state,
        root=root,
        across=request.across or request.by_options,
        by_options=request.by_options,
        repository=repository,
        tree=tree,
        notes=notes,
    )


def _find_commits(request: Request, repository: Repository) -> tuple[list[_Code], list[str]]:
    """Return both commits, and what the user should know of them."""
    use_tree = request.head == WORKING_TREE
    current = repository.resolve_commit("HEAD")
    head = current if use_tree or request.head is None else repository.resolve_commit(request.head)
    base, named = (
        (repository.resolve_commit(request.base), request.base)
        if request.base is not None
        else repository.find_default_base(head)
    )
    dirty = repository.has_changes()
    same = base == head and not (use_tree and dirty)
    if same and (None in (request.base, request.head) or "..." in named):
        raise PlanError(
            f"base ({named}) and head ({request.head or 'HEAD'}) are the same commit {base[:10]}, so "
            "nothing can differ; name another base, or both with --base and --head to measure the noise"
        )
    notes = ["both sides are the same commit; differences are noise (A/A)"] if same else []
    if dirty and not use_tree and head == current:
        notes.append("uncommitted changes are not measured; --head . measures the working tree")
    origin = "working tree" if use_tree else request.head or "HEAD"
    return [
        _Code(named, base[:7], Source(commit=base, dirty=False), in_place=False),
        _Code(origin, head[:7], Source(commit=head, dirty=use_tree and dirty), in_place=use_tree),
    ], notes


def _list_option_sets(
    request: Request, commands: tuple[Command, Command], repository: Repository | None
) -> tuple[list[_Code], list[str]]:
    """Return the working tree for both sides, and what the user should know of it."""
    source = Source()
    if repository is not None:
        source = Source(commit=repository.resolve_commit("HEAD"), dirty=repository.has_changes())
    codes = [
        # A command line may name credentials, and is not recorded.
        _Code((text or "no options") if request.command and command.python else letter, letter, source)
        for letter, text, command in zip("ab", request.ab, commands, strict=True)
    ]
    return codes, ["both sides are the same; differences are noise (A/A)"] * (commands[0] == commands[1])


def _check_paths(words: Sequence[str], root: Path) -> None:
    """Refuse absolute paths into the user's checkout: both sides would run the code there."""
    for word in words:
        path = Path(word.rpartition("=")[2])
        if path.is_absolute() and path.resolve().is_relative_to(root.resolve()):
            raise PlanError(
                f"{word} is in your checkout, but each side has its own; write the path relative to this "
                "directory"
            )


def _set_up(side: Side, setup: str, code: str, state: State, say: Callable[[str], None]) -> Side:
    """Create the environment of a side and run ``--setup`` in its checkout, unless that is done already."""
    venv = state.checkouts / f"{side.name}-venv"
    log = state.directory / f"setup-{side.name}.log"
    environment = {name: value for name, value in side.environment.items() if name != "PYTHONHOME"}
    environment["VIRTUAL_ENV"] = str(venv)
    environment["PATH"] = os.pathsep.join([str(venv / "bin"), environment.get("PATH", os.defpath)])
    inputs = "\n".join([code, setup, sys.executable, sys.version])
    # Written once the environment is complete.
    ready = venv.with_name(f"{venv.name}.ready")
    if not (ready.is_file() and ready.read_text() == inputs):
        say(f"setting up {side.name}: {setup}")
        ready.unlink(missing_ok=True)
        shutil.rmtree(venv, ignore_errors=True)
        quiet = {**environment, **WITHOUT_QUESTIONS, "PIP_NO_INPUT": "1"}
        steps = (
            ("python -m venv", [sys.executable, *VENV_COMMAND, str(venv)], side.environment),
            (f"--setup {setup!r}", ["sh", "-c", setup], quiet),
        )
        for what, words, variables in steps:
            if (status := run_step(side, words, variables, log)) != 0:
                line = show_failure(log, say)
                raise PlanError(
                    f"{side.name}: {what} failed with exit code {status}: {line!r}; the whole log: {log}"
                )
        ready.write_text(inputs)
    python = (str(venv / "bin" / "python"), *side.python[1:]) if side.python else ()
    return replace(side, venv=venv, python=python, environment=environment)


def _hash_scripts(command: Command, directory: Path) -> list[str]:
    """Return hashes of the scripts that a command names, which git may not know."""
    found = []
    for word in " ".join(command.args).split() if command.measured is not None else ():
        path = directory / word.strip("'\"")
        with suppress(OSError, ValueError):
            if path.suffix in SCRIPTS and path.is_file():
                found.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return found


def list_own_modules(root: Path) -> dict[str, str]:
    """Return the importable modules and packages of a checkout by their names, with their paths in it."""
    files = [Path(name) for name in Repository(root).list_files("*.py", "pyproject.toml", "*/pyproject.toml")]
    projects = {each.parent for each in files if each.name in ("pyproject.toml", "setup.py")}
    roots = {*map(Path, SOURCE_ROOTS), *projects, *(each / "src" for each in projects)}
    python = [each for each in files if each.suffix == ".py"]
    places = [each.parent if each.name == "__init__.py" else each for each in python]
    found = {place.stem: str(place) for place in places if place.parent in roots}
    return {name: place for name, place in found.items() if name not in sys.stdlib_module_names}


def check_imports(side: Side, lists: Iterable[Path]) -> None:
    """Check where the processes of a session imported the modules of its checkout from."""
    own, root, venv = list_own_modules(side.root), side.root, side.venv
    for file in sorted(lists):
        imported: dict[str, str] = json.loads(file.read_text())
        for name in imported.keys() & own:
            place = imported[name]
            path = Path(place)
            # A copy that is installed is not the checkout, even if the environment is in it.
            in_checkout = path.is_relative_to(root.resolve()) and INSTALL_DIRECTORIES.isdisjoint(path.parts)
            if not in_checkout and not (venv is not None and path.is_relative_to(venv.resolve())):
                raise PlanError(
                    f"{side.name} imported {name} from {place} instead of its own {own[name]}, {SAME_CODE}"
                )
