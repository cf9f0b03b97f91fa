# SPDX-License-Identifier: Apache-2.0
"""The git repository, checkouts of both commits, and a virtual environment for each side.

Each commit is checked out into a separate worktree outside the user's checkout.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pytest_llenergy.errors import PlanError
from pytest_llenergy.scratch import ScratchDirectory

#: Variables that git sets for hooks. They would point our git commands at the repository of the hook.
REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")

#: Our git and that of --setup ask nothing; no hook of the user runs by ours.
BATCH = {"GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}
WITHOUT_QUESTIONS = {"GIT_TERMINAL_PROMPT": "0"}
WITHOUT_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")

#: Leaves files of Git LFS as pointers, also where git-lfs is not installed.
WITHOUT_LFS = tuple(
    word for option in ("smudge=", "process=", "required=false") for word in ("-c", f"filter.lfs.{option}")
)

#: Candidates for the default branch, in order.
DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")

#: Paths that do not count as changes: files that test runs and ``ab`` itself leave behind.
IGNORED_PATHS = (":(exclude,top).llenergy", ":(exclude,top,glob)**/__pycache__/**")

#: Arguments of Python that create a virtual environment.
VENV_COMMAND = ("-m", "venv")

#: Lines of a log to show after a failure.
TAIL_LINES = 10


def without_git_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which git finds the repository by itself."""
    return {name: value for name, value in environment.items() if name not in REPOSITORY_VARIABLES}


