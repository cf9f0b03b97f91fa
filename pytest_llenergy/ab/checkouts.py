# SPDX-License-Identifier: Apache-2.0
"""Git checkouts of both commits and their virtual environments."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import PlanError

# What git knows: commits, merge bases, and what has not been committed.

#: What git is told where a command runs inside a hook or another git command: not of this repository.
REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")

#: Where to look for the default branch.
DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")

#: What running tests leaves behind, and what ``ab`` itself writes.
IGNORED_PATHS = (":(exclude,top).llenergy", ":(exclude,top,glob)**/__pycache__/**")


def without_git_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which git looks for the repository itself."""
    return {name: value for name, value in environment.items() if name not in REPOSITORY_VARIABLES}


@dataclass(frozen=True)
class Repository:
    """A checkout. ``root`` is its top directory."""

    root: Path

    def commit(self, reference: str) -> str:
        """The commit that a name means; ``A...B`` is their merge base, as in ``git checkout``.

        Raises ``PlanError`` for a name that git does not know.
        """
        left, dots, right = reference.partition("...")
        if dots:
            found = self._ask("merge-base", self.commit(left or "HEAD"), self.commit(right or "HEAD"))
            if found is None:
                raise PlanError(f"{reference}: the two have no commit in common here{self._shallow()}")
            return found
        found = self._ask("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
        if found is None:
            raise PlanError(f"{reference!r} is no commit that git knows here{self._shallow()}")
        return found

    def default_base(self, head: str) -> tuple[str, str]:
        """The merge base of a commit and the default branch, and the branch.

        Raises ``PlanError`` where there is none.
        """
        for branch in DEFAULT_BRANCHES:
            found = self._ask("rev-parse", "--verify", "--quiet", f"{branch}^{{commit}}")
            if found is not None:
                return self.commit(f"{found}...{head}"), branch
        raise PlanError(f"no default branch was found ({', '.join(DEFAULT_BRANCHES)}); name one: --base REF")

    def dirty(self) -> bool:
        """Whether the working tree has changes that are in no commit."""
        return bool(self._told("status", "--porcelain", "--", ".", *IGNORED_PATHS))

    def working_tree(self) -> str:
        """A name for what the working tree holds: all files that are not ignored.

        Files that git does not know may be large; but for Python's, they go by their size and time. Logs are
        left out.
        """
        with tempfile.TemporaryDirectory() as scratch:
            own = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            self._told("read-tree", "HEAD", **own)
            self._told("add", "--update", "--", ".", *IGNORED_PATHS, **own)
            others = [
                name
                for name in self._listed("--others", "--exclude-standard", "--", ".", *IGNORED_PATHS, **own)
                # Perhaps that of this very command.
                if not name.endswith(".log")
            ]
            for name in others:
                if name.endswith(".py"):
                    self._told("add", "--", f":(literal){name}", **own)
            data = "".join(_stat(self.root, name) for name in others if not name.endswith(".py"))
            tree = self._told("write-tree", **own)
        return f"{tree}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}" if data else tree

    def files(self) -> list[str]:
        """All files of the checkout that are not ignored, from its top."""
        return self._listed("--cached", "--others", "--exclude-standard")

    def run(self, *args: str) -> None:
        """Raises ``PlanError`` with git's own words."""
        self._told(*args)

    def file(self, commit: str, name: str) -> str:
        """A file of a commit; empty where it has none."""
        return self._ask("show", f"{commit}:{name}") or ""

    def _listed(self, *args: str, **environment: str) -> list[str]:
        return [name for name in self._told("ls-files", "-z", *args, **environment).split("\0") if name]

    def _shallow(self) -> str:
        if self._ask("rev-parse", "--is-shallow-repository") != "true":
            return ""
        return "; this clone is shallow: git fetch --unshallow (actions/checkout: fetch-depth: 0)"

    def _ask(self, *args: str) -> str | None:
        done = _run_git(self.root, args)
        return done.stdout.strip() if done.returncode == 0 else None

    def _told(self, *args: str, **environment: str) -> str:
        done = _run_git(self.root, args, environment)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no reason was given"]
            raise PlanError(f"git {args[0]} failed: {lines[-1]}")
        return done.stdout.strip()


def find_repository(directory: Path) -> Repository:
    """That which a directory is in. Raises ``PlanError`` where it is in none."""
    try:
        done = _run_git(directory, ("rev-parse", "--show-toplevel"))
    except FileNotFoundError:
        raise PlanError("git is not installed; compare two option sets: --a='…' --b='…'") from None
    if done.returncode != 0:
        raise PlanError(f"{directory} is in no git checkout; compare two option sets: --a='…' --b='…'")
    return Repository(Path(done.stdout.strip()))


def _stat(root: Path, name: str) -> str:
    try:
        found = (root / name).lstat()
    except FileNotFoundError:
        # Between the list and now.
        return ""
    return f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0"


def _run_git(
    directory: Path, args: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(directory), *args],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env={**without_git_variables(os.environ), **(environment or {})},
        check=False,
    )


