# SPDX-License-Identifier: Apache-2.0
"""``llenergy list``: what is saved, newest first."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.report import PairedReport, Report, Source, encode_paired_report, encode_report

from ..compare.runs import record_of, report_of

Output = pytest.CaptureFixture[str]


def report(started_at: str, commit: str, *, dirty: bool = False, complete: bool = True) -> Report:
    failed = record_of("t.py::broken", status="failed", reason="boom", rounds=[], metrics={})
    made = report_of(record_of(), *([failed] if dirty else []), complete=complete)
    run = msgspec.structs.replace(made.run, started_at=started_at)
    return msgspec.structs.replace(made, run=run, source=Source(commit=commit, branch="main", dirty=dirty))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / ".llenergy"
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return directory


def test_saved_reports_are_listed_newest_first(kept: Path, capsys: Output) -> None:
    old, new = (
        report("2026-01-02T03:04:05Z", "a" * 40),
        report("2026-02-03T04:05:06Z", "b" * 40, dirty=True, complete=False),
    )
    (kept / "main.json").write_bytes(encode_report(old))
    (kept / "work.json").write_bytes(encode_report(new))
    (kept / "broken.json").write_text("[]")
    (kept / "notes.txt").write_text("")
    assert main(["list"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "date", "(UTC)", "commit", "tests", "kind"]
    assert [" ".join(row.split()) for row in rows[:3]] == [
        "work 2026-02-03 04:05 bbbbbbbbb with changes 1 of 2, interrupted measured",
        "main 2026-01-02 03:04 aaaaaaaaa 1 measured",
        "broken - - - -",
    ]
    assert rows[3].startswith("broken: not a report of pytest --energy-report")


def test_a_file_of_ab_has_both_commits(kept: Path, capsys: Output) -> None:
    base, head = report("2026-01-02T03:04:05Z", "a" * 40), report("2026-01-02T04:04:05Z", "b" * 40)
    compared = compare_reports(base, head, ("base", "head"), [Criterion(gated=True)])
    paired = PairedReport(
        schema_version=1,
        tool=base.tool,
        pairs="6+6",
        complete=True,
        sessions=[],
        base=base,
        head=head,
        compared=compared,
    )
    (kept / "ab.json").write_bytes(encode_paired_report(paired))
    assert main(["list", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "ab",
            "started_at": "2026-01-02T04:04:05Z",
            "commits": ["a" * 40, "b" * 40],
            "dirty": False,
            "tests": 1,
            "measured": 1,
            "kinds": ["measured"],
            "complete": True,
        }
    ]
    assert main(["compare", "ab"]) == 0


def test_nothing_saved_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    assert capsys.readouterr().err.startswith("llenergy list: nothing is saved in ")
