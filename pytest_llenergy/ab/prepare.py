# SPDX-License-Identifier: Apache-2.0
"""Turn the command line of ``llenergy ab`` into two sides that are ready to run.

Everything that can be checked is checked here, before anything is measured.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest_llenergy
from pytest_llenergy.ab import imported_code, state
from pytest_llenergy.ab.campaign import CampaignCallbacks, CampaignPlan
from pytest_llenergy.ab.checkouts import (
    NoRepositoryError,
    Repository,
    activate,
    check_out,
    create_venv,
    find_repository,
    list_omissions,
    read_tail,
    session_environment,
    venv_python,
)
from pytest_llenergy.ab.cleaning import discard_all, discard_empty, remove_abandoned, remove_checkouts
from pytest_llenergy.ab.command import Command, check_environment, parse_command, parse_options
from pytest_llenergy.ab.floors import apply_floors, load_floors
from pytest_llenergy.ab.progress import describe_plan
from pytest_llenergy.ab.schedule import Schedule, Side, plan_schedule
from pytest_llenergy.ab.state import CampaignInputs, State
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.gate import parse_criteria
from pytest_llenergy.compare.stages import DEFAULT_STAGES, parse_pairs
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import Report, SideName

#: Value of ``--head`` for the working tree with its uncommitted changes.
WORKING_TREE = "."

TREE_CHANGED = (
    "the working tree has changed since the comparison began; the same command starts a new one (add files "
    "that tests write to .gitignore)"
)


@dataclass(frozen=True)
class CommandLine:
    """The command line; ``command`` is what follows ``--``.

    With ``comparisons``, the head is compared with itself so many times.
    """

    command: Sequence[str]
    base: str | None = None
    head: str | None = None
    setup: str | None = None
    options: tuple[str | None, str | None] = (None, None)
    pythons: tuple[str | None, str | None] = (None, None)
    pairs: str = str(DEFAULT_STAGES)
    rounds: int = 1
    metrics: Sequence[str] = ()
    fail_on: Sequence[str] = ()
    floor: float | None = None
    across: bool = False
    fresh: bool = False
    comparisons: int | None = None

    def criteria(self) -> list[Criterion]:
        """Parse metrics and thresholds.

        Raises:
            PlanError: If they are invalid.
        """
        return parse_criteria(self.fail_on, self.metrics, self.floor)

    @property
    def by_options(self) -> bool:
        """Whether two option sets or interpreters are compared instead of two commits."""
        return any(each is not None for each in (*self.options, *self.pythons))


@dataclass(frozen=True)
class Prepared:
    """A comparison that is ready to run. ``remove_checkouts`` removes the checkouts."""

    plan: CampaignPlan
    state: State
    root: Path
    before: Callable[[Side], None]
    check: Callable[[Side, Sequence[Path]], None]
    remove_checkouts: Callable[[], None]
    request: CommandLine

    def callbacks(self, say: Callable[[str], None], show: Callable[[str], None] | None) -> CampaignCallbacks:
        """Return the callbacks of the campaign."""
        request = self.request

        def choose(report: Report) -> list[Criterion]:
            criteria, lines = apply_floors(request.criteria(), load_floors(self.root, report))
            for line in lines:
                say(line)
            return criteria

        # The default floor must not hide alarms while a floor is learned.
        fixed = request.floor is not None or request.comparisons is not None
        return CampaignCallbacks(say, show, self.before, self.check, None if fixed else choose)


def prepare(request: CommandLine, directory: Path, say: Callable[[str], None]) -> Prepared:
    """Resolve commits, check everything, check out and set up. Nothing is measured.

    Args:
        request: The command line.
        directory: The directory in which the command was given.
        say: Receives progress lines.

    Raises:
        PlanError: If the comparison cannot run.
    """
    command = parse_command(request.command)
    check_environment(session_environment())
    request.criteria()
    if request.rounds < 1:
        raise PlanError(f"--rounds-per-session={request.rounds} must be 1 or more")
    wanted = parse_pairs(request.pairs)
    plan = plan_schedule(wanted, request.rounds)
    if plan.stages != wanted:
        say(f"{wanted} pairs with {request.rounds} rounds per session become {plan.stages}")
    if request.comparisons is not None:
        request = _compared_with_itself(request)
    if request.by_options or (request.comparisons is not None and request.head is None):
        return _prepare_option_sets(request, command, plan, directory, say)
    return _prepare_commits(request, command, plan, directory, say)


def _compared_with_itself(request: CommandLine) -> CommandLine:
    """Return the request for the head on both sides; without a base and head it is the working tree."""
    if request.comparisons is not None and request.comparisons < 1:
        raise PlanError(f"--aa={request.comparisons} must be 1 or more")
    if request.base is not None or request.by_options:
        raise PlanError("--aa compares the head with itself; it allows neither --base nor option sets")
    if request.head == WORKING_TREE:
        if request.setup is not None:
            raise PlanError(
                "--aa with --head . measures in this environment; remove --setup, or name a commit"
            )
        return replace(request, head=None)
    return replace(request, base=request.head or "HEAD", head=request.head or "HEAD")


def _prepare_commits(
    request: CommandLine, command: Command, plan: Schedule, directory: Path, say: Callable[[str], None]
) -> Prepared:
    repository = find_repository(directory)
    _check_paths(command, repository.root)
    head = repository.resolve_commit("HEAD" if request.head in (None, WORKING_TREE) else str(request.head))
    use_tree = request.head == WORKING_TREE
    base, named = (
        (repository.resolve_commit(request.base), request.base)
        if request.base is not None
        else repository.find_default_base(head)
    )
    tree = repository.hash_working_tree() if use_tree else ""
    if base == head and "..." in named:
        of = named.partition("...")[0] or "HEAD"
        raise PlanError(f"head {head[:10]} is part of {of}: there is nothing of its own to compare")
    if base == head and not (use_tree and repository.has_changes()) and None in (request.base, request.head):
        raise PlanError(
            f"base ({named}) and head ({request.head or 'HEAD'}) are the same commit {base[:10]}, so "
            "nothing can differ; name another base, or both with --base and --head to measure the noise"
        )
    inputs = _campaign_inputs(request, command, directory, {"base": [base], "head": [head, tree]})
    if request.fresh:
        discard_all(repository.root, repository)
    discard_empty(repository.root, repository, inputs.key)
    for line in remove_abandoned(repository.root, repository, inputs.key):
        say(line)
    saved = State(repository.root, inputs)
    saved.use_checkouts()
    origins = {"base": named, "head": "working tree" if use_tree else request.head or "HEAD"}
    notes = _commit_notes(repository, base, head, request.head)
    say(f"base {base[:10]} ({origins['base']}), head {head[:10]} ({origins['head']})")
    for line in dict.fromkeys([*notes, *list_omissions(repository, base), *list_omissions(repository, head)]):
        say(line)
    _report_state(saved, plan, repository.root, say)
    roots = {
        "base": saved.checkouts / "base",
        "head": repository.root if use_tree else saved.checkouts / "head",
    }
    for name, commit in (("base", base), ("head", head)):
        if roots[name] != repository.root:
            check_out(repository, commit, roots[name])
    below = directory.resolve().relative_to(repository.root.resolve())
    sides: dict[SideName, Side] = {}
    interpreters: dict[SideName, imported_code.InterpreterInfo] = {}
    for name, commit in (("base", base), ("head", f"{head}{tree}")):
        side = _commit_side(name, origins[name], roots[name], below, commit)
        side = _with_environment(side, request.setup, commit, saved, say)
        interpreters[side.name] = imported_code.inspect_interpreter(side)
        sides[side.name] = side

    def before(side: Side) -> None:
        if use_tree and side.name == "head" and repository.hash_working_tree() != tree:
            raise PlanError(TREE_CHANGED)

    def check(side: Side, modules: Sequence[Path]) -> None:
        other = sides["head" if side.name == "base" else "base"]
        imported_code.check_imported_modules(
            side, interpreters[side.name], modules, repository.root, other.root
        )

    measured = CampaignPlan(
        sides,
        command,
        plan,
        request.criteria(),
        request.across,
        notes=notes,
    )
    return Prepared(
        measured,
        saved,
        repository.root,
        before,
        check,
        lambda: remove_checkouts(saved.checkouts, repository),
        request,
    )


def _prepare_option_sets(
    request: CommandLine, command: Command, plan: Schedule, directory: Path, say: Callable[[str], None]
) -> Prepared:
    if request.base is not None or request.head is not None or request.setup is not None:
        raise PlanError(
            "--base, --head and --setup compare commits, --a and --b compare option sets; use only one kind"
        )
    try:
        repository: Repository | None = find_repository(directory)
    except NoRepositoryError:
        repository = None
    root = directory if repository is None else repository.root
    tree = "" if repository is None else repository.hash_working_tree()
    names: tuple[SideName, SideName] = ("base", "head")
    sides: dict[SideName, Side] = {}
    for name, letter, text, python in zip(names, "ab", request.options, request.pythons, strict=True):
        options = parse_options(text or "", letter)
        origin = [shlex.join(options)] if options else []
        origin += [python] if python is not None else []
        sides[name] = Side(
            name=name,
            origin=" with ".join(origin) or "no options",
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
        notes.append("both sides are the same; differences are noise (A/A)")
    command = replace(
        command, gpus=command.gpus or any("--energy-gpus" in each for each in a.options + b.options)
    )
    inputs = _campaign_inputs(
        request,
        command,
        directory,
        {side.name: [*side.options, str(side.python), tree] for side in sides.values()},
    )
    if request.fresh:
        discard_all(root, repository)
    discard_empty(root, repository, inputs.key)
    for line in remove_abandoned(root, repository, inputs.key):
        say(line)
    saved = State(root, inputs)
    say(f"a: {a.origin}; b: {b.origin}")
    for line in notes:
        say(line)
    _report_state(saved, plan, root, say)
    for side in sides.values():
        imported_code.inspect_interpreter(side)

    def before(_: Side) -> None:
        if repository is not None and repository.hash_working_tree() != tree:
            raise PlanError(TREE_CHANGED)

    measured = CampaignPlan(
        sides,
        command,
        plan,
        request.criteria(),
        across=True,
        renamed=True,
        notes=notes,
    )
    return Prepared(
        measured,
        saved,
        root,
        before,
        lambda *_: None,
        lambda: remove_checkouts(saved.checkouts, repository),
        request,
    )


def _commit_notes(repository: Repository, base: str, head: str, head_name: str | None) -> list[str]:
    notes = []
    use_tree = head_name == WORKING_TREE
    dirty = repository.has_changes()
    if base == head and not (use_tree and dirty):
        notes.append("both sides are the same commit; differences are noise (A/A)")
    if dirty and not use_tree and head == repository.resolve_commit("HEAD"):
        notes.append("uncommitted changes are not measured; --head . measures the working tree")
    return notes


def _check_paths(command: Command, root: Path) -> None:
    """Refuse absolute paths into the user's checkout: both sides would run the tests there."""
    for word in command.args:
        _, _, path = word.rpartition("=")
        if Path(path).is_absolute() and root.resolve() in (
            Path(path).resolve(),
            *Path(path).resolve().parents,
        ):
            raise PlanError(
                f"{word} is in your checkout, but each side has its own; write the path relative to this "
                "directory"
            )


