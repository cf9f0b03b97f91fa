# SPDX-License-Identifier: Apache-2.0
"""Tests other than functions: unittest classes and doctests."""

from __future__ import annotations

import pytest

from .runs import RunSuite

UNITTEST = """
import time, unittest, pytest
class TestMeasured(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def give(self, energy):
        self.energy = energy
    def test_good(self):
        self.assertGreater(self.energy(time.sleep, 0.05).energy_j, 0.3)
    def test_fails(self):
        self.energy(time.sleep, 0.05)
        self.fail("of its own")
    def test_skips(self):
        self.skipTest("not here")
    @unittest.skip("not at all")
    def test_skipped(self):
        pass
    @unittest.expectedFailure
    def test_expected(self):
        self.energy(time.sleep, 0.05)
        self.fail("of its own")
    def test_nothing(self):
        pass
    @pytest.mark.energy_gate(budget="0.1 J")
    def test_gate(self):
        self.energy(time.sleep, 0.05)
    @pytest.mark.energy_gate(budget="0.1 J")
    def test_fails_before_its_gate(self):
        self.energy(time.sleep, 0.05)
        self.fail("of its own")
class TestOther(unittest.TestCase):
    def test_other(self):
        pass
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.slow)], ids=str)
def test_unittest_methods_are_recorded(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run_suite(UNITTEST, *workers, plugins=("xdist",))
    ran.result.assert_outcomes(passed=2, failed=4, skipped=2, xfailed=1)
    assert ran.statuses() == {
        ("TestMeasured::test_good", 1): "measured",
        ("TestMeasured::test_fails", 1): "failed",
        ("TestMeasured::test_skips", 1): "skipped",
        ("TestMeasured::test_skipped", 1): "skipped",
        ("TestMeasured::test_expected", 1): "failed",
        ("TestMeasured::test_nothing", 1): "failed",
        ("TestMeasured::test_gate", 1): "failed",
        ("TestMeasured::test_fails_before_its_gate", 1): "failed",
    }
    assert ran.reason("TestMeasured::test_fails") == "AssertionError: of its own"
    assert ran.reason("TestMeasured::test_expected").startswith("xfail")
    assert "measured nothing" in ran.reason("TestMeasured::test_nothing")
    # A gate is evaluated only if the test passed otherwise.
    judged = {name for (name, _), record in ran.records().items() if record["failed_gate"]}
    assert judged == {"TestMeasured::test_gate"}


MODULE = '''
def answer():
    """
    >>> energy = getfixture("energy")
    >>> run = energy(sum, range(9999))
    >>> run.energy_j > 0
    True
    """
def plain():
    """
    >>> 1 + 1
    2
    """
def wrong():
    """
    >>> getfixture("energy")(sum, range(9999)).result
    5
    """
'''

FILE = """
>>> import time
>>> energy_meter = getfixture("energy_meter")
>>> with energy_meter("load") as window:
...     time.sleep(0.2)
>>> window.energy_j > 0.3
True
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.slow)], ids=str)
def test_doctests_are_recorded(
    run_suite: RunSuite, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.maketxtfile(test_file=FILE)
    ran = run_suite({"module": MODULE}, "--doctest-modules", *workers, plugins=("xdist",))
    ran.result.assert_outcomes(passed=3, failed=1)
    assert ran.statuses() == {
        ("module.answer", 1): "measured",
        ("module.wrong", 1): "failed",
        ("test_file.txt", 1): "measured",
    }
