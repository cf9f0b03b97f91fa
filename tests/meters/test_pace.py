# SPDX-License-Identifier: Apache-2.0
"""The timetable of readings: few, and where the ticks are."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from pytest_llenergy.meters.schedule import Pace
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


def put_off(sensor: Sensor, seconds: int, wait_ns: int) -> tuple[Series, Pace, int]:
    """Read a sensor no oftener than that for so long, then by the timetable for two seconds."""
    series, rng = Series("nvml", domain(period_s=0.1)), Random(0)
    pace = Pace([series], 0.01)
    now_ns, due_ns, end_ns = EPOCH, EPOCH, EPOCH + seconds * S
    while now_ns < end_ns:
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        due_ns = pace.next_ns(now_ns, put_off=True)
        now_ns = max(due_ns, now_ns + wait_ns) + rng.randrange(MS // 2)
    readings = 0
    while now_ns < end_ns + 2 * S:
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        now_ns = pace.next_ns(now_ns) + rng.randrange(MS // 2)
        readings += 1
    return series, pace, readings


@pytest.mark.parametrize("wait_ms", [20, 50, 90])
@pytest.mark.parametrize("jitter_ms", [0, 4])
def test_ticks_are_found_again_after_readings_were_put_off(wait_ms: int, jitter_ms: int) -> None:
    end_ns = EPOCH + 30 * S
    series, _, readings = put_off(Sensor(WAVE, 100 * MS, jitter_ns=jitter_ms * MS), 30, wait_ms * MS)
    after = [tick for tick in series.ticks if tick.earliest_ns > end_ns]
    assert len(after) >= 18
    assert max(tick.gap_s for tick in after) < 0.005
    assert median(tick.gap_s for tick in after) < 0.002
    assert readings < 110


def test_a_counter_whose_readings_are_put_off_is_seen_at_every_tick() -> None:
    sensor = Sensor(WAVE, 100 * MS)
    series, pace, _ = put_off(sensor, 10, 90 * MS)
    assert pace.longest_ns < 100 * MS
    assert len([tick for tick in series.ticks if tick.latest_ns < EPOCH + 10 * S]) >= 98


@pytest.mark.parametrize("jitter_ms", [0, 2])
def test_the_timetable_tells_when_a_counter_ticked_that_was_read_rarely(jitter_ms: int) -> None:
    sensor = Sensor(WAVE, 100 * MS, jitter_ns=jitter_ms * MS)
    series, rng = Series("nvml", domain(period_s=0.1)), Random(0)
    pace, now_ns, narrow = Pace([series], 0.01), EPOCH, []
    while now_ns < EPOCH + 10 * S:
        closely = now_ns < EPOCH + 3 * S
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        due_ns = pace.next_ns(now_ns, put_off=not closely)
        if not closely:
            narrow.append(pace.narrowed(series.ticks[-1]))
        now_ns = (due_ns if closely else now_ns + 90 * MS) + rng.randrange(MS // 2)
    late = [tick for tick in narrow if tick.earliest_ns > EPOCH + 3.2 * S]
    assert median(tick.gap_s for tick in late) < 0.02
    for tick in late:
        # It ticks at whole tenths of a second, but for its jitter.
        nearest_ns = EPOCH + round((tick.time_ns - EPOCH) / (100 * MS)) * 100 * MS
        slack_ns = jitter_ms * MS
        assert tick.earliest_ns - slack_ns <= nearest_ns <= tick.latest_ns + slack_ns


def test_a_timetable_that_was_never_learned_tells_nothing() -> None:
    series, _, _ = put_off(Sensor(WAVE, 100 * MS), 3, 90 * MS)
    tick = series.ticks[10]
    assert Pace([series], 0.01).narrowed(tick) == tick


@pytest.mark.parametrize("wait_ms", [160, 437, 960])
@pytest.mark.parametrize("jitter_ms", [0, 4])
def test_the_timetable_counts_the_ticks_that_were_left_unseen(wait_ms: int, jitter_ms: int) -> None:
    sensor = Sensor(WAVE, 100 * MS, jitter_ns=jitter_ms * MS)
    series, rng = Series("nvml", domain(period_s=0.1)), Random(0)
    pace, now_ns, found = Pace([series], 0.01), EPOCH, []
    while now_ns < EPOCH + 10 * S:
        closely = now_ns < EPOCH + 3 * S
        series.add(now_ns, now_ns, sensor.counter_j(now_ns))
        due_ns = pace.next_ns(now_ns, put_off=not closely)
        if not closely:
            found.append((now_ns, pace.narrowed(series.ticks[-1])))
        now_ns = (due_ns if closely else now_ns + wait_ms * MS) + rng.randrange(MS // 2)
    for read_ns, tick in found[1:]:
        assert tick.earliest_ns <= sensor.last_ns(read_ns) <= tick.latest_ns
    # It drifts by a fifth of a millisecond at each, seventy times; some were due when they were read.
    assert median(tick.gap_s for _, tick in found[1:]) < 0.05
