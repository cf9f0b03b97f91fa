# SPDX-License-Identifier: Apache-2.0
"""``run.complete`` is true if every selected test had its turn, whatever the exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..conftest import TEN_WATTS

pytestmark = pytest.mark.usefixtures("few_plugins", "no_xdist")

Read = Callable[..., dict[str, Any]]

SUITE = """
import os, pytest, time
def test_first(energy):
    energy(time.sleep, 0.01)
def test_second(energy):
    energy(time.sleep, 0.01)
    exec(os.environ.get("IN_TEST", ""))
def test_third(energy):
    energy(time.sleep, 0.01)
"""

EXIT = "pytest.exit('enough', returncode={})"
INTERRUPTED_LAST = """
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(): raise KeyboardInterrupt
"""
INTERRUPT = "raise KeyboardInterrupt"
FAIL = "assert False"


@pytest.mark.parametrize(
    ("conftest", "in_test", "options", "complete"),
    [
        pytest.param("", "", [], True, id="all", marks=pytest.mark.slow),
        pytest.param("", FAIL, [], True, id="failure"),
        pytest.param("", "", ["-k", "not second"], True, id="deselected", marks=pytest.mark.slow),
        pytest.param("", EXIT.format(0), [], False, id="exit-0"),
        pytest.param("", FAIL, ["-x"], False, id="-x"),
        pytest.param(
            "",
            FAIL,
            ["--maxfail=1", "-k", "not third"],
            True,
            id="maxfail at the last test",
            marks=pytest.mark.slow,
        ),
        pytest.param("", INTERRUPT, [], False, id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(INTERRUPTED_LAST, "", [], True, id="Ctrl-C after all tests", marks=pytest.mark.slow),
        pytest.param("", EXIT.format(0), ["-n1"], False, id="exit-0 -n1", marks=pytest.mark.slow),
        pytest.param("", FAIL, ["-n1", "-x"], False, id="-x -n1", marks=pytest.mark.slow),
    ],
)
def test_complete_means_that_no_test_was_left_out(
    quick: pytest.Pytester,
    read_report: Read,
    monkeypatch: pytest.MonkeyPatch,
    conftest: str,
    in_test: str,
    options: list[str],
    complete: bool,
) -> None:
    quick.makeconftest(TEN_WATTS + conftest)
    quick.makepyfile(SUITE)
    monkeypatch.setenv("IN_TEST", in_test)
    result = quick.runpytest_subprocess("--energy-report", *options)
    report = read_report()
    assert report["run"]["complete"] is complete, result.stdout.str()
    assert {record["id"].rpartition("_")[2] for record in report["records"]} >= (
        {"first"} if in_test or not complete else {"first", "third"}
    )


def test_tests_that_last_failed_are_all_that_is_selected(quick: pytest.Pytester, read_report: Read) -> None:
    quick.makepyfile("def test_one(energy): energy(sum, [1])\ndef test_two(energy): assert energy is None\n")
    quick.runpytest("--energy-report").assert_outcomes(passed=1, failed=1)
    quick.runpytest("--energy-report", "--lf").assert_outcomes(failed=1)
    report = read_report()
    assert [record["id"].partition("::")[2] for record in report["records"]] == ["test_two"]
    assert report["run"]["complete"] is True


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.slow)])
def test_a_file_that_was_not_collected_is_missing(
    quick: pytest.Pytester, read_report: Read, workers: tuple[str, ...]
) -> None:
    quick.makepyfile(test_ok="def test_it(energy): energy(sum, [1])", test_broken="import no_such_module")
    quick.runpytest_subprocess("--energy-report", "--continue-on-collection-errors", *workers)
    report = read_report()
    assert len(report["records"]) == 1
    assert report["run"]["complete"] is False
