# SPDX-License-Identifier: Apache-2.0
"""Shapes of power, compared with values computed by hand, and the C side with the ground truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from .boards import Board
from .draw import draw
from .instant_reads import counter_mj, power_mw
from .shapes import Burst, Decay, Noise, Power, Ramp
from .world import World

Attach = Callable[[World], ModuleType]
MS = 1_000_000
SECOND = 1000 * MS
START = 1000 * SECOND
BARE = Board(power_w=0.0, latch_ns=0, energy_offset_mj=0)


def world_of(tmp_path: Path, *powers: tuple[int, Power]) -> World:
    world = World(tmp_path / "world", [BARE], start_ns=START)
    for after_ns, power in powers:
        world.set_power(0, power, at_ns=START + after_ns)
    return world


def test_draws_are_those_of_splitmix64() -> None:
    # The first outputs for the seed 1234567 from other implementations.
    assert [draw(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize(("first", "last", "half_j", "full_j"), [(0, 100, 12.5, 50), (100, 0, 37.5, 50)])
def test_a_ramp_rises_linearly_and_then_holds(
    tmp_path: Path, nvml_attach: Attach, first: float, last: float, half_j: float, full_j: float
) -> None:
    world = world_of(tmp_path, (0, Ramp(first, last, SECOND)))
    assert world.true_energy_j(0, START, START + SECOND // 2) == half_j
    assert world.true_energy_j(0, START, START + SECOND) == full_j
    assert world.true_energy_j(0, START, START + 3 * SECOND) == full_j + 2 * last
    assert [world.true_power_w(0, START + at * MS) for at in (0, 500, 1000, 9000)] == [first, 50, last, last]
    nvml = nvml_attach(world)
    assert counter_mj(nvml, 0, START + SECOND // 2) == half_j * 1000
    assert counter_mj(nvml, 0, START + SECOND) == full_j * 1000
    assert power_mw(nvml, 0, START + SECOND // 2) == 50_000


@pytest.mark.parametrize(
    ("first", "last", "shown_w"), [(500, 100, [500, 400, 300, 200, 150]), (0, 64, [0, 16, 32, 48, 56])]
)
def test_a_decay_halves_its_distance_in_each_period(
    tmp_path: Path, nvml_attach: Attach, first: float, last: float, shown_w: list[float]
) -> None:
    world = world_of(tmp_path, (0, Decay(first, last, SECOND)))
    moments = [START + at * SECOND // 2 for at in (0, 1, 2, 4, 6)]
    assert [world.true_power_w(0, at) for at in moments] == shown_w
    # Three quarters of the difference in the first period, half as much in the second, and so on.
    above_j = (first - last) * 0.75
    assert world.true_energy_j(0, START, START + SECOND) == last + above_j
    assert world.true_energy_j(0, START + SECOND, START + 3 * SECOND) == 2 * last + above_j * 0.75
    assert world.true_energy_j(0, START, START + 40 * SECOND) == pytest.approx(40 * last + 2 * above_j)
    assert world.true_power_w(0, START + 24 * SECOND) == last
    nvml = nvml_attach(world)
    for at in (*moments, START + 90 * SECOND):
        assert counter_mj(nvml, 0, at) == int(world.true_energy_j(0, START, at) * 1000)
        assert power_mw(nvml, 0, at) == world.true_power_w(0, at) * 1000


def test_a_ramp_is_cut_off_by_the_next_step(tmp_path: Path) -> None:
    world = world_of(tmp_path, (0, Ramp(0, 100, SECOND)), (500 * MS, 10.0))
    assert world.true_energy_j(0, START, START + SECOND) == 12.5 + 5


def test_the_energy_of_a_falling_ramp_is_rounded_down(tmp_path: Path, nvml_attach: Attach) -> None:
    # 1 MW for 1 ns would be 1 mJ, but the ramp has fallen slightly.
    world = world_of(tmp_path, (0, Ramp(1e6, 0, 1000 * SECOND)))
    nvml = nvml_attach(world)
    assert counter_mj(nvml, 0, START + 1) == world.counter_mj(0, START + 1) == 0


def test_noise_is_drawn_anew_in_each_period_within_its_limits(tmp_path: Path) -> None:
    world = world_of(tmp_path, (0, Noise(100.0, 300.0, 10 * MS, seed=7)))
    levels = [world.true_power_w(0, START + i * 10 * MS) for i in range(400)]
    assert levels == [world.true_power_w(0, START + (i + 1) * 10 * MS - 1) for i in range(400)]
    assert all(100 <= level <= 300 for level in levels)
    # The mean of 400 uniform draws from 100..300 has a standard deviation of 200 / sqrt(12 * 400) = 2.9.
    assert sum(levels) / 400 == pytest.approx(200, abs=12)
    assert min(levels) < 110
    assert max(levels) > 290
    assert world.true_energy_j(0, START, START + 4 * SECOND) == pytest.approx(sum(levels) * 0.01, rel=1e-12)
    assert levels[0] == 100 + draw(7, 0) % 200_001 / 1000


def test_the_seed_determines_the_noise(tmp_path: Path) -> None:
    boards = [Board(), Board(), Board()]
    world = World(tmp_path / "world", boards, start_ns=START)
    for index, seed in enumerate((1, 1, 2)):
        world.set_power(index, Noise(50.0, 500.0, MS, seed=seed), at_ns=START)
    seen = [[world.true_power_w(index, START + i * MS) for i in range(20)] for index in range(3)]
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("seed", range(4))
def test_c_and_python_agree_on_any_waveform(tmp_path: Path, nvml_attach: Attach, seed: int) -> None:
    rng = Random(seed)
    world = world_of(tmp_path)
    nvml = nvml_attach(world)
    at_ns = START
    for _ in range(30):
        high_w, period_ns = rng.uniform(100, 900), rng.randrange(MS, 40 * MS)
        shapes: list[Power] = [
            rng.uniform(0, 900),
            Burst(50.0, high_w, period_ns, rng.random()),
            Ramp(rng.uniform(0, 900), high_w, rng.randrange(1, SECOND)),
            Decay(rng.uniform(0, 900), high_w, rng.choice([1, MS, 10 * SECOND])),
            Noise(100.0, high_w, period_ns, seed=rng.getrandbits(64)),
        ]
        world.set_power(0, rng.choice(shapes), at_ns=at_ns)
        at_ns += rng.choice([0, rng.randrange(SECOND)])
        for look_ns in (rng.randrange(START - SECOND, at_ns + SECOND) for _ in range(10)):
            assert counter_mj(nvml, 0, look_ns) == world.counter_mj(0, look_ns)
            assert power_mw(nvml, 0, look_ns) == int(world.true_power_w(0, look_ns) * 1000 + 0.5)
            mean_w = world.true_energy_j(0, look_ns - SECOND, look_ns)
            assert power_mw(nvml, 0, look_ns, averaged=True) == pytest.approx(mean_w * 1000, abs=1)


def test_a_counter_equals_the_truth_in_millijoules(tmp_path: Path) -> None:
    world = world_of(tmp_path, (0, Noise(50.0, 700.0, MS, seed=3)), (2 * SECOND, Ramp(50, 600, SECOND)))
    for at_ns in range(START, START + 4 * SECOND, 37_123_457):
        assert world.counter_mj(0, at_ns) == int(world.true_energy_j(0, START, at_ns) * 1000)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ramp(0, 100, 0),
        lambda: Ramp(0, 100, 86_400 * SECOND + 1),
        lambda: Decay(0, 100, 0),
        lambda: Decay(0, 100, 10 * SECOND + 1),
        lambda: Noise(0, 100, 0),
        lambda: Noise(100, 99, MS),
        lambda: Noise(0, 100, MS, seed=-1),
        lambda: Burst(0, 100, 0, 0.5),
    ],
)
def test_impossible_shapes_are_refused(make: Callable[[], Power]) -> None:
    with pytest.raises(ValueError, match="got "):
        make()
