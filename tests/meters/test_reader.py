# SPDX-License-Identifier: Apache-2.0
"""How often the background reader wakes up at work, beside a loop in its own process and beside none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from pytest_llenergy.meters.schedule import ALONE_NS, HANDOVER_NS, SHARE_AT_WORK
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.window_arithmetic import trace_flags

from .watching import READ_NS, WAKE_NS, Spell, watched
from .waves import EPOCH, MS, S, Sensor, Wave, domain

TICK = 100 * MS
BEGIN = EPOCH + 3 * S
WAVE = Wave(((EPOCH - S, 100.0), (BEGIN, 400.0), (EPOCH + 100 * S, 400.0)))

#: What a wake-up takes that reads eight boards and hands the lock over each time (nanoseconds).
WAKE_COST_NS = 1.5 * WAKE_NS + 8 * READ_NS + 9 * HANDOVER_NS


def woken(
    works: Sequence[tuple[int, int]], held: bool, boards: int = 8, period_s: float | None = 0.1
) -> tuple[Series, list[int]]:
    """The first board's series and the wake-ups of a reader; from and to which moments there is work."""
    sensors = [Sensor(WAVE, TICK, phase_ns=index * TICK // boards) for index in range(boards)]
    spells = [Spell(begin_ns, end_ns, at_work=True) for begin_ns, end_ns in works]
    begin_ns, end_ns = min(begin_ns for begin_ns, _ in works), max(end_ns for _, end_ns in works)
    moments: list[int] = []
    holding_ns = (begin_ns, end_ns) if held else (0, 0)
    of = domain(period_s=period_s)
    series = watched(sensors, Random(1), EPOCH, end_ns + S, of, spells, holding_ns, moments)
    return series, [moment for moment in moments if begin_ns < moment < end_ns]


def longest_ns(moments: Sequence[int]) -> int:
    return max(later - earlier for earlier, later in pairwise(moments))


def test_beside_a_loop_in_its_process_it_keeps_to_its_share() -> None:
    _, moments = woken([(BEGIN, BEGIN + 30 * S)], held=True)
    assert len(moments) * WAKE_COST_NS / (30 * S) == pytest.approx(SHARE_AT_WORK, rel=0.2)


def test_without_handovers_hardly_a_tick_is_missed() -> None:
    series, moments = woken([(BEGIN, BEGIN + 30 * S)], held=False)
    assert len(moments) >= 300
    assert len(series.between(BEGIN, BEGIN + 30 * S)) >= 290


def test_the_ticks_after_an_edge_are_seen_and_paid_for_later() -> None:
    series, moments = woken([(BEGIN, BEGIN + 10 * S)], held=True)
    assert len([moment for moment in moments if moment < BEGIN + 450 * MS]) >= 3
    assert len(series.between(BEGIN, BEGIN + 450 * MS)) >= 2
    assert longest_ns(moments) > 5 * TICK


def test_a_counter_that_breaks_is_found_out_in_a_second() -> None:
    _, moments = woken([(BEGIN, BEGIN + 30 * S)], held=True)
    # A wake-up hands the lock over nine times, and may come late.
    assert longest_ns(moments) < ALONE_NS + 100 * MS


def test_the_edges_of_work_within_work_are_seen_too() -> None:
    inner = BEGIN + 10 * S
    _, moments = woken([(BEGIN, BEGIN + 20 * S), (inner, inner + 2 * S)], held=True)
    for edge_ns in (inner, inner + 2 * S):
        after = [moment for moment in moments if edge_ns <= moment < edge_ns + 450 * MS]
        assert after[0] < edge_ns + 60 * MS
        assert len(after) >= 3


def test_a_counter_of_unknown_period_is_seen_at_every_tick() -> None:
    _, moments = woken([(BEGIN, BEGIN + 20 * S)], held=True, period_s=None)
    assert longest_ns(moments) < 2 * TICK


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("length_s", [0.5, 1, 3, 20])
def test_ticks_that_are_left_unseen_raise_no_flag(length_s: float, held: bool) -> None:
    end_ns = BEGIN + round(length_s * S)
    series, _ = woken([(BEGIN, end_ns)], held)
    assert series.late == []
    assert trace_flags([series], BEGIN, end_ns) == []
