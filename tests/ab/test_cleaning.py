# SPDX-License-Identifier: Apache-2.0
"""What stopped comparisons leave behind is found again and removed, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from pytest_llenergy.ab.checkouts import check_out, find_repository
from pytest_llenergy.ab.cleaning import MAX_UNUSED_DAYS

from .project import Project
from .test_resume import QUICK, WAITING, check_resumes, stop, until

#: Another comparison of the same project, which is short.
OTHER = ["--base=HEAD", "--head=HEAD", "--pairs=4", "--rounds-per-session=4", "--", "pytest", "-k", "test_a"]


@pytest.fixture
def waiting(project: Project, tmp_path: Path) -> Project:
    project.environment["GO_ON"] = str(tmp_path / "pid")
    project.write("test_some.py", WAITING)
    project.commit()
    return project


def checkouts(project: Project) -> list[Path]:
    return sorted((Path(project.environment["LLENERGY_CACHE_DIR"]) / "ab").glob("*"))


def worktrees(project: Project) -> int:
    return project.git("worktree", "list").count("\n")


def test_nothing_to_remove(project: Project) -> None:
    result = project.ab("--clean")
    assert (result.status, result.out, result.err) == (0, "nothing to remove\n", "")
    assert project.error("--clean", "--", "pytest").startswith("--clean only removes what comparisons have")


@pytest.mark.slow
def test_checkouts_of_a_killed_run_are_removed_after_git_clean(waiting: Project) -> None:
    stop(waiting, signal.SIGKILL)
    (left,) = checkouts(waiting)
    with (left / "base-venv").open("wb") as file:
        file.write(b"x" * 12_000_000)
    waiting.git("clean", "-ffdxq")
    assert worktrees(waiting) == 2
    result = waiting.ab(*OTHER)
    assert result.status == 0
    assert f"removed {left} (checkouts of a stopped comparison; 12 MB)" in result.lines
    assert (checkouts(waiting), worktrees(waiting)) == ([], 0)


def test_clean_removes_all_of_a_killed_run(waiting: Project) -> None:
    stop(waiting, signal.SIGKILL)
    (left,) = checkouts(waiting)
    (state,) = (path.parent for path in waiting.path.rglob("inputs.json"))
    result = waiting.ab("--clean")
    assert result.status == 0
    first, second = result.out.splitlines()
    assert first.startswith(f"removed {left} (checkouts and environments; 0.")
    assert second.startswith(f"removed {state} (measurements of 2 sessions, logs; 0.")
    assert (checkouts(waiting), worktrees(waiting), state.exists()) == ([], 0, False)
    assert waiting.ab("--clean").out == "nothing to remove\n"


@pytest.mark.slow
def test_another_comparison_leaves_a_recent_one_to_be_continued(waiting: Project) -> None:
    stop(waiting, signal.SIGKILL)
    (left,) = checkouts(waiting)
    assert "removed" not in waiting.ab(*OTHER).err
    assert checkouts(waiting) == [left]
    check_resumes(waiting)


@pytest.mark.slow
def test_measurements_outlive_checkouts_that_are_old(waiting: Project) -> None:
    stop(waiting, signal.SIGKILL)
    (left,) = checkouts(waiting)
    long_ago = time.time() - (MAX_UNUSED_DAYS + 0.1) * 86400
    os.utime(left / "project", (long_ago, long_ago))
    assert f"removed {left} (" in waiting.ab(*OTHER).err
    assert (checkouts(waiting), worktrees(waiting)) == ([], 0)
    check_resumes(waiting)


def test_running_comparison_keeps_its_checkouts(waiting: Project) -> None:
    running = waiting.start(*QUICK, "--", "pytest")
    try:
        until(lambda: Path(waiting.environment["GO_ON"]).exists())
        (left,) = checkouts(waiting)
        in_use = f"in use by process {running.pid}"
        lines = waiting.ab("--clean").out.splitlines()
        assert [line.endswith(in_use) for line in lines] == [True, True]
        # Its lock in the project is gone then.
        waiting.git("clean", "-ffdxq")
        assert waiting.ab("--clean").out.splitlines() == [f"kept {left}: {in_use}"]
        # Devices are in use too, so this one must not measure.
        other = waiting.ab("--base=HEAD", "--head=HEAD", "--", "pytest", "--no-such-option")
        assert f"kept {left}: {in_use}" in other.lines
        again = waiting.ab(*QUICK, "--", "pytest")
        assert again.lines[-1].startswith(f"llenergy ab: process {running.pid} is running this comparison")
        assert (left / "head" / "work.py").exists()
    finally:
        running.kill()
        running.communicate(timeout=60)


@pytest.mark.slow
def test_worktrees_in_another_cache_are_found_through_git(waiting: Project, tmp_path: Path) -> None:
    stop(waiting, signal.SIGKILL)
    (left,) = checkouts(waiting)
    waiting.git("clean", "-ffdxq")
    waiting.environment["LLENERGY_CACHE_DIR"] = str(tmp_path / "another")
    # One was deleted by hand, but git still knows it.
    shutil.rmtree(left / "head")
    assert waiting.ab("--clean").out.startswith(f"removed {left} (")
    assert (left.exists(), worktrees(waiting)) == (False, 0)


@pytest.mark.slow
def test_kept_comparison_is_removed_only_on_request(project: Project) -> None:
    assert project.ab("--keep", *OTHER).status == 0
    (kept,) = checkouts(project)
    project.ab(*OTHER[:2], "--pairs=5", *OTHER[3:])
    assert checkouts(project) == [kept]
    assert len(project.ab("--clean").out.splitlines()) == 2
    assert (checkouts(project), worktrees(project)) == ([], 0)


@pytest.mark.slow
def test_checkouts_of_a_project_that_is_gone_are_removed(waiting: Project, tmp_path: Path) -> None:
    stop(waiting, signal.SIGKILL)
    (left,) = checkouts(waiting)
    gone = waiting.path.rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    other = Project(tmp_path / "other")
    other.environment = waiting.environment
    line = other.ab("--clean").out
    assert line.startswith(f"removed {left} (checkouts of {waiting.path}, which is gone; 0.")
    shutil.rmtree(gone)


def test_any_bytes_in_the_path_of_a_project_are_read(project: Project) -> None:
    left = Path(project.environment["LLENERGY_CACHE_DIR"]) / "ab" / "x-00000000-000000000000"
    left.mkdir(parents=True)
    (left / "project").write_bytes(b"/gone/\xff")
    line = project.ab("--clean").out
    assert line.startswith(f"removed {left} (checkouts of /gone/\\udcff, which is gone; 0.")


def test_checkout_that_was_killed_while_git_made_it_is_made_again(project: Project, tmp_path: Path) -> None:
    found, place = find_repository(project.path), tmp_path / "ab" / "base"
    check_out(found, found.resolve_commit("HEAD"), place)
    project.git("worktree", "lock", "--reason", "initializing", str(place))
    place.with_name("base.ready").unlink()
    (place / "work.py").unlink()
    check_out(found, found.resolve_commit("HEAD"), place)
    assert (place / "work.py").exists()
