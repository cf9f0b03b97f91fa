# SPDX-License-Identifier: Apache-2.0
"""Rounds of decoding, measured in this process with the plugin's own experiment, as in a test."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from pytest_llenergy.devices.allocation import select_devices
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.energy.meters.base import Targets
from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters
from pytest_llenergy.measure.experiment import Experiment, measure_on_hosts
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import CallWorkload

from .work import Steps

#: Seconds of warm-up before the rounds of one length.
WARMUP_S = 0.5


def measure_step_s(work: Steps) -> float:
    """Measure the seconds per step after warm-up."""
    steps = 2
    while True:
        begin_s = time.monotonic()
        work.run(steps)
        taken_s = time.monotonic() - begin_s
        if taken_s > 0.3:
            return taken_s / steps
        steps = math.ceil(steps * min(8.0, 0.4 / max(taken_s, 1e-3)))


def measure_rounds(work: Steps, steps: int, rounds: int, each_s: float) -> Experiment:
    """Measure ``rounds`` rounds of ``steps`` steps; ``each_s`` is the approximate duration of a step."""
    lease = select_devices(GpuRequest(1))
    warmup = max(1, math.ceil(WARMUP_S / (steps * each_s)))
    # Without a budget, exactly ``rounds`` rounds of one iteration are measured.
    plan = RoundPlan(rounds, warmup, gap_s=0.25, target=0.02, budget_s=0.0, iterations=1)
    selection = open_meters(("nvml",), MeterRegistry(), Targets(lease.uuids))
    hosts = [LocalMeters(selection, lease.uuids)]
    return measure_on_hosts(CallWorkload(lambda: work.run(steps)), plan, hosts)


@dataclass(frozen=True)
class Window:
    """All rounds of one length. Energies are joules per token; ``u_j`` is the stated standard uncertainty.

    ``values_j`` and ``each_u_j`` belong to the rounds that have a value. ``temperature_c`` is the mean of the
    temperatures at the start of the rounds.
    """

    seconds: float
    steps: int
    mean_j: float
    u_j: float
    u_absolute_j: float
    values_j: tuple[float, ...]
    each_u_j: tuple[float, ...]
    temperature_c: float | None
    flags: tuple[str, ...]

    @property
    def spread(self) -> float | None:
        """Return the relative standard deviation of the rounds."""
        if len(self.values_j) < 2:
            return None
        mean_j = math.fsum(self.values_j) / len(self.values_j)
        squares = math.fsum((value - mean_j) ** 2 for value in self.values_j)
        return math.sqrt(squares / (len(self.values_j) - 1)) / mean_j


def measure_window(work: Steps, seconds: float, rounds: int, each_s: float) -> Window | str:
    """Measure rounds of about ``seconds`` each. Returns the reason as text if there is no value."""
    steps = max(1, round(seconds / each_s))
    found = measure_rounds(work, steps, rounds, each_s)
    tokens = steps * work.tokens_per_step
    energy = found.metrics["energy_j"]
    flags = {flag.name for round_ in found.rounds for flag in round_.flags} | {
        flag.name for flag in found.flags
    }
    if energy.value is None or energy.uncertainty is None:
        return energy.reason or "; ".join(sorted(flags)) or "no energy"
    known = [
        (round_.energy_j / tokens, round_.energy_u_j / tokens)
        for round_ in found.rounds
        if round_.energy_j is not None and round_.energy_u_j is not None
    ]
    degrees = [round_.temperature_start_c for round_ in found.rounds]
    warm = [each for each in degrees if each is not None]
    return Window(
        seconds=math.fsum(round_.duration_s for round_ in found.rounds) / len(found.rounds),
        steps=steps,
        mean_j=energy.value / tokens,
        u_j=energy.uncertainty / tokens,
        u_absolute_j=(energy.uncertainty_absolute or energy.uncertainty) / tokens,
        values_j=tuple(value for value, _ in known),
        each_u_j=tuple(u_j for _, u_j in known),
        temperature_c=math.fsum(warm) / len(warm) if warm else None,
        flags=tuple(sorted(flags)),
    )
