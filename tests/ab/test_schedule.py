# SPDX-License-Identifier: Apache-2.0
"""The order of sessions over the stages."""

from __future__ import annotations

import pytest

from pytest_llenergy.ab.schedule import plan_schedule
from pytest_llenergy.compare.stages import parse_pairs


@pytest.mark.parametrize(
    ("pairs", "rounds", "measured", "sessions"),
    [
        ("6+6", 1, "6+6", (6, 6)),
        ("6+6", 3, "6+6", (2, 2)),
        ("6+6", 4, "8+8", (2, 2)),
        ("5+1", 2, "6+2", (3, 1)),
    ],
)
def test_stages_are_rounded_up_to_whole_sessions(
    pairs: str, rounds: int, measured: str, sessions: tuple[int, int]
) -> None:
    made = plan_schedule(parse_pairs(pairs), rounds)
    assert str(made.stages) == measured
    assert made.pairs == sessions


def test_alternation_continues_over_the_stages() -> None:
    made = plan_schedule(parse_pairs("5+4"), 1)
    turns = [turn for stage in (1, 2) for pair in made.turns(stage) for turn in pair]
    assert "".join(turn.side[0] for turn in turns) == "bhhbbhhbbh" + "hbbhhbbh"
    assert [turn.number for turn in turns] == list(range(1, 19))
