# SPDX-License-Identifier: Apache-2.0
"""Showing a history: anchors, accepted steps and change points."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.history.add import add_run
from pytest_llenergy.compare.history.store import Store
from pytest_llenergy.compare.history.trend import load_trends
from pytest_llenergy.record.environment import environment_key
from pytest_llenergy.record.report import Report, encode_report

from ..record.reports import BOARD, HOST, REPORT
from .runs import TEST, record_of, scaled
from .sessions import commit, day_of, session

PLACE = Store(Path(".llenergy/history"))


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")


def keep(*reports: Report) -> None:
    for report in reports:
        add_run(report, "x", PLACE)


def levels(factors: Sequence[float], start: int = 0) -> list[Report]:
    return [day_of(start + day, factor) for day, factor in enumerate(factors)]


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["history", "show", "--format=json", *options]) == 0
    message: dict[str, Any] = json.loads(capsys.readouterr().out)
    return message


def standing(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    (found,) = shown(capsys, *options)["standings"]
    return dict(found)


def test_fixed_anchor_reveals_slow_creep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep(*levels([1.01**day for day in range(30)]))
    found = standing(capsys)
    assert found["from_rolling"] == pytest.approx(1.01**5.5 - 1, rel=0.01)
    assert (found["rolling_sessions"], found["sessions"]) == (10, 30)
    # The series is a staircase of short levels, of which the anchor is the first.
    assert found["from_anchor"] == pytest.approx(1.01**27.5 - 1, rel=0.05)
    assert (found["anchor_commit"], found["accepted"]) == (commit(0), False)


def test_fixed_anchor_is_the_median_of_several_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    keep(*levels([1.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    found = standing(capsys)
    assert (found["from_anchor"], found["anchor_sessions"]) == (pytest.approx(0.0), 5)
    assert main(["history", "accept", commit(5), "--reason", "x"]) == 0
    assert standing(capsys)["anchor_sessions"] == 1


def test_change_soon_after_an_accepted_step_does_not_move_the_anchor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep(*levels([1.0] * 5 + [1.1] * 3 + [1.3] * 6))
    assert main(["history", "accept", commit(5), "--reason", "larger model"]) == 0
    found = standing(capsys)
    assert (found["from_anchor"], found["anchor_sessions"]) == (pytest.approx(1.3 / 1.1 - 1), 3)


def test_accepting_a_step_moves_both_anchors(capsys: pytest.CaptureFixture[str]) -> None:
    keep(*levels([1.0] * 5 + [1.1] * 5))
    assert standing(capsys)["from_anchor"] == pytest.approx(0.1)
    assert main(["history", "accept", commit(5)[:8], "--reason", "larger model"]) == 0
    message = f".llenergy/history: accepted {commit(5)}: larger model\n"
    assert capsys.readouterr().out == message
    found = standing(capsys)
    assert (found["anchor_commit"], found["accepted"]) == (commit(5), True)
    assert found["from_anchor"] == pytest.approx(0.0)
    assert (found["from_rolling"], found["rolling_sessions"]) == (pytest.approx(0.0), 4)


def test_last_accepted_step_counts(capsys: pytest.CaptureFixture[str]) -> None:
    keep(*levels([1.0, 1.1, 1.2]))
    for day in (2, 1):
        assert main(["history", "accept", commit(day), "--reason", "x"]) == 0
    assert standing(capsys)["anchor_commit"] == commit(1)
    assert len(list(Path(".llenergy/history/accepted").iterdir())) == 2


def test_step_of_one_test_keeps_the_anchors_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("t.py::a", "t.py::b")
    keep(*(session(day, *(record_of(name, scaled(1 + day / 10)) for name in names)) for day in range(3)))
    assert main(["history", "accept", commit(1), "--reason=x", "--test=a"]) == 0
    assert capsys.readouterr().out == f".llenergy/history: accepted {commit(1)} for 1 test: x\n"
    anchors = {each["id"]: each["anchor_commit"] for each in shown(capsys)["standings"]}
    assert anchors == {"t.py::a": commit(1), "t.py::b": commit(0)}
    assert main(["history", "accept", commit(1), "--reason=x", "--test=c"]) == 2
    assert "no session of commit 0001cccccc has c" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ffff", "--reason=x"], "no session is of commit ffff; llenergy history add adds one"),
        (["000", "--reason=x"], "commit '000' is too short; give at least 4 characters"),
        ([commit(1), "--reason= "], "--reason is empty; state why the change is accepted"),
    ],
)
def test_invalid_step_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(*levels([1.0, 1.1]))
    assert main(["history", "accept", *arguments]) == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")
    assert not Path(".llenergy/history/accepted").exists()


def test_ambiguous_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    keep(*levels([1.0, 1.0]))
    other = session(2, record_of())
    keep(msgspec.structs.replace(other, source=msgspec.structs.replace(other.source, commit="0001d" * 8)))
    assert main(["history", "accept", "0001", "--reason=x"]) == 2
    assert "0001 abbreviates 2 commits with sessions; give more letters" in capsys.readouterr().err


def test_a_change_is_reported_near_its_commit(capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(1)
    keep(*levels([random.gauss(1.0, 0.005) for _ in range(10)]))
    keep(*levels([random.gauss(1.06, 0.005) for _ in range(10)], start=10))
    (change,) = standing(capsys)["changes"]
    assert change["commit"] == commit(10)
    assert change["size"] == pytest.approx(0.06, abs=0.01)
    main(["history", "show"])
    assert re.search(r"\+[56]\.\d% near 0010cccccc", capsys.readouterr().out)


def test_joules_per_token_are_shown_unless_another_metric_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    no_tokens = record_of("t.py::plain")
    rounds = [msgspec.structs.replace(each, tokens=None) for each in no_tokens.rounds]
    keep(session(0, record_of(), record_of("t.py::plain", rounds=rounds)))
    metrics = {each["id"]: each["metric"] for each in shown(capsys)["standings"]}
    assert metrics == {TEST: "energy_per_output_token_j", "t.py::plain": "energy_j"}
    found = standing(capsys, "test_decode[8]", "--metric=output_tokens_per_s")
    assert (found["metric"], found["better"], found["from_rolling"]) == ("output_tokens_per_s", "more", None)


def test_a_different_workload_starts_a_new_series(capsys: pytest.CaptureFixture[str]) -> None:
    keep(
        *levels([1.0] * 4), day_of(4, 3.0, params={"batch_size": 9}), day_of(5, 3.1, params={"batch_size": 9})
    )
    found = standing(capsys)
    assert (found["sessions"], found["earlier"]) == (2, 4)
    assert found["from_anchor"] == pytest.approx(3.1 / 3.0 - 1)
    main(["history", "show"])
    assert "1 tests had a different workload before; those sessions are left out" in capsys.readouterr().out


def elsewhere(day: int) -> Report:
    host = msgspec.structs.replace(HOST, cpu_model="Another CPU")
    assert REPORT.environment is not None
    there = msgspec.structs.replace(REPORT.environment, host=host, key=environment_key(host, [BOARD]))
    return session(day, record_of(joules=scaled(2.0)), environment=there)


def test_each_kind_of_devices_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    keep(*levels([1.0] * 3), elsewhere(3))
    found = shown(capsys)
    assert sorted(each["sessions"] for each in found["standings"]) == [1, 3]
    (note,) = found["notes"]
    assert note.startswith("several kinds of devices, each compared only with itself: ")
    assert note.endswith(" until 2026-01-04T03:04:05Z")
    key = next(each["device_key"] for each in found["standings"] if each["sessions"] == 1)
    assert standing(capsys, f"--device={key}")["last"]["run_id"] == "run-3"


def test_the_table_and_markdown_show_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    keep(*levels([1.0, 1.0, 1.1]))
    assert main(["history", "show"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"test_decode\[8\] +0\.6878 J/token +\+10\.0% +\+10\.0% from 0000cccccc +3", text)
    assert main(["history", "show", "--format=markdown"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "<code>" in line]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2:6] == ["0.6878 J/token", "+10.0%", "+10.0% from 0000cccccc", "3"]


def test_names_are_whole_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for day in range(3):
        keep(session(day, record_of("benchmarks/llm/test_generation.py::test_long_prompt_decode[8-float16]")))
    assert main(["history", "show"]) == 0
    assert "test_long_prompt_decode[8-float16]" in capsys.readouterr().out


def test_test_ids_are_escaped_in_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    keep(session(0, record_of("t.py::t[a|<b>`\n@x]")))
    main(["history", "show", "--format=markdown"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "t.py" in line]
    assert row.count("|") == 7
    assert "<b>" not in row
    assert "@x" not in row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], ".llenergy/history: it has no session; llenergy history add REPORT adds one"),
        (["--metric=energyj"], "unknown metric 'energyj'; did you mean energy_j?"),
    ],
)
def test_empty_history_or_unknown_metric_is_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "show", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"llenergy history: {message}")


def test_unknown_test_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    keep(day_of(0))
    assert main(["history", "show", "test_x"]) == 2
    assert "no session has test_x; llenergy history show lists all tests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty session; delete it"),
        (b'{"schema_version": 1', "broken session (its last line is incomplete)"),
        (b'{"schema_version": 2, "more": 1}\n', "schema version 2 is newer than 1, the newest this "),
        (b'{"schema_version": 1}\n', "broken session (Object missing required field `id`)"),
        (b"[]\n", "not a session of llenergy history (Expected `object`, got `array`)"),
    ],
)
def test_broken_file_is_named(content: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    keep(day_of(0))
    (path,) = Path(".llenergy/history").rglob("*.jsonl")
    path.write_bytes(content)
    assert main(["history", "show"]) == 2
    assert capsys.readouterr().err.startswith(f"llenergy history: {path}: {message}")


def test_trend_marks_the_change_point_the_outlier_and_the_accepted_step() -> None:
    keep(*levels([1.0] * 5 + [1.1] * 5 + [1.4] + [1.1] * 4))
    assert main(["history", "accept", commit(5), "--reason", "larger model"]) == 0
    (trend,) = load_trends(PLACE, test=TEST)
    points = trend.points
    assert [place for place, point in enumerate(points) if point.changed] == [5]
    assert [place for place, point in enumerate(points) if point.outlier] == [10]
    assert [(place, point.accepted) for place, point in enumerate(points) if point.accepted] == [
        (5, "larger model")
    ]
    assert points[0].time == "2026-01-01T03:04:05Z"
    assert points[5].commit == commit(5)
    assert points[5].value == pytest.approx(0.6878, abs=1e-3)
    assert all(point.low is not None and point.high is not None for point in points)
    assert all(point.low < point.value < point.high for point in points)  # type: ignore[operator]


def test_report_page_shows_the_trend(capsys: pytest.CaptureFixture[str]) -> None:
    days = levels([1.0] * 5 + [1.1] * 5)
    keep(*days)
    Path("last.json").write_bytes(encode_report(days[-1]))
    assert (
        main(["report", "last.json", "--format=html", "-o", "page.html", "--history", str(PLACE.name)]) == 0
    )
    text = Path("page.html").read_text("utf-8")
    assert ">Trend of " in text
    assert "change point" in text
    assert all(commit(day)[:10] in text for day in range(10))
    assert main(["report", "last.json", "--format=html", "-o", "page.html", "--history", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "llenergy report: nowhere: it has no session; llenergy history add REPORT adds one\n"
    )
