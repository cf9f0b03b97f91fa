# SPDX-License-Identifier: Apache-2.0
"""From what the user says to two sides that are ready to run."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest_llenergy
from pytest_llenergy.ab import imported_code, state
from pytest_llenergy.ab.campaign import Plan, Progress
from pytest_llenergy.ab.checkouts import (
    Repository,
    activate,
    check_out,
    create_venv,
    find_repository,
    list_omissions,
    read_tail,
    remove_checkout,
    session_environment,
    venv_python,
)
from pytest_llenergy.ab.command import Command, check_environment, parse_command, parse_options
from pytest_llenergy.ab.schedule import Schedule, Side, plan_schedule
from pytest_llenergy.ab.state import CampaignInputs, State
from pytest_llenergy.compare import comparison
from pytest_llenergy.compare.gate import parse_criteria
from pytest_llenergy.compare.stages import parse_pairs
from pytest_llenergy.errors import PlanError
from pytest_llenergy.model.report import SideName

#: The user's own directory, committed or not.
WORKING_TREE = "."

TREE_CHANGED = (
    "the working tree has changed since the comparison began; the same command begins a new one (what tests "
    "write belongs in .gitignore)"
)


@dataclass(frozen=True)
class Request:
    """What the command line says. ``command`` is what follows ``--``."""

    command: Sequence[str]
    base: str | None = None
    head: str | None = None
    setup: str | None = None
    options: tuple[str | None, str | None] = (None, None)
    pythons: tuple[str | None, str | None] = (None, None)
    pairs: str = "6+6"
    rounds: int = 1
    metrics: Sequence[str] = ()
    fail_on: Sequence[str] = ()
    floor: str | None = None
    across: bool = False
    fresh: bool = False

    def asked(self) -> list[comparison.Criterion]:
        """What to compare. Raises ``PlanError`` for what cannot be."""
        return parse_criteria(self.fail_on, self.metrics, self.floor)

    @property
    def by_options(self) -> bool:
        """Whether two option sets or interpreters are compared, and not two commits."""
        return any(each is not None for each in (*self.options, *self.pythons))


@dataclass(frozen=True)
class Prepared:
    """Ready to be measured. ``tidy`` takes away what was checked out."""

    plan: Plan
    state: State
    root: Path
    before: Callable[[Side], None]
    check: Callable[[Side, Sequence[Path]], None]
    tidy: Callable[[], None]

    def watcher(self, say: Callable[[str], None], show: Callable[[str], None] | None) -> Progress:
        """Who is told of it."""
        return Progress(say, show, self.before, self.check)


def prepare(request: Request, directory: Path, say: Callable[[str], None]) -> Prepared:
    """Resolve commits, check everything, check out, set up; nothing is measured. Raises ``PlanError``."""
    command = parse_command(request.command)
    check_environment(session_environment())
    request.asked()
    if request.rounds < 1:
        raise PlanError(f"--rounds-per-session={request.rounds} needs a whole number, 1 or more")
    wanted = parse_pairs(request.pairs)
    plan = plan_schedule(wanted, request.rounds)
    if plan.stages != wanted:
        say(f"{wanted} pairs with {request.rounds} rounds a session: {plan.stages}")
    if request.by_options:
        return _prepare_option_sets(request, command, plan, directory, say)
    return _prepare_commits(request, command, plan, directory, say)


def _prepare_commits(
    request: Request, command: Command, plan: Schedule, directory: Path, say: Callable[[str], None]
) -> Prepared:
    found = find_repository(directory)
    _check_paths(command, found.root)
    head = found.commit("HEAD" if request.head in (None, WORKING_TREE) else str(request.head))
    here = request.head == WORKING_TREE
    base, named = (
        (found.commit(request.base), request.base) if request.base is not None else found.default_base(head)
    )
    tree = found.working_tree() if here else ""
    if base == head and not (here and found.dirty()) and None in (request.base, request.head):
        raise PlanError(
            f"base ({named}) and head ({request.head or 'HEAD'}) are the same commit {base[:10]}, nothing "
            "can differ; name another base, or both with --base and --head to see the noise"
        )
    asked = _campaign_inputs(request, command, directory, {"base": [base], "head": [head, tree]})
    if request.fresh:
        _discard_all(found.root, found)
    _discard_empty(found.root, found, asked.key)
    kept = State(found.root, asked)
    notes = _commit_notes(found, base, head, request.head)
    say(
        f"base {base[:10]} ({named}), head {head[:10]} ({'working tree' if here else request.head or 'HEAD'})"
    )
    for line in dict.fromkeys([*notes, *list_omissions(found, base), *list_omissions(found, head)]):
        say(line)
    _report_state(kept, plan, found.root, say)
    roots = {"base": kept.checkouts / "base", "head": found.root if here else kept.checkouts / "head"}
    for name, commit in (("base", base), ("head", head)):
        if roots[name] != found.root:
            check_out(found, commit, roots[name])
    origins = {"base": named, "head": "working tree" if here else request.head or "HEAD"}
    below = directory.resolve().relative_to(found.root.resolve())
    sides: dict[SideName, Side] = {}
    told: dict[SideName, imported_code.InterpreterInfo] = {}
    for name, commit in (("base", base), ("head", f"{head}{tree}")):
        side = _commit_side(name, origins[name], roots[name], below, commit)
        side = _with_environment(side, request.setup, commit, kept, say)
        other = roots["head" if side.name == "base" else "base"]
        told[side.name] = imported_code.inspect_interpreter(side)
        imported_code.check_import_sources(side, told[side.name], found.root, other)
        sides[side.name] = side

    def before(side: Side) -> None:
        if here and side.name == "head" and found.working_tree() != tree:
            raise PlanError(TREE_CHANGED)

    def check(side: Side, modules: Sequence[Path]) -> None:
        other = sides["head" if side.name == "base" else "base"]
        imported_code.check_imported_modules(side, told[side.name], modules, found.root, other.root)

    measured = Plan(
        sides,
        command,
        plan,
        request.asked(),
        request.across,
        notes=notes,
    )
    return Prepared(
        measured, kept, found.root, before, check, lambda: _remove_checkouts(kept.checkouts, found)
    )


def _prepare_option_sets(
    request: Request, command: Command, plan: Schedule, directory: Path, say: Callable[[str], None]
) -> Prepared:
    if request.base is not None or request.head is not None or request.setup is not None:
        raise PlanError(
            "--base, --head and --setup compare two commits, --a and --b two option sets: one at a time"
        )
    try:
        found: Repository | None = find_repository(directory)
    except PlanError:
        found = None
    root = directory if found is None else found.root
    tree = "" if found is None else found.working_tree()
    names: tuple[SideName, SideName] = ("base", "head")
    sides: dict[SideName, Side] = {}
    for name, letter, text, python in zip(names, "ab", request.options, request.pythons, strict=True):
        options = parse_options(text or "", letter)
        told = [shlex.join(options)] if options else []
        told += [python] if python is not None else []
        sides[name] = Side(
            name=name,
            origin=" with ".join(told) or "no options",
            short=letter,
            root=root,
            directory=directory,
            python=_find_interpreter(python, letter),
            environment=session_environment(),
            options=options,
        )
    a, b = sides["base"], sides["head"]
    notes = []
    if (a.options, a.python) == (b.options, b.python):
        notes.append("both sides are the same: what differs is noise (A/A)")
    command = replace(
        command, gpus=command.gpus or any("--energy-gpus" in each for each in a.options + b.options)
    )
    asked = _campaign_inputs(
        request,
        command,
        directory,
        {side.name: [*side.options, str(side.python), tree] for side in sides.values()},
    )
    if request.fresh:
        _discard_all(root, found)
    _discard_empty(root, found, asked.key)
    kept = State(root, asked)
    say(f"a: {a.origin}; b: {b.origin}")
    for line in notes:
        say(line)
    _report_state(kept, plan, root, say)
    for side in sides.values():
        imported_code.inspect_interpreter(side)

    def before(_: Side) -> None:
        if found is not None and found.working_tree() != tree:
            raise PlanError(TREE_CHANGED)

    measured = Plan(
        sides,
        command,
        plan,
        request.asked(),
        across=True,
        renamed=True,
        notes=notes,
    )
    return Prepared(
        measured, kept, root, before, lambda *_: None, lambda: _remove_checkouts(kept.checkouts, found)
    )


def _commit_notes(found: Repository, base: str, head: str, asked: str | None) -> list[str]:
    notes = []
    here = asked == WORKING_TREE
    dirty = found.dirty()
    if base == head and not (here and dirty):
        notes.append("both sides are the same commit: what differs is noise (A/A)")
    if dirty and not here and head == found.commit("HEAD"):
        notes.append("changes that are not committed are not measured; --head . measures the working tree")
    return notes


def _check_paths(command: Command, root: Path) -> None:
    """A path into the user's checkout would make both sides run what is there."""
    for word in command.args:
        _, _, path = word.rpartition("=")
        if Path(path).is_absolute() and root.resolve() in (
            Path(path).resolve(),
            *Path(path).resolve().parents,
        ):
            raise PlanError(
                f"{word} names the checkout itself, and each side has its own: write it relative to this "
                "directory"
            )


