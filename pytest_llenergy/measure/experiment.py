# SPDX-License-Identifier: Apache-2.0
"""Run one measurement, from open meters to metrics.

Warm-up and calibration come first, then rounds until the target is met or the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from pytest_llenergy import real_time
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.measure.accounting import account_round
from pytest_llenergy.measure.host_meters import DomainFacts, HostMeters, account_on_all
from pytest_llenergy.measure.quality import drift_flags, unfinished_flag
from pytest_llenergy.measure.request_energy import request_spans
from pytest_llenergy.measure.round_plan import (
    RoundPlan,
    Step,
    StepCallback,
    ignore_step,
    is_finished,
    next_round,
    plan_for_meters,
)
from pytest_llenergy.measure.rounds import (
    FIRST_TICK_TIMEOUT_S,
    PhaseDither,
    Workload,
    required_gap_s,
    required_strata,
    run_round,
)
from pytest_llenergy.measure.warmup import WarmUp, choose_iterations, warm_up
from pytest_llenergy.record.goodput import mark_good_requests, whole_loads
from pytest_llenergy.record.load_curve import Slo
from pytest_llenergy.record.metrics import compute_metrics, relative_uncertainty
from pytest_llenergy.record.record import Flag, MeterInfo, Metric, Procedure, Round, Times


class MemoryAware(Workload, Protocol):
    """A workload that reports its peak memory."""

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory in bytes; ``None`` if unknown."""


@dataclass(frozen=True)
class Experiment:
    """Result of a measurement. ``flags`` concern the whole measurement, not single rounds."""

    rounds: list[Round]
    metrics: dict[str, Metric]
    meters: list[MeterInfo]
    load_average: float | None
    procedure: Procedure
    flags: list[Flag]
    times: Times | None = None


def measure_on_hosts(
    workload: MemoryAware,
    plan: RoundPlan,
    hosts: Sequence[HostMeters],
    on_step: StepCallback = ignore_step,
    load_s: float = 0.0,
    slo: Slo | None = None,
    is_enough: Callable[[Sequence[Round]], bool] | None = None,
    on_failure: Callable[[Experiment], None] = lambda _: None,
) -> Experiment:
    """Measure a workload, then close the meters.

    Args:
        workload: The work, loaded and able to run.
        plan: How to measure.
        hosts: The meters of each host that the work uses.
        on_step: Called before each step.
        load_s: Time that preparing the workload took (seconds), for the record.
        slo: Limits of the latencies of a served load.
        is_enough: Decides after each round whether to stop; by default, the plan does.
        on_failure: Called with the rounds so far, if there are any, before an error is raised. The last of
            them is invalid if the error was raised in it.

    Raises:
        WorkerError: A host was lost.
        Exception: Whatever the workload raises.
    """
    __tracebackhide__ = True
    with ExitStack() as reading:
        for host in hosts:
            reading.enter_context(host)
        begin_s = real_time.monotonic()
        for host in hosts:
            host.await_ticks(0, FIRST_TICK_TIMEOUT_S)
        _await_periods(hosts)
        plan = plan_for_meters(plan, _domains(hosts))
        warmup = warm_up(workload, plan, hosts, on_step)
        domains = _domains(hosts)
        gap_s = required_gap_s(domains, plan.gap_s)
        start_s = real_time.monotonic()
        left_s = plan.budget_s - (start_s - begin_s)
        iterations = plan.iterations or choose_iterations(warmup, plan, gap_s, left_s, domains)
        coverage = min((domain.coverage for domain in domains), default=1.0)
        times = Times(load_s=load_s, warmup_s=start_s - begin_s)
        series = _RoundSeries(workload, plan, hosts, warmup, gap_s, coverage, times, slo, start_s, iterations)
        dither = PhaseDither(max(plan.rounds, required_strata(coverage)))
        try:
            while not series.is_over(is_enough):
                # Only here, between two quiet gaps: elsewhere the cost of reporting a step, and of a terminal
                # that draws it, would count as idle power or as joules of the work.
                on_step(series.next_step())
                series.add_round(dither)
        except BaseException:
            if series.rounds or series.unfinished:
                # An error here must not hide that of the measurement.
                with suppress(Exception):
                    on_failure(series.conclude(failed=True))
            raise
        return series.conclude()


def _await_periods(hosts: Sequence[HostMeters]) -> None:
    """Wait until counters have shown their periods, which decide how long quiet gaps must be."""
    end_s = real_time.monotonic() + FIRST_TICK_TIMEOUT_S
    while any(domain.ticks and not domain.period_s for domain in _domains(hosts)):
        left_s = end_s - real_time.monotonic()
        if left_s <= 0:
            return
        for host in hosts:
            host.await_ticks(real_time.monotonic_ns(), left_s)


