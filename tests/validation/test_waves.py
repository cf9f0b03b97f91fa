# SPDX-License-Identifier: Apache-2.0
"""The part about the sensor, on sensors whose answers are known: ticks, jitter, how long they look."""

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

from validation.reading import Readings, table  # noqa: E402
from validation.ticks import timing  # noqa: E402
from validation.waves import Wave, fit, powers_of_counter, powers_of_reading, scatter  # noqa: E402

Attach = Callable[[World], ModuleType]

MS = 1_000_000
IDLE_W, BUSY_W = 90.0, 640.0

#: How long the load is on and off (ms), a second and a half of each.
HALVES_MS = (5, 10, 20, 35, 50, 100, 200)


def board(period_ms: int, window_ms: int, jitter_ms: float = 0.0) -> Board:
    """One whose counter and power come from a sensor that looks so long at the end of each period."""
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
    """Square waves, told in advance; nobody waits for them."""
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
    """What somebody would read who looks every millisecond, asked for at once."""
    times = range(wave.start_ns - 500 * MS, wave.end_ns, step_ns)
    return table(
        [
            (
                at,
                at + 2000,
                counter_mj(nvml, 0, at),
                power_mw(nvml, 0, at, averaged=True),
                power_mw(nvml, 0, at),
            )
            for at in times
        ]
    )


@pytest.fixture
def seen(tmp_path: Path, nvml_attach: Attach) -> Callable[[Board], tuple[Wave, Readings]]:
    """Waves on a board, and what it says."""

    def see(made: Board) -> tuple[Wave, Readings]:
        world = World(tmp_path / "world", [made])
        nvml = nvml_attach(world)
        wave = waves(world)
        return wave, read(nvml, wave)

    return see


@pytest.mark.parametrize(
    ("period_ms", "window_ms"), [(100, 100), (100, 25), (20, 20), (20, 10)], ids=lambda value: f"{value}ms"
)
def test_the_counter_tells_how_long_its_sensor_looks(
    seen: Callable[[Board], tuple[Wave, Readings]], period_ms: int, window_ms: int
) -> None:
    wave, readings = seen(board(period_ms, window_ms, jitter_ms=0.5))
    found = timing(readings.time_ns, readings.counter_j)
    assert found.period_s == pytest.approx(period_ms / 1e3, rel=0.005)
    look = fit(wave, *powers_of_counter(readings.time_ns, readings.counter_j))
    assert look is not None
    # The jitter makes the time between two ticks, over which a full sensor looks, half a millisecond vague.
    assert look.window_s == pytest.approx(window_ms / 1e3, rel=0.1, abs=0.0011)
    assert look.low_s <= look.window_s <= look.high_s
    assert look.coverage(period_ms / 1e3) == pytest.approx(window_ms / period_ms, rel=0.1)
    assert look.lag_s <= 0.0041
    assert look.r2 > 0.95
    assert look.idle_w == pytest.approx(IDLE_W, abs=25)
    assert look.busy_w == pytest.approx(BUSY_W, abs=40)


def test_the_power_reading_tells_it_too(seen: Callable[[Board], tuple[Wave, Readings]]) -> None:
    wave, readings = seen(board(100, 25))
    look = fit(wave, *powers_of_reading(readings.time_ns, readings.instant_w))
    assert look is not None
    assert look.window_s == pytest.approx(0.025, rel=0.1)


def test_the_average_is_told_to_be_one_over_a_second(seen: Callable[[Board], tuple[Wave, Readings]]) -> None:
    wave, readings = seen(board(100, 25))
    look = fit(wave, *powers_of_reading(readings.time_ns, readings.average_w))
    assert look is not None
    assert look.window_s == pytest.approx(1.0, rel=0.05)
    assert look.lag_s < 0.03


def test_a_late_and_noisy_sensor_is_told_to_be_late(seen: Callable[[Board], tuple[Wave, Readings]]) -> None:
    wave, readings = seen(board(100, 25))
    moments, powers = powers_of_counter(readings.time_ns, readings.counter_j)
    noise_w = np.random.default_rng(1).normal(0, 40, len(powers))
    look = fit(wave, moments + 43 * MS, powers + noise_w)
    assert look is not None
    assert look.lag_s == pytest.approx(0.043, abs=0.003)
    assert look.window_s == pytest.approx(0.025, rel=0.2)
    assert look.low_s <= 0.025 <= look.high_s
    assert 0.8 < look.r2 < 0.99


def test_a_part_time_sensor_scatters_where_a_full_one_does_not(
    seen: Callable[[Board], tuple[Wave, Readings]],
) -> None:
    wave, readings = seen(board(100, 25))
    moments, powers = powers_of_counter(readings.time_ns, readings.counter_j)
    look = fit(wave, moments, powers)
    assert look is not None
    inside = (moments > wave.start_ns) & (moments < wave.end_ns)
    as_seen = float(powers[inside].std(ddof=1))
    assert scatter(wave, moments[inside], look, look.window_s) == pytest.approx(as_seen, rel=0.1)
    assert (scatter(wave, moments[inside], look, 0.1) or 0) < 0.8 * as_seen


@pytest.mark.parametrize("jitter_ms", [0.0, 2.0, 10.0])
def test_jitter_is_found(seen: Callable[[Board], tuple[Wave, Readings]], jitter_ms: float) -> None:
    _, readings = seen(board(50, 50, jitter_ms=jitter_ms))
    found = timing(readings.time_ns, readings.counter_j)
    assert found.jitter_s is not None
    # Each tick is late by an even draw: its standard deviation is the width over sqrt(12), that of a gap
    # sqrt(2) times as much. So is each look, once a millisecond. Two hundred gaps tell it to some 6 per cent.
    look_ms = 1.0 if jitter_ms else 0.0
    assert found.jitter_s * 1e3 == pytest.approx(hypot(jitter_ms, look_ms) / 6**0.5, rel=0.3, abs=0.05)


def test_what_is_not_told_has_no_ticks_and_no_look() -> None:
    readings = table([(at * MS, at * MS + 10, -1, -1, 5000) for at in range(1000)])
    assert timing(readings.time_ns, readings.counter_j).ticks == 0
    assert timing(readings.time_ns, readings.instant_w).period_s is None
    wave = Wave([(100 * MS, 200 * MS), (400 * MS, 500 * MS)])
    assert fit(wave, *powers_of_reading(readings.time_ns, readings.instant_w)) is None


def test_a_missed_tick_is_no_jitter() -> None:
    # A reading of the same value twice looks like one long gap.
    values = [at // 20 if not 200 <= at < 240 else 9 for at in range(1000)]
    found = timing(np.arange(1000) * MS, np.array(values, dtype=float))
    assert found.period_s == pytest.approx(0.02)
    assert found.jitter_s == pytest.approx(0.0, abs=1e-9)
    assert found.missed >= 1


def test_the_share_of_a_wave_is_that_of_its_time() -> None:
    wave = Wave([(0, 10 * MS), (20 * MS, 30 * MS)])
    ends_s = np.array([0.005, 0.010, 0.020, 0.030, 0.050])
    assert wave.share(ends_s, 0.010).tolist() == pytest.approx([0.5, 1.0, 0.0, 1.0, 0.0])
    assert wave.share(ends_s, 0.030).tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 3, 2 / 3, 1 / 3])
