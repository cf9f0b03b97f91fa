# SPDX-License-Identifier: Apache-2.0
"""What git is asked: which commits are meant, what is not committed, and checkouts that are whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_llenergy.ab.checkouts import (
    Repository,
    check_out,
    find_repository,
    list_omissions,
    remove_checkout,
)
from pytest_llenergy.errors import PlanError

from .project import Project


@pytest.fixture
def forked(project: Project) -> tuple[Repository, str]:
    """A branch, a main that has moved on, and where they parted."""
    parted = project.git("rev-parse", "HEAD")
    project.git("checkout", "-q", "-b", "feature")
    project.commit()
    project.git("checkout", "-q", "main")
    project.write("moved.txt", "on")
    project.commit()
    project.git("checkout", "-q", "feature")
    return find_repository(project.path), parted


def test_three_dots_are_the_merge_base(forked: tuple[Repository, str]) -> None:
    found, parted = forked
    assert found.commit("main...") == found.commit("main...feature") == parted
    assert found.commit("main") not in (parted, found.commit("HEAD"))


def test_without_a_name_the_base_is_where_it_parted_from_the_default_branch(
    forked: tuple[Repository, str],
) -> None:
    found, parted = forked
    assert found.default_base(found.commit("HEAD")) == (parted, "main")


def test_without_a_default_branch_one_is_to_be_named(
    forked: tuple[Repository, str], project: Project
) -> None:
    project.git("branch", "-q", "-M", "main", "trunk")
    with pytest.raises(PlanError, match=r"^no default branch was found .*; name one: --base REF$"):
        forked[0].default_base("HEAD")


def test_a_shallow_clone_says_why(project: Project, tmp_path: Path) -> None:
    project.commit()
    project.git("clone", "-q", "--depth=1", project.path.as_uri(), str(tmp_path / "shallow"))
    with pytest.raises(PlanError, match=r"this clone is shallow: git fetch --unshallow"):
        find_repository(tmp_path / "shallow").commit("HEAD~1")


def test_a_hook_of_another_repository_does_not_mislead(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert find_repository(project.path).root == project.path


def test_the_name_of_a_working_tree_is_of_what_runs(project: Project) -> None:
    found = find_repository(project.path)
    clean = found.working_tree()
    project.write(".git/info/exclude", "*.log\n")
    for left in ("__pycache__/work.pyc", ".llenergy/ab.json", "some.log"):
        project.write(left, "left behind")
    assert found.working_tree() == clean
    assert project.git("diff", "--cached", "--name-only") == ""
    project.write("new.py", "")
    untracked = found.working_tree()
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    edited = found.working_tree()
    project.write("data.json", "1")
    added = found.working_tree()
    assert found.working_tree() == added
    project.write("data.json", "10")
    assert len({clean, untracked, edited, added, found.working_tree()}) == 5


def test_a_checkout_that_was_made_half_is_made_again(project: Project, tmp_path: Path) -> None:
    found, place = find_repository(project.path), tmp_path / "checkouts" / "base"
    commit = found.commit("HEAD")
    check_out(found, commit, place)
    (place / "work.py").unlink()
    place.with_name("base.ready").unlink()
    check_out(found, commit, place)
    assert (place / "work.py").exists()
    shutil.rmtree(place)
    check_out(found, commit, place)
    assert (place / "work.py").exists()


def test_the_worktrees_of_the_user_stay(project: Project, tmp_path: Path) -> None:
    """Also one whose disk is not there just now."""
    found, place = find_repository(project.path), tmp_path / "base"
    project.git("worktree", "add", "-q", "--detach", str(tmp_path / "users"))
    (tmp_path / "users").rename(tmp_path / "away")
    check_out(found, found.commit("HEAD"), place)
    remove_checkout(found, place)
    assert "users" in project.git("worktree", "list")
    assert str(place) not in project.git("worktree", "list")


def test_what_a_checkout_leaves_out_is_told(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_repository(project.path)
    assert list_omissions(found, found.commit("HEAD")) == []
    project.write(".gitmodules", '[submodule "x"]\n\tpath = x\n\turl = ../x\n')
    project.write(".gitattributes", "*.bin filter=lfs diff=lfs\n")
    commit = project.commit()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    told = list_omissions(found, commit)
    assert [line.split(" ", 1)[0] for line in told] == [commit[:10], commit[:10]]
    assert "submodules, which are not checked out" in told[0]
    assert "in Git LFS, which is not installed here" in told[1]
