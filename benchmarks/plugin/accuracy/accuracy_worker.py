# SPDX-License-Identifier: Apache-2.0
"""Measure one sensor with every tool; write readings and truth. Runs in the peers' interpreter."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from accuracy_tools import Answer, Ask, Tool, open_tools
from accuracy_world import (
    DURATIONS_S,
    IDLE_W,
    LOOPS,
    TICK_NS,
    TURNS,
    VARIED,
    board,
    run_burst,
    run_part,
)

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import CallWorkload
from pytest_llenergy.record.timeline import Timeline
from tests.measure.marks import measure
from tests.nvml_sim import World

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stand_in import use_world

OURS_ROUNDS = "pytest-llenergy, rounds"

#: Warm-up before the rounds of one duration (seconds).
WARMUP_S = 1.0

#: Rest between two bursts that are measured as windows, and the range of the random time added to it
#: (seconds). A window without its own gap takes the power around it from the three ticks of this rest.
REST_S = 0.4
RANDOM_REST_S = TICK_NS / 1e9


@dataclass
class Bursts:
    """Bursts as the work of rounds; records the true joules of each, including warm-up."""

    world: World
    seconds: float
    truths_j: list[float] = field(default_factory=list)
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        self._call = CallWorkload(lambda: run_burst(self.world, self.seconds))

    def prepare_round(self) -> None:
        self._call.prepare_round()

    def work(self, iterations: int = 1) -> None:
        assert iterations == 1
        self._call.work(iterations)

    def timeline(self) -> Timeline:
        timeline = self._call.timeline()
        self.truths_j.append(self.world.true_energy_j(0, timeline.start_ns, timeline.end_ns))
        return timeline


def measure_rounds(world: World, seconds: float, repeats: int) -> dict[str, Any]:
    """Measure as a test does, one burst per round. Returns each round, and the median with its u."""
    lease = select_devices(GpuRequest(1), environment={})
    workload = Bursts(world, seconds)
    # Without a budget, exactly the requested rounds of one iteration are measured.
    plan = RoundPlan(
        repeats, math.ceil(WARMUP_S / seconds), gap_s=0.25, target=0.02, budget_s=0.0, iterations=1
    )
    selection = open_meters(("nvml",), MeterRegistry(), Targets(lease.uuids))
    result = measure(workload, plan, selection, lease)
    truths_j = workload.truths_j[-repeats:]
    readings = [
        _reading(Answer(round_.energy_j, round_.energy_u_j, round_.reason), true_j)
        | {"phase": round_.phase, "flags": [flag.name for flag in round_.flags]}
        for round_, true_j in zip(result.rounds, truths_j, strict=True)
    ]
    energy = result.metrics["energy_j"]
    return {"readings": readings, "value_j": energy.value, "value_u_j": energy.uncertainty}


def measure_windows(world: World, repeats: int, random: Random) -> Iterator[tuple[float, dict[str, Any]]]:
    """Measure ``repeats`` bursts of each duration with all other tools at once."""
    tools = open_tools(world.board(0).uuid)
    readings: dict[float, dict[str, list[dict[str, Any]]]] = {
        seconds: {tool.name: [] for tool in tools} for seconds in DURATIONS_S
    }
    # Readers and running averages of the tools settle before the first burst.
    time.sleep(1.0)
    for _ in range(repeats):
        for seconds in random.sample(DURATIONS_S, len(DURATIONS_S)):
            # Start at a random phase of the counter's ticks.
            time.sleep(random.random() * RANDOM_REST_S)
            opened: list[int] = []
            for tool in tools:
                tool.begin()
                opened.append(time.monotonic_ns())
            run_burst(world, seconds)
            ended = [(tool, time.monotonic_ns(), tool.end()) for tool in reversed(tools)]
            # Idle power between bursts, so that a burst does not affect the next reading.
            time.sleep(REST_S)
            # The time that a tool needs to open or close a window does not count against it.
            for start_ns, (tool, end_ns, ask) in zip(opened, reversed(ended), strict=True):
                true_j = world.true_energy_j(0, start_ns, end_ns)
                readings[seconds][tool.name].append(_reading(ask(), true_j))
    for tool in tools:
        tool.close()
    for seconds, by_tool in readings.items():
        yield seconds, {name: {"readings": each} for name, each in by_tool.items()}


def measure_loops(world: World, random: Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the windows of each loop with all tools but the rounds at once, and ask them after the loop."""
    tools = open_tools(world.board(0).uuid)
    # Readers and running averages of the tools settle before the first window.
    time.sleep(1.0)
    for name, (parts, rest_s) in LOOPS.items():
        readings: dict[str, list[dict[str, Any]]] = {tool.name: [] for tool in tools}
        ended: list[tuple[Tool, int, int, Ask]] = []
        for _ in range(TURNS):
            for window, seconds, watts in parts:
                varied_s = seconds * random.uniform(1 - VARIED, 1 + VARIED)
                opened: list[int] = []
                for tool in tools:
                    # Each loop has windows of its own names.
                    tool.begin(f"{window} of {name}")
                    opened.append(time.monotonic_ns())
                run_part(world, varied_s, watts)
                if window == parts[-1][0] and rest_s:
                    world.set_power(0, IDLE_W)
                for tool, start_ns in zip(reversed(tools), reversed(opened), strict=True):
                    ended.append((tool, start_ns, time.monotonic_ns(), tool.end()))
            # The simulated board rests meanwhile.
            time.sleep(rest_s * random.uniform(1 - VARIED, 1 + VARIED))
        world.set_power(0, IDLE_W)
        # The counter ticks again after the last window, and loops do not affect each other.
        time.sleep(REST_S)
        for tool, start_ns, end_ns, ask in ended:
            readings[tool.name].append(_reading(ask(), world.true_energy_j(0, start_ns, end_ns)))
        yield name, {tool: {"readings": each} for tool, each in readings.items()}
    for tool in tools:
        tool.close()


def _reading(answer: Answer, true_j: float) -> dict[str, Any]:
    return {**asdict(answer), "true_j": true_j}


def main(sensor: str, library: Path, out: Path, repeats: int, seed: int) -> None:
    """Measure the bursts of one sensor; ``out`` is a new directory for the world and the results."""
    with World(out / "world", [board(sensor)]) as world:
        use_world(world, library)
        results: dict[str, dict[str, Any]] = {}
        for seconds in DURATIONS_S:
            results[f"{seconds:g}"] = {OURS_ROUNDS: measure_rounds(world, seconds, repeats)}
            print(f"{sensor}: rounds of {seconds:g} s done", flush=True)
        for seconds, by_tool in measure_windows(world, repeats, Random(seed)):
            results[f"{seconds:g}"].update(by_tool)
        loops = dict(measure_loops(world, Random(seed)))
    (out / "results.json").write_text(json.dumps({"bursts": results, "loops": loops}))
    print(f"{sensor}: windows done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
