# SPDX-License-Identifier: Apache-2.0
"""Read the meters around rounds that another benchmark tool runs.

Such a tool calibrates with the first call of the work: how warm the caches are and how high the clock is then
decides how many iterations a round has. So nothing runs between the set-up of a test and that call. Meters
are opened before the set-up, and the first reading comes after the calibration. The only quiet gap of a
benchmark lies right after its rounds; it also gives the idle power before the next benchmark. The tool then
calls the work once more for its result, which leaves the caches as they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from pytest_llenergy import real_time
from pytest_llenergy.devices.condition import Condition
from pytest_llenergy.devices.cpu import load_average
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.attribution import CpuReading, CpuUse, read_cpu
from pytest_llenergy.energy.cpu_time import ProcessTree
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.sampler import Sampler
from pytest_llenergy.energy.window import synchronize_gpus
from pytest_llenergy.measure.boards import BoardWatch
from pytest_llenergy.measure.experiment import Experiment, unread_meter_flags
from pytest_llenergy.measure.foreign_rounds import (
    ForeignRounds,
    account_stretch,
    drop_unresolvable,
    foreign_metrics,
    foreign_round_flags,
    marks_of,
    min_stretch_s,
    split_into_stretches,
)
from pytest_llenergy.measure.local_meters import domain_facts, meter_info
from pytest_llenergy.measure.quality import drift_flags
from pytest_llenergy.measure.rounds import FIRST_TICK_TIMEOUT_S, MeasuredRound, required_gap_s
from pytest_llenergy.record.metrics import relative_uncertainty
from pytest_llenergy.record.record import Procedure, Times
from pytest_llenergy.record.timeline import Iteration, RankTimeline, Timeline

#: Age up to which the quiet gap of the previous benchmark gives the idle power before the next (seconds).
QUIET_FOR_S = 60.0

#: Ticks before the latest quiet gap that are kept (nanoseconds).
KEPT_NS = 2_000_000_000


@dataclass(frozen=True)
class QuietGap:
    """A stretch in which nothing ran (monotonic nanoseconds), with the CPU use of other processes."""

    start_ns: int
    end_ns: int
    cpu: CpuUse


class _Opened(NamedTuple):
    """The open meters, their reader, and the processes of the test."""

    selection: Selection
    sampler: Sampler
    tree: ProcessTree


class ForeignMeters:
    """The meters of consecutive benchmarks on the same devices.

    A benchmark calls ``prepare``, ``begin``, ``between`` after rounds, ``end`` and ``account`` in this order;
    ``abandon`` if its work raises. A thread reads counters from the first ``prepare`` until ``close``, so
    that their ticks are known.

    Args:
        lease: The leased devices.
        least_gap_s: Shortest quiet gap.
    """

    def __init__(self, lease: Lease, least_gap_s: float) -> None:
        self._least_gap_s = least_gap_s
        self._reading = ExitStack()
        self._watch = self._reading.enter_context(closing(BoardWatch(lease.uuids)))
        self._opened: _Opened | None = None
        self._rests = False
        self._due_ns = 0
        self._quiet: QuietGap | None = None
        self._work: ExitStack | None = None
        self._whole: MeasuredRound | None = None

    def prepare(self, open_meters: Callable[[], Selection]) -> None:
        """Do everything that takes time, before a test is set up; the second call for a test does nothing.

        Args:
            open_meters: Opens the meters, if they are not open.

        Raises:
            MeterError: A meter cannot be opened.
        """
        if self._opened is None:
            self._open(open_meters())
        self._load = load_average()
        if not self._rests and self._needs_gap():
            # The gap must not contain work that is still queued on a GPU.
            synchronize_gpus()
            self._quiet = self._take_gap(read_cpu(self._open_meters.tree))

    def _open(self, selection: Selection) -> None:
        tree = self._reading.enter_context(closing(ProcessTree({os.getpid(), *selection.processes})))
        self._rests = all(domain.rests for meter in selection.meters for domain in meter.domains)
        # What rests is read between rounds only: a thread would come between the calibration and the rounds.
        sampler = self._reading.enter_context(Sampler(selection.meters, threaded=not self._rests))
        self._opened = _Opened(selection, sampler, tree)
        if not self._rests:
            sampler.await_ticks(0, FIRST_TICK_TIMEOUT_S)

    def _needs_gap(self) -> bool:
        return self._quiet is None or real_time.monotonic_ns() - self._quiet.end_ns > QUIET_FOR_S * 1e9

    def begin(self) -> None:
        """Read the meters before the first round."""
        sampler = self._reader
        self._least_s = min_stretch_s(sampler.series)
        self._due_ns = 0
        self._before = self._watch.read()
        self._work = ExitStack()
        self._work.enter_context(sampler.at_work())
        self._during = self._work.enter_context(self._watch.collect())
        self._cpu_before = read_cpu(self._open_meters.tree)
        sampler.read_now()
        self._begin_ns = real_time.monotonic_ns()

    def between(self) -> None:
        """Read counters that are always fresh between two rounds, and note an edge for the others."""
        sampler = self._reader
        sampler.read_now()
        now_ns = real_time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + round(self._least_s * 1e9)
            sampler.note_edge()

    def end(self) -> None:
        """Read the meters after the last round and take the quiet gap; the second call does nothing."""
        if self._work is None:
            return
        synchronize_gpus()
        end_ns = real_time.monotonic_ns()
        sampler, quiet = self._reader, self._quiet
        sampler.read_now()
        self._end_work()
        cpu = read_cpu(self._open_meters.tree)
        after = self._watch.read()
        # What rests has no idle power, and was just read.
        gap = self._quiet = None if self._rests else self._take_gap(cpu)
        self._whole = self._measured(end_ns, self._cpu_before.until(cpu), after, quiet, gap)

    def _measured(
        self,
        end_ns: int,
        use: CpuUse,
        after: Mapping[str, Condition],
        quiet: QuietGap | None,
        gap: QuietGap | None,
    ) -> MeasuredRound:
        iteration = Iteration(start_ns=self._begin_ns, end_ns=end_ns)
        rank = RankTimeline(rank=0, iterations=(iteration,), cpu_time_s=use.own_s)
        return MeasuredRound(
            timeline=Timeline(ranks=(rank,)),
            gap_start_ns=self._begin_ns if quiet is None else quiet.start_ns,
            gap_end_ns=real_time.monotonic_ns() if gap is None else gap.end_ns,
            quiet_until_ns=None if quiet is None else quiet.end_ns,
            other_cpu_s=use.other_s,
            stolen_cpu_s=use.stolen_s,
            before=self._before,
            during=self._during,
            after=after,
            own_cpu_s=use.own_s,
            gap_cpu=None if quiet is None or gap is None else (quiet.cpu, gap.cpu),
        )

    def account(self, reported: ForeignRounds, criterion: str, target: float) -> Experiment:
        """Return the record of the rounds that the tool reports.

        Args:
            reported: The rounds between ``begin`` and ``end``.
            criterion: How the tool chose rounds and iterations, for the record.
            target: Relative standard uncertainty for the record; nothing is repeated to reach it.
        """
        whole, least_s = self._whole, self._least_s
        assert whole is not None, "account() comes after begin() and end()"
        reasons = self._open_meters.selection.reasons
        trace = self._reader.series
        stretches = split_into_stretches(reported, least_s)
        marks = marks_of(stretches)
        rounds = [
            account_stretch(stretch, whole, trace, reasons, plain=reported.plain, marks=marks)
            for stretch in stretches
        ]
        rounds = drop_unresolvable(rounds, stretches)
        coverage = min((series.domain.coverage for series in trace), default=1.0)
        work_s = whole.timeline.duration_s
        gap_s = (whole.gap_end_ns - whole.timeline.end_ns) / 1e9
        procedure = Procedure(
            warmup_iterations=0,
            settled=None,
            criterion=criterion,
            iterations=median_low(round_.iterations for round_ in rounds),
            gap_s=gap_s,
            target=target,
            budget_s=0.0,
            measuring_s=work_s + gap_s,
            reached=relative_uncertainty(rounds, coverage),
        )
        flags = [
            *foreign_round_flags(reported, stretches),
            *drift_flags(rounds),
            *unread_meter_flags(reasons),
        ]
        infos = [meter_info(series) for series in trace]
        metrics = foreign_metrics(rounds, stretches, coverage)
        times = Times(rounds_s=work_s, gaps_s=gap_s)
        self._forget()
        return Experiment(rounds, metrics, infos, self._load, procedure, flags, times=times)

    def abandon(self) -> None:
        """End a benchmark that has no result."""
        self._end_work()
        self._forget()

    def close(self) -> None:
        """Close the meters."""
        self.abandon()
        self._reading.close()

    def _forget(self) -> None:
        self._whole = None
        if self._opened is not None:
            # Ticks are objects that the garbage collector of the next benchmark would visit.
            kept_ns = real_time.monotonic_ns() if self._quiet is None else self._quiet.start_ns
            self._reader.forget_before(kept_ns - KEPT_NS)

    def _end_work(self) -> None:
        if self._work is not None:
            self._work.close()
            self._work = None

    def _take_gap(self, cpu: CpuReading) -> QuietGap:
        sampler = self._reader
        start_ns = real_time.monotonic_ns()
        with sampler.reading_closely():
            domains = [domain_facts(series) for series in sampler.series]
            real_time.sleep(required_gap_s(domains, self._least_gap_s))
        sampler.read_now()
        end_ns = real_time.monotonic_ns()
        return QuietGap(start_ns, end_ns, cpu.until(read_cpu(self._open_meters.tree)))

    @property
    def _open_meters(self) -> _Opened:
        assert self._opened is not None, "prepare() comes first"
        return self._opened

    @property
    def _reader(self) -> Sampler:
        return self._open_meters.sampler
