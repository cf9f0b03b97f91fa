# SPDX-License-Identifier: Apache-2.0
"""Readings become ticks: which ones, when, and how surely."""

from __future__ import annotations

import pytest

from pytest_llenergy.meters.base import Domain, within
from pytest_llenergy.meters.trace import Series

MS = 1_000_000


def series_of(
    *readings: tuple[int, float],
    period_s: float | None = None,
    max_age_s: float | None = None,
    late_s: tuple[float, float] = (0.0, 0.0),
) -> Series:
    domain = Domain(
        name="cpu:x",
        kind="measured",
        source="test",
        scope="test",
        update_period_s=period_s,
        max_age_s=max_age_s,
        late_s=late_s,
        resolution_j=0.001,
        accuracy="exact",
        limits=within(0),
    )
    series = Series("test", domain)
    for time_ms, energy_j in readings:
        series.add(time_ms * MS, time_ms * MS, energy_j)
    return series


def test_a_tick_lies_between_the_two_readings_that_saw_it() -> None:
    series = series_of((0, 5.0), (10, 5.0), (20, 7.0), (30, 7.0), (50, 9.0))
    assert [(tick.time_ns // MS, tick.energy_j, tick.gap_s) for tick in series.ticks] == [
        (15, 7.0, 0.01),
        (40, 9.0, 0.02),
    ]
    assert [(tick.earliest_ns // MS, tick.latest_ns // MS) for tick in series.ticks] == [(10, 20), (30, 50)]


def test_the_first_reading_is_a_tick_only_where_the_counter_is_known_to_be_fresh() -> None:
    assert series_of((0, 5.0)).ticks == []
    (tick,) = series_of((10, 5.0), max_age_s=0.001).ticks
    assert (tick.earliest_ns, tick.latest_ns) == (9 * MS, 10 * MS)


def test_a_reading_that_is_never_old_narrows_the_gap() -> None:
    ticks = series_of((0, 1.0), (100, 2.0), max_age_s=0.01).ticks
    assert (ticks[-1].earliest_ns, ticks[-1].latest_ns, ticks[-1].gap_s) == (90 * MS, 100 * MS, 0.01)


def test_after_a_long_pause_the_last_tick_is_no_older_than_the_period_allows() -> None:
    ticks = series_of((0, 1.0), (1000, 9.0), period_s=0.1).ticks
    assert (ticks[-1].earliest_ns, ticks[-1].latest_ns) == (850 * MS, 1000 * MS)


def test_joules_that_are_told_late_are_those_of_a_moment_before() -> None:
    (tick,) = series_of((300, 5.0), (310, 7.0), late_s=(0.1, 0.1)).ticks
    assert (tick.earliest_ns, tick.latest_ns) == (200 * MS, 210 * MS)


def test_how_late_may_not_be_known_but_is_the_same_for_all_ticks() -> None:
    series = series_of((300, 5.0), (310, 7.0), (320, 8.0), late_s=(0.0, 0.2))
    assert [(tick.earliest_ns, tick.latest_ns) for tick in series.ticks] == [
        (100 * MS, 310 * MS),
        (110 * MS, 320 * MS),
    ]
    assert [(tick.earliest_ns, tick.latest_ns) for tick in series.as_one(series.ticks)] == [
        (200 * MS, 210 * MS),
        (210 * MS, 220 * MS),
    ]


def test_a_stretch_that_was_not_read_takes_with_it_what_was_told_late() -> None:
    series = series_of((300, 5.0), (310, 7.0), late_s=(0.1, 0.1))
    series.miss(400 * MS, 600 * MS, "nobody came")
    assert series.outages == [(300 * MS, 600 * MS, "nobody came")]


def test_a_slow_reading_is_a_wide_tick() -> None:
    series = series_of((0, 1.0))
    series.add(10 * MS, 15 * MS, 1.0)
    series.add(20 * MS, 60 * MS, 2.0)
    # The value may be as old as the start of the reading that did not have it, or as young as the end.
    assert [(tick.earliest_ns // MS, tick.latest_ns // MS) for tick in series.ticks] == [(10, 60)]


@pytest.mark.parametrize(
    ("at_ms", "before", "after"),
    [
        (9, None, 1.0),
        (10, None, 1.0),
        (15, None, 2.0),
        (20, 1.0, 2.0),
        (25, 1.0, 3.0),
        (30, 2.0, 3.0),
        (41, 3.0, None),
    ],
)
def test_ticks_that_were_surely_before_and_after(
    at_ms: int, before: float | None, after: float | None
) -> None:
    series = series_of((10, 0.0), (20, 1.0), (30, 2.0), (40, 3.0))
    found = [
        None if tick is None else tick.energy_j
        for tick in (series.before(at_ms * MS), series.after(at_ms * MS))
    ]
    assert found == [before, after]


def test_ticks_that_were_surely_within() -> None:
    series = series_of((10, 0.0), (20, 1.0), (30, 2.0), (40, 3.0))
    assert [tick.energy_j for tick in series.between(11 * MS, 40 * MS)] == [2.0, 3.0]
    assert [tick.energy_j for tick in series.between(10 * MS, 39 * MS)] == [1.0, 2.0]


def test_the_period_is_the_median_and_needs_three_ticks() -> None:
    readings = [(0, 0.0), (10, 1.0), (20, 2.0), (30, 3.0), (90, 4.0)]
    assert series_of(*readings[:3]).tick_period_s is None
    assert series_of(*readings).tick_period_s == pytest.approx(0.01)


BACKWARDS = "test: the counter of cpu:x went backwards, from 6.000 J to 2.000 J; it was reset or is broken"


def test_a_counter_that_runs_backwards_spoils_the_windows_that_it_touches_and_no_others() -> None:
    readings = [(0, 3.0), (10, 4.0), (20, 5.0), (30, 6.0), (40, 2.0), (50, 3.0), (60, 4.5), (70, 5.0)]
    series = series_of(*readings)
    assert series.reason_between(10 * MS, 20 * MS) is None
    assert series.reason_between(25 * MS, 45 * MS) == BACKWARDS
    assert series.reason_between(10 * MS, 60 * MS) == BACKWARDS
    assert series.reason_between(50 * MS, 60 * MS) is None
    # What lies between two ticks after it is right: 1 J, 1.5 J, 0.5 J.
    assert [tick.energy_j for tick in series.ticks] == pytest.approx([4, 5, 6, 7, 8.5, 9])


def test_an_outage_ends_with_the_next_reading() -> None:
    series = series_of((0, 1.0), (10, 2.0))
    series.fail(20 * MS, "test: lost")
    series.fail(30 * MS, "test: lost again")
    assert series.reason == "test: lost"
    assert series.reason_between(25 * MS, 40 * MS) == "test: lost"
    for time_ms, energy_j in ((40, 5.0), (50, 6.0), (60, 7.0), (70, 8.0)):
        series.add(time_ms * MS, time_ms * MS, energy_j)
    assert series.reason_between(60 * MS, 65 * MS) is None
    assert series.reason_between(15 * MS, 35 * MS) == "test: lost"
    assert series.reason_between(60 * MS, 65 * MS) is None


def test_a_stretch_without_a_due_reading_is_found_where_it_touches() -> None:
    series = series_of((0, 1.0))
    series.late.append((100 * MS, 400 * MS))
    assert series.latest_pause_s(0, 99 * MS) == 0
    assert series.latest_pause_s(350 * MS, 900 * MS) == pytest.approx(0.3)


def test_a_counter_that_moves_by_more_than_a_board_can_use_is_not_believed() -> None:
    series = series_of((0, 0.0), (100, 70.0), (200, 140.0), period_s=0.1)
    series.domain = series.domain._replace(highest_w=700.0)
    series.add(300 * MS, 300 * MS, 900.0)
    series.add(400 * MS, 400 * MS, 970.0)
    (outage,) = series.outages
    assert outage.reason == (
        "test: the counter of cpu:x jumped by 760.000 J in 100 ms, of a board that may draw 700 W"
    )
    assert [tick.energy_j for tick in series.ticks] == [70.0, 140.0, 210.0]


def test_a_counter_may_have_been_busy_while_nobody_read_it() -> None:
    series = series_of((0, 0.0), (100, 70.0), (1000, 700.0), period_s=0.1)
    series.domain = series.domain._replace(highest_w=700.0)
    series.add(2000 * MS, 2000 * MS, 1400.0)
    assert series.outages == []


def test_a_stretch_that_later_readings_do_not_tell_of_has_no_joules() -> None:
    series = series_of((0, 0.0), (100, 70.0), (500, 140.0), (600, 210.0), (700, 280.0), period_s=0.1)
    series.miss(200 * MS, 480 * MS, "not read")
    assert series.reason_between(150 * MS, 450 * MS) == "not read"
    assert series.reason_between(610 * MS, 690 * MS) is None


def test_a_stretch_that_is_missed_while_a_board_is_lost_does_not_end_the_loss() -> None:
    series = series_of((0, 0.0), (100, 70.0), period_s=0.1)
    series.fail(200 * MS, "lost")
    series.miss(210 * MS, 390 * MS, "not read")
    assert series.reason == "lost"
    series.add(500 * MS, 500 * MS, 140.0)
    assert [(each.reason, each.end_ns // MS) for each in series.outages] == [("not read", 390), ("lost", 500)]
