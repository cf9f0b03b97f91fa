# SPDX-License-Identifier: Apache-2.0
"""One round: quiet gap, work, quiet gap.

The gaps are there to be measured: they give the idle power of the live context, which the window
arithmetic needs at both edges of a round and which net energy subtracts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_llenergy.devices.condition import Condition
from pytest_llenergy.measure.lookout import Watch, looking_out
from pytest_llenergy.measure.phase import PhaseDither
from pytest_llenergy.meters.cpu_time import CpuTime, cpu_time
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.timeline import RoundTimeline

#: Ticks of the slowest counter that a quiet gap must hold, so that three lie within it for certain.
GAP_TICKS = 3.5


class Workload(Protocol):
    """What is measured. Only ``work`` is done between the quiet gaps."""

    def ready(self) -> None:
        """Do what must not disturb the gap before the work, such as collecting garbage."""

    def work(self, iterations: int = 1) -> None:
        """Do the work so often; blocks until it is done everywhere."""

    def timeline(self) -> RoundTimeline:
        """What happened in ``work``; counting and detokenising are done here."""


@dataclass(frozen=True)
class MeasuredRound:
    """A round with the quiet gaps before and after it (monotonic nanoseconds).

    ``before``, ``during`` and ``after`` are the conditions of the boards at its start, every half second of
    the work, and right after it.
    """

    timeline: RoundTimeline
    gap_start_ns: int
    gap_end_ns: int
    other_cpu_s: float = 0.0
    stolen_cpu_s: float = 0.0
    before: Mapping[str, Condition] | None = None
    during: Sequence[Mapping[str, Condition]] = ()
    after: Mapping[str, Condition] | None = None

    @property
    def temperature_start_c(self) -> float | None:
        """Of the hottest board."""
        known = [each.temperature_c for each in (self.before or {}).values()]
        return max((value for value in known if value is not None), default=None)


def gap_needed_s(trace: Sequence[Series], least_s: float) -> float:
    """How long a quiet gap must be to show the idle power of every counter (seconds)."""
    late = [series.domain.smear_s + series.domain.late_s[1] for series in trace]
    needed = [late_s + GAP_TICKS * (each.period_s or 0.0) for late_s, each in zip(late, trace, strict=True)]
    return max([least_s, *needed])


def run_round(
    workload: Workload, iterations: int, gap_s: float, dither: PhaseDither, sampler: Sampler, watch: Watch
) -> MeasuredRound:
    """Run one round while the sampler reads; the calling thread sleeps or blocks throughout."""
    workload.ready()
    before = watch.read()
    gap_start_ns = time.monotonic_ns()
    with sampler.closely():
        time.sleep(gap_s)
        cpu_before = cpu_time()
        dither.wait(sampler.series)
    # Edges of work in this process are read as they happen; for ranks it costs nothing.
    sampler.read_now()
    with sampler.at_work(), looking_out(watch) as during:
        workload.work(iterations)
    sampler.read_now()
    with sampler.closely():
        cpu_after = cpu_time()
        after = watch.read()
        time.sleep(gap_s)
    gap_end_ns = time.monotonic_ns()
    timeline = workload.timeline()
    return MeasuredRound(
        timeline=timeline,
        gap_start_ns=gap_start_ns,
        gap_end_ns=gap_end_ns,
        other_cpu_s=_others(cpu_before, cpu_after, timeline),
        stolen_cpu_s=cpu_after.stolen_s - cpu_before.stolen_s,
        before=before,
        during=during,
        after=after,
    )


def _others(before: CpuTime, after: CpuTime, timeline: RoundTimeline) -> float:
    return max(0.0, after.busy_s - before.busy_s - timeline.cpu_time_s)
