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
EXIT_IN_FIXTURE = """
@pytest.fixture(autouse=True)
def ends(request):
    if request.node.name == "test_second": pytest.exit("enough", returncode=0)
"""
EXIT_IN_HOOK = """
def pytest_runtest_logfinish(nodeid):
    if nodeid.endswith("test_first"): pytest.exit("enough", returncode=0)
"""
#: As if Ctrl-C were pressed again before pytest has set its exit code.
INTERRUPTED_AGAIN = """
def pytest_keyboard_interrupt(): raise KeyboardInterrupt
"""
INTERRUPTED_LAST = """
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(): raise KeyboardInterrupt
"""
SHOULD_STOP = """
@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid): SESSION.shouldstop = "enough"
def pytest_sessionstart(session):
    global SESSION
    SESSION = session
"""
#: A loop of another plugin that ends as if nothing had happened.
LOOP_SWALLOWS = """
@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    item = session.items[0]
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return True
"""
#: Plugins that run tests themselves, with delayed reports and without any.
DELAYED_REPORTS = """
from _pytest.runner import runtestprotocol
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if item.name == "test_second": return True
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
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
        pytest.param("", EXIT.format(1), [], False, id="exit-1", marks=pytest.mark.slow),
        pytest.param("", EXIT.format(5), [], False, id="exit-5", marks=pytest.mark.slow),
        pytest.param(EXIT_IN_FIXTURE, "", [], False, id="exit in a fixture", marks=pytest.mark.slow),
        pytest.param(EXIT_IN_HOOK, "", [], False, id="exit in a hook", marks=pytest.mark.slow),
        pytest.param("", FAIL, ["-x"], False, id="-x"),
        pytest.param(
            "",
            FAIL,
            ["--maxfail=1", "-k", "not third"],
            True,
            id="maxfail at the last test",
            marks=pytest.mark.slow,
        ),
        pytest.param(SHOULD_STOP, "", [], False, id="shouldstop", marks=pytest.mark.slow),
        pytest.param("", INTERRUPT, [], False, id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(INTERRUPTED_AGAIN, INTERRUPT, [], False, id="Ctrl-C twice", marks=pytest.mark.slow),
        pytest.param(INTERRUPTED_LAST, INTERRUPT, [], False, id="Ctrl-C at the end", marks=pytest.mark.slow),
        pytest.param(INTERRUPTED_LAST, "", [], True, id="Ctrl-C after all tests", marks=pytest.mark.slow),
        pytest.param(LOOP_SWALLOWS, "", [], False, id="another loop", marks=pytest.mark.slow),
        pytest.param(DELAYED_REPORTS, "", [], True, id="another protocol", marks=pytest.mark.slow),
        pytest.param(
            INTERRUPTED_AGAIN, INTERRUPT, ["-n2"], False, id="Ctrl-C twice -n2", marks=pytest.mark.slow
        ),
        pytest.param("", EXIT.format(0), ["-n1"], False, id="exit-0 -n1", marks=pytest.mark.slow),
        pytest.param("", FAIL, ["-n1", "-x"], False, id="-x -n1", marks=pytest.mark.slow),
        pytest.param(
            DELAYED_REPORTS.replace('"test_second"', "0"),
            "",
            ["-n1"],
            True,
            id="protocol -n1",
            marks=pytest.mark.slow,
        ),
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
