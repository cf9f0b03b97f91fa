# SPDX-License-Identifier: Apache-2.0
"""The git repository, and checkouts of both commits: worktrees outside the user's checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
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

    def hash_working_tree(self, *, data: bool = True) -> str:
        """Return a hash of the working tree: all files that are not ignored, except logs.

        Untracked files may be large, so except for Python files only their size and time count, and without
        ``data`` not even these.
        """
        with ScratchDirectory() as scratch:
            own = {"GIT_INDEX_FILE": str(scratch.path / "index")}
            self._run("read-tree", "HEAD", **own)
            self._run("add", "--update", "--", ".", *IGNORED_PATHS, **own)
            others = self._listed("--others", "--exclude-standard", "--", ".", *IGNORED_PATHS, **own)
            for name in others:
                if name.endswith(".py"):
                    self._run("add", "--", f":(literal){name}", **own)
            # A log may be that of this very command.
            files = [name for name in others if data and not name.endswith((".py", ".log"))]
            found = "".join(_stat(self.root, name) for name in files)
            tree = self._run("write-tree", **own)
        return f"{tree}-{hashlib.sha256(os.fsencode(found)).hexdigest()[:12]}" if found else tree

    def add_worktree(self, place: Path, commit: str) -> None:
        """Check a commit out into a worktree, without hooks and files of Git LFS.

        Raises:
            PlanError: If it fails, with git's message.
        """
        self._run(*WITHOUT_LFS, "worktree", "add", "--detach", "--force", str(place), commit)

    def remove_worktree(self, place: Path) -> None:
        """Remove a worktree, if it is one, even if only git still knows it."""
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
    hint = "compare two commands or option sets: --a='…' --b='…'"
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
    # Written once a checkout is complete.
    ready = place.with_name(f"{place.name}.ready")
    if ready.is_file() and ready.read_text() == commit and place.is_dir():
        return
    ready.unlink(missing_ok=True)
    repository.remove_worktree(place)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    repository.add_worktree(place, commit)
    ready.write_text(commit)


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
