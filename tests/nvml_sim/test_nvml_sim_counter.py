# SPDX-License-Identifier: Apache-2.0
"""How sensors and counters follow a waveform: jitter, part-time sampling, resets, modules."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Literal

import pytest

from .boards import Board, Fault
from .instant_reads import counter_mj, power_mw
from .shapes import Burst, Noise, Power
from .world import World

Attach = Callable[[World], ModuleType]
MS = 1_000_000
SECOND = 1000 * MS
START = 1000 * SECOND
PART_TIME = Board(power_w=100.0, energy_offset_mj=0, sensor_window_ns=25 * MS)
KINDS: list[Literal["offset", "stall", "loss"]] = ["offset", "stall", "loss"]
JITTERED = Board(power_w=400.0, latch_ns=20 * MS, latch_phase_ns=7, latch_jitter_ns=19 * MS)


def world_of(tmp_path: Path, *boards: Board) -> World:
    return World(tmp_path / "world", boards, start_ns=START)


def test_every_jittered_tick_lies_in_its_own_interval(tmp_path: Path) -> None:
    world = world_of(tmp_path, JITTERED, JITTERED)
    late = [[world.tick_ns(index, k) - 7 - k * 20 * MS for k in range(-50, 50)] for index in range(2)]
    assert all(0 <= each < 19 * MS for each in itertools.chain(*late))
    assert len(set(late[0])) > 90
    assert late[0] != late[1]


def test_ticks_lists_those_within_the_given_times(tmp_path: Path) -> None:
    world = world_of(tmp_path, Board(latch_phase_ns=3), Board(latch_ns=0), JITTERED)
    assert world.tick_ns(0, 5) == 500 * MS + 3
    assert world.ticks(0, 3, 200 * MS + 3) == [3, 100 * MS + 3]
    assert world.ticks(0, 4, 100 * MS + 3) == []
    assert world.ticks(2, START, START + SECOND) == [
        tick for k in range(49_900, 50_100) if START <= (tick := world.tick_ns(2, k)) < START + SECOND
    ]
    with pytest.raises(ValueError, match="board 1 has no ticks"):
        world.tick_ns(1, 0)


def test_a_jittered_counter_moves_only_at_its_ticks_to_the_exact_integral(
    tmp_path: Path, nvml_attach: Attach
) -> None:
    world = world_of(tmp_path, JITTERED)
    world.set_power(0, Noise(50.0, 700.0, 3 * MS), at_ns=START + 100 * MS)
    nvml = nvml_attach(world)
    ticks = world.ticks(0, START, START + SECOND)
    assert len(ticks) in (49, 50, 51)
    for tick, following in itertools.pairwise(ticks):
        exact_mj = 1_000_000 + int(world.true_energy_j(0, START, tick) * 1000)
        assert counter_mj(nvml, 0, tick) == counter_mj(nvml, 0, following - 1) == exact_mj
        assert counter_mj(nvml, 0, following) > exact_mj


def test_a_live_jittered_counter_can_be_followed_tick_by_tick(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [JITTERED])
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    begin_ns = time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + 300 * MS:
        before_ns = time.monotonic_ns()
        seen_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        moments = [before_ns, *world.ticks(0, before_ns, time.monotonic_ns() + 1)]
        assert seen_mj in [world.counter_mj(0, moment) for moment in moments]


@pytest.mark.parametrize(
    ("burst_at_ms", "rise_mj"),
    [
        # In the last 25 ms of the interval: (15 ms x 100 W + 10 ms x 500 W) / 25 ms x 100 ms.
        (80, 26_000),
        # Half of it within the window: (20 ms x 100 W + 5 ms x 500 W) / 25 ms x 100 ms.
        (70, 18_000),
        # Within the 75 ms in which the sensor does not sample.
        (30, 10_000),
    ],
)
def test_a_part_time_sensor_counts_only_its_window(
    tmp_path: Path, nvml_attach: Attach, burst_at_ms: int, rise_mj: int
) -> None:
    world = world_of(tmp_path, PART_TIME)
    nvml = nvml_attach(world)
    world.set_power(0, 500.0, at_ns=START + SECOND + burst_at_ms * MS)
    world.set_power(0, 100.0, at_ns=START + SECOND + (burst_at_ms + 10) * MS)
    before, after = (counter_mj(nvml, 0, START + SECOND + ms * MS) for ms in (0, 100))
    assert (before, after - before) == (100_000, rise_mj)
    assert counter_mj(nvml, 0, START + SECOND + 99 * MS) == before
    assert counter_mj(nvml, 0, START + 2 * SECOND) - after == 90_000
    assert world.true_energy_j(0, START + SECOND, START + SECOND + 100 * MS) == 14


def test_a_part_time_sensor_extrapolates_its_mean_over_a_jittered_interval(tmp_path: Path) -> None:
    board = Board(energy_offset_mj=0, power_w=200.0, sensor_window_ns=10 * MS, latch_jitter_ns=90 * MS)
    world = world_of(tmp_path, board)
    before, tick = world.ticks(0, START + SECOND, START + 2 * SECOND)[:2]
    world.set_power(0, 600.0, at_ns=tick - 4 * MS)
    # The sensor saw (6 ms x 200 W + 4 ms x 600 W) / 10 ms = 360 W.
    rise_mj = world.counter_mj(0, tick) - world.counter_mj(0, before)
    assert rise_mj == pytest.approx(360 * (tick - before) / MS, abs=1)


@pytest.mark.parametrize("window_ms", [0, 100, 250])
def test_a_sensor_without_a_window_or_with_a_long_one_counts_everything(
    tmp_path: Path, window_ms: int
) -> None:
    world = world_of(tmp_path, Board(energy_offset_mj=0, power_w=100.0, sensor_window_ns=window_ms * MS))
    world.set_power(0, 500.0, at_ns=START + SECOND + 30 * MS)
    world.set_power(0, 100.0, at_ns=START + SECOND + 40 * MS)
    assert world.counter_mj(0, START + 2 * SECOND) == 204_000


@pytest.mark.parametrize("seed", range(6))
def test_c_and_python_agree_on_any_counter(tmp_path: Path, nvml_attach: Attach, seed: int) -> None:
    rng = Random(seed)
    latch_ns = rng.choice([7 * MS, 20 * MS, 100 * MS])
    board = Board(
        latch_ns=latch_ns,
        latch_phase_ns=rng.randrange(-2 * START, 2 * START),
        latch_jitter_ns=rng.choice([0, latch_ns // 3, latch_ns - 1]),
        sensor_window_ns=rng.choice([1, latch_ns // 4, latch_ns - 1]),
        energy_gain=rng.choice([0.97, 1.0, 1.05]),
    )
    world = world_of(tmp_path, Board(), board)
    nvml = nvml_attach(world)
    at_ns = START
    for _ in range(25):
        powers: list[Power] = [rng.uniform(0, 900), Burst(50.0, 600.0, 3 * MS, 0.3), Noise(50.0, 600.0, MS)]
        world.set_power(1, rng.choice(powers), at_ns=at_ns)
        if rng.random() < 0.1:
            world.reset_counter(1, at_ns=at_ns)
        if rng.random() < 0.2:
            kind = rng.choice(KINDS)
            world.add_fault(1, Fault(kind, at_ns, at_ns + rng.randrange(1, 30 * MS), rng.randrange(10**6)))
            at_ns += 30 * MS
        # Times in any order, many after the next step: cached sums must not be relied on.
        for look_ns in (rng.randrange(START - SECOND, at_ns + SECOND) for _ in range(4)):
            assert counter_mj(nvml, 1, look_ns) == world.counter_mj(1, look_ns)
        at_ns += rng.choice([0, rng.randrange(SECOND // 2)])


def test_a_window_may_reach_back_beyond_the_previous_tick(tmp_path: Path, nvml_attach: Attach) -> None:
    # With this jitter two ticks may be 1 ms apart, and the later one still covers 19 ms.
    world = world_of(tmp_path, replace(JITTERED, sensor_window_ns=19 * MS))
    for number, tick in enumerate(world.ticks(0, START + SECOND, START + 9 * SECOND)[::4]):
        world.set_power(0, 100.0 + 400.0 * (number % 2), at_ns=tick - MS)
    at_ns = START + 10 * SECOND
    assert counter_mj(nvml_attach(world), 0, at_ns) == world.counter_mj(0, at_ns)


def test_a_power_reading_can_be_the_mean_of_a_window(tmp_path: Path, nvml_attach: Attach) -> None:
    board = Board(power_w=100.0, power_latch_ns=100 * MS, power_window_ns=25 * MS)
    world = world_of(tmp_path, board, Board(power_w=100.0, power_latch_ns=100 * MS))
    for index in range(2):
        world.set_power(index, 500.0, at_ns=START + 90 * MS)
    nvml = nvml_attach(world)
    seen = [[power_mw(nvml, i, START + ms * MS) for ms in (99, 100, 199, 200)] for i in range(2)]
    # (15 ms x 100 W + 10 ms x 500 W) / 25 ms, or the power at the very instant of the tick.
    assert seen == [[0, 260_000, 260_000, 500_000], [100_000, 500_000, 500_000, 500_000]]
    # The mean over one second reaches back before the world's 0.1 s.
    assert power_mw(nvml, 0, START + 100 * MS, averaged=True) == 14_000


def test_power_usage_follows_the_window_when_it_is_not_averaged(tmp_path: Path, nvml_attach: Attach) -> None:
    burst = Burst(100.0, 500.0, 20 * MS, 0.5)
    board = Board(burst=burst, power_window_ns=40 * MS, power_usage_averaged=False)
    nvml = nvml_attach(World(tmp_path / "world", [board]))
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetPowerUsage(handle) == 300_000
    assert nvml.nvmlDeviceGetFieldValues(handle, [186])[0].value.uiVal == 300_000


@pytest.mark.parametrize("window_ms", [0, 25])
def test_a_reset_counter_restarts_at_zero(tmp_path: Path, nvml_attach: Attach, window_ms: int) -> None:
    world = world_of(tmp_path, Board(power_w=100.0, sensor_window_ns=window_ms * MS))
    nvml = nvml_attach(world)
    assert world.reset_counter(0, at_ns=START + SECOND + 60 * MS) == START + SECOND + 60 * MS
    instants = [START + SECOND + ms * MS for ms in (0, 59, 60, 99, 100, 200)]
    # The first tick after the reset counts 40 ms of 100 W.
    expected = [1_100_000, 1_100_000, 0, 0, 4_000, 14_000]
    assert [world.counter_mj(0, at) for at in instants] == expected
    assert [counter_mj(nvml, 0, at) for at in instants] == expected
    world.update(0, energy_offset_mj=1_000_007)
    assert counter_mj(nvml, 0, instants[-1]) == 14_007


def test_a_live_counter_runs_backwards_after_a_reset(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(power_w=100.0, latch_ns=0)])
    handle = (nvml := nvml_attach(world)).nvmlDeviceGetHandleByIndex(0)
    first = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    at_ns = world.reset_counter(0)
    second = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    assert second <= world.counter_mj(0, time.monotonic_ns()) < first
    assert world.counter_mj(0, at_ns) == 0
    world.update(0, energy_offset_mj=world.board(0).energy_offset_mj + 10**9)
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) >= 10**9


def test_resets_out_of_order_or_too_many_are_refused(tmp_path: Path) -> None:
    world = world_of(tmp_path, Board())
    world.reset_counter(0, at_ns=START + 8)
    with pytest.raises(ValueError, match="time order"):
        world.reset_counter(0, at_ns=START + 7)
    for at_ns in range(START + 9, START + 40):
        world.reset_counter(0, at_ns=at_ns)
    with pytest.raises(ValueError, match="already has 32 resets"):
        world.reset_counter(0)


def test_an_offset_makes_the_counter_step_back(tmp_path: Path, nvml_attach: Attach) -> None:
    world = World(tmp_path / "world", [Board(energy_offset_mj=5_000)])
    nvml = nvml_attach(world)
    at_ns = time.monotonic_ns()
    before = counter_mj(nvml, 0, at_ns)
    world.update(0, energy_offset_mj=world.board(0).energy_offset_mj - 300)
    assert counter_mj(nvml, 0, at_ns) == world.counter_mj(0, at_ns) == before - 300


@pytest.mark.parametrize("window_ms", [0, 25])
@pytest.mark.parametrize(
    ("fault", "rises_mj"),
    [
        # The rise over each tick of 100 ms at 100 W. A fault applies to the ticks at 1.2 and 1.3 s.
        (Fault("offset", START + 1150 * MS, START + 1350 * MS, 50_000), [10_000, 60_000, 10_000, -40_000]),
        (Fault("offset", START + 1150 * MS, offset_mj=-50_000), [10_000, -40_000, 10_000, 10_000]),
        (Fault("stall", START + 1150 * MS, START + 1350 * MS), [10_000, 0, 0, 30_000]),
        (Fault("loss", START + 1150 * MS, START + 1350 * MS), [10_000, 0, 0, 10_000]),
    ],
)
def test_a_fault_applies_to_the_ticks_in_its_time(
    tmp_path: Path, nvml_attach: Attach, window_ms: int, fault: Fault, rises_mj: list[int]
) -> None:
    world = world_of(tmp_path, Board(power_w=100.0, sensor_window_ns=window_ms * MS))
    world.add_fault(0, fault)
    nvml = nvml_attach(world)
    for offset_ms in (0, 99):
        moments = [START + SECOND + tick * 100 * MS + offset_ms * MS for tick in range(5)]
        shown_mj = [world.counter_mj(0, at) for at in moments]
        assert [after - before for before, after in itertools.pairwise(shown_mj)] == rises_mj
        assert [counter_mj(nvml, 0, at) for at in moments] == shown_mj
    world.reset_counter(0, at_ns=START + 2 * SECOND)
    assert counter_mj(nvml, 0, START + 3 * SECOND) == world.counter_mj(0, START + 3 * SECOND) == 100_000


def test_a_continuous_counter_can_stand_still(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, Board(power_w=100.0, latch_ns=0, energy_offset_mj=0))
    world.add_fault(0, Fault("stall", START + SECOND, START + 2 * SECOND))
    world.add_fault(0, Fault("loss", START + 3 * SECOND, START + 4 * SECOND))
    nvml = nvml_attach(world)
    moments = [START + ms * MS for ms in (1000, 1999, 2000, 3999, 5000)]
    assert [counter_mj(nvml, 0, at) for at in moments] == [99_999, 99_999, 200_000, 299_999, 400_000]
    assert [world.counter_mj(0, at) for at in moments] == [99_999, 99_999, 200_000, 299_999, 400_000]


def test_faults_out_of_order_or_too_many_are_refused(tmp_path: Path) -> None:
    world = world_of(tmp_path, Board())
    world.add_fault(0, Fault("stall", START, START + 8))
    for start_ns, end_ns in ((START + 7, START + 9), (START + 9, START + 9)):
        with pytest.raises(ValueError, match="must follow one another"):
            world.add_fault(0, Fault("stall", start_ns, end_ns))
    for number in range(63):
        world.add_fault(0, Fault("offset", START + 9 + number))
    with pytest.raises(ValueError, match="already has 64 faults"):
        world.add_fault(0, Fault("offset", START + SECOND))


def test_the_module_reads_a_multiple_of_the_gpu(tmp_path: Path, nvml_attach: Attach) -> None:
    board = Board(power_w=200.0, energy_offset_mj=0, scopes=(0, 1), module_factor=1.5, latch_ns=0)
    world = World(tmp_path / "world", [board])
    world.update(0, frozen=True)
    nvml = nvml_attach(world)
    fields = [(191, 0), (191, 1), (83, 1), (186, 0), (186, 1), (185, 1)]
    values = nvml.nvmlDeviceGetFieldValues(nvml.nvmlDeviceGetHandleByIndex(0), fields)
    gpu, module, plain = (value.value.ullVal for value in values[:3])
    now_ns = time.monotonic_ns()
    assert gpu == plain == world.counter_mj(0, now_ns)
    assert module == world.counter_mj(0, now_ns, scope=1)
    assert module == pytest.approx(1.5 * gpu, abs=1)
    assert [value.value.uiVal for value in values[3:]] == [200_000, 300_000, 300_000]


def test_grace_hopper_reports_only_the_module(tmp_path: Path, nvml_attach: Attach) -> None:
    nvml = nvml_attach(World(tmp_path / "world", [Board(scopes=(1,))]))
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    fields = [(83, 0), (83, 1), (185, 0), (186, 0), (191, 0), (185, 1), (186, 1), (191, 1)]
    codes = [value.nvmlReturn for value in nvml.nvmlDeviceGetFieldValues(handle, fields)]
    assert codes == [nvml.NVML_ERROR_NOT_SUPPORTED] * 5 + [0] * 3
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latch_jitter_ns": 100 * MS}, "latch_jitter_ns must be below latch_ns=100000000"),
        ({"latch_ns": 0, "latch_jitter_ns": 1}, "latch_jitter_ns must be below latch_ns=0"),
        ({"sensor_window_ns": -1}, "sensor_window_ns must not be negative"),
        ({"power_window_ns": -1}, "power_window_ns must not be negative"),
    ],
)
def test_impossible_sensors_are_refused(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world_of(tmp_path, Board()).update(0, **fields)


READ_AT = """
import sys, pynvml
sys.path.insert(0, sys.argv[1])
from nvml_sim.instant_reads import counter_mj
pynvml.nvmlInit()
print(*(counter_mj(pynvml, 0, int(at_ns)) for at_ns in sys.argv[2:]))
"""

# A thread is always within a read when this forks, and the child must still be able to read.
FORK_WHILE_READING = """
import os, sys, threading, pynvml
sys.path.insert(0, sys.argv[1])
from nvml_sim.instant_reads import counter_mj
pynvml.nvmlInit()
instants = [int(at_ns) for at_ns in sys.argv[2:]]
stop = threading.Event()
def read():
    while not stop.is_set():
        for at_ns in instants:
            counter_mj(pynvml, 0, at_ns)
