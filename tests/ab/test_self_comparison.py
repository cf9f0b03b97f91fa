# SPDX-License-Identifier: Apache-2.0
"""Unchanged code compared with itself: false alarms, spread and floor where they are known by hand."""

from __future__ import annotations

import json
import re

import pytest

from pytest_llenergy.ab import campaign
from pytest_llenergy.ab.self_comparison import estimate_floor
from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.record.comparison import Comparison

from .fake import FakeSessions
from .project import Project, Result

ONCE = ["--pairs=6", "--rounds-per-session=6", "--metric=energy_j", "--", "pytest"]
A = "t.py::test_a"

#: What the head draws more in each comparison. The fourth is a false alarm.
FACTORS = {2: 1.011, 3: 0.985, 4: 1.06}


def factor_of(files: SessionFiles) -> float:
    number = re.search(r"sessions-(\d+)", str(files.directory))
    return FACTORS.get(int(number[1]), 1.0) if number and "head" in files.directory.name else 1.0


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Result]:
    """Five comparisons of a commit with itself."""
    project, sessions = Project(tmp_path_factory.mktemp("repeated")), FakeSessions()
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()
    sessions.factor = factor_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "run_session", sessions)
        return project, project.ab("--aa=5", *ONCE)


def test_alarms_and_ratios_are_those_that_were_driven(repeated: tuple[Project, Result]) -> None:
    project, result = repeated
    assert result.status == 0
    test, alarms, floor = result.out.splitlines()
    assert test.startswith("t.py::test_a, energy_j: 1 regressed, 4 unchanged; ratios 0.985 … 1.060; finds ")
    assert alarms == "false alarms: 1 of 5 comparisons"
    # 6 % less the half width of the interval, which six rounds with 0.2 % noise have.
    assert re.fullmatch(r"floor of energy_j: (5\.[5-9])%; use it by --floor=\1%", floor)
    pairs = [line.partition("]")[0] for line in result.lines if "pair 1" in line]
    assert pairs == [f"[comparison {number} of 5, pair 1 of at most 1" for number in range(1, 6)]
    assert "[comparison 4 of 5] 1 regressed" in result.lines
    assert project.git("worktree", "list").count("\n") == 0


@pytest.mark.parametrize(
    ("limits", "floor"),
    [
        ([(0.99, 1.01)] * 5, 0.0),
        ([(0.99, 1.01), (1.0101, 1.03)], 0.011),
        ([(0.9, 0.98), (1.01, 1.03)], 0.021),
        ([(1.01, 1.03)] * 19 + [(1.1, 1.2)], 0.01),
    ],
)
def test_the_floor_is_what_unchanged_code_was_certain_of(
    limits: list[tuple[float, float]], floor: float
) -> None:
    found = [
        Comparison(id="t", metric="energy_j", unit="J", verdict="worse", reason="", low=low, high=high)
        for low, high in limits
    ]
    assert estimate_floor(found) == pytest.approx(floor)


def test_a_stopped_campaign_continues_with_more(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()

    def factor(files: SessionFiles) -> float:
        if "sessions-002" in str(files.directory):
            raise KeyboardInterrupt
        return 1.0

    sessions.factor = factor
    assert project.ab("--aa=3", *ONCE).status == 130
    sessions.factor = lambda _: 1.0
    result = project.ab("--aa=4", *ONCE)
    assert result.status == 0
    assert "resuming a stopped comparison: 2 sessions are finished" in result.lines
    assert "false alarms: 0 of 4 comparisons" in result.out
    assert "; too few for a floor: it needs 5 comparisons" in result.out
    assert len([name for name in sessions.ran if name == "002-head"]) == 4


def test_the_working_tree_is_compared_with_itself(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 20.0}))
    assert project.ab("--aa=1", "--head=.", *ONCE).status == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--aa=0"], "--aa=0 must be 1 or more"),
        (["--aa=2", "--base=main"], "--aa compares the head with itself; it allows neither --base nor "),
        (["--aa=2", "--a=-q"], "--aa compares the head with itself; "),
        (["--aa=2", "--head=.", "--setup=true"], "--base, --head and --setup compare commits, "),
        (["--aa=2", "--format=html"], "--aa prints lines; it allows neither --format nor --output"),
    ],
)
def test_unsuitable_options_are_refused(project: Project, args: list[str], message: str) -> None:
    assert project.error(*args, "--", "pytest").startswith(message)
