# SPDX-License-Identifier: Apache-2.0
"""pytest-forked: every test has a record, also if its process crashed."""

from __future__ import annotations

import pytest

from .runs import IN_RANKS, STATUSES, SUITE, RunSuite

FORKED = ("pytest_forked",)

pytestmark = pytest.mark.skipif(
    pytest.version_tuple >= (9, 2),
    reason="pytest-forked 1.7.5 runs no test at all with pytest 9.2; tox run -e neighbours-pytest8 has 8.4",
)


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_records_come_back_from_forks(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run_suite(SUITE, "--forked", *workers, plugins=(*FORKED, "xdist") if workers else FORKED)
    ran.result.stdout.fnmatch_lines(["*1 failed, 4 passed, 1 skipped, 1 xfailed*"])
    assert ran.statuses() == STATUSES


DIES = """
import os, pytest
@pytest.mark.forked
def test_dies(energy):
    os._exit(7)
@pytest.mark.forked
def test_other_dies():
    os._exit(7)
def test_good(energy):
    energy(sum, [1])
"""


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_a_crashed_fork_is_recorded(run_suite: RunSuite, workers: tuple[str, ...]) -> None:
    ran = run_suite(DIES, *workers, plugins=(*FORKED, "xdist") if workers else FORKED)
    ran.result.assert_outcomes(passed=1, failed=2)
    found = ran.records()
    assert set(found) == {("test_dies", 1), ("test_good", 1)}
    assert found["test_dies", 1]["status"] == "crashed"
    assert "EXITED with status 7" in ran.reason("test_dies")


def test_each_fork_starts_its_own_ranks(run_suite: RunSuite) -> None:
    """Warm ranks of the parent process stay usable."""
    before, after = IN_RANKS.format("_before"), IN_RANKS.format("_after")
    fork = IN_RANKS.format("_fork").replace("@", "@pytest.mark.forked\n@")
    ran = run_suite(before + fork + after, plugins=FORKED)
    ran.result.assert_outcomes(passed=3)
    assert [len(record["ranks"]) for record in ran.records().values()] == [2, 2, 2]
