# SPDX-License-Identifier: Apache-2.0
"""Resolving commits, naming the working tree, and checkouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_llenergy.ab.repository import Repository, find_repository
from pytest_llenergy.ab.state import remove_checkouts
from pytest_llenergy.errors import PlanError

from .project import Project


def repository_of(directory: Path) -> Repository:
    found = find_repository(directory)
    assert found is not None
    return found


@pytest.fixture
def forked(project: Project) -> tuple[Repository, str]:
    """A branch, a main branch that has moved on, and their merge base."""
    parted = project.git("rev-parse", "HEAD")
    project.git("checkout", "-q", "-b", "feature")
    project.commit()
    project.git("checkout", "-q", "main")
    project.write("moved.txt", "on")
    project.commit()
    project.git("checkout", "-q", "feature")
    return repository_of(project.path), parted


def test_three_dots_are_the_merge_base(forked: tuple[Repository, str]) -> None:
    found, parted = forked
    assert found.resolve_commit("main...") == found.resolve_commit("main...feature") == parted
    assert found.resolve_commit("main") not in (parted, found.resolve_commit("HEAD"))


def test_default_base_is_the_merge_base_with_the_default_branch(
    forked: tuple[Repository, str],
) -> None:
    found, parted = forked
    assert found.find_default_base(found.resolve_commit("HEAD")) == (parted, "main")


def test_shallow_clone_is_named_as_the_reason(project: Project, tmp_path: Path) -> None:
    project.commit()
    project.git("clone", "-q", "--depth=1", project.path.as_uri(), str(tmp_path / "shallow"))
    with pytest.raises(PlanError, match=r"this clone is shallow: git fetch --unshallow"):
        repository_of(tmp_path / "shallow").resolve_commit("HEAD~1")


def test_working_tree_name_depends_on_files_that_matter(project: Project) -> None:
    found = repository_of(project.path)
    clean = found.hash_working_tree()
    project.write(".git/info/exclude", "*.log\n")
    for left in ("__pycache__/work.pyc", ".llenergy/ab/ab.json", "some.log", "data.json"):
        project.write(left, "left behind")
    assert found.hash_working_tree() == clean
    assert project.git("diff", "--cached", "--name-only") == ""
    project.write("new.py", "")
    untracked = found.hash_working_tree()
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    assert len({clean, untracked, found.hash_working_tree()}) == 3


def test_incomplete_checkout_is_made_again(project: Project, tmp_path: Path) -> None:
    found, place = repository_of(project.path), tmp_path / "checkouts" / "base"
    commit = found.resolve_commit("HEAD")
    found.check_out(commit, place)
    (place / "work.py").unlink()
    place.with_name("base.ready").unlink()
    found.check_out(commit, place)
    assert (place / "work.py").exists()
    shutil.rmtree(place)
    found.check_out(commit, place)
    assert (place / "work.py").exists()


def test_worktrees_of_the_user_are_kept(project: Project, tmp_path: Path) -> None:
    """Also one whose disk is not there just now."""
    found, place = repository_of(project.path), tmp_path / "checkouts" / "base"
    project.git("worktree", "add", "-q", "--detach", str(tmp_path / "users"))
    (tmp_path / "users").rename(tmp_path / "away")
    found.check_out(found.resolve_commit("HEAD"), place)
    remove_checkouts(place.parent, found)
    assert "users" in project.git("worktree", "list")
    assert str(place) not in project.git("worktree", "list")


def test_hooks_and_large_files_of_the_user_stay_out_of_checkouts(project: Project, tmp_path: Path) -> None:
    """A filter that is missing or fails, as git-lfs does without a network, and a hook that ends or waits."""
    project.write(".gitattributes", "*.bin filter=lfs diff=lfs\n")
    project.write("weights.bin", "version https://git-lfs.github.com/spec/v1\n")
    commit = project.commit()
    hook = project.path / ".git/hooks/post-checkout"
    hook.write_text("#!/bin/sh\nread answer\nexit 1\n")
    hook.chmod(0o755)
    for name, value in (("smudge", "no-git-lfs"), ("process", "no-git-lfs"), ("required", "true")):
        project.git("config", f"filter.lfs.{name}", value)
    place = tmp_path / "base"
    repository_of(project.path).check_out(commit, place)
    assert (place / "weights.bin").read_text().startswith("version")


def test_git_s_own_reason_is_given_in_full(project: Project) -> None:
    """Not the owner of a directory, which the settings of the machine may allow."""
    project.write(".git/config", "[\n")
    with pytest.raises(PlanError, match=r"^git: fatal: bad config line 1 in file .*config"):
        repository_of(project.path)


def test_the_user_s_own_ssh_command_fetches_what_a_partial_clone_lacks(
    project: Project, tmp_path: Path
) -> None:
    """As after actions/checkout with ``ssh-key``."""
    for name in ("allowFilter", "allowAnySHA1InWant"):
        project.git("config", f"uploadpack.{name}", "true")
    ssh, clone = tmp_path / "ssh", tmp_path / "clone"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\neval "$last"\n')
    ssh.chmod(0o755)
    url = f"ssh://none.invalid{project.path}"
    project.git("clone", "-qn", "--filter=blob:none", "-c", f"core.sshCommand={ssh}", url, str(clone))
    repository_of(clone).check_out(project.git("rev-parse", "HEAD"), tmp_path / "base")
    assert (tmp_path / "base" / "work.py").exists()
