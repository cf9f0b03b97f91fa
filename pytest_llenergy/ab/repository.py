# SPDX-License-Identifier: Apache-2.0
"""The git repository, and checkouts of both commits: worktrees outside the user's checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import PlanError

#: Variables that git sets for hooks. They would point our git commands at the repository of the hook.
REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")

#: Our git and that of --setup ask nothing; no hook of the user runs by ours.
WITHOUT_QUESTIONS = {"GIT_TERMINAL_PROMPT": "0", "SSH_ASKPASS_REQUIRE": "never"}
WITHOUT_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")

#: Leaves files of Git LFS as pointers, also where git-lfs is not installed.
WITHOUT_LFS = tuple(
    word for option in ("smudge=", "process=", "required=false") for word in ("-c", f"filter.lfs.{option}")
)

#: Candidates for the default branch, in order.
DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")

#: Paths that do not count as changes: files that test runs and ``ab`` itself leave behind.
IGNORED_PATHS = (".", ":(exclude,top).llenergy", ":(exclude,top,glob)**/__pycache__/**")


@dataclass(frozen=True)
class Repository:
    """The repository of a checkout, whose top directory is ``root``. Its methods raise ``PlanError``."""

    root: Path

    def resolve_commit(self, reference: str) -> str:
        """Return the hash of a commit; ``A...B`` is the merge base of both, as in ``git checkout``."""
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
        found = self._find_commit(reference)
        if found is None:
            raise PlanError(f"git knows no commit {reference!r} in this repository{self._shallow()}")
        return found

    def has_commits(self) -> bool:
        """Return whether there is any commit yet."""
        return self._find_commit("HEAD") is not None

    def find_default_base(self, head: str) -> tuple[str, str]:
        """Return the merge base of a commit and the default branch, and the name of the branch."""
        for branch in DEFAULT_BRANCHES:
            if self._find_commit(branch) is not None:
                return self.resolve_commit(f"{branch}...{head}"), branch
        raise PlanError(
            f"found no default branch ({', '.join(DEFAULT_BRANCHES)}); name the baseline with --base REF"
        )

    def has_changes(self) -> bool:
        """Return whether the working tree has uncommitted changes."""
        return bool(self._run("status", "--porcelain", "--", *IGNORED_PATHS))

    def hash_working_tree(self) -> str:
        """Return a hash of the working tree: changes of known files, and new scripts."""
        changes = self._run(
            "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--", *IGNORED_PATHS
        )
        found = hashlib.sha256(f"{self.resolve_commit('HEAD')}\n{changes}".encode(errors="surrogateescape"))
        for name in self._list("--others", "--exclude-standard", "--", *IGNORED_PATHS):
            # What else is new may be written by this very command.
            if name.endswith((".py", ".sh")):
                state = (self.root / name).lstat()
                found.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}".encode(errors="surrogateescape"))
        return found.hexdigest()[:16]

    def check_out(self, commit: str, place: Path) -> None:
        """Make a detached worktree of a commit, without hooks and files of Git LFS, unless it exists."""
        # Written once a checkout is complete.
        ready = place.with_name(f"{place.name}.ready")
        if ready.is_file() and ready.read_text() == commit and place.is_dir():
            return
        ready.unlink(missing_ok=True)
        self.remove_worktree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        self._run(*WITHOUT_LFS, "worktree", "add", "--detach", "--force", str(place), commit)
        ready.write_text(commit)

    def remove_worktree(self, place: Path) -> None:
        """Remove a worktree and its directory, even if only one of them is left."""
        # Twice, because git locks a worktree until it is complete.
        self._query("worktree", "remove", "--force", "--force", str(place))
        shutil.rmtree(place, ignore_errors=True)

    def list_files(self, *patterns: str) -> list[str]:
        """Return the files that are not ignored, relative to the top."""
        return self._list("--cached", "--others", "--exclude-standard", "--", *patterns)

    def _find_commit(self, name: str) -> str | None:
        return self._query("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")

    def _shallow(self) -> str:
        if self._query("rev-parse", "--is-shallow-repository") != "true":
            return ""
        return "; this clone is shallow: git fetch --unshallow (actions/checkout: fetch-depth: 0)"

    def _list(self, *args: str) -> list[str]:
        return [name for name in self._run("ls-files", "-z", *args).split("\0") if name]

    def _query(self, *args: str) -> str | None:
        done = _run_git(self.root, args)
        return done.stdout.strip() if done.returncode == 0 else None

    def _run(self, *args: str) -> str:
        done = _run_git(self.root, args)
        if done.returncode != 0:
            raise PlanError(_reason_of(done))
        return done.stdout.strip()


def find_repository(directory: Path) -> Repository | None:
    """Return the repository of a directory; None if there is none, or no git."""
    try:
        done = _run_git(directory, ("rev-parse", "--show-toplevel"))
    except FileNotFoundError:
        return None
    if "not a git repository" in done.stderr:
        return None
    if done.returncode != 0:
        raise PlanError(_reason_of(done))
    return Repository(Path(done.stdout.strip()))


def inherited_environment() -> dict[str, str]:
    """Return the variables for processes that are not part of a git hook or of pytest-xdist."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in REPOSITORY_VARIABLES and not name.startswith("PYTEST_XDIST_W")
    }


def _reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return all that git says, in one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"git: {' '.join(lines) or f'exit code {done.returncode}'}"


def _run_git(directory: Path, args: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(directory), *WITHOUT_HOOKS, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env={**inherited_environment(), **WITHOUT_QUESTIONS, "LC_ALL": "C"},
        # Without a terminal, ssh cannot ask either.
        start_new_session=True,
        check=False,
    )
