# SPDX-License-Identifier: Apache-2.0
"""Windows and rounds of real boards, recorded beside an external power meter (benchmarks/plugin/silicon)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "plugin" / "silicon"))

from counter_run import stretches_of
from recordings import COUNTER, FOLDER, PRESENT, USAGE, WHERE, load_counters, load_recordings
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


def test_rounds_of_a_board_with_a_counter_agree_with_ticks_far_from_them() -> None:
    """It draws more than its power limit when work begins, which is no fault."""
    found = [each for of in load_counters() for each in stretches_of(of)]
    if not found:
        pytest.skip(f"{os.environ[FOLDER]} has no recording of a board's own counter")
    for each in found:
        energy_j, u_j = each.as_round.energy_j, each.as_round.energy_u_j
        assert energy_j is not None
        assert u_j is not None
        # Distant ticks are known to 1 J.
        away_j = max(each.far_j[0] - energy_j, energy_j - each.far_j[1], 0.0)
        assert away_j <= 2 * (u_j**2 + 1.0) ** 0.5
        assert u_j < 0.03 * energy_j
