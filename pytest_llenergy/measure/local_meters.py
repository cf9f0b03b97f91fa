# SPDX-License-Identifier: Apache-2.0
"""The meters of this host, read in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import partial

import msgspec

from pytest_llenergy import real_time
from pytest_llenergy.devices.cpu import load_average
from pytest_llenergy.devices.processes import process_tree
from pytest_llenergy.energy.attribution import read_cpu
from pytest_llenergy.energy.cpu_time import ProcessTree
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.sampler import Sampler
from pytest_llenergy.energy.trace import Series, Trace
from pytest_llenergy.energy.uncertainty import Power
from pytest_llenergy.measure.boards import BoardWatch
from pytest_llenergy.measure.domain_rounds import account_domains
from pytest_llenergy.measure.host_meters import DomainFacts, HostRound, TickReference
from pytest_llenergy.measure.rounds import MeasuredRound, tick_reference
from pytest_llenergy.record.record import MeterInfo


class LocalMeters:
    """The ``HostMeters`` of this host. A thread reads the counters while they are entered.

    Args:
        selection: The open meters.
        boards: UUIDs of the leased boards, whose condition is watched too.
        threaded: Whether a thread reads; otherwise only ``sampler.read_now`` does.
    """

    def __init__(self, selection: Selection, boards: Sequence[str] = (), *, threaded: bool = True) -> None:
        self.reasons: Sequence[str] = selection.reasons
        self.load_average: float | None = None
        self.lost: str | None = None
        self._selection = selection
        self.sampler = Sampler(selection.meters, threaded=threaded)
        self._roots = {os.getpid(), *selection.processes}
        self._boards = boards
        self._reading = ExitStack()
        # What lasts until the next step of a round.
        self._step = ExitStack()
        #: Power of each domain in the last gap in which others were quiet.
        self.rest: dict[str, Power] = {}

    def __enter__(self) -> LocalMeters:
        self.load_average = load_average()
        with ExitStack() as reading:
            reading.enter_context(self.sampler)
            self._watch = reading.enter_context(closing(BoardWatch(self._boards)))
            self._processes = reading.enter_context(closing(ProcessTree(self._roots)))
            self._reading = reading.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.interrupt()
        self._reading.close()

    def interrupt(self) -> None:
        """End a round whose work has failed in the middle of it."""
        self._step.close()

    def close(self) -> None:
        self._selection.close()

    @property
    def trace(self) -> Trace:
        """What was read, one series for each domain."""
        return self.sampler.series

    def domains(self) -> Sequence[DomainFacts]:
        return [domain_facts(series) for series in self.trace]

    def infos(self) -> Sequence[MeterInfo]:
        return [meter_info(series) for series in self.trace]

    def await_ticks(self, after_ns: int, timeout_s: float) -> None:
        self.sampler.await_ticks(after_ns, timeout_s)

    def at_work(self) -> AbstractContextManager[None]:
        return self.sampler.at_work()

    def tick_reference(self) -> TickReference | None:
        return tick_reference(self.trace)

    def begin_gap(self) -> None:
        self._before = self._watch.read()
        self._cpu_at_first = read_cpu(self._processes)
        self._step.enter_context(self.sampler.reading_closely())

    def prepare_work(self) -> None:
        # Nothing here takes a while.
        pass

    def begin_work(self) -> None:
        # After the wait for a phase, in which others use the CPU too.
        self._cpu_before = read_cpu(self._processes)
        self._step.close()
        self._step.enter_context(self.sampler.at_work())
        self._during = self._step.enter_context(self._watch.collect())
        # Read the edges of work in this process as they happen; for work in ranks this is merely superfluous.
        self.sampler.read_now()

    def end_work(self) -> None:
        self.sampler.read_now()
        self._step.close()
        self._step.enter_context(self.sampler.reading_closely())
        self._cpu_after = read_cpu(self._processes)
        self._after = self._watch.read()

    def end_gap(self) -> int:
        self.sampler.read_now()
        self._step.close()
        end_ns = real_time.monotonic_ns()
        self._cpu_at_last = read_cpu(self._processes)
        return end_ns

    def account(self, measured: MeasuredRound) -> Callable[[], HostRound]:
        return partial(account_domains, self.observed(measured), self.trace, self.reasons, self.rest)

    def observed(self, measured: MeasuredRound) -> MeasuredRound:
        """Return a round with the CPU use and the conditions of the boards in it."""
        # Only the ranks know of a server that was started elsewhere.
        use = self._cpu_before.until(self._cpu_after, measured.timeline.cpu_time_s)
        servers = measured.timeline.servers
        return replace(
            measured,
            cpu=use._replace(duration_s=measured.timeline.duration_s),
            gap_cpu=(
                self._cpu_at_first.until(self._cpu_before),
                self._cpu_after.until(self._cpu_at_last),
            ),
            before=self._before,
            during=self._during,
            after=self._after,
            unleased=self._watch.find_others(process_tree(*servers)) if servers else (),
        )


def domain_facts(series: Series) -> DomainFacts:
    """Return what is known of a domain so far."""
    domain = series.domain
    return DomainFacts(
        name=domain.name,
        kind=domain.kind,
        period_s=series.period_s or 0.0,
        ticks=domain.max_age_s is None,
        rests=domain.rests,
        lag_s=series.smear_s + domain.late_s[1],
        coverage=domain.coverage,
    )


def meter_info(series: Series) -> MeterInfo:
    """Return the meter's entry in the record, with the observed period if it has no nominal one."""
    info = series.domain.info(series.meter)
    if info.update_period_s is not None or series.domain.max_age_s is not None:
        return info
    return msgspec.structs.replace(info, update_period_s=series.tick_period_s)
