# SPDX-License-Identifier: Apache-2.0
"""Turn the command line of ``llenergy ab`` into two sides that are ready to run.

Everything that can be checked is checked here, before anything is measured.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest_llenergy
from pytest_llenergy.ab.commands import EXAMPLE, PytestCommand, check_options, parse_pytest, split
from pytest_llenergy.ab.imports import check_imports
from pytest_llenergy.ab.measured_command import MeasuredCommand, parse_measured
from pytest_llenergy.ab.repository import (
    WITHOUT_QUESTIONS,
    NoRepositoryError,
    Repository,
    check_out,
    find_repository,
    list_omissions,
    without_git_variables,
)
from pytest_llenergy.ab.schedule import Schedule, plan_schedule
from pytest_llenergy.ab.session import Side, find_error_line, read_tail
from pytest_llenergy.ab.state import State, remove_checkouts
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.gate import parse_criteria
from pytest_llenergy.compare.stages import DEFAULT_STAGES, parse_pairs
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import SideName, Source

#: Value of ``--head`` for the working tree with its uncommitted changes.
WORKING_TREE = "."

#: Arguments of Python that create a virtual environment.
VENV_COMMAND = ("-m", "venv")


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


@dataclass(frozen=True)
class Prepared:
    """A comparison that is ready to run.

    Attributes:
        sides: Baseline and head.
        schedule: The order of sessions.
        criteria: Metrics and rules.
        state: Its files.
        root: The project.
        across: Whether the workloads differ on purpose.
        by_options: Whether the sides have their own commands, which may change the ids of tests.
        repository: The project's repository, if any.
        tree: Hash of the working tree, if a side measures it.
        notes: Notes for the report.
    """

    sides: Mapping[SideName, Side]
    schedule: Schedule
    criteria: Sequence[Criterion]
    state: State
    root: Path
    across: bool = False
    by_options: bool = False
    repository: Repository | None = None
    tree: str = ""
    notes: Sequence[str] = ()

    def check_before(self, side: Side) -> None:
        """Raise ``PlanError`` if the working tree that a side measures has changed."""
        if self.repository is None or not self.tree or side.root != self.repository.root:
            return
        if self.repository.hash_working_tree(data=side.measured is None) != self.tree:
            raise PlanError(
                "the working tree has changed since the comparison began; the same command starts a new one "
                "(add files that tests write to .gitignore)"
            )

    def check_after(self, side: Side, imports: Sequence[Path]) -> None:
        """Raise ``PlanError`` if the first session of a side imported code of another checkout."""
        if not self.by_options and side.measured is None:
            other = self.sides["head" if side.name == "base" else "base"]
            check_imports(side.root, side.venv, imports, [self.root, other.root], side.name)

    def remove_checkouts(self) -> None:
        """Remove the checkouts and environments."""
        remove_checkouts(self.state.checkouts, self.repository)


def prepare(request: Request, directory: Path, say: Callable[[str], None]) -> Prepared:
    """Resolve commits, check everything, check out and set up. Nothing is measured.

    Args:
        request: The command line.
        directory: The directory in which the command was given.
        say: Receives progress lines.

    Raises:
        PlanError: If the comparison cannot run.
    """
    if request.rounds < 1:
        raise PlanError(f"--rounds-per-session={request.rounds} must be 1 or more")
    request = _compared_with_itself(request)
    commands = _parse_commands(request)
    criteria = parse_criteria(request.fail_on, commands.metrics(request), request.floor)
    if commands.measured is not None:
        for criterion in criteria:
            commands.measured.check_metric(str(criterion.metric))
    wanted = parse_pairs(request.pairs)
    schedule = plan_schedule(wanted, request.rounds)
    if schedule.stages != wanted:
        say(f"{wanted} pairs with {request.rounds} rounds per session become {schedule.stages}")
    by_options = request.ab != (None, None) or (request.comparisons is not None and request.head is None)
    if by_options and (request.base, request.head, request.setup) != (None, None, None):
        raise PlanError(
            "--base, --head and --setup compare commits, --a and --b compare commands or option sets; use "
            "only one kind"
        )
    make = _prepare_commands if by_options else _prepare_commits
    prepared = make(request, commands, (schedule, criteria), directory, say)
    for line in prepared.notes:
        say(line)
    if prepared.state.finished_sessions:
        say(f"resuming a stopped comparison: {prepared.state.finished_sessions} sessions are finished")
    else:
        say(schedule.describe())
    return prepared


@dataclass(frozen=True)
class _Commands:
    """The commands of both sides: of pytest or, with ``measured``, any others."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    pytest: tuple[PytestCommand, PytestCommand] | None = None
    measured: MeasuredCommand | None = None
    origins: tuple[str, str] = ("", "")

    def side(self, number: int, **facts: object) -> Side:
        """Return a side: 0 is the base, 1 the head. mypy cannot check ``facts``, its other fields."""
        if self.pytest is None:
            return Side(args=self.sides[number], measured=self.measured, **facts)  # type: ignore[arg-type]
        command = self.pytest[number]
        own = command.program if "/" in command.program else sys.executable
        return Side(args=command.args, python=(own, *command.interpreter), **facts)  # type: ignore[arg-type]

    def metrics(self, request: Request) -> Sequence[str]:
        """Return the names of the metrics to compare, besides those of ``--fail-on``."""
        if self.measured is None:
            return request.metrics
        named = request.metrics or request.fail_on
        return [*request.metrics, *(self.measured.better if named else self.measured.metrics)]


