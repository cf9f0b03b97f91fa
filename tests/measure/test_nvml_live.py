# SPDX-License-Identifier: Apache-2.0
"""The real path on a simulated board whose power changes live: pynvml, meter, sampler, rounds, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.record.timeline import Timeline

from ..energy.waves import MS
from ..nvml_sim import Board, World
from .marks import iteration, measure, rank_of
from .plans import round_plan

pytestmark = pytest.mark.clock

Attach = Callable[[World], ModuleType]


@dataclass
class Surges:
    """Draws 500 W, then 300 W, then idle power; keeps the true energy of every round and its prefill."""

    world: World
    seconds: float = 0.25
    peak_memory_bytes: int | None = None
    truths: list[tuple[float, float]] = field(default_factory=list)

    def prepare_round(self) -> None:
        """Do nothing."""

    def work(self, iterations: int = 1) -> None:
        assert iterations == 1
        start_ns = self.world.set_power(0, 500.0)
        time.sleep(self.seconds)
        border_ns = self.world.set_power(0, 300.0)
        time.sleep(self.seconds)
        end_ns = self.world.set_power(0, 100.0)
        joules = self.world.true_energy_j
        self.truths.append((joules(0, start_ns, end_ns), joules(0, start_ns, border_ns)))
        self._rank = rank_of(iteration(start_ns, end_ns, border_ns))

    def timeline(self) -> Timeline:
        return Timeline(ranks=(self._rank,))


def measure_on(workload: Surges | CallWorkload, plan: RoundPlan) -> Experiment:
    lease = select_devices(GpuRequest(1), environment={})
    return measure(workload, plan, open_meters((), MeterRegistry(), Targets(lease.uuids)), lease)


def world_of(tmp_path: Path, board: Board) -> World:
    return World(tmp_path / "world", [board])


@pytest.mark.parametrize("latch_ms", [20, 100])
def test_the_energy_of_rounds_agrees_with_the_truth(
    tmp_path: Path, nvml_attach: Attach, latch_ms: int
) -> None:
    world = world_of(tmp_path, Board(power_w=100.0, latch_ns=latch_ms * MS, temperature_c=55))
    nvml_attach(world)
    # Phases are long enough that ticks missed by a late reader do not matter.
    workload = Surges(world, seconds=0.25 + 6 * latch_ms / 1e3)
    result = measure_on(workload, round_plan(rounds=2, warmup=0, gap_s=0.4, exact=True))
    assert [meter.name for meter in result.meters] == ["nvml"]
    assert result.meters[0].update_period_s == pytest.approx(latch_ms / 1e3, rel=0.2)
    assert len(result.rounds) == len(workload.truths) == 2
    for round_, (true_j, true_prefill_j) in zip(result.rounds, workload.truths, strict=True):
        assert round_.energy_j is not None, round_.reason
        assert round_.energy_u_j is not None
        # Two standard uncertainties cover 95 % of windows (test_window_arithmetic); one window gets four.
        assert abs(round_.energy_j - true_j) <= 4 * round_.energy_u_j
        assert round_.energy_u_j < 0.05 * round_.energy_j
        assert round_.idle_power_w == pytest.approx(100, rel=0.15)
        prefill, decode = round_.phases
        assert prefill.energy_j is not None, prefill.reason
        assert prefill.energy_u_j is not None
        assert decode.energy_j is not None
        assert abs(prefill.energy_j - true_prefill_j) <= 4 * prefill.energy_u_j
        assert prefill.energy_j + decode.energy_j == pytest.approx(round_.energy_j, rel=1e-9)
        assert round_.temperature_start_c == 55
        assert [flag.name for flag in round_.flags if flag.severity == "invalid"] == []
    mean_j = sum(true for true, _ in workload.truths) / 2
    assert result.metrics["energy_j"].value == pytest.approx(mean_j, rel=0.05)


@dataclass
class Bursts(Surges):
    """Draws 500 W for 30 ms, less than the blind time of a part-time sensor."""

    def work(self, iterations: int = 1) -> None:
        start_ns = self.world.set_power(0, 500.0)
        time.sleep(0.03)
        end_ns = self.world.set_power(0, 100.0)
        self.truths.append((self.world.true_energy_j(0, start_ns, end_ns), 0.0))
        self._rank = rank_of(iteration(start_ns, end_ns))


@pytest.mark.slow
def test_dithered_rounds_find_the_energy_that_a_part_time_sensor_misses(
    tmp_path: Path, nvml_attach: Attach
) -> None:
    """A single round is 100 % too low or 200 % too high."""
    board = Board(name="NVIDIA H100 80GB HBM3", power_w=100.0, latch_ns=100 * MS, sensor_window_ns=25 * MS)
    world = world_of(tmp_path, board)
    nvml_attach(world)
    workload = Bursts(world)
    result = measure_on(workload, round_plan(rounds=16, warmup=0, gap_s=0.1, budget_s=0.1))
    assert result.meters[0].coverage == pytest.approx(0.25, rel=0.05)
    errors = [
        abs((round_.energy_j or 0.0) - true_j) / true_j
        for round_, (true_j, _) in zip(result.rounds, workload.truths, strict=True)
    ]
    assert max(errors) > 0.5
    energy = result.metrics["energy_j"]
    true_j = sum(true for true, _ in workload.truths) / len(workload.truths)
    assert energy.value is not None
    assert energy.uncertainty is not None
    assert energy.value == pytest.approx(true_j, rel=0.2)
    assert abs(energy.value - true_j) <= 4 * energy.uncertainty
    assert energy.uncertainty < 0.3 * true_j
