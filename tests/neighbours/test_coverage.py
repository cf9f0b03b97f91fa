# SPDX-License-Identifier: Apache-2.0
"""pytest-cov: coverage data are written, and ranks run as usual."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from .runs import IN_RANKS, RunSuite

LIBRARY = """
def used():
    return 5
def unused():
    return 6
"""

SUITE = (
    """
import time
from library import used
def test_here(energy):
    energy(lambda: time.sleep(used() / 100))
"""
    + IN_RANKS
)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=str)
def test_coverage_counts_lines_of_the_test_process(
    run_suite: RunSuite, start: str, workers: tuple[str, ...]
) -> None:
    args = (f"--energy-start-method={start}", "--cov=library", "--cov-report=xml", *workers)
    files = {"library": LIBRARY, "test_it": SUITE}
    plugins = ("pytest_cov", "xdist") if workers else ("pytest_cov",)
    ran = run_suite(files, *args, plugins=plugins)
    ran.result.assert_outcomes(passed=2)
    assert ran.statuses() == {("test_here", 1): "measured", ("test_ranks", 1): "measured"}
    assert ElementTree.parse(ran.path / "coverage.xml").getroot().get("line-rate") == "0.75"


def test_coverage_of_subprocesses_leaves_no_partial_files(
    run_suite: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.path.joinpath(".coveragerc").write_text("[run]\npatch = subprocess\nsource = library\n")
    ran = run_suite(
        {"library": LIBRARY, "test_it": SUITE}, "--cov", "--cov-report=xml", plugins=("pytest_cov",)
    )
    ran.result.assert_outcomes(passed=2)
    assert ran.statuses() == {("test_here", 1): "measured", ("test_ranks", 1): "measured"}
    assert ElementTree.parse(ran.path / "coverage.xml").getroot().get("line-rate") == "0.75"
    left = [each.name for each in ran.path.glob(".coverage*")]
    assert sorted(left) == [".coverage", ".coveragerc"]