def _commit_side(name: str, origin_: str, root: Path, below: Path, commit: str) -> Side:
    directory = root / below
    if not directory.is_dir():
        raise PlanError(f"{name}: {commit[:10]} has no directory {below}; start from the top of the checkout")
    return Side(
        name="base" if name == "base" else "head",
        origin=origin_,
        short=commit[:7],
        root=root,
        directory=directory,
        python=Path(sys.executable),
        environment=session_environment(),
    )


def _with_environment(
    side: Side, setup: str | None, commit: str, kept: State, say: Callable[[str], None]
) -> Side:
    if setup is None:
        return side
    venv = kept.checkouts / f"{side.name}-venv"
    log = kept.directory / f"setup-{side.name}.log"
    made_of = "\n".join([commit, setup, sys.executable, sys.version])
    say(f"setting up {side.name}: {setup}")
    try:
        create_venv(venv, side.root, setup, made_of, log, side.name)
    except PlanError:
        for line in read_tail(log):
            say(f"  | {line}")
        raise
    return replace(side, venv=venv, python=venv_python(venv), environment=activate(venv, side.environment))


def _find_interpreter(named: str | None, letter: str) -> Path:
    if named is None:
        return Path(sys.executable)
    found = shutil.which(named)
    if found is None:
        raise PlanError(f"--{letter}-python={named}: no such program")
    # Not resolved: the link of a virtual environment is what makes it one.
    return Path(found).absolute()


