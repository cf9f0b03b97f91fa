# SPDX-License-Identifier: Apache-2.0
"""Annotations: regressions at their tests, everything else in one warning, and no way out of a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.cli.compare import ComparisonResult, render_comparison
from pytest_llenergy.compare.case import Criterion
from pytest_llenergy.compare.comparison import compare_reports
from pytest_llenergy.record.comparison import ComparedReports
from pytest_llenergy.record.report import encode_report
from pytest_llenergy.report.ci import MAX_SUMMARY_BYTES, workflow_command

from ..compare.runs import UNSURE, record_of, report_of, scaled
from ..record.reports import REPORT
from .test_pr_comment import compared, comparison

NAMES = ("benchmarks/test_decode.py::test_a[8]", "benchmarks/test_decode.py::TestB::test_b")


@pytest.fixture(autouse=True)
def _outside_of_github(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)


def shown(compared: ComparedReports) -> str:
    return render_comparison(ComparisonResult(compared, (REPORT, REPORT)), "github")


def regressed() -> ComparedReports:
    base = report_of(*(record_of(name) for name in NAMES), record_of("t.py::few", UNSURE))
    head = report_of(
        record_of(NAMES[0], scaled(1.1)), record_of(NAMES[1], scaled(1.2)), record_of("t.py::few", UNSURE)
    )
    return compare_reports(base, head, ("base.json", "head.json"), [Criterion(gated=True)])


def test_regressions_are_errors_worst_first_and_the_rest_is_one_warning() -> None:
    lines = shown(regressed()).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error", "::warning", "energy:"]
    assert lines[0].startswith(
        "::error title=Energy%3A test_decode.py%3A%3ATestB%3A%3Atest_b +20.0%25,"
        "file=benchmarks/test_decode.py::"
        "energy_per_output_token_j regressed, 625.3 -> 750.4 mJ/token: +20.0%25, at least +1"
    )
    assert lines[2] == "::warning title=Energy::1 inconclusive; see the summary"
    assert lines[3].startswith("energy: 2 regressed, 1 inconclusive; noise ")


@pytest.mark.parametrize("name", ["/etc/x.py::t", "../x.py::t", "x.txt::t", "t"])
def test_files_outside_the_repository_are_not_named(name: str) -> None:
    assert "file=" not in shown(compared(comparison(name, "regressed", gated=True)))


def test_values_are_escaped_as_the_toolkit_does() -> None:
    assert workflow_command("error", {"title": "50%: a,b\r\n"}, "50%: a,b\r\n") == (
        "::error title=50%25%3A a%2Cb%0D%0A::50%25: a,b%0D%0A"
    )


def test_a_test_id_cannot_inject_a_workflow_command() -> None:
    hostile = comparison(
        "t.py::t[a\n::set-env name=X::y\r::stop-commands::z]", "regressed", reason="\n::x::", gated=True
    )
    lines = re.split("[\r\n]", shown(compared(hostile)).rstrip("\n"))
    assert [line.partition(" ")[0] for line in lines] == ["::error", "energy:"]


def test_invisible_characters_are_escaped_in_the_log() -> None:
    odd = "\x1b[31m\u202e\x85"
    found = comparison(
        f"d{odd}/t.py::t[{odd}]",
        "regressed",
        reason=odd,
        metric=odd,
        unit=odd,
        base=1.0,
        head=1.0,
        gated=True,
    )
    text = shown(compared(found))
    assert all(each.isprintable() or each == "\n" for each in text)
    assert text.count("\\x1b") == 6


def test_github_shows_ten_and_the_others_are_counted() -> None:
    many = [comparison(f"t.py::t[{i}]", "regressed", ratio=1 + i / 100, gated=True) for i in range(13)]
    lines = shown(compared(*many)).splitlines()
    assert [line.startswith("::error") for line in lines].count(True) == 10
    assert "t[12] +12.0%25" in lines[0]
    assert lines[10] == "::warning title=Energy::3 more regressed; see the summary"


def test_the_comment_is_added_to_the_summary_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    for name, factor in (("base.json", 1.0), ("head.json", 1.1)):
        Path(name).write_bytes(encode_report(report_of(record_of(joules=scaled(factor)))))
    assert main(["compare", "base.json", "head.json", "--format=github"]) == 1
    assert capsys.readouterr().out.startswith("::error ")
    text = summary.read_text()
    assert text.startswith(
        "# Before\n<!-- llenergy:compare -->\n### ❌ Energy: fail, 1 of 1 test regressed (+10.0%); +10.0%"
    )


@pytest.mark.parametrize(("taken", "message"), [(0, 1000), (900_000, 200), (1024 * 1024 - 100, 0)])
@pytest.mark.slow
def test_the_step_summary_stays_below_the_limit_of_github(
    taken: int, message: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * taken)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    shown(compared(*(comparison(f"t.py::t[{i}]", "regressed", gated=True) for i in range(20_000))))
    text = summary.read_text()
    assert len(text.encode()) <= MAX_SUMMARY_BYTES
    assert text.count("🔴") >= message
    # Without room for a comment, nothing is written.
    assert "Cut to fit" in text or text == "x" * taken
