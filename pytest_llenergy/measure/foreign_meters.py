# SPDX-License-Identifier: Apache-2.0
"""Read the meters around rounds that another benchmark tool runs.

Such a tool calibrates with the first call of the work: how warm the caches are and how high the clock is then
decides how many iterations a round has. So nothing runs between the set-up of a test and that call. Meters
are opened before the set-up, and the first reading comes after the calibration. The only quiet gap of a
benchmark lies right after its rounds and shows its idle power. The tool then calls the work once more for its
result, which leaves the caches as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median_low

from pytest_llenergy import real_time
from pytest_llenergy.devices.cpu import load_average
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.energy.meters.select import Selection
from pytest_llenergy.energy.window import synchronize_gpus
from pytest_llenergy.measure.experiment import Experiment, unread_meter_flags
from pytest_llenergy.measure.foreign_rounds import (
    ForeignRounds,
    account_stretches,
    joined_flags,
    min_stretch_s,
    split_into_stretches,
)
from pytest_llenergy.measure.local_meters import LocalMeters
from pytest_llenergy.measure.quality import drift_flags
from pytest_llenergy.measure.rounds import FIRST_TICK_TIMEOUT_S, MeasuredRound, required_gap_s
from pytest_llenergy.record.metrics import compute_metrics, relative_uncertainty
from pytest_llenergy.record.record import Procedure, Times
from pytest_llenergy.record.timeline import Iteration, RankTimeline, Timeline

#: Ticks that are kept for the next benchmark (nanoseconds).
KEPT_NS = 2_000_000_000


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
        self._lease, self._least_gap_s = lease, least_gap_s
        self._reading = ExitStack()
        self._opened: LocalMeters | None = None
        self._working = False
        self._whole: MeasuredRound | None = None

    @property
    def _meters(self) -> LocalMeters:
        assert self._opened is not None, "prepare() comes first"
        return self._opened

    def prepare(self, open_meters: Callable[[], Selection]) -> None:
        """Do everything that takes time, before a test is set up; the second call for a test does nothing.

        Args:
            open_meters: Opens the meters, if they are not open.

        Raises:
            MeterError: A meter cannot be opened.
        """
        self._load = load_average()
        if self._opened is None:
            selection = open_meters()
            # What rests is read between rounds only: a thread would come between calibration and rounds.
            rests = all(domain.rests for meter in selection.meters for domain in meter.domains)
            meters = LocalMeters(selection, self._lease.uuids, threaded=not rests)
            self._opened = self._reading.enter_context(meters)
            if not rests:
                meters.await_ticks(0, FIRST_TICK_TIMEOUT_S)

    def begin(self) -> None:
        """Read the meters before the first round."""
        self._least_s, self._due_ns = min_stretch_s(self._meters.trace), 0
        self._meters.begin_gap()
        self._meters.begin_work()
        self._working = True
        self._begin_ns = real_time.monotonic_ns()

    def between(self) -> None:
        """Read counters that are always fresh between two rounds, and note an edge for the others."""
        sampler = self._meters.sampler
        sampler.read_now()
        now_ns = real_time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + round(self._least_s * 1e9)
            sampler.note_edge()

    def end(self) -> None:
        """Read the meters after the last round and take the quiet gap; the second call does nothing."""
        if not self._working:
            return
        meters, self._working = self._meters, False
        synchronize_gpus()
        end_ns = real_time.monotonic_ns()
        meters.end_work()
        if meters.trace:
            real_time.sleep(required_gap_s(meters.domains(), self._least_gap_s))
        work = Iteration(start_ns=self._begin_ns, end_ns=end_ns)
        timeline = Timeline(ranks=(RankTimeline(rank=0, iterations=(work,), cpu_time_s=0.0),))
        measured = MeasuredRound(timeline, self._begin_ns, meters.end_gap())
        self._whole = meters.observed(measured)

    def account(self, reported: ForeignRounds, criterion: str, target: float) -> Experiment:
        """Return the record of the rounds that the tool reports.

        Args:
            reported: The rounds between ``begin`` and ``end``.
            criterion: How the tool chose rounds and iterations, for the record.
            target: Relative standard uncertainty for the record; nothing is repeated to reach it.
        """
        whole, meters = self._whole, self._meters
        assert whole is not None, "account() comes after begin() and end()"
        stretches = split_into_stretches(reported, self._least_s)
        rounds = account_stretches(
            stretches, whole, meters.trace, meters.reasons, meters.rest, plain=reported.plain
        )
        coverage = min((domain.coverage for domain in meters.domains()), default=1.0)
        work_s, gap_s = whole.timeline.duration_s, (whole.gap_end_ns - whole.timeline.end_ns) / 1e9
        experiment = Experiment(
            rounds=rounds,
            metrics=compute_metrics(rounds, None, coverage),
            meters=list(meters.infos()),
            load_average=self._load,
            procedure=Procedure(
                warmup_iterations=0,
                settled=None,
                criterion=criterion,
                iterations=median_low(round_.iterations for round_ in rounds),
                gap_s=gap_s,
                target=target,
                budget_s=0.0,
                measuring_s=work_s + gap_s,
                reached=relative_uncertainty(rounds, coverage),
            ),
            flags=[
                *joined_flags(reported, stretches),
                *drift_flags(rounds),
                *unread_meter_flags(meters.reasons),
            ],
            times=Times(rounds_s=work_s, gaps_s=gap_s),
        )
        self._forget()
        return experiment

    def abandon(self) -> None:
        """End a benchmark that has no result."""
        self._working = False
        if self._opened is not None:
            self._opened.interrupt()
            self._forget()

    def close(self) -> None:
        """Close the meters."""
        self.abandon()
        self._reading.close()

    def _forget(self) -> None:
        """Drop old ticks: they are objects that the garbage collector of the next benchmark would visit."""
        self._whole = None
        self._meters.sampler.forget_before(real_time.monotonic_ns() - KEPT_NS)
