# SPDX-License-Identifier: Apache-2.0
"""All distribution modes of pytest-xdist give the same records, one table and one report."""

from __future__ import annotations

from typing import Any

import pytest

from .suites import Read

pytestmark = pytest.mark.usefixtures("few_plugins")

DISTS = [
    "load",
    *(pytest.param(dist, marks=pytest.mark.slow) for dist in ("loadscope", "loadfile", "worksteal")),
]

SUITE = """
import time, pytest
class TestIt:
    @pytest.mark.xdist_group("two@words")
    @pytest.mark.parametrize("i", ["a@b", "c::d"])
    def test_it(self, energy, i):
        energy(time.sleep, 0.01)
@pytest.mark.xdist_group("other")
def test_one(energy):
    energy(time.sleep, 0.01)
def test_plain():
    pass
def test_breaks(energy):
    assert False, "broken"
def test_skips(energy):
    pytest.skip("not here")
"""

STATES = {
    "TestIt::test_it[a@b]": "measured",
    "TestIt::test_it[c::d]": "measured",
    "test_one": "measured",
    "test_breaks": "failed",
    "test_skips": "skipped",
}


def states(report: dict[str, Any]) -> dict[str, str]:
    """Return the statuses by node id without the file; fail if an attempt is there twice."""
    records = report["records"]
    assert len({(record["id"], record["attempt"]) for record in records}) == len(records)
    return {record["id"].partition("::")[2]: record["status"] for record in records}


def tables(result: pytest.RunResult) -> int:
    return sum(line.strip("= ") == "energy" for line in result.outlines)


@pytest.mark.parametrize("dist", DISTS)
@pytest.mark.slow
def test_each_test_has_one_record(quick: pytest.Pytester, read_report: Read, dist: str) -> None:
    quick.makepyfile(SUITE)
    result = quick.runpytest_subprocess("--energy-report", "-n2", f"--dist={dist}")
    result.assert_outcomes(passed=4, failed=1, skipped=1)
    report = read_report()
    assert states(report) == STATES
    assert report["run"]["complete"] is True
    assert tables(result) == 1
    assert sorted(path.name for path in quick.path.glob("energy*")) == ["energy.json"]


class TestStopping:
    @pytest.mark.parametrize("args", [["-x"], pytest.param(["--maxfail=2"], marks=pytest.mark.slow)])
    def test_stopped_run_keeps_finished_tests(
        self, quick: pytest.Pytester, read_report: Read, args: list[str]
    ) -> None:
        quick.makepyfile(
            """
            import time, pytest
            @pytest.mark.parametrize("i", range(12))
            def test_it(energy, i):
                energy(time.sleep, 0.01)
                assert i % 4 != 1, i
            """
        )
        result = quick.runpytest_subprocess("--energy-report", "-n2", *args)
        outcomes = result.parseoutcomes()
        report = read_report()
        assert len(states(report)) == outcomes["passed"] + outcomes["failed"] < 12
        assert sum(state == "failed" for state in states(report).values()) == outcomes["failed"]
        assert report["run"]["complete"] is False
        assert tables(result) == 1
