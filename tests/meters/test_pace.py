# SPDX-License-Identifier: Apache-2.0
"""The timetable of readings: few, and where the ticks are."""

from __future__ import annotations

from random import Random
from statistics import median

from pytest_llenergy.meters.pace import Pace
from pytest_llenergy.meters.trace import Series

from .waves import EPOCH, MS, S, Sensor, Wave, domain

WAVE = Wave(((EPOCH - S, 100.0), (EPOCH + 100 * S, 100.0)))


def run(sensor: Sensor, seconds: int, max_age_s: float | None = None) -> tuple[Series, int]:
    """Read a sensor by the timetable, each reading up to half a millisecond late. Series, readings."""
    series, rng, readings = Series("nvml", domain(max_age_s=max_age_s)), Random(0), 0
    pace = Pace([series], 0.01)
    now_ns = EPOCH
    while now_ns < EPOCH + seconds * S:
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        readings += 1
        now_ns = pace.next_ns(now_ns) + rng.randrange(MS // 2)
    return series, readings


def test_a_regular_counter_takes_four_readings_a_tick_and_is_known_to_two_milliseconds() -> None:
    series, readings = run(Sensor(WAVE, 100 * MS), 20)
    assert len(series.ticks) == 199
    assert readings < 5 * len(series.ticks)
    assert median(tick.gap_s for tick in series.ticks[20:]) < 0.002


def test_a_counter_that_jitters_is_read_over_a_wider_stretch() -> None:
    series, readings = run(Sensor(WAVE, 100 * MS, jitter_ns=12 * MS), 20)
    assert readings < 8 * len(series.ticks)
    assert median(tick.gap_s for tick in series.ticks[20:]) < 0.008


def test_no_tick_is_missed() -> None:
    sensor = Sensor(WAVE, 100 * MS, jitter_ns=12 * MS)
    series, _ = run(sensor, 20)
    assert series.ticks[-1].energy_j - series.ticks[0].energy_j == sum(
        b.energy_j - a.energy_j for a, b in zip(series.ticks, series.ticks[1:], strict=False)
    )
    assert 195 <= len(series.ticks) <= 200


def test_a_counter_that_moves_all_the_time_is_read_evenly() -> None:
    series, readings = run(Sensor(WAVE, 0), 2, max_age_s=0.001)
    assert 180 <= readings <= 201
    assert len(series.ticks) == readings


def test_a_counter_that_stops_ticking_is_still_looked_after() -> None:
    stopping = Wave(((EPOCH - S, 100.0), (EPOCH + 2 * S, 0.0), (EPOCH + 100 * S, 0.0)))
    series, readings = run(Sensor(stopping, 100 * MS), 10)
    assert len(series.ticks) <= 21
    assert readings > 600
