# SPDX-License-Identifier: Apache-2.0
"""Measure windows, loops and tests with phases in one world of ``stand_in_run.py``, and write the truth."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from stand_in_worlds import BUSY_W, MS, WORLDS, Rank, S, Setting, add_faults

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.energy import Window, measure
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.errors import LLEnergyError
from pytest_llenergy.measure.experiment import Experiment
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.timeline import Iteration, RankTimeline, RequestTimeline, Timeline
from tests.measure.marks import measure as measure_test

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stand_in import use_world

from tests.nvml_sim import World

#: Largest random change of each length, as a share.
VARIED = 0.05

#: Lengths of single windows, the rest before each of them, and how often each length is measured (seconds).
WINDOWS_S, REST_S, WINDOWS = (0.1, 0.25, 1.0), (0.35, 0.45), 6

#: Windows in a loop and the rest after each of them (seconds), and their number.
LOOPS_S, TURNS = ((0.05, 0.01), (0.05, 0.05), (0.1, 0.05), (0.3, 0.05)), 20

#: Power (W) and length (seconds) of the phases of an iteration.
PHASES = {"prefill": (600.0, 0.06), "decode": (250.0, 0.2)}

#: Iterations of a round, and rounds of a test.
ITERATIONS, ROUNDS = 4, 6

#: Faults in each stretch: the windows, each loop, each test.
FAULTS = {"windows": 8, "loop": 2, "test": 3}

#: A fault this near concerns a result (nanoseconds).
NEAR_NS = 300 * MS

Result = dict[str, Any]


@dataclass
class Generation:
    """A workload with phases. Keeps the joules of each round and phase, and those of the lengths it drew."""

    rank: Rank
    random: Random
    peak_memory_bytes: int | None = None
    drawn_j: list[dict[str, float]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    def prepare_round(self) -> None:
        """Nothing to do."""

    def work(self, iterations: int = 1) -> None:
        drawn_j = dict.fromkeys(PHASES, 0.0)
        marks: list[int] = []
        for _ in range(iterations):
            for name, (watts, usual_s) in PHASES.items():
                length_s = vary(self.random, usual_s)
                drawn_j[name] += self.rank.mean_w(watts) * length_s
                marks.append(self.rank.draw_power(watts))
                # The simulated board is busy while this sleeps.
                time.sleep(length_s)
        marks.append(self.rank.rest())
        self.drawn_j.append(drawn_j)
        parts = zip(marks[:-1:2], marks[1::2], marks[2::2], strict=True)
        self._iterations = tuple(_iteration(*part) for part in parts)

    def timeline(self) -> Timeline:
        timeline = Timeline(ranks=(RankTimeline(rank=0, iterations=self._iterations, cpu_time_s=0.0),))
        self.timelines.append(timeline)
        return timeline


def _iteration(start_ns: int, border_ns: int, end_ns: int) -> Iteration:
    request = RequestTimeline(
        input_tokens=16, output_tokens=32, first_token_ns=border_ns, last_token_ns=end_ns
    )
    return Iteration(start_ns=start_ns, end_ns=end_ns, requests=(request,))


def vary(random: Random, seconds: float) -> float:
    """Return a length that does not keep step with the counter."""
    return seconds * random.uniform(1 - VARIED, 1 + VARIED)


@dataclass
class Stage:
    """A world, and what was found in it."""

    rank: Rank
    random: Random
    uuids: Sequence[str]
    results: list[Result] = field(default_factory=list)
    faults: list[tuple[int, int]] = field(default_factory=list)

    def disturb(self, stretch: str, length_s: float, after_s: float = 0.0) -> None:
        """Schedule the faults of a stretch that begins after some seconds."""
        start_ns = time.monotonic_ns() + round(after_s * S)
        self.faults += add_faults(self.rank, self.random, start_ns, length_s, FAULTS[stretch])

    def settle(self) -> None:
        """Wait until the latest fault is over, and a little longer."""
        until_ns = max([time.monotonic_ns(), *(end_ns for _, end_ns in self.faults)]) + S // 2
        # The faults and the counter's recovery from them happen in real time.
        time.sleep((until_ns - time.monotonic_ns()) / S)

    def add(
        self,
        kind: str,
        what: str,
        energy: tuple[float | None, float | None, str | None],
        span_ns: tuple[int, int],
        true_j: float,
        flags: Sequence[Flag],
    ) -> None:
        """Add a result."""
        energy_j, u_j, reason = energy
        near = any(a < span_ns[1] + NEAR_NS and b > span_ns[0] - NEAR_NS for a, b in self.faults)
        self.results.append(
            {
                "kind": kind,
                "what": what,
                "energy_j": energy_j,
                "u_j": u_j,
                "reason": reason,
                "true_j": true_j,
                "flags": sorted({flag.name for flag in flags if flag.severity == "warning"}),
                "invalid": next((flag.detail for flag in flags if flag.severity == "invalid"), None),
                "start_ns": span_ns[0],
                "end_ns": span_ns[1],
                "near_fault": near,
            }
        )

    def add_window(self, kind: str, what: str, window: Window) -> None:
        """Add the result of a window that has ended."""
        found = window.record
        start_ns = round(found.start_s * S)
        span_ns = (start_ns, start_ns + round(found.duration_s * S))
        energy = (found.energy_j, found.energy_u_j, found.reason)
        self.add(kind, what, energy, span_ns, self.rank.true_j(*span_ns), found.flags)


def measure_windows(stage: Stage) -> None:
    """Measure single windows between rests, and ask for them at the end."""
    ended: list[tuple[float, Window]] = []
    with measure(stage.uuids) as energy:
        # The reader learns when the counter ticks.
        time.sleep(1.0)
        stage.disturb("windows", WINDOWS * (sum(WINDOWS_S) + len(WINDOWS_S) * sum(REST_S) / 2))
        for _ in range(WINDOWS):
            for seconds in stage.random.sample(WINDOWS_S, len(WINDOWS_S)):
                # The board is idle between windows.
                time.sleep(stage.random.uniform(*REST_S))
                ended.append((seconds, _run_window(stage, energy, f"{seconds:g} s", seconds)))
        stage.settle()
        for seconds, window in ended:
            stage.add_window("windows", f"{seconds * 1e3:g} ms", window)


def measure_loops(stage: Stage) -> None:
    """Measure the windows of each loop, and ask for them after it."""
    with measure(stage.uuids) as energy:
        # As above.
        time.sleep(1.0)
        for seconds, rest_s in LOOPS_S:
            name = f"{seconds * 1e3:g} ms, rests of {rest_s * 1e3:g} ms"
            stage.disturb("loop", TURNS * (seconds + rest_s))
            ended: list[Window] = []
            for _ in range(TURNS):
                ended.append(_run_window(stage, energy, name, seconds))
                # The rest of the loop.
                time.sleep(vary(stage.random, rest_s))
            stage.settle()
            for window in ended:
                stage.add_window("loops", name, window)


def _run_window(stage: Stage, energy: Any, name: str, seconds: float) -> Window:
    energy.begin(name)
    stage.rank.draw_power(BUSY_W)
    # The simulated board is busy meanwhile.
    time.sleep(vary(stage.random, seconds))
    stage.rank.rest()
    window: Window = energy.end(name)
    return window


def measure_rounds(stage: Stage) -> Iterator[dict[str, Any]]:
    """Measure tests of rounds with phases. Yields the metrics of each, and its joules beyond the drawn."""
    plan = RoundPlan(ROUNDS, 2, gap_s=0.25, target=0.02, budget_s=0.0, iterations=ITERATIONS, exact=True)
    for _ in range(stage.rank.setting.tests):
        stage.settle()
        workload = Generation(stage.rank, stage.random)
        lease = select_devices(GpuRequest(len(stage.uuids)), environment={})
        selection = open_meters(("nvml",), MeterRegistry(), Targets(lease.uuids))
        work_s = ITERATIONS * sum(seconds for _, seconds in PHASES.values())
        stage.disturb("test", ROUNDS * (work_s + 0.7), after_s=1.5)
        try:
            found = measure_test(workload, plan, selection, lease)
        except LLEnergyError as error:
            yield {"raised": f"{type(error).__name__}: {error}"}
            continue
        yield _add_test(stage, workload, found)


def _add_test(stage: Stage, workload: Generation, found: Experiment) -> dict[str, Any]:
    beyond_j: dict[str, list[float]] = {"energy_j": [], **{f"{name}_energy_j": [] for name in PHASES}}
    timelines, drawn = workload.timelines[-ROUNDS:], workload.drawn_j[-ROUNDS:]
    uneven = [flag for flag in found.flags if flag.name == "uneven-rounds"]
    named = {int(number) for flag in uneven for number in re.findall(r"round (\d+) ", flag.detail)}
    for number, round_, timeline, drawn_j in zip(count(1), found.rounds, timelines, drawn, strict=False):
        span_ns = (timeline.start_ns, timeline.end_ns)
        true_j = stage.rank.true_j(*span_ns)
        energy = (round_.energy_j, round_.energy_u_j, round_.reason)
        flags = [*round_.flags, *(uneven if number in named else [])]
        stage.add("rounds", "round", energy, span_ns, true_j, flags)
        beyond_j["energy_j"].append((true_j - sum(drawn_j.values())) / ITERATIONS)
        spans = phase_spans(timeline)
        for phase in round_.phases:
            phase_j = sum(stage.rank.true_j(*part) for part in spans[phase.name])
            answer = (phase.energy_j, phase.energy_u_j, phase.reason)
            stage.add("phases", phase.name, answer, span_ns, phase_j, round_.flags)
            beyond_j[f"{phase.name}_energy_j"].append((phase_j - drawn_j[phase.name]) / ITERATIONS)
    warnings = {flag.name for flag in found.flags if flag.severity == "warning"}
    warnings |= {flag.name for round_ in found.rounds for flag in round_.flags if flag.severity == "warning"}
    usual_j = {f"{name}_energy_j": stage.rank.mean_w(watts) * s for name, (watts, s) in PHASES.items()}
    usual_j["energy_j"] = sum(usual_j.values())
    metrics = [
        {
            "what": name,
            "energy_j": found.metrics[name].value,
            "u_j": found.metrics[name].uncertainty,
            "reason": found.metrics[name].reason,
            "usual_j": joules,
            "flags": sorted(warnings),
        }
        for name, joules in usual_j.items()
    ]
    return {"metrics": metrics, "beyond_j": beyond_j}


def run(setting: Setting, library: Path, out: Path, seed: str) -> dict[str, Any]:
    """Measure everything in a new world."""
    random = Random(seed)
    with World(out / "world", setting.boards) as world:
        use_world(world, library)
        rank = Rank(world, setting)
        stage = Stage(rank, random, [world.board(index).uuid for index in range(len(setting.boards))])
        with rank.with_neighbour(Random(f"neighbour {seed}")):
            measure_windows(stage)
            measure_loops(stage)
            tests = list(measure_rounds(stage))
    # What the self-check found, on which the readings of the whole process depend.
    checks = [json.loads(path.read_text()) for path in sorted((out / "cache" / "meters").glob("*.json"))]
    return {"results": stage.results, "tests": tests, "faults": stage.faults, "checks": checks}


if __name__ == "__main__":
    NAME, LIBRARY, OUT, SEED = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    (OUT / "results.json").write_text(json.dumps(run(WORLDS[NAME], LIBRARY, OUT, SEED)))
