# SPDX-License-Identifier: Apache-2.0
"""Checkouts of the two commits, each in a directory of its own, beside that of the user."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from pytest_llenergy.ab.repository import Repository
from pytest_llenergy.errors import PlanError


def check_out(repository: Repository, commit: str, place: Path) -> None:
    """Make, or find again, a worktree of a commit that belongs to no branch. Raises ``PlanError``."""
    ready = _ready(place)
    if ready.is_file() and ready.read_text() == commit and place.is_dir():
        return
    remove(repository, place)
    place.parent.mkdir(parents=True, exist_ok=True)
    repository.run("worktree", "add", "--detach", "--force", str(place), commit)
    ready.write_text(commit)


def remove(repository: Repository, place: Path) -> None:
    """Take a worktree away, also one that was made half.

    Only this one: ``git worktree prune`` would forget those of the user whose disk is not there just now.
    """
    _ready(place).unlink(missing_ok=True)
    if place.exists():
        with suppress(PlanError):
            repository.run("worktree", "remove", "--force", str(place))
        shutil.rmtree(place, ignore_errors=True)


def left_out(repository: Repository, commit: str) -> list[str]:
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


def _ready(place: Path) -> Path:
    """Written once a checkout is whole."""
    return place.with_name(f"{place.name}.ready")