# Checkouts of the two commits, each in a directory of its own, beside that of the user.


def check_out(repository: Repository, commit: str, place: Path) -> None:
    """Make, or find again, a worktree of a commit that belongs to no branch. Raises ``PlanError``."""
    ready = _ready_file(place)
    if ready.is_file() and ready.read_text() == commit and place.is_dir():
        return
    remove_checkout(repository, place)
    place.parent.mkdir(parents=True, exist_ok=True)
    repository.run("worktree", "add", "--detach", "--force", str(place), commit)
    ready.write_text(commit)


def remove_checkout(repository: Repository, place: Path) -> None:
    """Take a worktree away, also one that was made half.

    Only this one: ``git worktree prune`` would forget those of the user whose disk is not there just now.
    """
    _ready_file(place).unlink(missing_ok=True)
    if place.exists():
        with suppress(PlanError):
            repository.run("worktree", "remove", "--force", str(place))
        shutil.rmtree(place, ignore_errors=True)


def list_omissions(repository: Repository, commit: str) -> list[str]:
    """What a worktree of this commit does not hold."""
    told = []
    if repository.file(commit, ".gitmodules"):
        told.append(
            f"{commit[:10]} has submodules, which are not checked out: --setup 'git submodule update --init "
            "--recursive && …'"
        )
    if "filter=lfs" in repository.file(commit, ".gitattributes") and shutil.which("git-lfs") is None:
        told.append(f"{commit[:10]} has files in Git LFS, which is not installed here: they are pointers")
    return told


def _ready_file(place: Path) -> Path:
    """Written once a checkout is whole."""
    return place.with_name(f"{place.name}.ready")


# A virtual environment of a side's own, made by the command that the user gives.

#: Lines of a log that are shown where something failed.
TAIL_LINES = 10


def session_environment() -> dict[str, str]:
    """The environment that sessions have of ours."""
    # An xdist worker of ours is none of theirs.
    return {
        name: value
        for name, value in without_git_variables(os.environ).items()
        if not name.startswith("PYTEST_XDIST_W")
    }


def activate(venv: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """As ``source venv/bin/activate`` leaves it."""
    changed = dict(environment)
    changed.pop("PYTHONHOME", None)
    changed["VIRTUAL_ENV"] = str(venv)
    changed["PATH"] = os.pathsep.join([str(venv / "bin"), changed.get("PATH", os.defpath)])
    return changed


def venv_python(venv: Path) -> Path:
    """Its interpreter."""
    return venv / "bin" / "python"


def create_venv(venv: Path, checkout: Path, command: str, made_of: str, log: Path, name: str) -> None:
    """Make the environment and run the command in the checkout; nothing where both are done already.

    ``made_of`` names everything that it is made of. Raises ``PlanError`` with the last line of the log.
    """
    ready = venv.with_name(f"{venv.name}.ready")
    if ready.is_file() and ready.read_text() == made_of and venv_python(venv).exists():
        return
    ready.unlink(missing_ok=True)
    shutil.rmtree(venv, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = activate(venv, session_environment())
    with log.open("wb") as file:
        for words, shell in (([sys.executable, "-m", "venv", str(venv)], False), (command, True)):
            done = subprocess.run(
                words,
                shell=shell,
                cwd=checkout,
                env=environment if shell else session_environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode != 0:
                what = f"--setup {command!r}" if shell else "python -m venv"
                raise PlanError(
                    f"{name}: {what} failed with exit code {done.returncode}: {find_error_line(log)!r}; "
                    f"the whole log: {log}"
                )
    ready.write_text(made_of)


def read_tail(log: Path, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with log.open(errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), count))
    except OSError:
        return []


def find_error_line(log: Path) -> str:
    """The line of a log that is most likely to say what went wrong."""
    lines = read_tail(log, 40)
    errors = [line for line in lines if line.startswith(("ERROR", "E  ", "error:"))]
    return (errors or lines or ["no output"])[-1].strip()[:300]