def _parse_commands(request: Request) -> _Commands:
    words, (a, b) = tuple(request.command), request.ab
    if not words and (a is None or b is None):
        raise PlanError(f"no command; write it after --, {EXAMPLE}")
    options = tuple(split(text or "", f"--{letter}") for letter, text in zip("ab", (a, b), strict=True))
    sides = (*words, *options[0]), (*words, *options[1])
    if not all(sides):
        raise PlanError("--a and --b are empty; write the command after --")
    base, head = parse_pytest(sides[0], "--a: " * bool(a)), parse_pytest(sides[1], "--b: " * bool(b))
    if base is not None and head is not None:
        if any((request.values, request.per, request.better, request.meters)):
            raise PlanError(
                "--value, --per, --better, --meter, --gpus and --require are for commands other than pytest"
            )
        check_options(split(os.environ.get("PYTEST_ADDOPTS", ""), "PYTEST_ADDOPTS"), "PYTEST_ADDOPTS: ")
        shown = [shlex.join(each) or "no options" for each in options]
        if not words:
            shown = [f"a ({base.program or 'pytest'})", f"b ({head.program or 'pytest'})"]
        return _Commands(sides, (base, head), origins=(shown[0], shown[1]))
    if request.rounds > 1:
        raise PlanError("--rounds-per-session needs pytest; a session of another command is one round")
    name = Path(words[0]).name if words else "command"
    measured = parse_measured(name, request.values, request.per, request.better, request.meters)
    if not words:
        sides = ("sh", "-c", str(a)), ("sh", "-c", str(b))
    # A command line may name credentials, and is not recorded.
    return _Commands(sides, measured=measured, origins=("a", "b"))


def _compared_with_itself(request: Request) -> Request:
    """Return the request for the head on both sides; without a base and head it is the working tree."""
    if request.comparisons is None:
        return request
    if request.comparisons < 1:
        raise PlanError(f"--aa={request.comparisons} must be 1 or more")
    if request.base is not None or request.ab != (None, None):
        raise PlanError("--aa compares the head with itself; it allows neither --base nor --a and --b")
    if request.head == WORKING_TREE:
        if request.setup is not None:
            raise PlanError(
                "--aa with --head . measures in this environment; remove --setup, or name a commit"
            )
        return replace(request, head=None)
    return replace(request, base=request.head or "HEAD", head=request.head or "HEAD")


