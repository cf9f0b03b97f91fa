# SPDX-License-Identifier: Apache-2.0
"""pytest-timeout: a timed-out test has a record, and the next test is not affected."""

from __future__ import annotations

import pytest

from pytest_llenergy.cli import main

from .runs import ONE, RunSuite

TIMEOUT = ("timeout",)

SLOW = """
import time, pytest
@pytest.mark.timeout(5)
def test_slow(energy):
    energy(time.sleep, 60)
@pytest.mark.timeout(1, func_only=True)
def test_slow_window(energy_meter):
    with energy_meter("load"):
        time.sleep(60)
@pytest.mark.timeout(10)
@pytest.mark.gpus(1, fallback="cpu")
def test_slow_rank(workers, energy):
    workers.run(int, "5")
    energy(workers.call(time.sleep, 60))
@pytest.mark.gpus(1, fallback="cpu")
def test_rank(workers, energy):
    assert energy(workers.call(int, "5")).result == 5
"""


def test_a_test_that_times_out_by_signal_is_recorded(run_suite: RunSuite) -> None:
    # The first test imports what all need, which takes long on a busy machine.
    ran = run_suite(ONE + SLOW, plugins=TIMEOUT)
    ran.result.assert_outcomes(passed=3, failed=3)
    assert ran.statuses() == {
        ("test_slow", 1): "failed",
        ("test_slow_window", 1): "failed",
        ("test_slow_rank", 1): "failed",
        ("test_rank", 1): "measured",
        ("test_one", 1): "measured",
    }
    assert ran.reason("test_slow_rank") == "Failed: Timeout (>10.0s) from pytest-timeout."


#: Only this test has a time limit: others may be slow on a busy machine.
SLOW_ALONE = """
import pytest, time
@pytest.mark.timeout(2)
def test_slow(energy):
    energy(time.sleep, 60)
"""


def test_a_run_that_times_out_by_thread_leaves_its_journal(run_suite: RunSuite) -> None:
    """The thread method ends the whole process."""
    ran = run_suite(ONE + SLOW_ALONE, "--timeout-method=thread", plugins=TIMEOUT)
    assert ran.result.ret == 1
    assert not (ran.path / "energy.json").exists()
    (journal,) = ran.path.glob("energy.*.journal.jsonl")
    assert main(["merge", str(journal), "-o", str(ran.path / "energy.json")]) == 0
    assert ran.statuses() == {("test_one", 1): "measured"}
    assert not ran.report()["run"]["complete"]


def test_an_xdist_worker_that_times_out_by_thread_is_recorded(run_suite: RunSuite) -> None:
    ran = run_suite(SLOW_ALONE + ONE, "-n1", "--timeout-method=thread", plugins=(*TIMEOUT, "xdist"))
    assert ran.result.ret == pytest.ExitCode.TESTS_FAILED
    assert ran.statuses() == {("test_slow", 1): "crashed", ("test_one", 1): "measured"}
