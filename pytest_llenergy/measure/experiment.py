# SPDX-License-Identifier: Apache-2.0
"""One measurement from open meters to figures: rounds are run, joined with the trace, summarised."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pytest_llenergy.devices.host import load_average
from pytest_llenergy.devices.inventory import temperature_c
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.measure.energy import account
from pytest_llenergy.measure.metrics import summarise
from pytest_llenergy.measure.rounds import RoundPlan, Workload, run_rounds
from pytest_llenergy.meters.cpu_time import cpu_time
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.select import Selection
from pytest_llenergy.model.record import MeterInfo, Metric, Round
from pytest_llenergy.model.timeline import RankTimeline, RoundTimeline


class MemoryAware(Workload, Protocol):
    """A workload that knows the highest memory it used, in bytes."""

    @property
    def peak_memory_bytes(self) -> int | None:
        """``None`` where it cannot be told."""


@dataclass(frozen=True)
class Experiment:
    """What a measurement gave."""

    rounds: list[Round]
    metrics: dict[str, Metric]
    meters: list[MeterInfo]
    load_average: float | None
    warmup_rounds: int


@dataclass
class CallWorkload:
    """A function measured in this process."""

    function: Callable[[], Any]
    peak_memory_bytes: int | None = field(default=None, init=False)
    result: Any = field(default=None, init=False)

    def ready(self) -> None:
        """Collect garbage now, so that it is not collected meanwhile."""
        gc.collect()

    def work(self) -> None:
        """Call it once."""
        cpu_before = time.process_time()
        start_ns = time.monotonic_ns()
        self.result = self.function()
        end_ns = time.monotonic_ns()
        cpu_time_s = time.process_time() - cpu_before
        self._rank = RankTimeline(rank=0, start_ns=start_ns, end_ns=end_ns, cpu_time_s=cpu_time_s)

    def timeline(self) -> RoundTimeline:
        """When it ran."""
        return RoundTimeline(ranks=(self._rank,))


def measure(workload: MemoryAware, plan: RoundPlan, selection: Selection, lease: Lease) -> Experiment:
    """Measure a workload that is ready to run. Closes the meters."""
    load = load_average()
    with Sampler(selection.meters) as sampler:
        measured = run_rounds(
            workload, plan, sampler, cpu_time=cpu_time, temperature_c=lambda: _hottest(lease.uuids)
        )
    rounds = [account(each, sampler.series, selection.reasons) for each in measured]
    infos = [
        _with_period(series.domain.info(series.meter), series.tick_period_s) for series in sampler.series
    ]
    return Experiment(rounds, summarise(rounds, workload.peak_memory_bytes), infos, load, plan.warmup)


def _hottest(uuids: Sequence[str]) -> float | None:
    known = [value for value in (temperature_c(uuid) for uuid in uuids) if value is not None]
    return max(known, default=None)


def _with_period(info: MeterInfo, seen_s: float | None) -> MeterInfo:
    """A period that only shows by watching is filled in from the trace."""
    if info.update_period_s is not None:
        return info
    return msgspec.structs.replace(info, update_period_s=seen_s)
