# SPDX-License-Identifier: Apache-2.0
"""Async tests of pytest-asyncio, anyio and unittest."""

from __future__ import annotations

import pytest

from .runs import RunSuite

SUITE = """
import time, unittest, pytest, {library}
from pytest_llenergy.energy import measure
{mark}
async def test_window(energy_meter):
    async with energy_meter("load") as window:
        await {library}.sleep(0.2)
    assert (await window.settled()).energy_j > 0.3
{mark}
async def test_call(energy):
    assert energy(time.sleep, 0.05).energy_j > 0.3
{mark}
async def test_coroutine(energy):
    energy({library}.sleep, 0.05)
{mark}
async def test_measure(energy_meter):
    with energy_meter("load"):
        time.sleep(0.2)
    with measure((), ["estimate"]) as energy:
        await {library}.sleep(0.05)
    assert energy.total.duration_s > 0.04
"""

OF_UNITTEST = """
import asyncio, unittest, pytest
class TestIt(unittest.IsolatedAsyncioTestCase):
    @pytest.fixture(autouse=True)
    def give(self, energy_meter):
        self.energy_meter = energy_meter
    async def test_window(self):
        async with self.energy_meter("load") as window:
            await asyncio.sleep(0.2)
        self.assertGreater((await window.settled()).energy_j, 0.3)
"""

#: Statuses of the records of the suite.
STATUSES = {"window": "measured", "call": "measured", "coroutine": "failed", "measure": "measured"}

REFUSED = "a call of this function only makes a coroutine or generator"


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_async_tests_of_pytest_asyncio_are_recorded(run_suite: RunSuite, mode: str) -> None:
    mark = "@pytest.mark.asyncio" if mode == "strict" else ""
    args = (f"--asyncio-mode={mode}", "-Werror", "-o", "asyncio_default_fixture_loop_scope=function")
    ran = run_suite(SUITE.format(library="asyncio", mark=mark), *args, plugins=("asyncio",))
    ran.result.assert_outcomes(passed=3, failed=1)
    assert ran.statuses() == {(f"test_{name}", 1): status for name, status in STATUSES.items()}
    assert REFUSED in ran.reason("test_coroutine")


def test_async_tests_of_anyio_are_recorded(run_suite: RunSuite) -> None:
    """Runs with asyncio and with trio."""
    pytest.importorskip("trio")
    ran = run_suite(SUITE.format(library="anyio", mark="@pytest.mark.anyio"), "-Werror", plugins=("anyio",))
    ran.result.assert_outcomes(passed=6, failed=2)
    assert ran.statuses() == {
        (f"test_{name}[{loop}]", 1): status
        for name, status in STATUSES.items()
        for loop in ("asyncio", "trio")
    }
    assert ran.records()["test_window[trio]", 1]["params"] == {"anyio_backend": "trio"}


def test_async_tests_of_unittest_are_recorded(run_suite: RunSuite) -> None:
    ran = run_suite(OF_UNITTEST, "-Werror")
    ran.result.assert_outcomes(passed=1)
    assert ran.statuses() == {("TestIt::test_window", 1): "measured"}
