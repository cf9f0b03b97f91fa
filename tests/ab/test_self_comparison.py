# SPDX-License-Identifier: Apache-2.0
"""Unchanged code compared with itself: false alarms, spread and floor where they are known by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pytest_llenergy.ab import campaign
from pytest_llenergy.ab.self_comparison import apply_floors
from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.errors import PlanError

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


def read_floor(repeated: tuple[Project, Result]) -> dict[str, Any]:
    (path,) = (repeated[0].path / ".llenergy" / "floors").glob("*.json")
    (found,) = json.loads(path.read_text())
    assert path.name == f"{found['key']}.json"
    return dict(found)


def test_alarms_and_ratios_are_those_that_were_driven(repeated: tuple[Project, Result]) -> None:
    project, result = repeated
    assert result.status == 0
    lines = result.out.splitlines()
    line = "t.py::test_a, energy_j: 1 regressed, 4 unchanged; ratios 0.985 … 1.060; finds "
    assert lines[0].startswith(line)
    assert lines[1] == "false alarms: 1 of 5 comparisons"
    pairs = [line.partition("]")[0] for line in result.lines if "pair 1" in line]
    assert pairs == [f"[comparison {number} of 5, pair 1 of at most 1" for number in range(1, 6)]
    assert "[comparison 4 of 5] 1 regressed" in result.lines
    assert project.git("worktree", "list").count("\n") == 0


def test_floor_is_the_largest_certain_change_of_few(repeated: tuple[Project, Result]) -> None:
    floor = read_floor(repeated)
    # 6 % less the half width of the interval, which six rounds with 0.2 % noise have.
    assert floor["floor"] == pytest.approx(0.0575, abs=0.0021)
    assert (floor["metric"], floor["comparisons"], floor["estimates"]) == ("energy_j", 5, 5)
    assert f"floor of energy_j: {floor['floor']:.1%}, estimates: 5, on " in repeated[1].out


def test_later_comparisons_use_the_floor_and_say_so_unless_one_is_named(
    repeated: tuple[Project, Result], sessions: FakeSessions
) -> None:
    """Four percent more on the head: above the threshold, and below the floor that was learned."""
    project = repeated[0]
    project.git("checkout", "-q", "-b", "feature")
    project.write("tests.json", json.dumps({A: 10.4}))
    project.commit()
    words = ["--base=main", "--fail-on=energy_j:3%", *ONCE]
    result = project.ab(*words)
    (line,) = [line for line in result.lines if line.startswith("floor ")]
    date = read_floor(repeated)["date"]
    assert re.match(rf"floor 5\.[5-9]% \(from 5 A/A comparisons of {date}\), in .*; changes up to it", line)
    (found,) = project.paired().compared.comparisons
    assert result.status == 0
    assert found.rule is not None
    assert found.rule.floor == pytest.approx(0.0575, abs=0.0021)
    named = project.ab("--floor=1%", *words)
    assert (named.status, "A/A comparisons" in named.err) == (1, False)


@pytest.mark.parametrize("floor", ["1e400", "-0.1", "NaN"])
def test_file_with_an_impossible_floor_is_refused(repeated: tuple[Project, Result], floor: str) -> None:
    project = repeated[0]
    (kept,) = (project.path / ".llenergy" / "floors").glob("*.json")
    text = kept.read_text()
    kept.write_text(re.sub('"floor": [0-9.]+', f'"floor": {floor}', text))
    try:
        with pytest.raises(PlanError, match=r"is not a file of floors .*; delete it"):
            apply_floors([Criterion()], project.path, project.paired().base)
    finally:
        kept.write_text(text)


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
    assert "the floor is not kept: it needs 5 comparisons" in result.out
    assert len([name for name in sessions.ran if name == "002-head"]) == 4


def test_the_working_tree_is_compared_with_itself(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 20.0}))
    assert project.ab("--aa=1", "--head=.", *ONCE).status == 0
    assert not (project.path / ".llenergy" / "floors").exists()


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
