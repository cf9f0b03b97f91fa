# SPDX-License-Identifier: Apache-2.0
"""Custom metrics in a run: table, gates, comparisons, history, page and exports; scores from a hook."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.compare.history import add_run, read_entries
from pytest_llenergy.record.report import json_schema
from pytest_llenergy.report.store import read_report as load_report

pytestmark = pytest.mark.clock

Read = Callable[..., dict[str, Any]]

TEST = """
    import os, time
    def test_it(energy):
        energy(time.sleep, 0.02)
        energy.metric("wer", float(os.environ["WER"]), unit="err", better="less")
        energy.metric("overlap", [0.5, 0.7], better="more")

    def test_other(energy):
        energy(time.sleep, 0.02)
"""

HOOK = """
from pytest_llenergy.api import add_metric

def pytest_llenergy_record(item, record):
    return add_metric(record, "lines", 12, better="less")
"""


@pytest.fixture
def suite(quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a pytester with a test that adds metrics; WER is the value of one of them."""
    monkeypatch.setenv("WER", "0.2")
    monkeypatch.setenv("COLUMNS", "160")
    quick.makepyfile(test_some=TEST)
    return quick


def test_they_are_in_table_report_page_and_exports(
    suite: pytest.Pytester, read_report: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    result = suite.runpytest("--energy-report", "--energy-html", "--junitxml=junit.xml")
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([r"test +.* wer +overlap$", r"test_it .* 0.2 err +0.60 ± 0.70$"])
    report = read_report()
    jsonschema.validate(report, json_schema())
    record = next(each for each in report["records"] if each["id"].endswith("test_it"))
    assert (record["metrics"]["wer"]["value"], record["metrics"]["wer"]["unit"]) == (0.2, "err")
    assert record["custom"]["overlap"] == {"better": "more", "values": [0.5, 0.7]}
    assert "overlap" in (suite.path / "energy.html").read_text()
    assert 'name="llenergy.wer" value="0.2"' in (suite.path / "junit.xml").read_text()
    capsys.readouterr()
    assert main(["export", str(suite.path / "energy.json"), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))
    assert [(row["value"], row["unit"]) for row in rows if row["metric"] == "wer"] == [("0.2", "err")]


def test_options_name_them(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--energy-columns=wer,energy_j")
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([r"test +wer +energy ± u", r"test_it +0.2 err ", r"test_other +- "])


def test_several_compared_metrics_are_named(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    monkeypatch.setenv("WER", "0.3")
    gates = ("--energy-fail-on=wer:5%", "--energy-fail-on=overlap:5%")
    result = suite.runpytest("--energy-compare=base.json", *gates, "-q")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["regressed: *test_it: wer: *"])
    result.stdout.fnmatch_lines(["*1 regressed, 1 unchanged, 2 no value*"])


@pytest.fixture
def losing(suite: pytest.Pytester) -> pytest.Pytester:
    """Return a pytester with a baseline in which three tests have a metric; with LOST only the first has."""
    suite.makepyfile(
        test_some="""
        import os, time
        def test_kept(energy):
            energy(time.sleep, 0.02)
            energy.metric("wer", 0.2, better="less")
        def test_gone(energy):
            energy(time.sleep, 0.02)
            if "LOST" not in os.environ:
                energy.metric("wer", 0.2, better="less")
        def test_window(energy_meter):
            with energy_meter("a"):
                time.sleep(0.1)
            if "LOST" not in os.environ:
                energy_meter.metric("wer", 0.2, better="less")
        def test_never(energy):
            energy(time.sleep, 0.02)
    """
    )
    suite.runpytest("--energy-report=base.json").assert_outcomes(passed=4)
    return suite


def test_a_test_that_never_had_a_metric_is_not_compared_by_it(
    losing: pytest.Pytester, read_report: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    result = losing.runpytest("--energy-compare=base.json", "--energy-fail-on=wer:5%", "--energy-report")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.OK
    verdicts = [each["comparisons"][0]["verdict"] for each in read_report()["records"]]
    assert verdicts == [*["unchanged"] * 3, "no value"]
    result.stdout.fnmatch_lines(
        ["no value: *test_never: wer: neither side has wer", "3 unchanged, 1 no value*"]
    )
    capsys.readouterr()
    assert main(["compare", "base.json", "energy.json", "--fail-on=wer:5%"]) == 0
    assert "3 unchanged, 1 no value" in capsys.readouterr().out


def test_a_lost_metric_fails_its_gate(
    losing: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOST", "1")
    gate = ("--energy-compare=base.json", "--energy-fail-on=wer:5%", "--energy-report=head.json")
    result = losing.runpytest(*gate)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines([f"*{name}*head has no wer" for name in ("test_gone", "test_window")])
    capsys.readouterr()
    assert main(["compare", "base.json", "head.json", "--fail-on=wer:5%"]) == 5
    assert "2 invalid, 1 unchanged, 1 no value" in capsys.readouterr().out


def test_the_mark_of_a_test_needs_its_metric(losing: pytest.Pytester) -> None:
    losing.makepyfile(
        test_some="""
        import time
        import pytest
        @pytest.mark.energy_gate(metric="wer", threshold="5%")
        def test_never(energy):
            energy(time.sleep, 0.02)
    """
    )
    result = losing.runpytest("--energy-compare=base.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*energy_gate: wer is invalid: base has no wer*"])


def test_a_gate_compares_them(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    gate = ("--energy-compare=base.json", "--energy-fail-on=wer:5%")
    suite.runpytest(*gate).assert_outcomes(passed=2)
    monkeypatch.setenv("WER", "0.3")
    result = suite.runpytest(*gate)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*energy_gate: wer regressed, 0.2 -> 0.3 err: +50.0%*"])
    result = suite.runpytest("--energy-compare=base.json", "--energy-fail-on=bleu:5%")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*nothing was gated*"])


def test_a_gate_passes_a_perfect_zero(suite: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    suite.makepyfile(
        test_some="""
        import time, pytest
        @pytest.mark.energy_gate(metric="wrong", threshold="5%+1")
        def test_mark(energy):
            energy(time.sleep, 0.02)
            energy.metric("wrong", 0, better="less")

        def test_option(energy):
            energy(time.sleep, 0.02)
            energy.metric("missed", 0, better="less", uncertainty=0.5)
    """
    )
    suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    gate = ("--energy-compare=base.json", "--energy-report=head.json")
    result = suite.runpytest(*gate, "--energy-fail-on=missed:5%+2")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["2 unchanged, 1 no value"])
    assert main(["compare", "base.json", "head.json", "--fail-on=wrong:5%+1", "--fail-on=missed:5%+2"]) == 0
    result = suite.runpytest(*gate, "--energy-fail-on=missed:5%")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "inconclusive: *missed: from 0 to 0, known to 1.16: *; add an absolute threshold*",
            "inconclusive: 1 of 2; an absolute threshold can decide, *",
        ]
    )
    capsys.readouterr()
    assert main(["compare", "base.json", "head.json", "--fail-on=missed:5%", "--inconclusive=fail"]) == 4
    assert "an absolute threshold, such as 5%+2" in " ".join(capsys.readouterr().out.split())


def test_commands_compare_them(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.runpytest("--energy-report=base.json").assert_outcomes(passed=2)
    monkeypatch.setenv("WER", "0.1")
    suite.runpytest("--energy-report=head.json").assert_outcomes(passed=2)
    capsys.readouterr()
    assert main(["compare", "base.json", "head.json", "--metric=wer", "--format=json"]) == 0
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)["comparisons"]}
    assert found["test_some.py::test_it"]["verdict"] == "improved"
    assert found["test_some.py::test_it"]["ratio"] == pytest.approx(0.5)
    assert main(["compare", "base.json", "head.json", "--metric=bleu"]) == 2
    assert "unknown metric 'bleu'; the nearest names are " in capsys.readouterr().err


def test_the_history_has_them(suite: pytest.Pytester) -> None:
    suite.runpytest("--energy-report").assert_outcomes(passed=2)
    store = Path("history")
    add_run(load_report(suite.path / "energy.json"), "energy.json", store, allow_dirty=True)
    entries = {each.metric: each for each in read_entries(store) if each.id.endswith("test_it")}
    assert (entries["wer"].value, entries["wer"].unit) == (0.2, "err")
    assert "overlap" in entries


def test_a_hook_adds_them(suite: pytest.Pytester, read_report: Read) -> None:
    suite.makeconftest((suite.path / "conftest.py").read_text() + HOOK)
    result = suite.runpytest("--energy-report")
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([r"test +.* lines$"])
    assert [each["custom"]["lines"]["better"] for each in read_report()["records"]] == ["less", "less"]


def test_windows_have_metrics_and_gates_too(
    quick: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, read_report: Read
) -> None:
    quick.makepyfile("""
        import os, time
        def test_it(energy_meter):
            with energy_meter("a"):
                time.sleep(0.2)
            energy_meter.metric("wer", float(os.environ["WER"]), better="less")
    """)
    monkeypatch.setenv("WER", "0.2")
    quick.runpytest("--energy-report=base.json")
    monkeypatch.setenv("WER", "0.4")
    result = quick.runpytest("--energy-compare=base.json", "--energy-fail-on=wer:5%", "--energy-report")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*energy_gate: wer regressed, 0.2 -> 0.4: +100.0%*"])
    assert read_report()["records"][0]["metrics"]["wer"]["value"] == 0.4


def test_xdist_brings_them_to_the_controller(suite: pytest.Pytester, read_report: Read) -> None:
    suite.runpytest("--energy-report", "-n1").assert_outcomes(passed=2)
    found = {each["id"]: each["custom"] for each in read_report()["records"]}
    assert set(found["test_some.py::test_it"]) == {"wer", "overlap"}
