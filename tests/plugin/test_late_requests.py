# SPDX-License-Identifier: Apache-2.0
"""Tests that ask for energy, or get a mark, only while they run, in runs without an option."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_llenergy.plugin.draft import NOTHING_MEASURED

from ..conftest import TEN_WATTS

#: Writes each finished record to a file, from the hook.
WRITE_RECORDS = (
    TEN_WATTS
    + """
import json, pathlib

def pytest_llenergy_record(item, record):
    with pathlib.Path("records.jsonl").open("a") as file:
        file.write(json.dumps([record.id, record.status, record.reason]) + "\\n")
"""
)

LATE = """
def test_before(): pass

def test_late(request):
    with request.getfixturevalue("energy_meter")("a"):
        sum(range(10**6))

def test_after(): pass
"""


def run(pytester: pytest.Pytester, tests: str, *args: str) -> tuple[pytest.RunResult, list[Any]]:
    """Run pytest in a separate process; return its result and the finished records."""
    pytester.makeconftest(WRITE_RECORDS)
    pytester.makepyfile(tests)
    result = pytester.runpytest_subprocess(*args)
    records = pytester.path / "records.jsonl"
    return result, [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


@pytest.mark.parametrize("args", [(), ("-n2",)], ids=["one process", "workers"])
@pytest.mark.slow
def test_energy_requested_in_the_body_is_recorded(pytester: pytest.Pytester, args: tuple[str, ...]) -> None:
    result, records = run(pytester, LATE, *args)
    result.assert_outcomes(passed=3)
    assert [(name.rpartition("::")[2], status) for name, status, _ in records] == [("test_late", "measured")]
    result.stdout.fnmatch_lines(["*= energy =*", "*test_late*"])


def test_energy_requested_by_a_fixture_is_recorded(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

@pytest.fixture
def meter(request):
    return request.getfixturevalue("energy_meter")

@pytest.fixture
def user(meter):
    with meter("a"):
        sum(range(10**6))

def test_late(request):
    request.getfixturevalue("user")
"""
    result, records = run(pytester, tests)
    result.assert_outcomes(passed=1)
    assert [status for _, status, _ in records] == ["measured"]
    result.stdout.fnmatch_lines(["*= energy =*", "*test_late*"])


def test_late_request_without_measurement_fails(pytester: pytest.Pytester) -> None:
    result, records = run(pytester, "def test_late(request): request.getfixturevalue('energy')")
    result.assert_outcomes(failed=1)
    assert [(status, reason) for _, status, reason in records] == [("failed", f"Failed: {NOTHING_MEASURED}")]


@pytest.mark.parametrize("place", ["setup", "call", "teardown", "part"])
@pytest.mark.slow
def test_package_error_is_one_line(pytester: pytest.Pytester, place: str) -> None:
    tests = """
import pytest

@pytest.fixture
def setup(request): return request.getfixturevalue("prompts")[:100]

def test_setup(setup): pass

def test_call(request):
    from pytest_llenergy.plugin.default_prompts import Prompts
    Prompts()[:100]

@pytest.fixture
def teardown(request):
    request.getfixturevalue("gpus")
    prompts = request.getfixturevalue("prompts")
    yield
    prompts[:100]

def test_teardown(teardown): pass

def test_part(request):
    request.getfixturevalue("gpus")
    with request.getfixturevalue("subtests").test():
        request.getfixturevalue("prompts")[:100]
"""
    if place == "part":
        pytest.importorskip("_pytest.subtests", reason="this pytest has no subtests of its own")
    result, records = run(pytester, tests, "-k", place)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    shown = [line for line in result.outlines if "prompts[:100]: " in line]
    assert shown[0].startswith("LLEnergyError: prompts[:100]: the set has ")
    # Lines with which pytest shows the source of other errors.
    assert not [line for line in result.outlines if line.startswith(("E  ", ">  "))]
    assert not records


@pytest.mark.slow
def test_marks_that_are_added_after_collection_have_no_effect(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

@pytest.fixture(autouse=True)
def late(request):
    for mark in (pytest.mark.gpus(99), pytest.mark.parallel(data=7), pytest.mark.energy_gate(budget="1 pJ")):
        request.node.add_marker(mark)

def test_it(energy): energy(sum, [1])
"""
    result, records = run(pytester, tests)
    result.assert_outcomes(passed=1)
    assert [status for _, status, _ in records] == ["measured"]


def test_mark_added_last_at_collection_is_checked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        marker="""
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.parallel(data=2))
"""
    )
    result, _ = run(pytester, "def test_it(workers): pass", "-p", "marker")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*test_it: @pytest.mark.parallel(data=2)*"])


def test_backend_requested_in_the_body_is_refused(pytester: pytest.Pytester) -> None:
    result, _ = run(pytester, "def test_it(request): request.getfixturevalue('backend')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["PlanError: a test runs once for each backend: make the fixture backend *"])
