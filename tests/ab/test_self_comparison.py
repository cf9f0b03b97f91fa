# SPDX-License-Identifier: Apache-2.0
"""Unchanged code compared with itself: false alarms, spread and floor where they are known by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pytest_llenergy.ab import campaign
from pytest_llenergy.ab.self_comparison import apply_floors, wilson_limits
from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import PairedReport
from pytest_llenergy.report.store import read_paired_report

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
        return project, project.ab("--aa=5", "-o", "aa.json", *ONCE)


def result_of(repeated: tuple[Project, Result]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repeated[0].path / "aa.json").read_text())
    return found


def read_comparisons(project: Project) -> list[PairedReport]:
    return [
        read_paired_report(path) for path in sorted((project.path / ".llenergy" / "ab" / "aa").glob("*.json"))
    ]


def test_alarms_are_counted_with_their_limits(repeated: tuple[Project, Result]) -> None:
    found = result_of(repeated)
    assert repeated[1].status == 0
    assert (found["comparisons"], found["pairs"]) == (5, "6")
    # Wilson's limits of 1 of 5, from a table.
    low, high = pytest.approx(0.0362, abs=1e-4), pytest.approx(0.6245, abs=1e-4)
    assert found["alarms"] == {"alarms": 1, "count": 5, "low": low, "high": high}


def test_ratios_are_those_that_were_driven(repeated: tuple[Project, Result]) -> None:
    (test,) = result_of(repeated)["tests"]
    assert test["ratios"] == pytest.approx([1, 1.011, 0.985, 1.06, 1], abs=0.001)
    assert test["detectable"] > 0.02
    assert test["verdicts"] == {"regressed": 1, "unchanged": 4}
    line = "t.py::test_a, energy_j: 1 regressed, 4 unchanged; ratios 0.985 … 1.060; finds "
    assert repeated[1].out.startswith(line)


def test_floor_is_the_largest_certain_change_of_few(repeated: tuple[Project, Result]) -> None:
    project, result = repeated
    (floor,) = result_of(repeated)["floors"]
    # 6 % less the half width of the interval, which six rounds with 0.2 % noise have.
    assert floor["floor"] == pytest.approx(0.0575, abs=0.0021)
    assert (floor["comparisons"], floor["estimates"]) == (5, 5)
    assert result_of(repeated)["kept"]
    kept = project.path / ".llenergy" / "floors" / f"{floor['key']}.json"
    assert json.loads(kept.read_text()) == [floor]
    assert floor["metric"] == "energy_j"
    assert f"floor of energy_j: {floor['floor']:.1%}, estimates: 5, on " in result.out


def test_progress_names_the_comparison_and_all_rounds_are_kept(repeated: tuple[Project, Result]) -> None:
    project, result = repeated
    pairs = [line.partition("]")[0] for line in result.lines if "pair 1" in line]
    assert pairs == [f"[comparison {number} of 5, pair 1 of at most 1" for number in range(1, 6)]
    assert "[comparison 4 of 5] 1 regressed; about " in result.err
    files = sorted((project.path / ".llenergy" / "ab" / "aa").glob("*.json"))
    assert len(files) == 5
    assert len(read_paired_report(files[3]).head.records[0].rounds) == 6
    assert project.git("worktree", "list").count("\n") == 0
    assert "false alarms: 1 of 5 (3.6% to 62.4%) comparisons" in result.out


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
    date = result_of(repeated)["date"]
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
            apply_floors([Criterion()], project.path, read_comparisons(project)[0].base)
    finally:
        kept.write_text(text)


def test_a_stopped_campaign_reports_what_it_has_and_continues_with_more(
    project: Project, sessions: FakeSessions
) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()

    def factor(files: SessionFiles) -> float:
        if "sessions-002" in str(files.directory):
            raise KeyboardInterrupt
        return 1.0

    sessions.factor = factor
    stopped = project.ab("--aa=3", *ONCE)
    assert stopped.status == 130
    assert "1 of 3 comparisons are finished:" in stopped.lines
    assert "false alarms: 0 of 1 (0.0% to 79.3%) comparisons" in stopped.out
    sessions.factor = lambda _: 1.0
    result = project.ab("--aa=4", *ONCE)
    assert result.status == 0
    assert "resuming a stopped comparison: 2 sessions are finished" in result.lines
    assert "false alarms: 0 of 4 (0.0% to 49.0%) comparisons" in result.out
    assert "the floor is not kept: it needs 5 comparisons" in result.out
    assert len([name for name in sessions.ran if name == "002-head.1"]) == 4


def test_the_working_tree_is_compared_with_itself(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 20.0}))
    result = project.ab("--aa=1", "--head=.", "--format=json", *ONCE)
    found = json.loads(result.out)
    assert (result.status, found["code"], found["kept"]) == (0, "the working tree", False)
    assert not (project.path / ".llenergy" / "floors").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--aa=0"], "--aa=0 must be 1 or more"),
        (["--aa=2", "--base=main"], "--aa compares the head with itself; it allows neither --base nor "),
        (["--aa=2", "--a=-q"], "--aa compares the head with itself; "),
        (["--aa=2", "--head=.", "--setup=true"], "--base, --head and --setup compare commits, "),
        (["--aa=2", "--format=html"], "--aa has no format html; choose text or json"),
    ],
)
def test_unsuitable_options_are_refused(project: Project, args: list[str], message: str) -> None:
    assert project.error(*args, "--", "pytest").startswith(message)


def test_wilson_limits() -> None:
    assert wilson_limits(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_limits(0, 0) == (0.0, 1.0)
