# SPDX-License-Identifier: Apache-2.0
"""hypothesis: one record per test, whatever the number of examples."""

from __future__ import annotations

from .runs import RunSuite

SUITE = """
import time
from hypothesis import HealthCheck, given, settings, strategies
quick = dict(max_examples=3, database=None, deadline=None)
same = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], **quick)
def test_examples_as_one_workload(energy):
    @settings(**quick)
    @given(strategies.integers())
    def work(i):
        time.sleep(0.01)
    assert energy(work).energy_j > 0
@same
@given(strategies.integers())
def test_a_window_each(energy_meter, i):
    with energy_meter("example"):
        time.sleep(0.2)
@same
@given(strategies.integers())
def test_each_measured(energy, i):
    energy(time.sleep, 0.05)
"""


def test_a_hypothesis_test_has_one_record_for_all_examples(run_suite: RunSuite) -> None:
    ran = run_suite(SUITE, "-Werror", plugins=("hypothesispytest",))
    ran.result.assert_outcomes(passed=2, failed=1)
    assert ran.statuses() == {
        ("test_examples_as_one_workload", 1): "measured",
        ("test_a_window_each", 1): "measured",
        ("test_each_measured", 1): "failed",
    }
    assert len(ran.records()["test_a_window_each", 1]["windows"]) >= 3
    assert "energy() was called twice in one test" in ran.reason("test_each_measured")