def _commit_side(name: str, origin: str, root: Path, below: Path, commit: str) -> Side:
    directory = root / below
    if name == "base":
        # A baseline without it has no tests there, which its first session finds.
        directory.mkdir(parents=True, exist_ok=True)
    if not directory.is_dir():
        raise PlanError(
            f"{name}: {commit[:10]} has no directory {below}; run the command from the top of the checkout"
        )
    return Side(
        name="base" if name == "base" else "head",
        origin=origin,
        short=commit[:7],
        root=root,
        directory=directory,
        python=Path(sys.executable),
        environment=session_environment(),
    )


def _with_environment(
    side: Side, setup: str | None, commit: str, saved: State, say: Callable[[str], None]
) -> Side:
    if setup is None:
        return side
    venv = saved.checkouts / f"{side.name}-venv"
    log = saved.directory / f"setup-{side.name}.log"
    if saved.finished_sessions and not venv.exists():
        say(f"{side.name}: its environment was removed and is created again; versions may have changed")
    inputs = "\n".join([commit, setup, sys.executable, sys.version])
    say(f"setting up {side.name}: {setup}")
    try:
        create_venv(venv, side.root, setup, inputs, log, side.name)
    except PlanError:
        for line in read_tail(log):
            say(f"  | {line}")
        raise
    return replace(side, venv=venv, python=venv_python(venv), environment=activate(venv, side.environment))


