# SPDX-License-Identifier: Apache-2.0
"""Reports as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.comparison import ComparedReports, ReportSource
from pytest_llenergy.record.custom_metrics import add_metric
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import (
    SCHEMA_VERSION,
    PairedReport,
    Report,
    encode_paired_report,
    encode_report,
)
from pytest_llenergy.report.store import Journal

from ..compare.runs import TEST, record_of, report_of, scaled
from ..record.reports import REPORT

#: It was measured, it has no joules, it did not run.
LOST = record_of("t.py::lost", [None] * 3)
GONE = Record(id="t.py::gone", attempt=1, status="skipped", reason="no GPU")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def export(report: Report | PairedReport) -> str:
    """What the command writes into a file."""
    data = encode_paired_report(report) if isinstance(report, PairedReport) else encode_report(report)
    Path("in.json").write_bytes(data)
    assert main(["export", "in.json", "-o", "out"]) == 0
    return Path("out").read_bytes().decode()


def paired() -> PairedReport:
    side = ReportSource(origin="x", run_id="1", started_at="2026-01-02T03:04:05Z", complete=True)
    return PairedReport(
        schema_version=SCHEMA_VERSION,
        tool=REPORT.tool,
        pairs="6+6",
        complete=True,
        sessions=[],
        base=report_of(record_of()),
        head=report_of(record_of(joules=scaled(1.1))),
        compared=ComparedReports(base=side, head=side, comparisons=[]),
    )


class TestCsv:
    def read(self, text: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def test_each_metric_of_each_test_has_a_line(self) -> None:
        hostile = record_of('t.py::t["a,b"\n]')
        rows = self.read(export(report_of(record_of(), hostile)))
        (row,) = [row for row in rows if row["id"] == TEST and row["metric"] == "energy_j"]
        assert float(row["value"]) == pytest.approx(5.0025)
        assert (row["unit"], row["n"], row["status"], row["commit"]) == ("J", "6", "measured", "abc")
        assert {row["id"] for row in rows} == {TEST, hostile.id.replace("\n", r"\n")}

    def test_missing_values_are_empty_with_a_reason(self) -> None:
        rows = self.read(export(report_of(LOST, GONE)))
        (energy,) = [row for row in rows if row["metric"] == "energy_j"]
        assert (energy["value"], energy["reason"]) == ("", "the counter stood still")
        (gone,) = [row for row in rows if row["id"] == "t.py::gone"]
        assert (gone["status"], gone["metric"], gone["value"], gone["reason"]) == (
            "skipped",
            "",
            "",
            "no GPU",
        )


class TestFiles:
    def test_a_journal_is_exported_like_a_report(self, capsys: pytest.CaptureFixture[str]) -> None:
        journal = Journal(Path("energy.x.journal.jsonl"))
        journal.add(report_of(complete=False))
        journal.add(record_of())
        journal.close(remove=False)
        assert main(["export", "energy.x.journal.jsonl", "--format=csv"]) == 0
        assert TEST in capsys.readouterr().out

    def test_both_sides_of_a_paired_file_are_exported(self) -> None:
        rows = csv.DictReader(io.StringIO(export(paired()), newline=""))
        sides = {row["side"]: float(row["value"]) for row in rows if row["metric"] == "energy_j"}
        assert sides == pytest.approx({"base": 5.0, "head": 5.5}, rel=1e-3)


def test_metrics_of_tests_have_their_unit_and_direction() -> None:
    record = add_metric(record_of(), "latency", 12.0, unit="ms", better="less")
    rows = csv.DictReader(io.StringIO(export(report_of(record)), newline=""))
    (found,) = [row for row in rows if row["metric"] == "latency"]
    assert (found["value"], found["unit"], found["better"]) == ("12.0", "ms", "less")