@dataclass(frozen=True)
class Repository:
    """The repository of a checkout, whose top directory is ``root``."""

    root: Path

    def resolve_commit(self, reference: str) -> str:
        """Return the hash of a commit; ``A...B`` is the merge base of both, as in ``git checkout``.

        Raises:
            PlanError: If git does not know the name.
        """
        left, dots, right = reference.partition("...")
        if dots:
            sides = [self.resolve_commit(side or "HEAD") for side in (left, right)]
            found = self._query("merge-base", *sides)
            if found is None:
                raise PlanError(f"{reference}: these commits have no common ancestor here{self._shallow()}")
            return found
        if not reference.strip("0"):
            raise PlanError(
                f"{reference!r} is no commit, as in a manual run or the first push of a branch; name one, "
                "such as origin/main"
            )
        found = self._query("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
        if found is None:
            raise PlanError(f"git knows no commit {reference!r} in this repository{self._shallow()}")
        return found

    def find_default_base(self, head: str) -> tuple[str, str]:
        """Return the merge base of a commit and the default branch, and the name of the branch.

        Raises:
            PlanError: If there is no default branch.
        """
        for branch in DEFAULT_BRANCHES:
            found = self._query("rev-parse", "--verify", "--quiet", f"{branch}^{{commit}}")
            if found is not None:
                return self.resolve_commit(f"{found}...{head}"), branch
        raise PlanError(
            f"found no default branch ({', '.join(DEFAULT_BRANCHES)}); name the baseline with --base REF"
        )

    def has_changes(self) -> bool:
        """Return whether the working tree has uncommitted changes."""
        return bool(self._run("status", "--porcelain", "--", ".", *IGNORED_PATHS))

    def hash_working_tree(self) -> str:
        """Return a hash of the working tree: all files that are not ignored.

        Untracked files may be large, so except for Python files only their size and time count. Logs are left
        out.
        """
        with ScratchDirectory() as scratch:
            own = {"GIT_INDEX_FILE": str(scratch.path / "index")}
            self._run("read-tree", "HEAD", **own)
            self._run("add", "--update", "--", ".", *IGNORED_PATHS, **own)
            others = [
                name
                for name in self._listed("--others", "--exclude-standard", "--", ".", *IGNORED_PATHS, **own)
                # It may be the log of this very command.
                if not name.endswith(".log")
            ]
            for name in others:
                if name.endswith(".py"):
                    self._run("add", "--", f":(literal){name}", **own)
            data = "".join(_stat(self.root, name) for name in others if not name.endswith(".py"))
            tree = self._run("write-tree", **own)
        return f"{tree}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}" if data else tree

    def list_worktrees(self) -> list[Path]:
        """Return the directories of all worktrees that git knows, even if they do not exist."""
        lines = (self._query("worktree", "list", "--porcelain") or "").splitlines()
        return [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]

    def add_worktree(self, place: Path, commit: str) -> None:
        """Check a commit out into a worktree, without hooks and files of Git LFS.

        Raises:
            PlanError: If it fails, with git's message.
        """
        self._run(*WITHOUT_LFS, "worktree", "add", "--detach", "--force", str(place), commit)

    def remove_worktree(self, place: Path) -> None:
        """Remove a worktree, if it is one."""
        # Twice, because git locks a worktree until it is complete.
        self._query("worktree", "remove", "--force", "--force", str(place))

    def list_projects(self) -> list[Path]:
        """Return the directories with a ``pyproject.toml`` or ``setup.py``, relative to the top."""
        names = self._listed("--", ":(glob)**/pyproject.toml", ":(glob)**/setup.py")
        return sorted({Path(name).parent for name in names})

    def read_file(self, commit: str, name: str) -> str:
        """Return the text of a file in a commit; empty if there is no such file."""
        return self._query("show", f"{commit}:{name}") or ""

    def _listed(self, *args: str, **environment: str) -> list[str]:
        return [name for name in self._run("ls-files", "-z", *args, **environment).split("\0") if name]

    def _shallow(self) -> str:
        if self._query("rev-parse", "--is-shallow-repository") != "true":
            return ""
        return "; this clone is shallow: git fetch --unshallow (actions/checkout: fetch-depth: 0)"

    def _query(self, *args: str) -> str | None:
        done = _run_git(self.root, args)
        return done.stdout.strip() if done.returncode == 0 else None

    def _run(self, *args: str, **environment: str) -> str:
        done = _run_git(self.root, args, environment)
        if done.returncode != 0:
            raise PlanError(_reason_of(done))
        return done.stdout.strip()


class NoRepositoryError(PlanError):
    """A directory is in no repository, or there is no git."""


def find_repository(directory: Path) -> Repository:
    """Return the repository of a directory.

    Raises:
        NoRepositoryError: If there is none, or no git.
        PlanError: If git refuses it.
    """
    hint = "compare two option sets: --a='…' --b='…'"
    try:
        done = _run_git(directory, ("rev-parse", "--show-toplevel"))
    except FileNotFoundError:
        raise NoRepositoryError(f"git is not installed; {hint}") from None
    if "not a git repository" in done.stderr:
        raise NoRepositoryError(f"{directory} is not in a git checkout; {hint}")
    if done.returncode != 0:
        raise PlanError(_reason_of(done))
    return Repository(Path(done.stdout.strip()))


def _reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return all that git says, in one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"git: {' '.join(lines) or f'exit code {done.returncode}'}"


def _stat(root: Path, name: str) -> str:
    try:
        found = (root / name).lstat()
    except FileNotFoundError:
        # Deleted since it was listed.
        return ""
    return f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0"


@cache
def _batch_ssh(directory: Path) -> dict[str, str]:
    """The command of the user, such as one with a key for CI, stays."""
    done = subprocess.run(
        ["git", "-C", str(directory), "config", "core.sshCommand"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=without_git_variables(os.environ),
        check=False,
    )
    return {} if done.stdout else BATCH


def _run_git(
    directory: Path, args: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(directory), *WITHOUT_HOOKS, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env={
            **_batch_ssh(directory),
            **without_git_variables(os.environ),
            **WITHOUT_QUESTIONS,
            "LC_ALL": "C",
            **(environment or {}),
        },
        check=False,
    )


def check_out(repository: Repository, commit: str, place: Path) -> None:
    """Make a detached worktree of a commit, unless it exists already.

    Args:
        repository: The user's repository.
        commit: Hash of the commit.
        place: Directory of the worktree.

    Raises:
        PlanError: If git fails.
    """
    ready = _completion_marker(place)
    if ready.is_file() and ready.read_bytes() == commit.encode() and place.is_dir():
        return
    remove_checkout(repository, place)
    place.parent.mkdir(parents=True, exist_ok=True)
    repository.add_worktree(place, commit)
    ready.write_text(commit)


def remove_checkout(repository: Repository | None, place: Path) -> None:
    """Remove a worktree, even an incomplete one, and one that only git still knows.

    This does not use ``git worktree prune``, which would forget worktrees of the user on a disk that is not
    mounted.

    Args:
        repository: The user's repository; None if it is gone.
        place: Directory of the worktree.
    """
    _completion_marker(place).unlink(missing_ok=True)
    if (place / ".git").exists():
        Repository(place).remove_worktree(place)
    shutil.rmtree(place, ignore_errors=True)
    if repository is not None and place in repository.list_worktrees():
        repository.remove_worktree(place)


def list_omissions(repository: Repository, commit: str) -> list[str]:
    """Return notes on what a worktree of this commit lacks."""
    notes = []
    if repository.read_file(commit, ".gitmodules"):
        notes.append(
            f"{commit[:10]} has submodules, which are not checked out; use --setup 'git submodule update "
            "--init --recursive && …'"
        )
    if "filter=lfs" in repository.read_file(commit, ".gitattributes"):
        notes.append(f"{commit[:10]} uses Git LFS: its files are pointers; use --setup 'git lfs pull && …'")
    return notes


def _completion_marker(place: Path) -> Path:
    """Return the file that is written once a checkout is complete."""
    return place.with_name(f"{place.name}.ready")


def session_environment() -> dict[str, str]:
    """Return the environment variables of this process that sessions inherit."""
    # A session is not a worker of pytest-xdist, even if this process is.
    return {
        name: value
        for name, value in without_git_variables(os.environ).items()
        if not name.startswith("PYTEST_XDIST_W")
    }


def activate(venv: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after ``source venv/bin/activate``."""
    changed = dict(environment)
    changed.pop("PYTHONHOME", None)
    changed["VIRTUAL_ENV"] = str(venv)
    changed["PATH"] = os.pathsep.join([str(venv / "bin"), changed.get("PATH", os.defpath)])
    return changed


def venv_python(venv: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return venv / "bin" / "python"


def create_venv(venv: Path, checkout: Path, command: str, inputs: str, log: Path, name: str) -> None:
    """Create a virtual environment and run the setup command in the checkout, unless done already.

    Args:
        venv: Where to create the environment.
        checkout: The directory in which the command runs.
        command: A shell command.
        inputs: Text of everything that determines the result; if it changes, the environment is created
            again.
        log: File for the output of the command.
        name: Name of the side, for messages.

    Raises:
        PlanError: If the command fails, with the line of its log that best explains the failure.
    """
    ready = venv.with_name(f"{venv.name}.ready")
    if ready.is_file() and ready.read_bytes() == inputs.encode() and venv_python(venv).exists():
        return
    ready.unlink(missing_ok=True)
    shutil.rmtree(venv, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = activate(venv, {**session_environment(), **WITHOUT_QUESTIONS, "PIP_NO_INPUT": "1"})
    with log.open("wb") as file:
        for words, shell in (([sys.executable, *VENV_COMMAND, str(venv)], False), (command, True)):
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
    ready.write_text(inputs)


def read_tail(log: Path, count: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log, without blank lines."""
    try:
        with log.open(errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), count))
    except OSError:
        return []


def find_error_line(log: Path) -> str:
    """Return the line of a log that most likely explains a failure."""
    lines = read_tail(log, 40)
    errors = [line for line in lines if line.startswith(("ERROR", "E  ", "error:"))]
    return (errors or lines or ["no output"])[-1].strip()[:300]
