# SPDX-License-Identifier: Apache-2.0
"""Ticks, jitter and averaging window of simulated sensors with known properties."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import hypot
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from ..nvml_sim import Board, World
from ..nvml_sim.instant_reads import counter_mj, power_mw

np = pytest.importorskip("numpy")

from validation.reading import Readings, build_readings  # noqa: E402
from validation.sensor_model import (  # noqa: E402
    Wave,
    counter_powers,
    fit_sensor,
    measure_timing,
    predict_scatter,
    reading_powers,
)

Attach = Callable[[World], ModuleType]

MS = 1_000_000
IDLE_W, BUSY_W = 90.0, 640.0

#: How long the load is on and off (ms), a second and a half of each.
HALVES_MS = (5, 10, 20, 35, 50, 100, 200)


def board(period_ms: int, window_ms: int, jitter_ms: float = 0.0) -> Board:
    """Return a board whose sensor samples the last ``window_ms`` of each period."""
    return Board(
        power_w=IDLE_W,
        latch_ns=period_ms * MS,
        latch_phase_ns=7 * MS,
        latch_jitter_ns=round(jitter_ms * MS),
        sensor_window_ns=window_ms * MS if window_ms < period_ms else 0,
        power_latch_ns=period_ms * MS,
        power_window_ns=window_ms * MS,
    )


def waves(world: World) -> Wave:
    """Schedule square waves in simulated time."""
    random = Random(3)
    at_ns = time.monotonic_ns() + 1000 * MS
    on = []
    for half_ms in HALVES_MS:
        until_ns = at_ns + 1500 * MS
        while at_ns < until_ns:
            on.append((at_ns, at_ns + half_ms * MS))
            world.set_power(0, BUSY_W, at_ns)
            world.set_power(0, IDLE_W, at_ns + half_ms * MS)
            at_ns += half_ms * MS + round(half_ms * MS * random.uniform(0.7, 1.3))
    return Wave(on)


def read(nvml: ModuleType, wave: Wave, step_ns: int = MS) -> Readings:
    """Return what polling every millisecond would read, without waiting."""
    times = range(wave.start_ns - 500 * MS, wave.end_ns, step_ns)
    return build_readings(
        [
            (
                at,
                at + 2000,
                counter_mj(nvml, 0, at),
                power_mw(nvml, 0, at, averaged=True),
                power_mw(nvml, 0, at),
                power_mw(nvml, 0, at, averaged=True),
            )
            for at in times
        ]
    )


@pytest.fixture
def seen(tmp_path: Path, nvml_attach: Attach) -> Callable[[Board], tuple[Wave, Readings]]:
    """Run the waves on a board; returns the waves and the readings."""

    def see(made: Board) -> tuple[Wave, Readings]:
        world = World(tmp_path / "world", [made])
        nvml = nvml_attach(world)
        wave = waves(world)
        return wave, read(nvml, wave)

    return see


@pytest.mark.parametrize(
    ("period_ms", "window_ms"), [(100, 100), (100, 25), (20, 20), (20, 10)], ids=lambda value: f"{value}ms"
)
def test_sensor_window_is_fitted_to_a_counter(
    seen: Callable[[Board], tuple[Wave, Readings]], period_ms: int, window_ms: int
) -> None:
    wave, readings = seen(board(period_ms, window_ms, jitter_ms=0.5))
    found = measure_timing(readings.time_ns, readings.counter_j)
    assert found.period_s == pytest.approx(period_ms / 1e3, rel=0.005)
    model = fit_sensor(wave, *counter_powers(readings.time_ns, readings.counter_j))
    assert model is not None
    # A full sensor samples between two ticks; jitter blurs this time by half a millisecond.
    assert model.window_s == pytest.approx(window_ms / 1e3, rel=0.1, abs=0.0011)
    assert model.low_s <= model.window_s <= model.high_s
    assert model.coverage(period_ms / 1e3) == pytest.approx(window_ms / period_ms, rel=0.1)
    assert model.lag_s <= 0.0041
    assert model.r2 > 0.95
    assert model.idle_w == pytest.approx(IDLE_W, abs=25)
    assert model.busy_w == pytest.approx(BUSY_W, abs=40)


def test_sensor_window_is_fitted_to_a_power_reading(seen: Callable[[Board], tuple[Wave, Readings]]) -> None:
    wave, readings = seen(board(100, 25))
    model = fit_sensor(wave, *reading_powers(readings.time_ns, readings.instant_w))
    assert model is not None
    assert model.window_s == pytest.approx(0.025, rel=0.1)


def test_averaged_power_has_a_window_of_one_second(seen: Callable[[Board], tuple[Wave, Readings]]) -> None:
    wave, readings = seen(board(100, 25))
    model = fit_sensor(wave, *reading_powers(readings.time_ns, readings.average_w))
    assert model is not None
    assert model.window_s == pytest.approx(1.0, rel=0.05)
    assert model.lag_s < 0.03


def test_lag_of_a_noisy_sensor_is_fitted(seen: Callable[[Board], tuple[Wave, Readings]]) -> None:
    wave, readings = seen(board(100, 25))
    moments, powers = counter_powers(readings.time_ns, readings.counter_j)
    noise_w = np.random.default_rng(1).normal(0, 40, len(powers))
    model = fit_sensor(wave, moments + 43 * MS, powers + noise_w)
    assert model is not None
    assert model.lag_s == pytest.approx(0.043, abs=0.003)
    assert model.window_s == pytest.approx(0.025, rel=0.2)
    assert model.low_s <= 0.025 <= model.high_s
    assert 0.8 < model.r2 < 0.99


def test_part_time_sensor_scatters_more_than_a_full_one(
    seen: Callable[[Board], tuple[Wave, Readings]],
) -> None:
    wave, readings = seen(board(100, 25))
    moments, powers = counter_powers(readings.time_ns, readings.counter_j)
    model = fit_sensor(wave, moments, powers)
    assert model is not None
    inside = (moments > wave.start_ns) & (moments < wave.end_ns)
    as_seen = float(powers[inside].std(ddof=1))
    assert predict_scatter(wave, moments[inside], model, model.window_s) == pytest.approx(as_seen, rel=0.1)
    assert (predict_scatter(wave, moments[inside], model, 0.1) or 0) < 0.8 * as_seen


@pytest.mark.parametrize("jitter_ms", [0.0, 2.0, 10.0])
def test_jitter_is_measured(seen: Callable[[Board], tuple[Wave, Readings]], jitter_ms: float) -> None:
    _, readings = seen(board(50, 50, jitter_ms=jitter_ms))
    found = measure_timing(readings.time_ns, readings.counter_j)
    assert found.jitter_s is not None
    # The delay of a tick is uniform: its standard deviation is the width over sqrt(12), that of a gap sqrt(2)
    # times as much. Polling every millisecond adds the same. Two hundred gaps estimate it within 6 per cent.
    poll_ms = 1.0 if jitter_ms else 0.0
    assert found.jitter_s * 1e3 == pytest.approx(hypot(jitter_ms, poll_ms) / 6**0.5, rel=0.3, abs=0.05)


def test_missing_values_have_no_ticks_and_no_fit() -> None:
    readings = build_readings([(at * MS, at * MS + 10, -1, -1, 5000, -1) for at in range(1000)])
    assert measure_timing(readings.time_ns, readings.counter_j).ticks == 0
    assert measure_timing(readings.time_ns, readings.instant_w).period_s is None
    wave = Wave([(100 * MS, 200 * MS), (400 * MS, 500 * MS)])
    assert fit_sensor(wave, *reading_powers(readings.time_ns, readings.instant_w)) is None


def test_missed_tick_does_not_count_as_jitter() -> None:
    # Two ticks with the same value look like one long gap.
    values = [at // 20 if not 200 <= at < 240 else 9 for at in range(1000)]
    found = measure_timing(np.arange(1000) * MS, np.array(values, dtype=float))
    assert found.period_s == pytest.approx(0.02)
    assert found.jitter_s == pytest.approx(0.0, abs=1e-9)
    assert found.missed >= 1


def test_share_of_a_wave_is_the_share_of_time_it_is_on() -> None:
    wave = Wave([(0, 10 * MS), (20 * MS, 30 * MS)])
    ends_s = np.array([0.005, 0.010, 0.020, 0.030, 0.050])
    assert wave.share(ends_s, 0.010).tolist() == pytest.approx([0.5, 1.0, 0.0, 1.0, 0.0])
    assert wave.share(ends_s, 0.030).tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 3, 2 / 3, 1 / 3])
