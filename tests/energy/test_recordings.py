# SPDX-License-Identifier: Apache-2.0
"""Windows and rounds of real boards, recorded beside an external power meter (benchmarks/plugin/silicon)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "plugin" / "silicon"))

from recordings import COUNTER, FOLDER, PRESENT, USAGE, WHERE, load_recordings
from silicon_run import Row, cases_of

pytestmark = pytest.mark.skipif(not os.environ.get(FOLDER), reason=WHERE)

CASES = 40


def row(board: str, way: str, kind: str, lengths_s: tuple[float, float]) -> Row:
    of = next((each for each in load_recordings() if each.name == board), None)
    if of is None or way not in of.ways:
        pytest.skip(f"{os.environ[FOLDER]} has no recording of {way} of {board}")
    return Row.of(cases_of(of, way, kind, lengths_s, CASES, seed=0))


@pytest.mark.parametrize("lengths_s", [(0.05, 0.3), (0.3, 1.0), (1.0, 5.0)], ids=str)
@pytest.mark.parametrize("kind", ["windows", "rounds"])
@pytest.mark.parametrize("way", [COUNTER, PRESENT, USAGE])
@pytest.mark.parametrize("board", ["a100", "rtx3090", "rtx4090"])
def test_real_boards_agree_with_the_meter(
    board: str, way: str, kind: str, lengths_s: tuple[float, float]
) -> None:
    found = row(board, way, kind, lengths_s)
    assert found.within >= 0.95
    assert found.silent <= 0.05 * CASES
    assert found.absolute >= 0.95
    if lengths_s[0] >= 0.3:
        assert found.error < (0.06 if board == "a100" or way == USAGE else 0.01)
    if kind == "rounds":
        assert found.null == 0
        assert found.fullness > 0.2


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="a load that alternates in step with the tick: no counter can tell",
)
def test_a_load_in_step_with_the_tick() -> None:
    assert row("rtx3090-square", COUNTER, "windows", (0.3, 1.0)).within >= 0.95


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="a part-time sensor sees the same part of each repetition; flagged",
)
def test_a_loop_under_a_part_time_sensor() -> None:
    assert row("a100", USAGE, "loops", (0.3, 1.0)).within >= 0.95
