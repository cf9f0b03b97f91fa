# SPDX-License-Identifier: Apache-2.0
"""Mistakes are reported in one line, before anything is measured where possible."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from pytest_llenergy.ab import checkouts

from .project import Project


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--base=HEAD", "--head=HEAD"],
            "no command; write it after --, such as: llenergy ab --base origin/main -- ",
        ),
        (
            ["--base=HEAD", "--head=HEAD", "--", "make", "bench"],
            "'make bench' is not a pytest command; write one after --, ",
        ),
        (["--base=nothing", "--", "pytest"], "git knows no commit 'nothing' in this repository"),
        (["--head=-x", "--", "pytest"], "git knows no commit '-x' in this repository"),
        (
            ["--base=HEAD", "--head=HEAD", "--pairs=2", "--", "pytest"],
            "invalid pairs '2'; the first stage needs at least 4 pairs",
        ),
        (
            ["--base=HEAD", "--head=HEAD", "--rounds-per-session=0", "--", "pytest"],
            "--rounds-per-session=0 must be 1 or more",
        ),
        (["--base=HEAD", "--head=HEAD", "--metric=energyj", "--", "pytest"], "unknown metric 'energyj'"),
        (
            ["--base=HEAD", "--head=HEAD", "-o", "no/where.json", "--", "pytest"],
            "--output=no/where.json: no directory no; create it",
        ),
        (
            ["--base=HEAD", "--head=HEAD", "--a=-q", "--", "pytest"],
            "--base, --head and --setup compare commits, --a and --b ",
        ),
        (["--a='", "--", "pytest"], "--a=': No closing quotation"),
        (["--a-python=nothing", "--", "pytest"], "--a-python=nothing: no such program"),
    ],
)
def test_usage_error_is_one_line(project: Project, args: list[str], message: str) -> None:
    assert project.error(*args).startswith(message)


def test_absolute_path_into_the_checkout_is_refused(project: Project) -> None:
    message = project.error("--base=HEAD", "--head=HEAD", "--", "pytest", f"{project.path}/test_some.py")
    assert message.endswith(
        "is in your checkout, but each side has its own; write the path relative to this directory"
    )


def test_directory_outside_git_is_refused(project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    project.path = outside
    assert project.error("--base=HEAD", "--head=HEAD", "--", "pytest") == (
        f"{outside} is not in a git checkout; compare two option sets: --a='…' --b='…'"
    )


@pytest.mark.parametrize("args", [[], ["--base=main"], ["--head=HEAD"], ["--base=main", "--head=."]])
def test_same_commit_is_compared_only_if_both_are_named(project: Project, args: list[str]) -> None:
    result = project.ab(*args, "--pairs=4", "--rounds-per-session=4", "--", "pytest")
    if len(args) == 2:
        assert result.status == 0
        return
    assert result.status == 2
    message = f"are the same commit {project.git('rev-parse', 'HEAD')[:10]}, so nothing can differ; name "
    assert message in result.lines[-1]
    assert project.session_logs() == []


def test_failing_setup_shows_its_output(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkouts, "VENV_COMMAND", (*checkouts.VENV_COMMAND, "--without-pip"))
    result = project.ab("--base=HEAD", "--head=HEAD", "--setup", "echo no luck; exit 3", "--", "pytest")
    assert result.lines[-2] == "  | no luck"
    message = result.lines[-1].removeprefix("llenergy ab: ")
    (log,) = (project.path / ".llenergy").rglob("setup-base.log")
    assert message == (
        "base: --setup 'echo no luck; exit 3' failed with exit code 3: 'no luck'; the whole log: " + str(log)
    )


def test_interpreter_without_pytest_is_refused(project: Project, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    message = project.error(f"--b-python={python}", "--", "pytest")
    assert message == (f"head: pytest is not installed for {python}; install it, for example in --setup")
