# SPDX-License-Identifier: Apache-2.0
"""``llenergy ab`` between two commits of a user's repository, on a simulated board."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from tests.nvml_sim import Board

from .conftest import GiveBoards
from .project import BOARDS_ALONE, Project
from .test_record import schema

WORK = "import time\ndef work(): time.sleep({seconds})\n"

TESTS = """
from work import work

def test_work(energy):
    energy(work)

def test_same(energy):
    import time
    energy(time.sleep, 0.1)
"""


def git(project: Project, *args: str) -> str:
    names = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *names, *args], cwd=project.path, env=project.env, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(project: Project, give_boards: GiveBoards) -> Project:
    """A repository whose last commit takes one and a half times as long."""
    give_boards(project, [Board(power_w=200.0, latch_ns=20_000_000)])
    project.write("pytest.ini", BOARDS_ALONE)
    project.write("work.py", WORK.format(seconds=0.2))
    project.write("test_some.py", TESTS)
    git(project, "init", "-q", "-b", "main")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "one")
    project.write("work.py", WORK.format(seconds=0.3))
    git(project, "commit", "-qam", "two")
    return project


@pytest.mark.slow
def test_two_commits_are_measured_in_turn_and_compared(repository: Project) -> None:
    done = repository.run(
        *llenergy("ab", "--base=HEAD~1", "--pairs=6", "--fail-on=energy_j:10%", "--", "pytest", "-q"),
        timeout_s=400,
    )
    assert done.ret == 1, done.text
    paired = repository.report(".llenergy/ab/ab.json")
    jsonschema.validate(paired, schema("ab-1"))
    shown = repository.llenergy("compare", ".llenergy/ab/ab.json", "--format=json")
    found = {each["id"].rpartition("::")[2]: each for each in json.loads(shown.out)["comparisons"]}
    assert found["test_work"]["verdict"] == "regressed"
    assert found["test_work"]["ratio"] == pytest.approx(1.5, rel=0.1)
    assert found["test_same"]["verdict"] in ("unchanged", "inconclusive")
    # Nothing of it is left, and the user's checkout is as before.
    assert git(repository, "status", "--porcelain", "--untracked-files=no") == ""
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert repository.survivors() == {}
    comment = repository.llenergy("comment", ".llenergy/ab/ab.json", "--dry-run", "--key=job", "--number=1")
    assert comment.ret == 0
    assert "regressed" in comment.out


@pytest.mark.slow
def test_the_working_tree_is_a_side_too(repository: Project) -> None:
    repository.write("work.py", WORK.format(seconds=0.2))
    done = repository.run(
        *llenergy("ab", "--base=HEAD", "--head=.", "--pairs=4", "--", "pytest", "-q", "-k", "test_work"),
        timeout_s=400,
    )
    assert done.ret == 0, done.text
    assert "improved" in done.text or "inconclusive" in done.text


def llenergy(*args: str) -> list[str]:
    import sys

    return [str(Path(sys.executable).with_name("llenergy")), *args]


def test_a_wrong_command_line_is_2_and_one_line(repository: Project) -> None:
    for args, word in (
        (["--base=no-such-branch", "--", "pytest"], "no-such-branch"),
        (["--base=HEAD~1", "--value=tokens", "--", "make"], "--value"),
        (["--base=HEAD~1", "--", "pytest", "--energy-save=x"], "--energy-save"),
        (["--base=HEAD~1", "--pairs=some", "--", "pytest"], "some"),
        # As in CI without a base: an empty name, and the hash that stands for none.
        (["--base=", "--", "pytest"], ""),
        ([f"--base={'0' * 40}", "--", "pytest"], ""),
    ):
        done = repository.llenergy("ab", *args)
        assert done.ret == 2, done.text
        assert word in done.err
        assert "Traceback" not in done.err


def test_outside_of_a_repository_it_says_so(project: Project) -> None:
    outside = str(project.path.parent)
    done = project.llenergy("ab", "--base=main", "--", "pytest", GIT_CEILING_DIRECTORIES=outside)
    assert done.ret == 2
    assert "git" in done.err


def test_a_base_that_is_no_commit_is_2(repository: Project) -> None:
    """As in CI without a base: an empty name, and the hash that stands for none."""
    for base in ("", "0" * 40):
        done = repository.llenergy("ab", f"--base={base}", "--", "pytest")
        assert done.ret == 2, done.text


def test_hooks_of_the_user_do_not_run_in_checkouts(repository: Project) -> None:
    hook = repository.write(".git/hooks/post-checkout", "#!/bin/sh\necho hook says no >&2\nexit 1\n")
    hook.chmod(0o755)
    done = repository.llenergy("ab", "--base=HEAD~1", "--pairs=4", "--", "pytest", "-q", "-k", "none")
    assert "hook says no" not in done.text


def test_git_tells_its_own_reason(repository: Project) -> None:
    repository.write(".git/config", "[\n")
    done = repository.llenergy("ab", "--base=HEAD~1", "--", "pytest")
    assert done.ret == 2
    assert "bad config line 1" in done.err


@pytest.mark.slow
def test_any_command_is_measured_in_turn_and_compared(repository: Project) -> None:
    # What it leaves behind must not run in later sessions.
    script = "sleep 600 > /dev/null 2>&1 &\nsleep {seconds}\necho '{{\"tokens\": 100}}' > out.json\n"
    for seconds in (0.3, 0.45):
        repository.write("bench.sh", script.format(seconds=seconds))
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", "more")
    tokens = ["--value=tokens=out.json:tokens", "--per=tokens", "--meter=nvml"]
    done = repository.run(
        *llenergy("ab", "--base=HEAD~1", "--pairs=6", *tokens, "--", "sh", "bench.sh"), timeout_s=400
    )
    assert done.ret == 1, done.text
    paired = repository.report(".llenergy/ab/ab.json")
    jsonschema.validate(paired, schema("ab-1"))
    (found,) = paired["compared"]["comparisons"]
    assert (found["id"], found["metric"], found["verdict"]) == ("sh", "J_per_tokens", "regressed")
    assert found["ratio"] == pytest.approx(1.5, rel=0.15)
    # 200 W for a third of a second or more, by 100 tokens.
    assert found["base"] == pytest.approx(0.6, rel=0.3)
    assert repository.survivors() == {}


def test_a_value_that_a_command_does_not_write_is_2_and_one_line(repository: Project) -> None:
    repository.write("out.json", '{"tokens": 100}')
    done = repository.llenergy("ab", "--a=true", "--b=:", "--value=tokens=out.json:tokens", "--meter=nvml")
    assert done.ret == 2
    last = done.err.splitlines()[-1]
    assert "out.json is of an earlier run" in last
    assert "Traceback" not in done.err