@dataclass
class _RoundSeries:
    """The rounds so far, all of the same length."""

    workload: MemoryAware
    plan: RoundPlan
    hosts: Sequence[HostMeters]
    warmup: WarmUp
    gap_s: float
    coverage: float
    times: Times
    slo: Slo | None
    start_s: float
    iterations: int
    rounds: list[Round] = field(init=False, default_factory=list)
    unfinished: Round | None = field(init=False, default=None)

    def is_over(self, is_enough: Callable[[Sequence[Round]], bool] | None) -> bool:
        """Return whether no round follows."""
        if is_enough is not None and self.rounds:
            return is_enough(self.rounds)
        return is_finished(self.rounds, self.plan, self.times.warmup_s, self._spent_s, self.coverage)

    def next_step(self) -> Step:
        """Return what comes next, and how long it may take."""
        each_s = self.warmup.iteration_s
        round_s = each_s * self.iterations + 2 * self.gap_s if each_s else None
        return next_round(self.rounds, self.plan, self.times.warmup_s, self._spent_s, self.coverage, round_s)

    @property
    def _spent_s(self) -> float:
        return real_time.monotonic() - self.start_s

    def add_round(self, dither: PhaseDither) -> None:
        """Measure a round.

        Raises:
            WorkerError: A host was lost, even one without ranks.
            Exception: The work failed. What the meters read until then is ``unfinished``.
        """
        __tracebackhide__ = True
        measured = run_round(self.workload, self.iterations, self.gap_s, dither, self.hosts)
        if measured.timeline.served or self.plan.requests is not None:
            spans = request_spans(measured.timeline, self.plan.requests or "equal")
            measured = replace(measured, requests=spans)
        if measured.failure is not None:
            # A meter that fails too must not hide the error of the work.
            with suppress(Exception):
                found = account_round(measured, account_on_all(self.hosts, measured))
                flag = unfinished_flag(measured.failure)
                self.unfinished = msgspec.structs.replace(found, flags=[flag, *found.flags])
            raise measured.failure
        on_hosts = account_on_all(self.hosts, measured)
        self.rounds.append(
            mark_good_requests(account_round(measured, on_hosts, self.plan.requests), self.slo)
        )
        lost = next((host.lost for host in self.hosts if host.lost is not None), None)
        if lost is not None:
            raise WorkerError(lost)

    def conclude(self, *, failed: bool = False) -> Experiment:
        """Return what all rounds together show; of a measurement that has ``failed``, what is left."""
        measuring_s, plan, hosts, coverage = self._spent_s, self.plan, self.hosts, self.coverage
        unfinished = [] if self.unfinished is None else [self.unfinished]
        rounds = [*self.rounds, *unfinished]
        # The median of a load and of a part of one would be neither.
        whole = whole_loads(self.rounds)
        procedure = Procedure(
            warmup_iterations=self.warmup.iterations,
            settled=self.warmup.settled,
            criterion=self.warmup.criterion,
            iterations=self.iterations,
            gap_s=self.gap_s,
            target=plan.target,
            budget_s=0.0 if plan.exact else plan.budget_s,
            measuring_s=measuring_s,
            reached=relative_uncertainty(whole, coverage, plan.rounds),
        )
        peak_memory_bytes = self.workload.peak_memory_bytes
        work_s = math.fsum(round_.duration_s for round_ in rounds)
        loads = [host.load_average for host in hosts if host.load_average is not None]
        return Experiment(
            rounds=rounds,
            metrics=compute_metrics([*whole, *unfinished], peak_memory_bytes, coverage, plan.rounds),
            meters=[info for host in hosts for info in host.infos()],
            load_average=max(loads, default=None),
            procedure=procedure,
            flags=[
                *drift_flags(whole),
                *([] if plan.is_estimate or failed else _target_flags(procedure, len(rounds))),
                *unread_meter_flags([reason for host in hosts for reason in host.reasons]),
            ],
            times=msgspec.structs.replace(self.times, rounds_s=work_s, gaps_s=max(0.0, measuring_s - work_s)),
        )


def _domains(hosts: Sequence[HostMeters]) -> list[DomainFacts]:
    return [domain for host in hosts for domain in host.domains()]


def _target_flags(procedure: Procedure, rounds: int) -> list[Flag]:
    if procedure.reached is None or procedure.reached <= procedure.target:
        return []
    limit = (
        f"the budget {procedure.budget_s:g} s (--energy-budget or the mark)"
        if procedure.budget_s
        else "and the number of rounds is given"
    )
    detail = (
        f"standard uncertainty {procedure.reached:.1%} after {rounds} rounds and "
        f"{procedure.measuring_s:.3g} s; the target is {procedure.target * 100:g}% (--energy-target or the "
        f"mark energy_options), {limit}"
    )
    return [Flag(name="imprecise", severity="warning", detail=detail)]


def unread_meter_flags(reasons: Sequence[str]) -> list[Flag]:
    """Return flags for applicable meters that could not be opened."""
    return [Flag(name="meter", severity="note", detail=reason) for reason in reasons]
