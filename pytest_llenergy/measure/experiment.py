# SPDX-License-Identifier: Apache-2.0
"""Run one measurement, from open meters to metrics.

Warm-up and calibration come first, then rounds until the target is met or the budget is spent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from pytest_llenergy.devices.condition import Condition, ConditionReader
from pytest_llenergy.devices.cpu import load_average
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.measure.accounting import account_round
from pytest_llenergy.measure.metrics import compute_metrics, relative_uncertainty
from pytest_llenergy.measure.power_trace import median_round_index, power_trace
from pytest_llenergy.measure.quality import add_comparison_flags, drift_flags, outlier_flags
from pytest_llenergy.measure.remaining_time import Forecast, StepCallback, ignore_step
from pytest_llenergy.measure.rounds import (
    FIRST_TICK_TIMEOUT_S,
    BoardMonitor,
    MeasuredRound,
    PhaseDither,
    Workload,
    required_gap_s,
    required_strata,
    run_round,
)
from pytest_llenergy.measure.warmup import WarmUp, calibrate_iterations, warm_up
from pytest_llenergy.meters.cpu_time import ProcessTree
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.select import Selection
from pytest_llenergy.meters.trace import Series, Trace
from pytest_llenergy.model.record import Flag, MeterInfo, Metric, PowerTrace, Procedure, Round


class MemoryAware(Workload, Protocol):
    """A workload that reports its peak memory."""

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory in bytes; ``None`` if unknown."""


@dataclass(frozen=True)
class RoundPlan:
    """How to measure. Iterations and rounds are added until the target is met or the budget is spent.

    Attributes:
        rounds: Smallest number of rounds.
        warmup: Number of warm-up iterations; ``None`` warms up until stable.
        gap_s: Shortest quiet gap.
        target: Relative standard uncertainty of the energy.
        budget_s: Seconds after which no round is added.
        iterations: Iterations of each round; ``None`` calibrates them.
        warmup_block: Iterations that run back to back in a warm-up of given length.
        exact: Whether to measure ``rounds`` rounds and add none.
    """

    rounds: int
    warmup: int | None
    gap_s: float
    target: float
    budget_s: float
    iterations: int | None = None
    warmup_block: int = 1
    exact: bool = False

    @property
    def rounds_budget_s(self) -> float:
        """Seconds after which no round is added; 0 if none is added at all."""
        return 0.0 if self.exact else self.budget_s


#: Relative standard uncertainty and seconds that are enough for an estimate: its model has far wider limits.
ESTIMATE_TARGET, ESTIMATE_BUDGET_S = 0.05, 2.0


def plan_for_meters(plan: RoundPlan, trace: Trace) -> RoundPlan:
    """Return the plan for these meters: further rounds cannot improve an estimate by much."""
    if plan.exact or not trace or any(series.domain.kind != "estimated" for series in trace):
        return plan
    return replace(
        plan,
        target=max(plan.target, ESTIMATE_TARGET),
        budget_s=min(plan.budget_s, ESTIMATE_BUDGET_S),
    )


@dataclass(frozen=True)
class Experiment:
    """Result of a measurement. ``flags`` concern the whole measurement, not single rounds."""

    rounds: list[Round]
    metrics: dict[str, Metric]
    meters: list[MeterInfo]
    load_average: float | None
    procedure: Procedure
    flags: list[Flag]
    power_trace: PowerTrace | None = None


