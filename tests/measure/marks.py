# SPDX-License-Identifier: Apache-2.0
"""Builders of timelines and measured rounds with given timestamps, and of what a host finds in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_llenergy.devices.condition import Condition
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.attribution import CpuUse
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.trace import Trace
from pytest_llenergy.energy.uncertainty import Power
from pytest_llenergy.measure.accounting import account_round
from pytest_llenergy.measure.domain_rounds import account_domains
from pytest_llenergy.measure.experiment import Experiment, MemoryAware, measure_on_hosts
from pytest_llenergy.measure.host_meters import HostRound
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.timeline import Iteration, RankTimeline, RequestTimeline, Timeline

from ..energy.waves import MS

GAP_NS = 250 * MS


def iteration(start_ns: int, end_ns: int, border_ns: int | None = None, repeats: int = 1) -> Iteration:
    """Return an iteration; with ``border_ns`` it holds one request whose first token comes then."""
    requests: tuple[RequestTimeline, ...] = ()
    if border_ns is not None:
        request = RequestTimeline(
            input_tokens=3, output_tokens=4, first_token_ns=border_ns, last_token_ns=end_ns
        )
        requests = (request,)
    return Iteration(start_ns=start_ns, end_ns=end_ns, repeats=repeats, requests=requests)


def rank_of(*iterations: Iteration, rank: int = 0) -> RankTimeline:
    return RankTimeline(rank=rank, iterations=iterations, cpu_time_s=0.0)


def measured_round(
    *iterations: Iteration,
    gaps: Sequence[int] | None = None,
    other_cpu_s: float = 0.0,
    stolen_cpu_s: float = 0.0,
    own_cpu_s: float = 0.0,
    gap_cpu: tuple[CpuUse, CpuUse] | None = None,
    before: Mapping[str, Condition] | None = None,
    during: Sequence[Mapping[str, Condition]] = (),
    after: Mapping[str, Condition] | None = None,
) -> MeasuredRound:
    """Return a round of one rank; its quiet gaps last 250 ms or reach to the two moments of ``gaps``."""
    timeline = Timeline(ranks=(rank_of(*iterations),))
    gap_start_ns, gap_end_ns = gaps or (timeline.start_ns - GAP_NS, timeline.end_ns + GAP_NS)
    return MeasuredRound(
        timeline,
        gap_start_ns,
        gap_end_ns,
        CpuUse(own_cpu_s, other_cpu_s, stolen_cpu_s, timeline.duration_s),
        before=before,
        during=during,
        after=after,
        gap_cpu=gap_cpu,
    )


class ReadBefore(LocalMeters):
    """Meters of this host whose readings were made before."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(Selection((), ()))
        self._given = trace

    @property
    def trace(self) -> Trace:
        return self._given

    def account(self, measured: MeasuredRound, *, trial: bool = False) -> Callable[[], HostRound]:
        return lambda: account_domains(measured, self._given)


def account_here(
    measured: MeasuredRound,
    trace: Trace,
    reasons: Sequence[str] = (),
    rest: dict[str, Power] | None = None,
) -> Round:
    """Return the record of a round with the meters of this host alone."""
    return account_round(measured, [account_domains(measured, trace, reasons, rest)])


def measure(
    workload: MemoryAware, plan: RoundPlan, selection: Selection, lease: Lease, *args: Any, **more: Any
) -> Experiment:
    """Measure a workload with the meters of this host."""
    return measure_on_hosts(workload, plan, [LocalMeters(selection, lease.uuids)], *args, **more)
