# SPDX-License-Identifier: Apache-2.0
"""A run in GitHub Actions appends its table to the step summary and never fails because of it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import msgspec
import pytest

from pytest_llenergy.record.comparison import Comparison, Verdict
from pytest_llenergy.record.record import Flag
from pytest_llenergy.report.layout import DEFAULT_LAYOUT, Layout
from pytest_llenergy.report.markdown import MAX_SUMMARY_BYTES, append_step_summary, render_run_markdown

from ..compare.runs import record_of

SUITE = """
import time, pytest
@pytest.mark.parametrize("text", ["a|b", "<img src=x>"])
def test_it(energy, text):
    energy(time.sleep, 0.05)
def test_fails(energy):
    assert energy(time.sleep, 0.05).energy_j < 0
def test_window(energy_meter):
    with energy_meter("load"):
        time.sleep(0.05)
def test_skips(energy):
    pytest.skip("not here")
"""


@pytest.fixture
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "summary.md"
    place.write_text("# Before")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    return place


@pytest.mark.parametrize(
    "arguments", [[], pytest.param(["-q"], marks=pytest.mark.slow), ["-n2"]], ids=["", "-q", "-n2"]
)
@pytest.mark.slow
def test_the_table_is_added_once(quick: pytest.Pytester, summary: Path, arguments: list[str]) -> None:
    quick.makepyfile(SUITE)
    result = quick.runpytest("--energy-report", *arguments)
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    text = summary.read_text()
    assert text.startswith("# Before\n### Energy: ")
    assert text.count("### Energy: ") == 1
    (head,) = (line for line in text.splitlines() if line.startswith("### Energy"))
    assert sorted(head.removeprefix("### Energy: ").split(", ")) == ["1 failed", "1 skipped", "3 measured"]
    rows = [line for line in text.splitlines() if line.startswith("| <code>")]
    assert len(rows) == 3
    assert len({row.count("|") for row in rows}) == 1
    assert "| **test_it** | | |" in text
    assert any(re.match(r"\| <code>text=a&#124;b</code> \| \d", row) for row in rows)
    assert any(row.startswith("| <code>test_fails (failed)</code> | ") for row in rows)
    assert "<img" not in text
    assert re.search(r"test_window &#183; load</code>: \d", text)


def test_an_unwritable_step_summary_is_reported_and_fails_nothing(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(quick.path))
    quick.makepyfile("import time\ndef test_it(energy):\n    energy(time.sleep, 0.05)\n")
    result = quick.runpytest("--energy-report")
    assert result.ret == pytest.ExitCode.OK
    message = f"energy: no step summary: GITHUB_STEP_SUMMARY={quick.path}: Is a directory"
    assert message in result.stdout.lines
    assert (quick.path / "energy.json").exists()


@pytest.mark.slow
def test_rows_that_do_not_fit_are_counted(summary: Path) -> None:
    record = record_of()
    records = [
        msgspec.structs.replace(record, id=f"t.py::test_it[{number}]", params={"number": number})
        for number in range(20_000)
    ]
    append_step_summary(records, DEFAULT_LAYOUT, complete=True)
    text = summary.read_text()
    assert MAX_SUMMARY_BYTES - 10_000 < len(text.encode()) <= MAX_SUMMARY_BYTES
    rows = text.count("| <code>")
    assert re.search(rf"\n{20_000 - rows + 2}\d* more lines are in the report.\n", text)


def test_warnings_and_verdicts_are_in_it() -> None:
    busy = Flag(name="contended", severity="warning", detail="others used <b>0.30</b> cores")
    unsure = compared("inconclusive", "between -2.0% and +9.0%: more rounds can tell")
    first = record_of("a/t.py::test_a", flags=[busy], params={}, ranks=[], comparisons=[unsure])
    second = record_of(
        "a/t.py::test_b", flags=[busy], params={}, ranks=[], comparisons=[compared("unchanged", "it is")]
    )
    text = html.unescape(render_run_markdown([second, first], Layout(), 100_000, complete=True))
    assert "contended: test_b and 1 more: others used " in text
    assert "inconclusive: t.py::test_a: between -2.0% and +9.0%: more rounds" in text
    assert "it is" not in text


def compared(verdict: Verdict, reason: str) -> Comparison:
    return Comparison(
        id="a/t.py::test_a", metric="energy_j", unit="J", verdict=verdict, reason=reason, ratio=1.03
    )
