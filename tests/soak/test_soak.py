# SPDX-License-Identifier: Apache-2.0
"""Long and random: nothing grows, nothing is left, and no test has another outcome than it should."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from .driver import RESIDENTS, Soak, render, soak

#: Length of the slow test, which may be shortened (seconds).
SECONDS = float(os.environ.get("LLENERGY_TEST_SOAK_S", "3600"))


def check(result: Soak) -> None:
    print(render(result))
    assert not result.findings
    assert all(each.tests for each in result.residents)


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    check(soak(8.0, 1, tmp_path, RESIDENTS[:1]))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1800)
def test_a_long_soak_finds_nothing_and_nothing_grows(tmp_path: Path) -> None:
    result = soak(SECONDS, int(time.time()), tmp_path)
    check(result)
    assert result.growth
