# SPDX-License-Identifier: Apache-2.0
"""The protocol of a measurement: warm-up, then rounds with quiet gaps around each.

The gaps are there to be measured: they give the idle power of the live context, which the window
arithmetic needs at both edges of a round and which net energy subtracts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pytest_llenergy.devices.host import CpuTime
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.model.timeline import RoundTimeline


class Workload(Protocol):
    """What is measured. ``run_round`` does the work once and blocks until it is done everywhere."""

    def run_round(self) -> RoundTimeline:
        """One repetition; its timeline holds nothing but the work."""


@dataclass(frozen=True)
class RoundPlan:
    """How often, and how long the quiet gaps last (seconds)."""

    rounds: int = 6
    warmup: int = 1
    gap_s: float = 0.25


@dataclass(frozen=True)
class MeasuredRound:
    """A round with the quiet gaps before and after it (monotonic nanoseconds)."""

    timeline: RoundTimeline
    gap_start_ns: int
    gap_end_ns: int
    other_cpu_s: float
    stolen_cpu_s: float
    temperature_start_c: float | None


def run_rounds(
    workload: Workload,
    plan: RoundPlan,
    sampler: Sampler,
    *,
    cpu_time: Callable[[], CpuTime],
    temperature_c: Callable[[], float | None],
) -> list[MeasuredRound]:
    """Run warm-up and rounds while the sampler reads; the calling thread sleeps or blocks throughout.

    ``cpu_time`` gives the host's CPU seconds so far, to tell what others used meanwhile.
    """
    for _ in range(plan.warmup):
        workload.run_round()
    rounds: list[MeasuredRound] = []
    gap_start_ns = time.monotonic_ns()
    time.sleep(plan.gap_s)
    for _ in range(plan.rounds):
        temperature = temperature_c()
        cpu_before = cpu_time()
        # Edges of work in this process are read as they happen; for ranks it costs nothing.
        sampler.read_now()
        timeline = workload.run_round()
        sampler.read_now()
        cpu_after = cpu_time()
        next_gap_ns = time.monotonic_ns()
        time.sleep(plan.gap_s)
        rounds.append(
            MeasuredRound(
                timeline=timeline,
                gap_start_ns=gap_start_ns,
                gap_end_ns=time.monotonic_ns(),
                other_cpu_s=max(0.0, cpu_after.busy_s - cpu_before.busy_s - timeline.cpu_time_s),
                stolen_cpu_s=cpu_after.stolen_s - cpu_before.stolen_s,
                temperature_start_c=temperature,
            )
        )
        gap_start_ns = next_gap_ns
    return rounds