def _prepare_commits(
    request: Request,
    commands: _Commands,
    planned: tuple[Schedule, Sequence[Criterion]],
    directory: Path,
    say: Callable[[str], None],
) -> Prepared:
    repository = find_repository(directory)
    _check_paths(commands.sides[0] if commands.pytest is None else commands.pytest[0].args, repository.root)
    use_tree = request.head == WORKING_TREE
    head = repository.resolve_commit("HEAD" if use_tree or request.head is None else request.head)
    base, named = (
        (repository.resolve_commit(request.base), request.base)
        if request.base is not None
        else repository.find_default_base(head)
    )
    dirty = repository.has_changes()
    same = base == head and not (use_tree and dirty)
    if same and "..." in named:
        of = named.partition("...")[0] or "HEAD"
        raise PlanError(f"head {head[:10]} is part of {of}: there is nothing of its own to compare")
    if same and None in (request.base, request.head):
        raise PlanError(
            f"base ({named}) and head ({request.head or 'HEAD'}) are the same commit {base[:10]}, so "
            "nothing can differ; name another base, or both with --base and --head to measure the noise"
        )
    tree = repository.hash_working_tree(data=commands.measured is None) if use_tree else ""
    state = State(repository.root, _inputs(request, directory, [base, head, tree]), fresh=request.fresh)
    origins = named, "working tree" if use_tree else request.head or "HEAD"
    say(f"base {base[:10]} ({origins[0]}), head {head[:10]} ({origins[1]})")
    notes = ["both sides are the same commit; differences are noise (A/A)"] if same else []
    if dirty and not use_tree and head == repository.resolve_commit("HEAD"):
        notes.append("uncommitted changes are not measured; --head . measures the working tree")
    omitted = dict.fromkeys([*list_omissions(repository, base), *list_omissions(repository, head)])
    for line in omitted:
        say(line)
    below = directory.resolve().relative_to(repository.root.resolve())
    sides: dict[SideName, Side] = {}
    names: tuple[SideName, SideName] = ("base", "head")
    for number, (name, commit) in enumerate(zip(names, (base, head), strict=True)):
        in_place = use_tree and name == "head"
        root = repository.root if in_place else state.checkouts / name
        if not in_place:
            check_out(repository, commit, root)
        if name == "base":
            # A baseline without it has no tests there, which its first session finds.
            (root / below).mkdir(parents=True, exist_ok=True)
        if not (root / below).is_dir():
            raise PlanError(
                f"{name}: {commit[:10]} has no directory {below}; run the command from the top of the "
                "checkout"
            )
        side = commands.side(
            number,
            name=name,
            origin=origins[number],
            short=commit[:7],
            root=root,
            directory=root / below,
            environment=session_environment(),
            source=Source(commit=commit, dirty=in_place and dirty),
        )
        if side.python:
            # Of the environment of llenergy, or the one that --setup makes, whatever the command names.
            side = replace(side, python=(sys.executable, *side.python[1:]))
        if request.setup is not None:
            side = _set_up(side, request.setup, f"{commit}{tree if in_place else ''}", state, say)
        sides[name] = side
    return Prepared(
        sides,
        *planned,
        state,
        repository.root,
        request.across,
        repository=repository,
        tree=tree,
        notes=notes,
    )


