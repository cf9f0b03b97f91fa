# SPDX-License-Identifier: Apache-2.0
"""Other plugins that measure energy: each measures its own tests."""

from __future__ import annotations

import csv

import pytest

from .runs import ONE, STATUSES, SUITE, RunSuite

THEIRS = """
@pytest.mark.energy(n=2)
def test_theirs():
    time.sleep(0.05)
"""

BOTH = "import pytest, time\n@pytest.mark.energy(n=2)\ndef test_both(energy):\n    energy(time.sleep, 0.05)\n"


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_pytest_codecarbon_changes_no_record(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    plugins = ("codecarbon", "xdist") if workers else ("codecarbon",)
    ran = run_suite(SUITE, "--carbon", "--carbon-dir=carbon", *workers, plugins=plugins)
    assert ran.statuses() == STATUSES
    with (ran.path / "carbon" / "emissions.csv").open() as file:
        rows = [row["project_name"] for row in csv.DictReader(file)]
    # Two workers would write to one file without a lock.
    assert len(rows) == 7 or workers


def test_pytest_energy_reporter_changes_no_record(run_suite: RunSuite) -> None:
    ran = run_suite(SUITE + THEIRS, plugins=("pytest_energy_reporter",))
    assert ran.statuses() == STATUSES
    ran.result.assert_outcomes(passed=5, failed=1, skipped=1, xfailed=1)
    ran.result.stdout.fnmatch_lines(["*= energy =*", "*- Energy Summary -*", "*py::test_theirs | *"])


def test_a_test_that_pytest_energy_reporter_repeats_fails(run_suite: RunSuite) -> None:
    """A test that uses ``energy`` should not carry its mark."""
    ran = run_suite(BOTH, plugins=("pytest_energy_reporter",))
    assert ran.statuses() == {("test_both", 1): "failed"}
    assert "energy() was called twice in one test" in ran.reason("test_both")


def test_two_energy_plugins_together_change_no_record(run_suite: RunSuite) -> None:
    ran = run_suite(ONE, "--carbon", plugins=("pytest_energy_reporter", "codecarbon"))
    ran.result.assert_outcomes(passed=2)
    assert ran.statuses() == {("test_one", 1): "measured"}
