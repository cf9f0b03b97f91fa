# SPDX-License-Identifier: Apache-2.0
"""Subtests of pytest, pytest-subtests and unittest: one record for the whole test."""

from __future__ import annotations

import pytest

from .runs import RunSuite

#: pytest has subtests since version 9; earlier versions need the plugin.
SUBTESTS = () if pytest.version_tuple >= (9,) else ("subtests",)

SUITE = """
import time, unittest, pytest
def test_good(subtests, energy):
    with subtests.test("before"):
        pass
    with subtests.test("measured"):
        energy(time.sleep, 0.05)
@pytest.mark.energy_gate(budget="0.1 J")
def test_bad(subtests, energy):
    for i in range(3):
        with subtests.test(i=i):
            assert i == 1
    energy(time.sleep, 0.05)
class TestIt(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def give(self, energy):
        self.energy = energy
    def test_good(self):
        for i in range(2):
            with self.subTest(i=i):
                pass
        self.energy(time.sleep, 0.05)
    def test_bad(self):
        with self.subTest("first"):
            assert False
        self.energy(time.sleep, 0.05)
"""

#: Source of a conftest that writes down the tests for which the hook is called.
HOOK = """
from pathlib import Path
def pytest_llenergy_record(item, record):
    with Path("seen.txt").open("a") as file:
        file.write(item.name + "\\n")
"""


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_a_test_with_subtests_has_one_record(
    run_suite: RunSuite, ten_watts: str, workers: tuple[str, ...]
) -> None:
    plugins = (*SUBTESTS, "xdist") if workers else SUBTESTS
    ran = run_suite({"conftest": ten_watts + HOOK, "test_it": SUITE}, *workers, plugins=plugins)
    assert ran.result.ret == pytest.ExitCode.TESTS_FAILED
    assert ran.statuses() == {
        ("test_good", 1): "measured",
        ("test_bad", 1): "failed",
        ("TestIt::test_good", 1): "measured",
        ("TestIt::test_bad", 1): "failed",
    }
    assert ran.reason("test_bad") == "2 failed subtests"
    assert ran.reason("TestIt::test_bad") == "1 failed subtest"
    # The measurement is kept as for any failed test; gates apply only to passed tests.
    bad = ran.records()["test_bad", 1]
    assert bad["metrics"]["energy_j"]["value"] > 0.1
    assert not bad["failed_gate"]
    seen = (ran.path / "seen.txt").read_text().split()
    assert sorted(seen) == ["test_bad", "test_bad", "test_good", "test_good"]