def _find_interpreter(named: str | None, letter: str) -> Path:
    if named is None:
        return Path(sys.executable)
    program = shutil.which(named)
    if program is None:
        raise PlanError(f"--{letter}-python={named}: no such program")
    # Not resolved: the link is what makes an interpreter belong to its virtual environment.
    return Path(program).absolute()


def _campaign_inputs(
    request: CommandLine, command: Command, directory: Path, sides: Mapping[str, Sequence[str]]
) -> CampaignInputs:
    return CampaignInputs(
        tool=pytest_llenergy.__version__,
        command=[*command.interpreter, "--", *command.args],
        directory=str(directory),
        sides={name: list(values) for name, values in sides.items()},
        pairs=request.pairs,
        rounds=request.rounds,
        setup=request.setup,
        metrics=[*request.metrics, *request.fail_on, str(request.floor)],
        across=request.across,
        to_itself=request.comparisons is not None,
    )


def _report_state(saved: State, plan: Schedule, root: Path, say: Callable[[str], None]) -> None:
    if saved.finished_sessions:
        say(f"resuming a stopped comparison: {saved.finished_sessions} sessions are finished")
    else:
        say(describe_plan(plan))
    others = [key for key in state.list_unfinished(root) if key != saved.inputs.key]
    if others:
        place = root / ".llenergy" / "ab"
        what, which = ("comparison", "it") if len(others) == 1 else ("comparisons", "them")
        say(f"{len(others)} other unfinished {what} in {place} (--fresh discards {which})")
