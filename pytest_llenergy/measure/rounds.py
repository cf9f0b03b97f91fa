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

from pytest_llenergy.meters.cpu_time import CpuTime
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.model.timeline import RoundTimeline


class Workload(Protocol):
    """What is measured. Only ``work`` is done between the quiet gaps."""

    def ready(self) -> None:
        """Do what must not disturb the gap before the work, such as collecting garbage."""

    def work(self) -> None:
        """Do the work once; blocks until it is done everywhere."""

    def timeline(self) -> RoundTimeline:
        """What happened in ``work``; counting and detokenising are done here."""


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
        workload.ready()
        workload.work()
        workload.timeline()
    rounds: list[MeasuredRound] = []
    for _ in range(plan.rounds):
        workload.ready()
        temperature = temperature_c()
        gap_start_ns = time.monotonic_ns()
        time.sleep(plan.gap_s)
        cpu_before = cpu_time()
        # Edges of work in this process are read as they happen; for ranks it costs nothing.
        sampler.read_now()
        workload.work()
        sampler.read_now()
        cpu_after = cpu_time()
        time.sleep(plan.gap_s)
        gap_end_ns = time.monotonic_ns()
        timeline = workload.timeline()
        rounds.append(
            MeasuredRound(
                timeline=timeline,
                gap_start_ns=gap_start_ns,
                gap_end_ns=gap_end_ns,
                other_cpu_s=max(0.0, cpu_after.busy_s - cpu_before.busy_s - timeline.cpu_time_s),
                stolen_cpu_s=cpu_after.stolen_s - cpu_before.stolen_s,
                temperature_start_c=temperature,
            )
        )
    return rounds
