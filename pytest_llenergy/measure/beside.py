# SPDX-License-Identifier: Apache-2.0
"""Measuring work that runs its own rounds: quiet gap, all of the work, quiet gap.

Nothing is asked of the work but when its rounds ended, and nothing is done while one of them runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median_low

from pytest_llenergy.devices.host import load_average
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.measure.experiment import FIRST_TICK_S, Experiment, meter_info, unread, watching
from pytest_llenergy.measure.lookout import looking_out
from pytest_llenergy.measure.metrics import relative_uncertainty
from pytest_llenergy.measure.own_figures import figures, resolved
from pytest_llenergy.measure.own_rounds import (
    OwnRounds,
    account_stretch,
    least_stretch_s,
    stretches,
    told,
)
from pytest_llenergy.measure.quality import drift_flags
from pytest_llenergy.measure.rounds import MeasuredRound, gap_needed_s
from pytest_llenergy.meters.cpu_time import cpu_time
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.select import Selection
from pytest_llenergy.meters.window import synchronize
from pytest_llenergy.model.record import Procedure
from pytest_llenergy.model.timeline import Iteration, RankTimeline, RoundTimeline

Work = Callable[[Callable[[], None]], OwnRounds]
"""The work, which tells its rounds. What it is given is to be called between two, ever so often."""


def measure_beside(
    work: Work, criterion: str, least_gap_s: float, target: float, selection: Selection, lease: Lease
) -> Experiment:
    """Let the work run and measure its rounds. Closes the meters, also when the work raises.

    ``criterion`` is what decided on rounds and iterations, ``target`` the relative standard uncertainty that
    is wished for; nothing is repeated to reach it.
    """
    __tracebackhide__ = True
    load = load_average()
    with ExitStack() as stack:
        sampler = stack.enter_context(Sampler(selection.meters))
        watch = stack.enter_context(watching(lease.uuids))
        sampler.await_ticks(0, FIRST_TICK_S)
        gap_s = gap_needed_s(sampler.series, least_gap_s)
        # What was queued before is not to be in the gap, nor what the rounds queue in the gap after them.
        synchronize()
        before = watch.read()
        gap_start_ns = time.monotonic_ns()
        with sampler.closely():
            time.sleep(gap_s)
            cpu_before, own_before_s = cpu_time(), _own_cpu_s()
        sampler.read_now()
        least_s = least_stretch_s(sampler.series)
        with sampler.at_work(), looking_out(watch) as during:
            start_ns = time.monotonic_ns()
            own = work(_Between(sampler, least_s))
            synchronize()
            end_ns = time.monotonic_ns()
        sampler.read_now()
        with sampler.closely():
            cpu_after, own_after_s = cpu_time(), _own_cpu_s()
            after = watch.read()
            time.sleep(gap_s)
        gap_end_ns = time.monotonic_ns()
        trace = sampler.series
    busy_s = cpu_after.busy_s - cpu_before.busy_s
    whole = MeasuredRound(
        timeline=_timeline(start_ns, end_ns, own_after_s - own_before_s),
        gap_start_ns=gap_start_ns,
        gap_end_ns=gap_end_ns,
        other_cpu_s=max(0.0, busy_s - (own_after_s - own_before_s)),
        stolen_cpu_s=cpu_after.stolen_s - cpu_before.stolen_s,
        before=before,
        during=during,
        after=after,
    )
    found = stretches(own, least_s)
    rounds = [account_stretch(stretch, whole, trace, selection.reasons) for stretch in found]
    rounds = resolved(rounds, found)
    coverage = min((series.domain.coverage for series in trace), default=1.0)
    procedure = Procedure(
        warmup_iterations=0,
        settled=None,
        criterion=criterion,
        iterations=median_low(round_.iterations for round_ in rounds),
        gap_s=gap_s,
        target=target,
        budget_s=0.0,
        measuring_s=(gap_end_ns - gap_start_ns) / 1e9,
        reached=relative_uncertainty(rounds, coverage),
    )
    flags = [*told(own, found), *drift_flags(rounds), *unread(selection.reasons)]
    infos = [meter_info(series) for series in trace]
    return Experiment(rounds, figures(rounds, found, coverage), infos, load, procedure, flags)


class _Between:
    """Called between two rounds: reads what is never old, and lets the ticks of the others be seen there."""

    def __init__(self, sampler: Sampler, every_s: float) -> None:
        self._sampler = sampler
        self._every_ns = round(every_s * 1e9)
        self._due_ns = 0

    def __call__(self) -> None:
        self._sampler.read_now()
        now_ns = time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + self._every_ns
            self._sampler.border()


def _timeline(start_ns: int, end_ns: int, cpu_time_s: float) -> RoundTimeline:
    iteration = Iteration(start_ns=start_ns, end_ns=end_ns)
    return RoundTimeline(ranks=(RankTimeline(rank=0, iterations=(iteration,), cpu_time_s=cpu_time_s),))


def _own_cpu_s() -> float:
    """CPU time of this process, and of those that it has started and waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system
