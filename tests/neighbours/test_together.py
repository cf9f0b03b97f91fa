# SPDX-License-Identifier: Apache-2.0
"""All plugins together."""

from __future__ import annotations

import json

import pytest

from pytest_llenergy.cli import main

from .runs import OUTCOMES, STATUSES, SUITE, RunSuite


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_all_plugins_together_change_no_record(
    run_suite: RunSuite, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    """In random order, with four reports and coverage data."""
    plugins = (
        *("rerunfailures", "timeout", "randomly", "asyncio", "anyio", "pytest_cov", "metadata", "html"),
        *("html_fixtures", "pytest_jsonreport", "pytest_reportlog", "sugar", "pytest-split"),
        *("hypothesispytest", "codecarbon", "xdist"),
    )
    args = ["--reruns=1", "--timeout=60", "--cov=test_it", "--html=page.html", "--json-report"]
    args += ["--report-log=log.jsonl", "--junitxml=junit.xml", "--splits=1", "--group=1"]
    ran = run_suite(SUITE, *args, *workers, plugins=plugins)
    assert ran.result.ret == pytest.ExitCode.TESTS_FAILED
    assert ran.statuses() == {**STATUSES, ("test_fails", 2): "failed"}
    summary = json.loads((ran.path / ".report.json").read_text())["summary"]
    assert {name: summary[name] for name in OUTCOMES} == OUTCOMES
    for name in (".coverage", "page.html", "log.jsonl", "junit.xml"):
        assert (ran.path / name).stat().st_size


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_records_do_not_depend_on_plugin_order(
    run_suite: RunSuite, workers: tuple[str, ...], seed: int
) -> None:
    plugins = ("randomly", "xdist") if workers else ("randomly",)
    ran = run_suite(SUITE, f"--randomly-seed={seed}", *workers, plugins=plugins)
    assert ran.statuses() == STATUSES


def test_partial_reports_merge_into_a_whole(run_suite: RunSuite) -> None:
    for group in (1, 2):
        args = ("--splits=2", f"--group={group}", f"--energy-report=part-{group}.json")
        ran = run_suite(SUITE, *args, plugins=("pytest-split",))
    parts = [ran.path / f"part-{group}.json" for group in (1, 2)]
    assert not ran.statuses(parts[0].name).keys() & ran.statuses(parts[1].name).keys()
    assert main(["merge", *map(str, parts), "-o", str(ran.path / "energy.json")]) == 0
    assert ran.statuses() == STATUSES
