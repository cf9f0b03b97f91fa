# SPDX-License-Identifier: Apache-2.0
"""Plugins that write reports or draw on the terminal: both reports are complete."""

from __future__ import annotations

import html
import json
import re

import pytest
from junitparser import JUnitXml

from .runs import OUTCOMES, STATUSES, SUITE, FinishedRun, RunSuite

BOTH = pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)


def run(run_suite: RunSuite, workers: tuple[str, ...], plugins: tuple[str, ...], *args: str) -> FinishedRun:
    ran = run_suite(SUITE, *workers, *args, plugins=(*plugins, "xdist") if workers else plugins)
    assert ran.result.ret == pytest.ExitCode.TESTS_FAILED
    assert ran.statuses() == STATUSES
    return ran


@BOTH
def test_pytest_html_lists_every_outcome(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run(run_suite, workers, ("metadata", "html", "html_fixtures"), "--html=page.html")
    page = (ran.path / "page.html").read_text()
    found = re.search(r'data-jsonblob="(.*?)"', page, re.DOTALL)
    assert found is not None
    rows = json.loads(html.unescape(found[1]))["tests"]
    results = [each["result"] for row in rows.values() for each in row]
    assert sorted(results) == sorted(["Passed"] * 4 + ["Failed", "Skipped", "XFailed"])


@BOTH
def test_pytest_json_report_has_measured_values(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run(run_suite, workers, ("metadata", "pytest_jsonreport"), "--json-report")
    report = json.loads((ran.path / ".report.json").read_text())
    assert {name: report["summary"][name] for name in OUTCOMES} == OUTCOMES
    tests = {test["nodeid"].partition("::")[2]: test for test in report["tests"]}
    found = {name: value for each in tests["test_window"]["user_properties"] for name, value in each.items()}
    assert found["llenergy.window.load.energy_j"] > 0
    assert "user_properties" not in tests["test_other"]


@BOTH
def test_pytest_reportlog_contains_the_records(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run(run_suite, workers, ("pytest_reportlog",), "--report-log=log.jsonl")
    lines = [json.loads(line) for line in (ran.path / "log.jsonl").read_text().splitlines()]
    calls = {line["nodeid"].partition("::")[2]: line for line in lines if line.get("when") == "call"}
    assert len(calls) == 7
    # Records are attached to test reports, so the log has them.
    kept = {name: line["llenergy"]["status"] for name, line in calls.items() if "llenergy" in line}
    assert kept == {name: status for (name, _), status in STATUSES.items()}


@BOTH
def test_junit_xml_counts_every_outcome(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run(run_suite, workers, (), "--junitxml=junit.xml")
    (suite,) = JUnitXml.fromfile(str(ran.path / "junit.xml"))
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (7, 1, 2, 0)


@BOTH
@pytest.mark.parametrize("forced", [(), ("--force-sugar",)], ids=str)
def test_with_pytest_sugar_the_energy_table_is_printed_once(
    run_suite: RunSuite, workers: tuple[str, ...], forced: tuple[str, ...]
) -> None:
    ran = run(run_suite, workers, ("sugar",), *forced)
    found = ran.result.stdout.str()
    assert len(re.findall("^=+ energy =+$", found, re.MULTILINE)) == 1
    assert len(re.findall(r"^  i=\d +\d.* mJ ", found, re.MULTILINE)) == 2
    ran.result.stdout.fnmatch_lines(["energy report: energy.json"])
