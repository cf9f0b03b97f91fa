# SPDX-License-Identifier: Apache-2.0
"""Runs without an option in which no test is known to be of ours until it asks, as it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_llenergy.recorder import NOTHING_MEASURED

from .conftest import TEN_WATTS

#: What is finished, as other plugins are told of it.
TELL = (
    TEN_WATTS
    + """
import json, pathlib

def pytest_llenergy_record(item, record):
    with pathlib.Path("told.jsonl").open("a") as file:
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
    """Each in a process of its own, which knows of no test that was before."""
    pytester.makeconftest(TELL)
    pytester.makepyfile(tests)
    result = pytester.runpytest_subprocess(*args)
    told = pytester.path / "told.jsonl"
    return result, [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


@pytest.mark.parametrize("args", [(), ("-n2",)], ids=["one process", "workers"])
def test_one_that_asks_in_its_body_has_its_record_and_its_row(
    pytester: pytest.Pytester, args: tuple[str, ...]
) -> None:
    result, told = run(pytester, LATE, *args)
    result.assert_outcomes(passed=3)
    assert [(name.rpartition("::")[2], status) for name, status, _ in told] == [("test_late", "measured")]
    result.stdout.fnmatch_lines(["*= energy =*", "*test_late*"])


def test_so_has_one_whose_own_fixture_asks(pytester: pytest.Pytester) -> None:
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
    result, told = run(pytester, tests)
    result.assert_outcomes(passed=1)
    assert [status for _, status, _ in told] == ["measured"]
    result.stdout.fnmatch_lines(["*= energy =*", "*test_late*"])


def test_one_that_measures_nothing_fails(pytester: pytest.Pytester) -> None:
    result, told = run(pytester, "def test_late(request): request.getfixturevalue('energy')")
    result.assert_outcomes(failed=1)
    assert [(status, reason) for _, status, reason in told] == [("failed", f"Failed: {NOTHING_MEASURED}")]


def test_a_part_that_fails_is_of_the_test(pytester: pytest.Pytester) -> None:
    pytest.importorskip("_pytest.subtests", reason="this pytest has no subtests of its own")
    tests = """
def test_late(request, subtests):
    with request.getfixturevalue("energy_meter")("a"):
        for index in range(3):
            with subtests.test(index=index):
                assert index != 1
"""
    _, told = run(pytester, tests)
    assert [(status, reason) for _, status, reason in told] == [("failed", "1 failed subtest")]


@pytest.mark.parametrize("place", ["setup", "call", "teardown", "part"])
def test_an_error_of_ours_is_one_line(pytester: pytest.Pytester, place: str) -> None:
    tests = """
import pytest

@pytest.fixture
def setup(request): return request.getfixturevalue("prompts")[:100]

def test_setup(setup): pass

def test_call(request):
    from pytest_llenergy.model.prompts import default_prompts
    default_prompts()[:100]

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
    result, told = run(pytester, tests, "-k", place)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    shown = [line for line in result.outlines if "prompts[:100]: " in line]
    assert shown[0].startswith("LLEnergyError: prompts[:100]: the set has 8 prompts")
    # What pytest shows of other errors is their source.
    assert not [line for line in result.outlines if line.startswith(("E  ", ">  "))]
    assert not told


MARKS = [
    "gpus(2)",
    "parallel(data=0)",
    "parallel(data=7)",
    "backend_options(dtype='x')",
    "backend_needs(task='nonsense')",
    "energy_gate(budget='1 J')",
]


@pytest.mark.parametrize("before", ["", "request.getfixturevalue('energy_meter')"], ids=["idle", "woken"])
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_that_a_fixture_adds_does_not_do_nothing(
    pytester: pytest.Pytester, mark: str, before: str
) -> None:
    tests = f"""
import pytest

@pytest.fixture(autouse=True)
def late(request):
    {before}
    request.node.add_marker(pytest.mark.{mark})

def test_it(): pass
"""
    result, _ = run(pytester, tests)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"PlanError: *test_it: *@pytest.mark.{mark.partition('(')[0]}*"])


def test_degrees_that_change_when_ranks_were_chosen_are_refused(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

@pytest.fixture
def late(request, workers): request.node.add_marker(pytest.mark.parallel(data=7))

def test_it(late): pass
"""
    result, _ = run(pytester, tests)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["PlanError: *test_it: @pytest.mark.parallel was added while *"])


