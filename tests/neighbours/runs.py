# SPDX-License-Identifier: Apache-2.0
"""Source of suites, and the report of a finished run by test and attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

#: Tests that are measured, measured by a window, failed, skipped, xfailed, and without energy.
SUITE = """
import time, pytest
@pytest.mark.parametrize("i", range(2))
def test_measured(energy, i):
    energy(time.sleep, 0.05)
def test_window(energy_meter):
    with energy_meter("load"):
        time.sleep(0.2)
def test_fails(energy):
    energy(time.sleep, 0.05)
    assert False
def test_skips(energy):
    pytest.skip("not here")
@pytest.mark.xfail
def test_xfails(energy):
    energy(time.sleep, 0.05)
    assert False
def test_other():
    pass
"""

#: Statuses of the records of ``SUITE``.
STATUSES = {
    ("test_measured[0]", 1): "measured",
    ("test_measured[1]", 1): "measured",
    ("test_window", 1): "measured",
    ("test_fails", 1): "failed",
    ("test_skips", 1): "skipped",
    ("test_xfails", 1): "failed",
}

#: Outcomes of ``SUITE`` for ``assert_outcomes``.
OUTCOMES = {"passed": 4, "failed": 1, "skipped": 1, "xfailed": 1}

#: One quick energy test and one test without energy.
ONE = """
import time
def test_one(energy):
    energy(time.sleep, 0.05)
def test_other():
    pass
"""

#: A test in ranks that needs no torch, long enough for its rounds to be resolved.
IN_RANKS = """
import time, pytest
@pytest.mark.gpus(2, fallback="cpu")
def test_ranks(workers, energy):
    assert energy(workers.call(time.sleep, 0.05)).result == [None, None]
"""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run and its directory."""

    result: pytest.RunResult
    path: Path

    def report(self, name: str = "energy.json") -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / name).read_text())
        return loaded

    def records(self, name: str = "energy.json") -> dict[tuple[str, int], dict[str, Any]]:
        """Return the records by node id without the file and attempt; fail on duplicates."""
        records = self.report(name)["records"]
        found = {(each["id"].partition("::")[2], each["attempt"]): each for each in records}
        assert len(found) == len(records)
        return found

    def statuses(self, name: str = "energy.json") -> dict[tuple[str, int], str]:
        """Return the status of each record; fail if a measured one has no energy."""
        found = self.records(name)
        for record in found.values():
            if record["status"] == "measured":
                assert joules(record) > 0
        return {key: record["status"] for key, record in found.items()}

    def reason(self, test: str, attempt: int = 1) -> str:
        return str(self.records()[test, attempt]["reason"])


class RunSuite(Protocol):
    """Runs a suite, or files by module name, with options and plugins."""

    def __call__(
        self, suite: str | dict[str, str], *args: str, plugins: tuple[str, ...] = ()
    ) -> FinishedRun: ...


def joules(record: dict[str, Any]) -> float:
    """Return the energy of the rounds, or else of the windows."""
    metric = record["metrics"].get("energy_j")
    found = metric["value"] if metric else sum(each["energy_j"] for each in record["windows"])
    assert found is not None
    return float(found)
