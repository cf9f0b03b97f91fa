# SPDX-License-Identifier: Apache-2.0
"""Long and random: nothing grows, nothing is left, and no test has another outcome than it should."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from .driver import RESIDENTS, Soak, render, soak

#: Length of the slow test, which may be shortened (seconds).
SECONDS = float(os.environ.get("LLENERGY_TEST_SOAK_S", "3600"))


def check(result: Soak) -> None:
    print(render(result))
    assert not result.findings
    assert all(each.tests for each in result.residents)


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    check(soak(8.0, 1, tmp_path, RESIDENTS[:1]))


@pytest.mark.parametrize("name", ["fds", "threads", "processes", "memory_bytes"])
def test_growth_is_a_finding(name: str) -> None:
    result = Soak(1.0, 1)
    steady: dict[str, Any] = {
        "role": "supervisor",
        "pid": 1,
        "fds": 8,
        "threads": 1,
        "processes": 3,
        "memory_bytes": 50_000_000,
    }
    samples = [{**steady, "tests": 5 * i} for i in range(40)]
    result.add_samples(samples, RESIDENTS[0])
    assert not result.findings
    step = 600_000 if name == "memory_bytes" else 1
    result.add_samples(
        [{**each, name: each[name] + i * step} for i, each in enumerate(samples)], RESIDENTS[0]
    )
    assert len(result.findings) == 1


@pytest.mark.slow
def test_a_run_that_leaks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOAK_LEAKS", "yes")
    result = soak(90.0, 1, tmp_path, RESIDENTS[:1])
    assert any("more fds" in finding for finding in result.findings), result.growth


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1800)
def test_a_long_soak_finds_nothing_and_nothing_grows(tmp_path: Path) -> None:
    result = soak(SECONDS, int(time.time()), tmp_path)
    check(result)
    assert result.growth