def _prepare_commands(
    request: Request,
    commands: _Commands,
    planned: tuple[Schedule, Sequence[Criterion]],
    directory: Path,
    say: Callable[[str], None],
) -> Prepared:
    try:
        repository: Repository | None = find_repository(directory)
    except NoRepositoryError:
        repository = None
    root = directory if repository is None else repository.root
    source, tree = Source(), ""
    if repository is not None:
        tree = repository.hash_working_tree(data=commands.measured is None)
        source = Source(commit=repository.resolve_commit("HEAD"), dirty=repository.has_changes())
    names: tuple[SideName, SideName] = ("base", "head")
    sides = {
        name: commands.side(
            number,
            name=name,
            origin=commands.origins[number],
            short="ab"[number],
            root=root,
            directory=directory,
            environment=session_environment(),
            source=source,
        )
        for number, name in enumerate(names)
    }
    state = State(root, _inputs(request, directory, [tree]), fresh=request.fresh)
    say("; ".join(f"{letter}: {shlex.join(each)}" for letter, each in zip("ab", commands.sides, strict=True)))
    same = commands.sides[0] == commands.sides[1]
    notes = ["both sides are the same; differences are noise (A/A)"] if same else []
    return Prepared(
        sides,
        *planned,
        state,
        root,
        across=True,
        by_options=True,
        repository=repository,
        tree=tree,
        notes=notes,
    )


def _inputs(request: Request, directory: Path, code: list[str]) -> list[object]:
    """Return what identifies a comparison: if any of it differs, it is another one."""
    fields: list[object] = [pytest_llenergy.__version__, str(directory), code]
    fields += [list(request.command), list(request.ab)]
    fields += [request.pairs, request.rounds, request.setup, list(request.metrics), list(request.fail_on)]
    fields += [list(request.values), list(request.per), list(request.better), list(request.meters)]
    # There may be more comparisons of one side with itself the next time.
    return [*fields, request.floor, request.across, request.comparisons is not None]


def _check_paths(words: Sequence[str], root: Path) -> None:
    """Refuse absolute paths into the user's checkout: both sides would run the code there."""
    for word in words:
        path = Path(word.rpartition("=")[2])
        if path.is_absolute() and root.resolve() in (path.resolve(), *path.resolve().parents):
            raise PlanError(
                f"{word} is in your checkout, but each side has its own; write the path relative to this "
                "directory"
            )


def session_environment() -> dict[str, str]:
    """Return the environment variables of this process that sessions inherit."""
    # A session is not a worker of pytest-xdist, even if this process is.
    return {
        name: value
        for name, value in without_git_variables(os.environ).items()
        if not name.startswith("PYTEST_XDIST_W")
    }


def _set_up(side: Side, setup: str, code: str, state: State, say: Callable[[str], None]) -> Side:
    """Create the environment of a side and run ``--setup`` in its checkout, unless that is done already."""
    venv = state.checkouts / f"{side.name}-venv"
    log = state.directory / f"setup-{side.name}.log"
    environment = {name: value for name, value in side.environment.items() if name != "PYTHONHOME"}
    environment["VIRTUAL_ENV"] = str(venv)
    environment["PATH"] = os.pathsep.join([str(venv / "bin"), environment.get("PATH", os.defpath)])
    python = venv / "bin" / "python"
    inputs = "\n".join([code, setup, sys.executable, sys.version])
    # Written once the environment is complete.
    ready = venv.with_name(f"{venv.name}.ready")
    if not (ready.is_file() and ready.read_text() == inputs and python.exists()):
        say(f"setting up {side.name}: {setup}")
        ready.unlink(missing_ok=True)
        shutil.rmtree(venv, ignore_errors=True)
        quiet = {**environment, **WITHOUT_QUESTIONS, "PIP_NO_INPUT": "1"}
        with log.open("wb") as file:
            for words in ([sys.executable, *VENV_COMMAND, str(venv)], ["sh", "-c", setup]):
                done = subprocess.run(
                    words,
                    cwd=side.root,
                    env=quiet if words[0] == "sh" else side.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
                if done.returncode != 0:
                    for line in read_tail(log):
                        say(f"  | {line}")
                    what = f"--setup {setup!r}" if words[0] == "sh" else "python -m venv"
                    raise PlanError(
                        f"{side.name}: {what} failed with exit code {done.returncode}: "
                        f"{find_error_line(log)!r}; the whole log: {log}"
                    )
        ready.write_text(inputs)
    own = (str(python), *side.python[1:]) if side.python else ()
    return replace(side, venv=venv, python=own, environment=environment)