ADDS = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.add_marker(pytest.mark.{mark})
"""


@pytest.mark.parametrize("mark", MARKS)
def test_one_that_a_hook_adds_to_a_test_is_told_as_ever(pytester: pytest.Pytester, mark: str) -> None:
    pytester.makepyfile(marker=ADDS.format(mark=mark))
    result, _ = run(pytester, "def test_it(): pass", "-p", "marker")
    if mark == "gpus(2)":
        result.assert_outcomes(skipped=1)
    elif mark == "parallel(data=7)":
        # Of a test without ranks; what it would do is not known to do nothing.
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines([f"PlanError: *test_it: *@pytest.mark.{mark.partition('(')[0]}*"])


def test_a_lease_that_a_hook_adds_is_taken(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(marker=ADDS.format(mark="gpus(1, fallback='cpu')"))
    tests = "def test_it(request): assert request.getfixturevalue('gpus').devices == ('cpu',)"
    result, _ = run(pytester, tests, "-p", "marker")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("args", [(), ("--co",)], ids=["run", "collected"])
def test_a_mark_that_a_hook_adds_last_of_all_is_obeyed(
    pytester: pytest.Pytester, args: tuple[str, ...]
) -> None:
    pytester.makepyfile(
        marker="""
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.parallel(data=2))
"""
    )
    result, _ = run(pytester, "def test_it(workers): pass", "-p", "marker", *args)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*test_it: @pytest.mark.parallel(data=2)*"])


def test_an_engine_is_not_asked_for_as_the_test_runs(pytester: pytest.Pytester) -> None:
    result, _ = run(pytester, "def test_it(request): request.getfixturevalue('backend')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["PlanError: a test runs once for each backend: name the fixture backend *"])


HOLDS = """
import pytest

held = []

@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    held.extend(item for item in session.items if "held" in item.nodeid)
    session.items[:] = [item for item in session.items if item not in held]

@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    session.items.extend(held)
    return (yield)
"""


def test_tests_that_come_when_others_were_collected_are_no_others(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

def test_plain(): pass

@pytest.mark.gpus(1, fallback="cpu")
class TestHeld:
    def test_held(self, request): assert request.getfixturevalue("gpus").devices == ("cpu",)
    def test_held_too(self): pass

@pytest.mark.gpus(99)
def test_held_skipped(): pass

@pytest.mark.parametrize("gpus", [3], indirect=True)
def test_held_value(gpus): pass
"""
    pytester.makepyfile(holder=HOLDS)
    result, _ = run(pytester, tests, "-p", "holder")
    result.assert_outcomes(passed=3, skipped=1, errors=1)
    result.stdout.fnmatch_lines(["PlanError: *test_held_value*: the fixture gpus takes no value*"])


def test_a_mark_on_what_a_test_is_in_is_obeyed_from_the_next_test_on(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

class TestIt:
    @pytest.fixture(autouse=True, scope="class")
    def late(self, request): request.node.add_marker(pytest.mark.gpus(1, fallback="cpu"))

    def test_first(self): pass
    def test_second(self): pass
    def test_third(self): pass
"""
    result, _ = run(pytester, tests)
    result.assert_outcomes(errors=1, passed=2)


@pytest.mark.parametrize("gated", ["hook", "fixture", "held"])
def test_a_gate_that_comes_late_to_a_benchmark_judges_it_or_is_refused(
    pytester: pytest.Pytester, gated: str
) -> None:
    pytest.importorskip("pytest_benchmark")
    gate = "energy_gate(budget='0.1 mJ')"
    plugin = {"hook": ADDS.format(mark=gate), "fixture": "", "held": HOLDS}[gated]
    decorator = f"@pytest.mark.{gate}" if gated == "held" else ""
    tests = f"""
import time
import pytest

@pytest.fixture(autouse={gated == "fixture"})
def late(request): request.node.add_marker(pytest.mark.{gate})

def test_plain(): pass

{decorator}
def test_held(benchmark): benchmark.pedantic(time.sleep, args=(0.02,), rounds=3)
"""
    pytester.makepyfile(marker=plugin)
    result, _ = run(pytester, tests, "-p", "marker", "-p", "no:xdist", "-k", "held")
    result.assert_outcomes(**{"errors" if gated == "fixture" else "failed": 1})
