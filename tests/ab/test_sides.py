# SPDX-License-Identifier: Apache-2.0
"""Mistakes are one line before anything is measured; working trees, environments and option sets."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llenergy.ab import sides
from pytest_llenergy.ab.commands import RESERVED_OPTIONS, Command, parse_pytest
from pytest_llenergy.ab.session import SessionFiles, Side
from pytest_llenergy.ab.sides import SAME_CODE, check_imports, list_own_modules
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import Source
from pytest_llenergy.report.store import read_paired_report

from .fake import FakeSessions
from .project import Project

ONCE = ["--pairs=4", "--rounds-per-session=4", "--metric=energy_j"]
SAME = ["--base=HEAD", "--head=HEAD"]
ROUNDS = ["--rounds-per-session=2", "--metric=energy_j"]
A = "t.py::test_a"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pytest", Command((), (sys.executable,))),
        ("/opt/venv/bin/pytest benchmarks -k x", Command(("benchmarks", "-k", "x"), (sys.executable,))),
        ("python3.12 -X dev -m pytest -q", Command(("-q",), (sys.executable, "-X", "dev"))),
        ("/opt/bin/python -m pytest", Command((), ("/opt/bin/python",))),
        ("python -m unittest", None),
        ("python pytest", None),
        ("tox run", None),
    ],
)
def test_pytest_is_recognised(text: str, found: Command | None) -> None:
    assert parse_pytest(tuple(text.split())) == found


@pytest.mark.parametrize("name", RESERVED_OPTIONS)
def test_options_that_ab_sets_are_refused(name: str) -> None:
    for words in ((f"{name}=x",), (name, "x")):
        with pytest.raises(PlanError, match=f"^{name} is not allowed in the pytest command; use -o"):
            parse_pytest(("pytest", *words))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (SAME, "no command; write it after --, such as: llenergy ab --base origin/main -- "),
        (["--base=nothing", "--", "pytest"], "git knows no commit 'nothing' in this repository"),
        (["--head=-x", "--", "pytest"], "git knows no commit '-x' in this repository"),
        ([*SAME, "--pairs=2", "--", "pytest"], "invalid pairs '2'; the first stage needs at least 4 pairs"),
        ([*SAME, "--rounds-per-session=0", "--", "pytest"], "--rounds-per-session=0 must be 1 or more"),
        ([*SAME, "--metric=energyj", "--", "pytest"], "unknown metric 'energyj'"),
        (
            [*SAME, "-o", "no/where.json", "--", "pytest"],
            "--output=no/where.json: no directory no; create it",
        ),
        ([*SAME, "--a=-q", "--", "pytest"], "--base, --head and --setup compare commits, --a and --b "),
        (["--a='", "--", "pytest"], "--a=': No closing quotation"),
        (["--b=--energy-save=x", "--", "pytest"], "--b: --energy-save is not allowed in the pytest command"),
        ([*SAME, "--", "pytest", "/etc/../PROJECT/t.py"], "/etc/../PROJECT/t.py is in your checkout, but "),
    ],
)
def test_a_usage_error_is_one_line(
    project: Project, sessions: FakeSessions, args: list[str], message: str
) -> None:
    words = [word.replace("/PROJECT", str(project.path)) for word in args]
    assert project.error(*words).startswith(message.replace("/PROJECT", str(project.path)))
    assert sessions.ran == []


def test_options_in_the_environment_are_checked(project: Project) -> None:
    project.environment["PYTEST_ADDOPTS"] = "-q --energy-save=x"
    assert project.error(*SAME, "--", "pytest").startswith("PYTEST_ADDOPTS: --energy-save is not allowed")


def test_a_directory_outside_git_is_refused(project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    project.path = outside
    assert project.error(*SAME, "--", "pytest") == (
        f"{outside} is not in a git checkout, or git is not installed; compare two commands or option sets: "
        "--a='…' --b='…'"
    )


@pytest.mark.parametrize("args", [[], ["--base=main"], ["--head=HEAD"], ["--base=main", "--head=."]])
def test_the_same_commit_is_compared_only_if_both_are_named(
    project: Project, sessions: FakeSessions, args: list[str]
) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()
    result = project.ab(*args, *ONCE, "--", "pytest")
    assert (result.status, bool(sessions.ran)) == ((0, True) if len(args) == 2 else (2, False))
    if result.status == 2:
        message = f"are the same commit {project.git('rev-parse', 'HEAD')[:10]}, so nothing can differ; name "
        assert message in result.lines[-1]


def test_uncommitted_changes_are_measured(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()
    project.write("tests.json", json.dumps({A: 11.0}))
    result = project.ab("--base=HEAD", "--head=.", "--pairs=4", *ROUNDS, "--", "pytest")
    assert result.status == 1
    assert result.lines[0].endswith(" (working tree)")
    assert project.paired().compared.comparisons[0].ratio == pytest.approx(1.1, rel=0.001)
    assert [side.root == project.path for side in sessions.sides[:2]] == [False, True]


@pytest.mark.parametrize("sides", [["--a=-q", "--b=-v"], ["--base=HEAD", "--head=."]])
@pytest.mark.parametrize(("name", "refused"), [("more.py", True), ("left.json", False)])
def test_a_working_tree_that_changes_meanwhile_is_refused(
    project: Project, sessions: FakeSessions, sides: list[str], name: str, refused: bool
) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()

    def leave(_: SessionFiles) -> float:
        project.write(name, "x")
        return 1.0

    sessions.factor = leave
    result = project.ab(*sides, "--pairs=4", *ROUNDS, "--", "pytest")
    assert result.status == (2 if refused else 0), result.err
    changed = "llenergy ab: the working tree has changed since the comparison began; "
    assert result.lines[-1].startswith(changed) == refused


def test_a_subdirectory_is_entered_in_each_checkout(project: Project, sessions: FakeSessions) -> None:
    project.write("below/tests.json", json.dumps({A: 10.0}))
    project.commit()
    project.path = project.path / "below"
    assert project.ab(*SAME, *ONCE, "--", "pytest", ".").status == 0
    paired = read_paired_report(project.path.parent / ".llenergy" / "ab" / "ab.json")
    assert paired.compared.comparisons[0].verdict == "unchanged"


def test_each_side_has_its_own_environment_made_once(
    project: Project, sessions: FakeSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "VENV_COMMAND", (*sides.VENV_COMMAND, "--without-pip"))
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()
    setup = "--setup=echo $VIRTUAL_ENV >> ../made; pwd >> ../made"
    sessions.happens[2] = lambda _: -9
    project.ab(*SAME, *ONCE, setup, "--", "pytest")
    (made,) = (Path(project.environment["LLENERGY_CACHE_DIR"]) / "ab").glob("*/made")
    root = made.parent
    lines = made.read_text().splitlines()
    assert lines == [f"{root}/base-venv", f"{root}/base", f"{root}/head-venv", f"{root}/head"]
    sessions.happens[2] = lambda _: -9
    project.ab(*SAME, *ONCE, setup, "--", "pytest")
    assert made.read_text().splitlines() == lines


def test_a_failing_setup_shows_its_output(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "VENV_COMMAND", (*sides.VENV_COMMAND, "--without-pip"))
    result = project.ab(*SAME, "--setup", "echo no luck; exit 3", "--", "pytest")
    assert result.lines[-2] == "  | no luck"
    (log,) = (project.path / ".llenergy").rglob("setup-base.log")
    assert result.lines[-1] == (
        "llenergy ab: base: --setup 'echo no luck; exit 3' failed with exit code 3: 'no luck'; "
        f"the whole log: {log}"
    )


@pytest.mark.parametrize("own", ["src/thing/__init__.py", "packages/b/src/thing.py", "thing.py"])
@pytest.mark.parametrize("place", ["site-packages", "clone/src"])
def test_own_code_imported_from_elsewhere_is_refused(
    project: Project, tmp_path: Path, own: str, place: str
) -> None:
    """A copy that is installed, or an editable installation of another clone."""
    project.write(own, "")
    project.write("packages/b/setup.py", "")
    project.commit()
    module = tmp_path / place / own[own.index("thing") :]
    shown = own.removesuffix("/__init__.py")
    assert list_own_modules(project.path)["thing"] == shown
    imports = tmp_path / "modules-1.json"
    imports.write_text(json.dumps({"work": str(project.path / "work.py"), "thing": str(module)}))
    side = Side("base", "x", "x", project.path, project.path, (), {}, Source())
    with pytest.raises(PlanError) as caught:
        check_imports(side, [imports])
    assert str(caught.value) == f"base imported thing from {module} instead of its own {shown}, {SAME_CODE}"
    # Its own environment may have a copy.
    check_imports(replace(side, venv=tmp_path), [imports])


def test_two_option_sets_are_compared_parameter_by_parameter(
    project: Project, sessions: FakeSessions
) -> None:
    """The options name the file that the session measures."""
    for dtype, factor in (("f32", 10.0), ("bf16", 9.0)):
        tests = {
            f"t.py::test[{dtype}-{n}]": {"joules": factor * n, "params": {"dtype": dtype, "n": n}}
            for n in (1, 8)
        }
        project.write(f"{dtype}/tests.json", json.dumps(tests))
    sessions.directory = lambda side: side.directory / side.args[-1]
    result = project.ab("--a=f32", "--b=bf16", *ONCE, "--", "pytest")
    assert result.status == 0, result.err
    found = {each.id: each for each in project.paired().compared.comparisons}
    assert list(found) == ["t.py::test[1]", "t.py::test[8]"]
    for each in found.values():
        assert (each.verdict, each.n_base) == ("improved", 4)
        # No ratio across unlike precision in silence.
        assert "different workload: params.dtype: 'f32' -> 'bf16'" in each.notes
    compared = project.paired().compared
    assert [compared.base.origin, compared.head.origin] == ["f32", "bf16"]
    assert (result.lines[0], compared.base.commit) == ("a: pytest f32; b: pytest bf16", None)


def test_two_commands_may_be_pytest_of_two_interpreters(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    python = "/opt/python/bin/python"
    done = project.ab(f"--a={python} -m pytest -q", "--b=python -X dev -m pytest -q", *ONCE)
    assert done.status == 0, done.err
    assert [side.python for side in sessions.sides[:2]] == [(python,), (sys.executable, "-X", "dev")]
