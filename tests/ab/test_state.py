# SPDX-License-Identifier: Apache-2.0
"""The state of a comparison on disk: what identifies it, and when a session is finished."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llenergy.ab.cleaning import discard
from pytest_llenergy.ab.schedule import Turn
from pytest_llenergy.ab.state import (
    CampaignInputs,
    SessionSummary,
    State,
    has_measured,
    list_unfinished,
)
from pytest_llenergy.errors import PlanError
from pytest_llenergy.record.report import Report, encode_report

from ..record.reports import REPORT

ASKED = CampaignInputs(
    tool="1",
    command=["--", "-q"],
    directory="/w",
    sides={"base": ["a"], "head": ["b"]},
    pairs="6+6",
    rounds=1,
    setup=None,
    metrics=[],
    across=False,
)
FIRST = Turn(1, "base")
WHOLE = msgspec.structs.replace(REPORT, run=msgspec.structs.replace(REPORT.run, complete=True))


@pytest.mark.parametrize(
    "change",
    [
        {"tool": "2"},
        {"command": ["--", "-v"]},
        {"directory": "/w/below"},
        {"sides": {"base": ["a"], "head": ["c"]}},
        {"pairs": "6"},
        {"rounds": 2},
        {"setup": "make"},
        {"metrics": ["energy_j"]},
        {"across": True},
        {"to_itself": True},
    ],
)
def test_every_input_identifies_the_comparison(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(ASKED, **change).key != ASKED.key


def ended(
    state: State,
    exit_status: int,
    *,
    report: bool = True,
    measured: Report = WHOLE,
    summary: SessionSummary | None = SessionSummary(failed=[], measured=True, stopped=False),  # noqa: B008
) -> None:
    files = state.next_attempt(FIRST)
    files.log.touch()
    if summary is not None:
        files.summary.write_bytes(msgspec.json.encode(summary))
    if report:
        files.report.write_bytes(encode_report(measured))
    state.record_end(files, exit_status, datetime.now(timezone.utc), 1.0)


@pytest.mark.parametrize(
    ("exit_status", "report", "done"),
    [
        (0, True, True),
        (1, True, True),
        (2, True, False),
        (5, True, False),
        (-9, True, False),
        (0, False, False),
    ],
)
def test_session_is_finished_if_it_ended_and_measured(
    tmp_path: Path, exit_status: int, report: bool, done: bool
) -> None:
    state = State(tmp_path, ASKED)
    ended(state, exit_status, report=report)
    assert (state.load_finished(FIRST) is not None) == done
    assert has_measured(tmp_path, ASKED.key) == report


@pytest.mark.parametrize(
    ("summary", "report", "how"),
    [
        (None, True, "ended with exit code 1 before pytest had finished"),
        (
            SessionSummary(failed=[], measured=True, stopped=True),
            True,
            "ended with exit code 1 and was stopped before all tests had run",
        ),
        (
            SessionSummary(failed=[], measured=True, stopped=False),
            False,
            "ended with exit code 1 but did not write its report",
        ),
        (SessionSummary(failed=["t"], measured=False, stopped=False), False, None),
    ],
)
def test_exit_code_alone_does_not_finish_a_session(
    tmp_path: Path, summary: SessionSummary | None, report: bool, how: str | None
) -> None:
    state = State(tmp_path, ASKED)
    ended(state, 1, report=report, summary=summary)
    assert state.explain_unfinished(FIRST, 1) == how
    assert state.finished_sessions == (how is None)


def test_incomplete_report_does_not_finish_a_session(tmp_path: Path) -> None:
    state = State(tmp_path, ASKED)
    ended(state, 0, measured=REPORT)
    assert state.explain_unfinished(FIRST, 0) == "ended with exit code 0 but its report is incomplete"


def test_attempt_without_remaining_tests_finishes_its_session(tmp_path: Path) -> None:
    state = State(tmp_path, ASKED)
    ended(state, 2)
    ended(state, 5, report=False)
    found = state.load_finished(FIRST)
    assert found is not None
    assert [report.records for report in found[0]] == [REPORT.records]


def test_kept_comparison_is_not_resumed(tmp_path: Path) -> None:
    state = State(tmp_path, ASKED)
    ended(state, 0)
    assert (state.finished_sessions, list(list_unfinished(tmp_path))) == (1, [ASKED.key])
    state.finish(keep=True)
    assert list(list_unfinished(tmp_path)) == []
    assert State(tmp_path, ASKED).finished_sessions == 0


def test_comparison_in_use_is_not_discarded(tmp_path: Path) -> None:
    state = State(tmp_path, ASKED)
    with pytest.raises(PlanError, match=r"^process \d+ is running this comparison; "):
        State(tmp_path, ASKED)
    discard(tmp_path, None, ASKED.key)
    assert list(list_unfinished(tmp_path)) == [ASKED.key]
    state.release()
    discard(tmp_path, None, ASKED.key)
    assert list(list_unfinished(tmp_path)) == []