def measure(
    workload: MemoryAware,
    plan: RoundPlan,
    selection: Selection,
    lease: Lease,
    on_step: StepCallback = ignore_step,
) -> Experiment:
    """Measure a workload, then close the meters.

    Args:
        workload: The work, loaded and able to run.
        plan: How to measure.
        selection: The open meters.
        lease: The leased devices.
        on_step: Called before each step.
    """
    __tracebackhide__ = True
    load = load_average()
    with (
        Sampler(selection.meters) as sampler,
        watch_boards(lease.uuids) as watch,
        closing(ProcessTree({os.getpid()})) as processes,
    ):
        sampler.await_ticks(0, FIRST_TICK_TIMEOUT_S)
        warmup = warm_up(workload, plan.warmup, plan.budget_s, sampler, on_step, plan.warmup_block)
        plan = plan_for_meters(plan, sampler.series)
        gap_s = required_gap_s(sampler.series, plan.gap_s)
        iterations = plan.iterations or calibrate_iterations(
            warmup, plan.rounds, gap_s, plan.target, plan.budget_s, sampler
        )
        start_s = time.monotonic()
        coverage = min((series.domain.coverage for series in sampler.series), default=1.0)
        dither = PhaseDither(max(plan.rounds, required_strata(coverage)))
        forecast = _forecast(plan, warmup, iterations, gap_s, coverage)
        rounds: list[Round] = []
        measured: list[MeasuredRound] = []
        while not _is_finished(rounds, plan, spent_s := time.monotonic() - start_s, coverage):
            # Only here, between two quiet gaps: elsewhere the cost of reporting a step, and of a terminal
            # that draws it, would count as idle power or as joules of the work.
            on_step(forecast.next_round(rounds, spent_s))
            measured.append(run_round(workload, iterations, gap_s, dither, sampler, watch, processes))
            rounds.append(account_round(measured[-1], sampler.series, selection.reasons))
        measuring_s = time.monotonic() - start_s
    rounds = add_comparison_flags(rounds, measured)
    infos = [meter_info(series) for series in sampler.series]
    procedure = _procedure(
        plan, warmup, iterations, gap_s, measuring_s, relative_uncertainty(rounds, coverage)
    )
    flags = [
        *drift_flags(rounds),
        *outlier_flags(rounds),
        *_target_flags(procedure, len(rounds)),
        *unread_meter_flags(selection.reasons),
    ]
    metrics = compute_metrics(rounds, workload.peak_memory_bytes, coverage)
    middle = median_round_index(rounds)
    course = power_trace(measured[middle], sampler.series) if middle is not None else None
    return Experiment(rounds, metrics, infos, load, procedure, flags, course)


def _forecast(plan: RoundPlan, warmup: WarmUp, iterations: int, gap_s: float, coverage: float) -> Forecast:
    round_s = warmup.iteration_s * iterations + 2 * gap_s if warmup.iteration_s else None
    return Forecast(plan.rounds, plan.target, plan.rounds_budget_s, round_s, coverage)


class NoBoards:
    """A ``BoardMonitor`` without boards."""

    def read(self) -> dict[str, Condition]:
        """Return no conditions."""
        return {}


@contextmanager
def watch_boards(uuids: Sequence[str]) -> Iterator[BoardMonitor]:
    """Monitor the boards of a lease. If that is impossible, measure without it."""
    try:
        watch = ConditionReader(uuids) if uuids else None
    except DeviceError:
        watch = None
    if watch is None:
        yield NoBoards()
        return
    try:
        yield watch
    finally:
        watch.close()


def _is_finished(rounds: Sequence[Round], plan: RoundPlan, spent_s: float, coverage: float) -> bool:
    """Return whether to stop: the target is met, the budget is spent, or rounds give no energy."""
    if len(rounds) < plan.rounds:
        return False
    if plan.rounds == 1 or spent_s >= plan.rounds_budget_s:
        return True
    reached = relative_uncertainty(rounds, coverage)
    return reached is None or reached <= plan.target


def _procedure(
    plan: RoundPlan,
    warmup: WarmUp,
    iterations: int,
    gap_s: float,
    measuring_s: float,
    reached: float | None,
) -> Procedure:
    return Procedure(
        warmup_iterations=warmup.iterations,
        settled=warmup.settled,
        criterion=warmup.criterion,
        iterations=iterations,
        gap_s=gap_s,
        target=plan.target,
        budget_s=plan.rounds_budget_s,
        measuring_s=measuring_s,
        reached=reached,
    )


def _target_flags(procedure: Procedure, rounds: int) -> list[Flag]:
    if procedure.reached is None or procedure.reached <= procedure.target:
        return []
    budget = f"the budget {procedure.budget_s:.0f} s (--energy-budget or the mark)"
    detail = (
        f"standard uncertainty {procedure.reached:.1%} after {rounds} rounds and "
        f"{procedure.measuring_s:.0f} s; the target is {procedure.target:.1%} (--energy-target or the mark "
        f"energy_options), {budget if procedure.budget_s else 'and the number of rounds is given'}"
    )
    return [Flag(name="target-missed", severity="warning", detail=detail)]


def unread_meter_flags(reasons: Sequence[str]) -> list[Flag]:
    """Return flags for applicable meters that could not be opened."""
    return [Flag(name="unread-meter", severity="note", detail=reason) for reason in reasons]


def meter_info(series: Series) -> MeterInfo:
    """Return the meter's entry in the record, with the observed period if it has no nominal one."""
    info = series.domain.info(series.meter)
    if info.update_period_s is not None or series.domain.max_age_s is not None:
        return info
    return msgspec.structs.replace(info, update_period_s=series.tick_period_s)