def _campaign_inputs(
    request: Request, command: Command, directory: Path, sides: Mapping[str, Sequence[str]]
) -> CampaignInputs:
    return CampaignInputs(
        tool=pytest_llenergy.__version__,
        command=[*command.interpreter, "--", *command.args],
        directory=str(directory),
        sides={name: list(told) for name, told in sides.items()},
        pairs=request.pairs,
        rounds=request.rounds,
        setup=request.setup,
        metrics=[*request.metrics, *request.fail_on, request.floor or ""],
        across=request.across,
    )


def _report_state(kept: State, plan: Schedule, root: Path, say: Callable[[str], None]) -> None:
    if kept.sessions:
        say(f"going on with a comparison that was stopped: {kept.sessions} sessions are there")
    else:
        say(f"{plan.stages} pairs, {plan.sessions_after(1)} sessions in the first stage")
    others = [key for key in state.list_unfinished(root) if key != kept.asked.key]
    if others:
        say(f"{len(others)} other unfinished in {root / '.llenergy' / 'ab'} (--fresh throws them away)")


def _discard_all(root: Path, found: Repository | None) -> None:
    for key in list(state.list_unfinished(root)):
        _discard(root, found, key)


def _discard_empty(root: Path, found: Repository | None, own: str) -> None:
    """Throw away what others have begun that has measured nothing."""
    for key in list(state.list_unfinished(root)):
        if key != own and not state.has_measured(root, key):
            _discard(root, found, key)


def _discard(root: Path, found: Repository | None, key: str) -> None:
    """Throw an unfinished comparison away, unless somebody is at it."""
    if state.discard_campaign(root, key):
        _remove_checkouts(state.checkout_directory(root, key), found)


def _remove_checkouts(checkouts: Path, found: Repository | None) -> None:
    if not checkouts.exists():
        return
    if found is not None:
        for name in ("base", "head"):
            remove_checkout(found, checkouts / name)
    shutil.rmtree(checkouts, ignore_errors=True)
