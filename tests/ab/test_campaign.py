# SPDX-License-Identifier: Apache-2.0
"""Comparing two commits by real sessions: their order, and the verdict on each test."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import Report

from .project import Project, Result

MANY = """
import pytest
from work import use, work

def test_a(energy):
    energy(work)

@pytest.mark.parametrize("odd", ["x y", "[1]", "a::b", "ü", ""])
def test_same(energy, odd):
    energy(use, 10.0)

def test_same_again(energy):
    energy(use, 3.0)

def test_fails(energy):
    energy(work)
    assert FINE

def test_{old}(energy):
    assert "{old}"
    energy(work)

def test_unmeasured():
    assert not FINE
"""

AA = ["--base=HEAD", "--head=HEAD", "--pairs=4", "--rounds-per-session=3"]
PAIRS = ["--pairs=4+4", "--rounds-per-session=2", "--metric=energy_j", "--keep"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Result]:
    """Ten percent more joules on the head, and a test for every other verdict."""
    project = Project(tmp_path_factory.mktemp("compared"))
    project.write("test_some.py", "FINE = True\n" + MANY.replace("{old}", "old"))
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.write("test_some.py", "FINE = False\n" + MANY.replace("{old}", "new"))
    project.commit()
    return project, project.ab(*PAIRS, "--", "pytest", "-q")


def comparison(compared: tuple[Project, Result], name: str) -> Comparison:
    found = {each.id: each for each in compared[0].paired().compared.comparisons}
    return found[f"test_some.py::{name}"]


def record(report: Report, name: str) -> Record:
    return next(each for each in report.records if each.id == f"test_some.py::{name}")


def test_ten_percent_more_is_a_regression(compared: tuple[Project, Result]) -> None:
    project, result = compared
    assert result.status == 1
    found = comparison(compared, "test_a")
    assert (found.verdict, found.n_base, found.n_head) == ("regressed", 8, 8)
    assert found.ratio == pytest.approx(1.1, rel=0.001)
    paired = project.paired()
    commits = [project.git("rev-parse", name) for name in ("main", "feature")]
    assert [paired.base.source.commit, paired.head.source.commit] == commits
    assert (paired.pairs, paired.complete) == ("4+4", True)


def test_sessions_alternate(compared: tuple[Project, Result]) -> None:
    sessions = compared[0].paired().sessions
    assert "".join(each.side[0] for each in sessions) == "bhhb" * 2
    assert [each.started_at for each in sessions] == sorted(each.started_at for each in sessions)


def test_only_tests_without_a_clear_verdict_are_measured_again(compared: tuple[Project, Result]) -> None:
    project, result = compared
    base = project.paired().base
    rounds = {each.id.partition("::")[2]: len(each.rounds) for each in base.records}
    assert rounds.pop("test_a") == 8
    assert {name: n for name, n in rounds.items() if name.startswith("test_same")} == {
        **{f"test_same[{odd}]": 4 for odd in ("x y", "[1]", "a::b", "\\xfc", "")},
        "test_same_again": 4,
    }
    assert comparison(compared, "test_same_again").verdict == "unchanged"
    pairs = [line for line in result.lines if line.startswith("[pair ")]
    assert [line.partition(";")[2].split(" open")[0] for line in pairs] == [
        " 7 of 10 tests",
        " 1 of 10 tests",
        " 1 of 10 tests",
        " no test",
    ]


def test_failing_test_is_invalid_and_not_run_again(compared: tuple[Project, Result]) -> None:
    paired = compared[0].paired()
    found = comparison(compared, "test_fails")
    assert found.verdict == "invalid"
    assert found.reason.startswith("the head test failed (session 2: ")
    assert len(record(paired.base, "test_fails").rounds) == len(record(paired.head, "test_fails").rounds) == 2


def test_tests_of_one_side_are_new_or_removed_and_not_run_again(compared: tuple[Project, Result]) -> None:
    paired = compared[0].paired()
    assert comparison(compared, "test_new").verdict == "new"
    assert comparison(compared, "test_old").verdict == "removed"
    assert len(record(paired.base, "test_old").rounds) == len(record(paired.head, "test_new").rounds) == 2


def test_renamed_test_is_measured_again(project: Project) -> None:
    project.git("checkout", "-q", "-b", "feature")
    project.edit("test_some.py", "test_a", "test_z")
    project.edit("work.py", "EACH = 10.0", "EACH = 11.0")
    project.commit()
    result = project.ab("--base=main", "--pairs=4", "--rounds-per-session=2", "--", "pytest")
    assert result.status == 1
    (found,) = project.paired().compared.comparisons
    assert (found.id, found.verdict, found.n_base) == ("test_some.py::test_z", "regressed", 4)
    assert project.paired().compared.notes == [
        "renamed, and compared: test_some.py::test_a -> test_some.py::test_z"
    ]


def test_rounds_are_in_session_order(compared: tuple[Project, Result]) -> None:
    paired = compared[0].paired()
    starts = [[each.start_s for each in record(side, "test_a").rounds] for side in (paired.base, paired.head)]
    assert starts == [[1, 2, 4, 5, 5, 6, 8, 9], [2, 3, 3, 4, 6, 7, 7, 8]]


def test_compare_prints_the_same_report(
    compared: tuple[Project, Result], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    project, result = compared
    assert main(["compare", str(project.path / ".llenergy" / "ab.json")]) == 1
    assert capsys.readouterr().out == result.out


def test_progress_lines_and_the_summary_are_printed(compared: tuple[Project, Result]) -> None:
    project, result = compared
    base, head = (project.git("rev-parse", name)[:10] for name in ("main", "feature"))
    assert result.lines[:2] == [
        f"base {base} (main), head {head} (HEAD)",
        "4+4 pairs of rounds: 2 to 4 pairs of sessions, as tests need",
    ]
    assert result.lines[2] == f"session 1 (base {base[:7]}) starts; the first of a side may load models"
    assert result.lines[3] == f"session 2 (head {head[:7]}) starts; the first of a side may load models"
    assert re.fullmatch(
        r"\[pair 1 of 2, at most 4\] base 0:\d\d, head 0:\d\d; 7 of 10 tests open; "
        r"verdicts in about \d+ s; at most \d+ s left",
        result.lines[4],
    )
    assert result.lines[-2:] == [
        f"both sides, all rounds: {project.path / '.llenergy' / 'ab.json'}",
        "llenergy ab: warning: 1 test of the baseline removed",
    ]
    assert "1 regressed, 1 invalid, 1 new, 1 removed, 6 unchanged; noise " in result.out


def test_same_commit_is_unchanged_and_leaves_nothing_behind(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.edit("work.py", "EACH = 10.0", "EACH = 20.0")
    result = project.ab(*AA, "--format=json", "--", "python", "-m", "pytest")
    assert result.status == 0
    assert result.lines[0] == "4 pairs with 3 rounds per session become 6"
    message = json.loads(result.out)
    assert [(each["verdict"], each["n_base"]) for each in message["comparisons"]] == [("unchanged", 6)]
    assert message["notes"] == [
        "both sides are the same commit; differences are noise (A/A)",
        "uncommitted changes are not measured; --head . measures the working tree",
    ]
    paired = project.paired()
    assert ([each.side for each in paired.sessions], paired.pairs) == (["base", "head", "head", "base"], "6")
    assert project.git("worktree", "list").count("\n") == 0
    assert {each.name for each in (project.path / ".llenergy").rglob("*")} == {"ab.json", "ab", ".gitignore"}
    assert not list((project.path.parent / "cache").rglob("*.py"))


def test_kept_reports_are_named_by_session(compared: tuple[Project, Result]) -> None:
    (directory,) = (compared[0].path / ".llenergy" / "ab").glob("*/sessions")
    reports = sorted(each.name for each in directory.glob("*.json"))
    order = itertools.islice(itertools.cycle(["base", "head", "head", "base"]), 8)
    assert reports == [f"{number:03d}-{side}.1.json" for number, side in enumerate(order, 1)]