readers = [threading.Thread(target=read) for _ in range(2)]
for reader in readers:
    reader.start()
expected = [counter_mj(pynvml, 0, at_ns) for at_ns in instants]
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit([counter_mj(pynvml, 0, at_ns) for at_ns in instants] != expected)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for reader in readers:
    reader.join()
print(*expected)
"""


@pytest.mark.parametrize("code", [READ_AT, FORK_WHILE_READING])
def test_other_processes_read_the_same(tmp_path: Path, nvml_library: Path, code: str) -> None:
    board = Board(sensor_window_ns=25 * MS, latch_jitter_ns=50 * MS)
    world = world_of(tmp_path, board)
    world.set_power(0, Noise(60.0, 700.0, 2 * MS), at_ns=START + SECOND)
    world.set_power(0, Burst(60.0, 700.0, 30 * MS, 0.4), at_ns=START + 3 * SECOND)
    instants = [START + ms * MS for ms in (5000, 2500, 100, 9000, 3333)]
    command = [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parents[1])]
    environment = {**os.environ, **world.environment(nvml_library.parent)}
    command += [str(at_ns) for at_ns in instants]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert [int(each) for each in said.stdout.split()] == [world.counter_mj(0, at) for at in instants]


def test_a_backdated_step_corrects_the_cached_sums(tmp_path: Path, nvml_attach: Attach) -> None:
    world = world_of(tmp_path, PART_TIME)
    nvml = nvml_attach(world)
    assert counter_mj(nvml, 0, START + 10 * SECOND) == 1_000_000
    world.set_power(0, 300.0, at_ns=START + 4 * SECOND)
    assert counter_mj(nvml, 0, START + 10 * SECOND) == 400_000 + 1_800_000
    assert counter_mj(nvml, 0, START + 4 * SECOND) == 400_000
