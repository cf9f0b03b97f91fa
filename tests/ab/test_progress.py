# SPDX-License-Identifier: Apache-2.0
"""The line for each pair, and the prediction of the remaining time."""

from __future__ import annotations

import msgspec
import pytest

from pytest_llenergy.ab.progress import RemainingTime, describe_pair, describe_plan
from pytest_llenergy.ab.schedule import plan_schedule
from pytest_llenergy.compare.stages import parse_pairs
from pytest_llenergy.record.record import Record, Times

from ..record.reports import REPORT

LOOKS = plan_schedule(parse_pairs("6+2+2+2+2+2+4+4+6+6"), 1)


def spent(seconds: float) -> Record:
    return msgspec.structs.replace(REPORT.records[0], times=Times(load_s=1.0, rounds_s=seconds - 1.0))


@pytest.fixture
def remaining() -> RemainingTime:
    """Four sessions of 5 s around two tests of 40 s and 10 s; the first also loads a model for 300 s."""
    made = RemainingTime()
    for load_s in (300, 0, 0, 0):
        made.add(55.0 + load_s, {"long": spent(40), "short": spent(10)})
    return made


def test_finished_tests_and_the_first_load_take_no_more_time(remaining: RemainingTime) -> None:
    assert remaining.predict_s(1, {"long", "short"}) == pytest.approx(110)
    assert remaining.predict_s(3, {"short"}) == pytest.approx(90)
    assert remaining.predict_s(1, {"long", "unknown"}) == pytest.approx(90)


@pytest.mark.parametrize(
    ("pair", "stage", "still_open", "line"),
    [
        (
            2,
            1,
            {"long", "short"},
            "[pair 2 of 6, at most 36] base 0:55, head 1:02; 2 of 2 tests open; verdicts in about 7 minutes; "
            "at most 62 minutes left",
        ),
        (
            6,
            1,
            {"short"},
            "[pair 6 of 8, at most 36] base 0:55, head 1:02; 1 of 2 tests open; verdicts in about 60 s; "
            "at most 15 minutes left",
        ),
        (
            31,
            10,
            {"short"},
            "[pair 31 of 36] base 0:55, head 1:02; 1 of 2 tests open; at most 2 minutes left",
        ),
        (8, 2, set(), "[pair 8 of 8] base 0:55, head 1:02; no test open"),
    ],
)
def test_line_of_a_pair(
    remaining: RemainingTime, pair: int, stage: int, still_open: set[str], line: str
) -> None:
    assert describe_pair(pair, stage, LOOKS, (55.0, 62.0), still_open, 2, remaining) == line


def test_plan_says_that_tests_may_finish_early() -> None:
    assert describe_plan(LOOKS).endswith(": 6 to 36 pairs of sessions, as tests need")
    assert describe_plan(plan_schedule(parse_pairs("12"), 3)) == "12 pairs of rounds: 4 pairs of sessions"
