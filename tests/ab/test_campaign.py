# SPDX-License-Identifier: Apache-2.0
"""The order of sessions, who is measured again, what is kept of a stopped comparison, and what is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.ab.session import SessionFiles
from pytest_llenergy.ab.sides import plan_schedule
from pytest_llenergy.cli import main
from pytest_llenergy.compare.stages import parse_pairs
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.report import encode_report
from pytest_llenergy.report.store import read_paired_report

from ..compare.runs import record_of, report_of
from .fake import FakeSessions, write_summary
from .project import Project, Result

ROUNDS = ["--rounds-per-session=2", "--metric=energy_j"]
PAIRS = ["--base=main", "--pairs=4+4", *ROUNDS, "--", "pytest"]
A = "t.py::test_a"


def two_commits(project: Project, base: dict[str, Any] | None, head: dict[str, Any] | None) -> None:
    """Commit what both sides measure; None is a side without tests."""
    if base is not None:
        project.write("tests.json", json.dumps(base))
    project.commit()
    project.git("checkout", "-q", "-b", "feature")
    if head is None:
        (project.path / "tests.json").unlink()
    else:
        project.write("tests.json", json.dumps(head))
    project.commit()


def found_of(project: Project) -> dict[str, Comparison]:
    return {each.id.partition("::")[2]: each for each in project.paired().compared.comparisons}


def compared(project: Project, base: dict[str, Any] | None, head: dict[str, Any] | None) -> Result:
    two_commits(project, base, head)
    return project.ab(*PAIRS)


def test_sessions_alternate_and_only_open_tests_are_measured_again(
    project: Project, sessions: FakeSessions, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {A: 10.0, "t.py::test_same[ü]": 3.0}
    result = compared(project, base, {**base, A: 11.0})
    assert result.status == 1
    paired, found = project.paired(), found_of(project)
    assert [each.side[0] for each in paired.sessions] == list("bhhb" * 2)
    assert (found["test_a"].verdict, found["test_a"].n_base, found["test_a"].n_head) == ("regressed", 8, 8)
    assert found["test_a"].ratio == pytest.approx(1.1, rel=0.001)
    assert (found["test_same[ü]"].verdict, found["test_same[ü]"].n_base) == ("unchanged", 4)
    assert [list(each.done) for each in sessions.earlier] == [[]] * 4 + [["t.py::test_same[ü]"]] * 4
    # Under pytest-xdist a test would run on any board that is free, and its rounds would not count.
    assert [each.devices.get(A) for each in sessions.earlier] == [None, *[["GPU-a"]] * 7]
    (record,) = [each for each in paired.head.records if each.id == A]
    assert [each.session for each in record.rounds] == [2, 2, 3, 3, 6, 6, 7, 7]
    commits = [project.git("rev-parse", name) for name in ("main", "feature")]
    lines = [line.partition(";")[0] for line in result.lines]
    assert lines[0] == f"base {commits[0][:10]} (main), head {commits[1][:10]} (HEAD)"
    assert lines[1] == "4+4 pairs of rounds: at most 4 pairs of sessions"
    assert lines[2] == f"session 1 (base {commits[0][:7]}) starts"
    pairs = [f"[pair {number} of at most 4" for number in range(1, 5)]
    assert [line.partition("]")[0] for line in lines[4:8]] == pairs
    assert "both sides, all rounds" in result.lines[-2]
    assert result.lines[-1] == "llenergy ab: fail, 1 of 2 tests regressed (+10.0%)"
    assert project.git("worktree", "list").count("\n") == 0
    left = {each.name for each in (project.path / ".llenergy").rglob("*")}
    assert left - {"lock"} == {"ab.json", "ab", ".gitignore"}
    assert main(["compare", str(project.path / ".llenergy" / "ab" / "ab.json")]) == 1
    assert "regressed" in capsys.readouterr().out


def test_same_commit_is_unchanged(project: Project, sessions: FakeSessions) -> None:
    project.write("tests.json", json.dumps({A: 10.0}))
    project.commit()
    project.write("tests.json", "{}")
    done = project.ab("--base=HEAD", "--head=HEAD", "--pairs=4", *ROUNDS, "--format=json", "--", "pytest")
    assert done.status == 0
    message = json.loads(done.out)
    assert [(each["verdict"], each["n_base"]) for each in message["comparisons"]] == [("unchanged", 4)]
    assert message["notes"] == [
        "both sides are the same commit; differences are noise (A/A)",
        "uncommitted changes are not measured; --head . measures the working tree",
    ]


def test_tests_that_more_sessions_cannot_decide_are_not_run_again(
    project: Project, sessions: FakeSessions
) -> None:
    base = {A: 10.0, "t.py::test_fails": 10.0, "t.py::test_old": 10.0}
    fails = {"status": "failed", "reason": "boom"}
    head = {A: 11.0, "t.py::test_fails": fails, "t.py::test_new": {"params": {"n": 3}}}
    assert compared(project, base, head).status == 1
    found = found_of(project)
    assert (found["test_fails"].verdict, found["test_new"].verdict) == ("invalid", "new")
    assert (found["test_old"].verdict, found["test_a"].verdict) == ("removed", "regressed")
    assert found["test_fails"].reason == "the head test failed (session 2: boom)"
    (fails_record,) = [each for each in project.paired().base.records if each.id.endswith("fails")]
    assert len(fails_record.rounds) == 2


def test_a_broken_budget_is_measured_and_compared_all_the_same(
    project: Project, sessions: FakeSessions
) -> None:
    over = {"status": "failed", "reason": "energy_gate: too much", "failed_gate": True}
    assert compared(project, {A: 10.0}, {A: {"joules": 10.0, **over}}).status == 0
    assert found_of(project)["test_a"].verdict == "unchanged"


@pytest.mark.parametrize("args", [["pytest", "tests.json"], ["pytest", "-q"]])
def test_a_baseline_without_energy_tests_passes_and_says_so(
    project: Project, sessions: FakeSessions, args: list[str]
) -> None:
    two_commits(project, None if len(args[1]) > 2 else {}, {A: 10.0})
    result = project.ab("--base=main", "--pairs=4", "--", *args)
    assert (result.status, result.lines[-1]) == (0, "llenergy ab: pass, no baseline: 1 new test")
    paired = project.paired()
    commits = [project.git("rev-parse", name) for name in ("main", "feature")]
    assert (paired.base.source.commit, len(paired.base.records)) == (commits[0], 0)


def test_a_head_without_energy_tests_has_removed_them(project: Project, sessions: FakeSessions) -> None:
    two_commits(project, {A: 10.0}, None)
    result = project.ab("--base=main", "--pairs=4", "--", "pytest", "tests.json")
    assert (result.status, found_of(project)["test_a"].verdict) == (5, "removed")
    assert result.lines[-1] == "llenergy ab: fail, 1 of 1 test removed, nothing was compared"


def killed(files: SessionFiles) -> int:
    return -9


def early(files: SessionFiles) -> int:
    return 0


def stopped(files: SessionFiles) -> int:
    write_summary(files, stopped=True)
    return 1


def unwritten(files: SessionFiles) -> int:
    write_summary(files)
    return 0


def partly(files: SessionFiles) -> int:
    files.report.write_bytes(encode_report(report_of(complete=False)))
    write_summary(files)
    return 1


@pytest.mark.parametrize(
    ("happens", "how"),
    [
        (killed, "was killed by signal 9: 'ERROR: no luck'"),
        (lambda _: 2, "ended with exit code 2: 'ERROR: no luck'"),
        (early, "ended with exit code 0 before all tests had run: "),
        (stopped, "ended with exit code 1 before all tests had run: "),
        (unwritten, "ended with exit code 0 before all tests had run: "),
        (partly, "ended with exit code 1 before all tests had run: "),
    ],
)
def test_a_session_that_does_not_finish_stops_the_comparison_which_can_continue(
    project: Project, sessions: FakeSessions, happens: Any, how: str
) -> None:
    two_commits(project, {A: 10.0}, {A: 10.0})
    sessions.happens[3] = happens
    for _ in range(2):
        result = project.ab(*PAIRS)
        assert (result.status, result.out) == (2, "")
        assert f"session 3 (head {project.git('rev-parse', 'HEAD')[:7]}) {how}" in result.lines[-1]
        assert "  | ERROR: no luck" in result.lines
    assert "resuming a stopped comparison: 2 sessions are finished" in result.lines
    assert sessions.ran == ["001-base", "002-head", "003-head", "003-head"]
    del sessions.happens[3]
    assert project.ab(*PAIRS).status == 0
    assert [len(each.rounds) for each in project.paired().head.records] == [4]
    assert sessions.ran[4:] == ["003-head", "004-base"]


def test_an_interrupted_comparison_continues_with_the_session_that_was_stopped(
    project: Project, sessions: FakeSessions
) -> None:
    two_commits(project, {A: 10.0, "t.py::b": 1.0}, {A: 10.0, "t.py::b": 1.0})

    def interrupt(files: SessionFiles) -> int:
        files.report.write_bytes(encode_report(report_of(record_of(A, [10.0, 10.0]), complete=False)))
        raise KeyboardInterrupt

    sessions.happens[4] = interrupt
    result = project.ab(*PAIRS)
    assert result.status == 130
    assert result.lines[-1] == "llenergy ab: interrupted; run the same command again to continue"
    sessions.happens.clear()
    assert project.ab(*PAIRS).status == 0
    assert sessions.ran == ["001-base", "002-head", "003-head", "004-base", "004-base"]
    paired = project.paired()
    assert [len(each.rounds) for each in paired.base.records] == [4, 4]
    assert [each.side[0] for each in paired.sessions] == list("bhhb")
    # Nothing of it is left to resume.
    assert project.ab(*PAIRS).status == 0
    assert len(sessions.ran) == 9


def test_fresh_discards_what_was_measured(project: Project, sessions: FakeSessions) -> None:
    two_commits(project, {A: 10.0}, {A: 10.0})
    sessions.happens[3] = killed
    project.ab(*PAIRS)
    # What was asked, such as a key among options, is not written anywhere.
    (state,) = (project.path / ".llenergy" / "ab").glob("*/")
    assert not any(b"pytest" in path.read_bytes()[:200] for path in state.glob("*") if path.is_file())
    sessions.happens.clear()
    assert project.ab("--fresh", *PAIRS).status == 0
    assert sessions.ran[3:] == ["001-base", "002-head", "003-head", "004-base"]


def test_clean_removes_all_unless_a_comparison_runs(project: Project, sessions: FakeSessions) -> None:
    two_commits(project, {A: 10.0}, {A: 10.0})
    busy: list[str] = []

    def cleaning(_: SessionFiles) -> int:
        busy.extend(project.ab(*words).lines[-1] for words in (["--clean"], PAIRS))
        return -9

    sessions.happens[3] = cleaning
    project.ab(*PAIRS)
    assert ["another llenergy ab runs in this project" in line for line in busy] == [True, True]
    lines = project.ab("--clean").out.splitlines()
    assert [line.startswith("removed ") for line in lines] == [True, True]
    assert project.git("worktree", "list").count("\n") == 0
    assert project.ab("--clean").out == "nothing to remove\n"
    assert project.error("--clean", "--", "pytest").startswith("--clean only removes what comparisons have")


def test_an_output_that_fails_at_the_end_loses_nothing(project: Project, sessions: FakeSessions) -> None:
    two_commits(project, {A: 10.0}, {A: 10.0})
    late = project.path / "late.json"

    def put_in_the_way(_: SessionFiles) -> float:
        late.mkdir(exist_ok=True)
        return 1.0

    sessions.factor = put_in_the_way
    result = project.ab("-o", "late.json", *PAIRS)
    assert result.status == 2
    assert "with another -o, writes the measurements" in result.lines[-1]
    ran = len(sessions.ran)
    assert project.ab("-o", "other.json", *PAIRS).status == 0
    assert len(sessions.ran) == ran
    assert len(read_paired_report(project.path / "other.json").head.records[0].rounds) == 4


@pytest.mark.parametrize("name", [".llenergy", ".llenergy/ab"])
def test_a_file_in_place_of_a_directory_is_refused_before_measuring(
    project: Project, sessions: FakeSessions, name: str
) -> None:
    project.write(name, "")
    message = project.error("--aa=5", "--pairs=4", "--", "pytest")
    assert message.startswith(f"{project.path / name}")
    assert "cannot write there (" in message
    assert sessions.ran == []


def test_output_that_cannot_be_created_is_refused_before_measuring(
    project: Project, sessions: FakeSessions
) -> None:
    message = project.error("-o", "/proc/x.json", "--base=HEAD", "--head=HEAD", "--", "pytest")
    assert message.startswith("--output=/proc/x.json: ")
    assert sessions.ran == []


@pytest.mark.parametrize(
    ("pairs", "rounds", "measured", "sessions_of"),
    [("6+6", 1, "6+6", (6, 6)), ("6+6", 4, "8+8", (2, 2)), ("5+1", 2, "6+2", (3, 1))],
)
def test_stages_are_rounded_up_to_whole_sessions(
    pairs: str, rounds: int, measured: str, sessions_of: tuple[int, int]
) -> None:
    made = plan_schedule(parse_pairs(pairs), rounds)
    assert (str(made.stages), made.pairs) == (measured, sessions_of)


def test_an_interrupt_during_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_llenergy.ab.sides.prepare", interrupt)
    assert main(["ab", "--", "pytest"]) == 130
    assert capsys.readouterr().err.startswith("llenergy ab: interrupted; ")
