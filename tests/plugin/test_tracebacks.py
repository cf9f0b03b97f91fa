# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of failing tests go from the test to its workload, without frames of this package."""

from __future__ import annotations

import pytest

from ..conftest import TEN_WATTS
from ..ranks.no_torch import without_torch

BROKEN_FIXTURES = """
@pytest.fixture
def broken():
    raise ValueError("in a fixture")

@pytest.fixture
def broken_later():
    yield
    raise ValueError("in teardown")
"""

FAILURES = """
import asyncio
import pytest

calls = []

def refuse():
    raise ValueError("in the workload")

def refuse_later():
    calls.append(1)
    if len(calls) > 1:
        raise ValueError("in a round")

def test_warm_up(energy):
    energy(refuse)

def test_round(energy):
    energy(refuse_later)

def test_outcome(energy):
    energy(lambda: pytest.fail("by pytest.fail"))

def test_window(energy_meter):
    with energy_meter("a"):
        refuse()

def test_async_window(energy_meter):
    async def work():
        async with energy_meter("a"):
            refuse()
    coroutine = work()
    try:
        asyncio.run(coroutine)
    finally:
        coroutine.close()

@pytest.mark.gpus(1, fallback="cpu")
def test_rank(workers):
    workers.run(refuse)

@pytest.mark.gpus(1, fallback="cpu")
def test_measured_rank(energy):
    energy(refuse)

def test_benchmark(benchmark):
    benchmark(refuse)

def test_metric(energy):
    energy(int).joules

def test_set_up(energy, broken):
    pass

def test_set_up_of_another_plugins_test(broken):
    pass

def test_tear_down(energy, broken_later):
    energy(int)
"""


@pytest.fixture
def failing(quick: pytest.Pytester) -> pytest.Pytester:
    without_torch(quick.path)
    quick.makeini("[pytest]\nenergy_rounds = 2\nenergy_warmup = 1\nenergy_budget = 0.1\n")
    quick.makeconftest(TEN_WATTS + BROKEN_FIXTURES)
    quick.makepyfile(FAILURES)
    return quick


@pytest.mark.slow
def test_no_frame_of_this_package_is_shown(failing: pytest.Pytester) -> None:
    result = failing.runpytest("--energy-report")
    result.assert_outcomes(failed=9, passed=1, errors=3)
    output = result.stdout.str()
    assert "pytest_llenergy/" not in output
    assert "contextlib.py" not in output
    for cause in ("the workload", "a round", "a fixture", "teardown"):
        assert f"ValueError: in {cause}" in output
    # The call in the test, then at once the line that raises.
    result.stdout.fnmatch_lines(
        [">*energy(refuse)", "", "*test_*.py:*", "_ _*", "", "*def refuse():", ">*raise ValueError(*"],
        consecutive=True,
    )


@pytest.mark.parametrize("option", ["--full-trace", "--tb=native"])
def test_full_tracebacks_show_every_frame(failing: pytest.Pytester, option: str) -> None:
    result = failing.runpytest(option, "-k", "test_round")
    result.assert_outcomes(failed=1, deselected=11)
    assert "pytest_llenergy/measure/rounds.py" in result.stdout.str()
