# SPDX-License-Identifier: Apache-2.0
"""Reports in other tools' formats, read by those tools where they can run here."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.metrics import METRICS
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


def export(report: Report | PairedReport, target: str) -> str:
    """What the command writes into a file."""
    data = encode_paired_report(report) if isinstance(report, PairedReport) else encode_report(report)
    Path("in.json").write_bytes(data)
    assert main(["export", "in.json", "--format", target, "-o", "out"]) == 0
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


class TestAction:
    def test_every_metric_where_less_is_better_is_exported_in_its_unit(self) -> None:
        entries = json.loads(export(report_of(record_of(), GONE), "github-action-benchmark"))
        found = {each["name"].removeprefix(f"{TEST} "): each for each in entries}
        assert "output_tokens_per_s" not in found
        assert all(METRICS[name].better == "less" for name in found)
        token = found["energy_per_output_token_j"]
        assert (token["unit"], token["value"]) == ("J/token", pytest.approx(10.005 / 16))
        assert token["range"].startswith("± 0.00")
        assert token["extra"] == "6 rounds\nmeasured\ncommit abc"
        # What it would scale: s, ms, us and ns are its own, and a base unit stays as it is.
        assert {each["unit"] for each in entries} == {"J", "J/token", "J/request", "W", "s"}


class TestCsv:
    def read(self, text: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def test_each_metric_of_each_test_has_a_line(self) -> None:
        hostile = record_of('t.py::t["a,b"\n]')
        rows = self.read(export(report_of(record_of(), hostile), "csv"))
        (row,) = [row for row in rows if row["id"] == TEST and row["metric"] == "energy_j"]
        assert float(row["value"]) == pytest.approx(5.0025)
        assert (row["unit"], row["n"], row["status"], row["commit"]) == ("J", "6", "measured", "abc")
        assert {row["id"] for row in rows} == {TEST, hostile.id.replace("\n", r"\n")}

    def test_missing_values_are_empty_with_a_reason(self) -> None:
        rows = self.read(export(report_of(LOST, GONE), "csv"))
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

    def test_both_sides_of_a_paired_file_are_exported_or_the_head(self) -> None:
        entries = json.loads(export(paired(), "github-action-benchmark"))
        found = {each["name"].partition(" ")[2]: each["value"] for each in entries}
        assert found["energy_j"] == pytest.approx(5.5, rel=1e-3)
        rows = csv.DictReader(io.StringIO(export(paired(), "csv"), newline=""))
        sides = {row["side"]: float(row["value"]) for row in rows if row["metric"] == "energy_j"}
        assert sides == pytest.approx({"base": 5.0, "head": 5.5}, rel=1e-3)

    def test_a_failed_test_has_no_figures_unless_only_its_gate_failed(self) -> None:
        failed = msgspec.structs.replace(record_of(), status="failed")
        assert json.loads(export(report_of(failed), "github-action-benchmark")) == []
        gated = msgspec.structs.replace(failed, failed_gate=True)
        assert json.loads(export(report_of(gated), "github-action-benchmark"))


class TestCustomMetrics:
    """Metrics of tests and hooks, with names that look like those of built-in metrics of a format."""

    @pytest.fixture
    def report(self) -> Report:
        record = record_of()
        for name, value, unit, better in (
            ("overlap_joules", [0.5, 0.7], "1", "more"),
            ("latency", 12.0, "ms", "less"),
            ("LATENCY", 3.0, '%/"é', "less"),
        ):
            record = add_metric(record, name, value, unit=unit, better=better)  # type: ignore[arg-type]
        return report_of(record)

    def test_github_action_benchmark_has_what_is_better_the_smaller_it_is(self, report: Report) -> None:
        entries = json.loads(export(report, "github-action-benchmark"))
        found = {each["name"].partition(" ")[2]: each for each in entries}
        assert (found["latency"]["value"], found["latency"]["unit"]) == (12.0, "ms")
        assert found["latency"]["extra"].startswith("1 value\n")
        assert not {"overlap_joules", "output_tokens_per_s"} & found.keys()
