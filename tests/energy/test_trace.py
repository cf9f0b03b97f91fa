# SPDX-License-Identifier: Apache-2.0
"""How readings become ticks, and how precisely their times are known."""

from __future__ import annotations

import pytest

from pytest_llenergy.energy.meters.base import Domain, within
from pytest_llenergy.energy.trace import LATEST, Series

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


def test_a_tick_lies_between_the_readings_around_it() -> None:
    series = series_of((0, 5.0), (10, 5.0), (20, 7.0), (30, 7.0), (50, 9.0))
    assert [(tick.time_ns // MS, tick.energy_j, tick.gap_s) for tick in series.ticks] == [
        (15, 7.0, 0.01),
        (40, 9.0, 0.02),
    ]
    assert [(tick.earliest_ns // MS, tick.latest_ns // MS) for tick in series.ticks] == [(10, 20), (30, 50)]


def test_the_first_reading_is_a_tick_only_if_its_age_is_bounded() -> None:
    assert series_of((0, 5.0)).ticks == []
    (tick,) = series_of((10, 5.0), max_age_s=0.001).ticks
    assert (tick.earliest_ns, tick.latest_ns) == (9 * MS, 10 * MS)


def test_after_a_long_pause_the_last_tick_is_no_older_than_the_period_allows() -> None:
    ticks = series_of((0, 1.0), (1000, 9.0), period_s=0.1).ticks
    assert (ticks[-1].earliest_ns, ticks[-1].latest_ns) == (850 * MS, 1000 * MS)


def test_delayed_readings_are_dated_back() -> None:
    (tick,) = series_of((300, 5.0), (310, 7.0), late_s=(0.1, 0.1)).ticks
    assert (tick.earliest_ns, tick.latest_ns) == (200 * MS, 210 * MS)


def test_an_unknown_delay_is_the_same_for_all_ticks() -> None:
    series = series_of((300, 5.0), (310, 7.0), (320, 8.0), late_s=(0.0, 0.2))
    assert [(tick.earliest_ns, tick.latest_ns) for tick in series.ticks] == [
        (100 * MS, 310 * MS),
        (110 * MS, 320 * MS),
    ]
    assert [(tick.earliest_ns, tick.latest_ns) for tick in series.without_common_delay(series.ticks)] == [
        (200 * MS, 210 * MS),
        (210 * MS, 220 * MS),
    ]


def test_a_slow_reading_widens_the_tick() -> None:
    series = series_of((0, 1.0))
    series.add(10 * MS, 15 * MS, 1.0)
    series.add(20 * MS, 60 * MS, 2.0)
    # The counter ticked between the start of the last old reading and the end of the slow one.
    assert [(tick.earliest_ns // MS, tick.latest_ns // MS) for tick in series.ticks] == [(10, 60)]


BACKWARDS = "test: the counter of cpu:x went backwards, from 6.000 J to 2.000 J; it was reset or is broken"


def test_a_counter_that_runs_backwards_affects_only_windows_around_it() -> None:
    readings = [(0, 3.0), (10, 4.0), (20, 5.0), (30, 6.0), (40, 2.0), (50, 3.0), (60, 4.5), (70, 5.0)]
    series = series_of(*readings)
    assert series.reason_between(10 * MS, 20 * MS) is None
    assert series.reason_between(25 * MS, 45 * MS) == BACKWARDS
    assert series.reason_between(10 * MS, 60 * MS) == BACKWARDS
    assert series.reason_between(50 * MS, 60 * MS) is None
    # Differences after the reset are correct: 1 J, 1.5 J, 0.5 J.
    assert [tick.energy_j for tick in series.ticks] == pytest.approx([4, 5, 6, 7, 8.5, 9])


def test_an_outage_ends_with_the_next_reading() -> None:
    series = series_of((0, 1.0), (10, 2.0))
    series.begin_outage(20 * MS, "test: lost")
    series.begin_outage(30 * MS, "test: lost again")
    assert series.reason == "test: lost"
    assert series.reason_between(25 * MS, 40 * MS) == "test: lost"
    for time_ms, energy_j in ((40, 5.0), (50, 6.0), (60, 7.0), (70, 8.0)):
        series.add(time_ms * MS, time_ms * MS, energy_j)
    assert series.reason_between(60 * MS, 65 * MS) is None
    assert series.reason_between(15 * MS, 35 * MS) == "test: lost"
    assert series.reason_between(60 * MS, 65 * MS) is None


def test_late_readings_are_found_where_they_overlap_the_window() -> None:
    series = series_of((0, 1.0))
    series.late.append((100 * MS, 400 * MS))
    assert series.latest_pause_s(0, 99 * MS) == 0
    assert series.latest_pause_s(350 * MS, 900 * MS) == pytest.approx(0.3)


def test_a_jump_beyond_the_power_limit_is_an_outage() -> None:
    series = series_of((0, 0.0), (100, 70.0), (200, 140.0), period_s=0.1)
    series.domain = series.domain._replace(highest_w=700.0)
    series.add(300 * MS, 300 * MS, 900.0)
    series.add(400 * MS, 400 * MS, 970.0)
    (outage,) = series.outages
    assert outage.reason == (
        "test: the counter of cpu:x jumped by 760.000 J in 100 ms, of a device that may draw 700 W"
    )
    assert [tick.energy_j for tick in series.ticks] == [70.0, 140.0, 210.0]


def test_a_large_step_after_a_long_pause_is_accepted() -> None:
    series = series_of((0, 0.0), (100, 70.0), (1000, 700.0), period_s=0.1)
    series.domain = series.domain._replace(highest_w=700.0)
    series.add(2000 * MS, 2000 * MS, 1400.0)
    assert series.outages == []


def test_a_missed_stretch_has_a_reason_instead_of_joules() -> None:
    series = series_of((0, 0.0), (100, 70.0), (500, 140.0), (600, 210.0), (700, 280.0), period_s=0.1)
    series.add_outage(200 * MS, 480 * MS, "not read")
    assert series.reason_between(150 * MS, 450 * MS) == "not read"
    assert series.reason_between(610 * MS, 690 * MS) is None


def test_a_missed_stretch_does_not_end_the_loss_of_a_board() -> None:
    series = series_of((0, 0.0), (100, 70.0), period_s=0.1)
    series.begin_outage(200 * MS, "lost")
    series.add_outage(210 * MS, 390 * MS, "not read")
    assert series.reason == "lost"
    series.add(500 * MS, 500 * MS, 140.0)
    assert [(each.reason, each.end_ns // MS) for each in series.outages] == [("not read", 390), ("lost", 500)]


def test_forgotten_ticks_leave_the_latest_ones() -> None:
    series = series_of(*((10 * n, float(n)) for n in range(1001)))
    series.late.append((0, 5 * MS))
    series.forget_before(9_000 * MS)
    assert series.ticks_seen == 1000
    assert LATEST <= len(series.ticks) < 2 * LATEST
    assert series.ticks[-1].energy_j == 1000.0
    assert series.tick_period_s == pytest.approx(0.01)
    assert not series.late
