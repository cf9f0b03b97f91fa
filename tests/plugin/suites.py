# SPDX-License-Identifier: Apache-2.0
"""Source of benchmark suites, and readers of the reports of their runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Read = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

#: Power of the meter: the true energy of a round is ten times its seconds.
WATTS = 10

#: Options that shorten the calibration and the rounds of pytest-benchmark.
SHORT = ("--benchmark-max-time=0.35", "-p", "no:cacheprovider")

BOTH = """
    import time
    def test_call(benchmark):
        assert benchmark(time.sleep, 0.002) is None
    def test_pedantic(benchmark):
        assert benchmark.pedantic(lambda n: time.sleep(n) or n, args=(0.2,), rounds=4) == 0.2
"""


def dumped(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    """Return the benchmarks that --benchmark-json wrote."""
    found: list[dict[str, Any]] = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    return found


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {record["id"].rpartition("::")[2]: record for record in report["records"]}


def energy(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["metrics"]["energy_j"]
    return found


def seconds(record: dict[str, Any]) -> float:
    return float(record["metrics"]["duration_s"]["value"])
