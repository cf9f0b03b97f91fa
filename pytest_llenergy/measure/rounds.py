# SPDX-License-Identifier: Apache-2.0
"""Run one round: quiet gap, work, quiet gap.

The gaps give the idle power of the live context, which the window arithmetic needs at both edges of a round
and which net energy subtracts.

Rounds start in shuffled phase to the counter. Work that always starts in the same part of a tick always falls
into the same part of a part-time sensor's sampling, and is wrong by the same amount however often it is
repeated. Rounds are therefore started in n strata of the tick, one each, in random order.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import Any, Protocol

import msgspec

from pytest_llenergy import real_time
from pytest_llenergy.devices.condition import Condition
from pytest_llenergy.energy.attribution import CpuUse
from pytest_llenergy.energy.trace import Series, Tick, Trace
from pytest_llenergy.measure.host_meters import NO_CPU, DomainFacts, HostMeters, TickReference
from pytest_llenergy.measure.request_energy import RequestSpan
from pytest_llenergy.record.record import Tokens
from pytest_llenergy.record.timeline import Iteration, RankTimeline, Timeline

#: Latest ticks among which the reference of the phase is chosen, and the relative error of a period: the
#: older the tick, the less certain the phase.
LOOK_BACK = 8
PERIOD_OFF = 0.02

#: Length of a quiet gap in ticks of the slowest counter, so that it always contains three ticks.
GAP_TICKS = 3.5

#: Length of a quiet gap if every counter rests while nothing is measured (seconds): enough to read it once
#: more, so that a reading surely lies after the work.
RESTING_GAP_S = 0.001

#: Wait for the first tick of every counter. Longer than the slowest counter that can bracket a window takes
#: (``energy.selfcheck``: 1 s).
FIRST_TICK_TIMEOUT_S = 1.5
#: Counters with a longer period than this are not waited for at the start of a round.
LONGEST_PHASE_WAIT_S = 2.0


@dataclass
class CallWorkload:
    """A callable measured in this process, and its latest result.

    ``setup`` runs before each round and ``teardown`` after it, outside the quiet gaps. ``count_tokens``
    returns the tokens of the round's calls. ``peak_memory_bytes`` is unknown, since the process has other
    uses too.
    """

    function: Callable[[], Any]
    setup: Callable[[], object] | None = None
    teardown: Callable[[], object] | None = None
    count_tokens: Callable[[int], Tokens | None] = lambda _: None
    peak_memory_bytes: int | None = field(default=None, init=False)
    result: Any = field(default=None, init=False)

    def prepare_round(self) -> None:
        """Run ``setup``, then collect garbage, so that it is not collected during the work."""
        __tracebackhide__ = True
        if self.setup is not None:
            self.setup()
        gc.collect()

    def work(self, iterations: int = 1) -> None:
        """Call the function ``iterations`` times."""
        __tracebackhide__ = True
        cpu_before = time.process_time()
        start_ns = real_time.monotonic_ns()
        for _ in range(iterations):
            self.result = self.function()
        end_ns = real_time.monotonic_ns()
        self._cpu_time_s = time.process_time() - cpu_before
        # Reading the clock after each call would cost more than a short call.
        self._iteration = Iteration(start_ns=start_ns, end_ns=end_ns, repeats=iterations)

    def timeline(self) -> Timeline:
        """Count tokens, run ``teardown``, and return when the function ran."""
        __tracebackhide__ = True
        tokens = self.count_tokens(self._iteration.repeats)
        if self.teardown is not None:
            self.teardown()
        iteration = msgspec.structs.replace(self._iteration, tokens=tokens)
        rank = RankTimeline(rank=0, iterations=(iteration,), cpu_time_s=self._cpu_time_s)
        return Timeline(ranks=(rank,))


class PhaseDither:
    """Delays the start of each round to a random phase; ``n`` is the number of strata."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self._n = n
        self._random = Random(seed)
        self._strata: list[int] = []

    def wait(self, reference: TickReference | None) -> None:
        """Sleep until a phase in the next stratum of a tick, of which ``reference`` is a past one."""
        if reference is None:
            return
        if not self._strata:
            self._strata = self._random.sample(range(self._n), self._n)
        phase = (self._strata.pop() + self._random.random()) / self._n
        target_ns = reference.time_ns + round(phase * reference.period_ns)
        ahead_ns = real_time.monotonic_ns() - target_ns
        real_time.sleep((-ahead_ns % reference.period_ns) / 1e9)


def tick_reference(trace: Trace) -> TickReference | None:
    """Return a late tick of the slowest counter whose time is known well; ``None`` if none ticks."""
    leader = slowest_series(trace)
    if leader is None or not leader.ticks or not leader.period_s:
        return None
    tick = _select_reference(leader.ticks[-LOOK_BACK:])
    return TickReference(tick.time_ns, round(leader.period_s * 1e9))


def required_strata(coverage: float) -> int:
    """Return the number of strata for which random starts leave no gap longer than the sensor's sample."""
    return math.ceil(2 / coverage) if coverage < 1 else 1


def slowest_series(trace: Trace) -> Series | None:
    """Return the ticking series with the longest period of at most ``LONGEST_PHASE_WAIT_S``."""
    ticking = [
        series
        for series in trace
        if series.domain.max_age_s is None and 0 < (series.period_s or 0.0) <= LONGEST_PHASE_WAIT_S
    ]
    return max(ticking, key=lambda series: series.period_s or 0.0, default=None)


def tick_phase(trace: Trace, time_ns: int) -> float | None:
    """Return the phase of a moment in the slowest counter's tick, from 0 to 1; ``None`` without ticks."""
    leader = slowest_series(trace)
    ticks = leader.ticks_around(time_ns, LOOK_BACK)[0] if leader is not None else []
    if leader is None or not ticks or not leader.period_s:
        return None
    return (time_ns - _select_reference(ticks).time_ns) / 1e9 / leader.period_s % 1.0


def _select_reference(ticks: Sequence[Tick]) -> Tick:
    """Return the tick that gives the phase after the last one most precisely.

    On a busy machine the time of one tick may be known to half a period, and that of the previous tick to a
    millisecond.
    """
    newest_ns = ticks[-1].time_ns
    return min(ticks, key=lambda tick: tick.gap_s / 2 + (newest_ns - tick.time_ns) / 1e9 * PERIOD_OFF)


class Workload(Protocol):
    """The measured work. Only ``work`` runs between the quiet gaps."""

    def prepare_round(self) -> None:
        """Do the housekeeping that must not happen in or after the gap, such as collecting garbage."""

    def work(self, iterations: int = 1) -> None:
        """Do the work ``iterations`` times; blocks until it is done on all ranks."""

    def timeline(self) -> Timeline:
        """Return timestamps and counts of the last ``work``. Tokens are counted and decoded here."""


@dataclass(frozen=True)
class MeasuredRound:
    """A round with the quiet gaps before and after it (monotonic nanoseconds), and what its host saw of it.

    ``run_round`` knows only the moments; the meters of a host add the rest. ``cpu`` is the CPU use during the
    work. ``before``, ``during`` and
    ``after`` are the conditions of the boards at its start, every half second during the work, and right
    after it. ``unleased`` are the UUIDs of other boards that the measured server uses. ``gap_cpu`` is the CPU
    use in both gaps, and ``in_reader`` whether the work ran in the thread that read the meters right before
    and after it. ``clock_u_ns`` is the standard uncertainty of the moments on the clock of a host that did
    not take them itself, and ``marking_u_ns`` that of the clock on which they were taken, which all hosts
    share. ``requests`` are those that share its energy.
    ``failure`` is why its work did not end or was not reported: then its moments are those at which the work
    was started and at which it failed.
    """

    timeline: Timeline
    gap_start_ns: int
    gap_end_ns: int
    cpu: CpuUse = NO_CPU
    before: Mapping[str, Condition] | None = None
    during: Sequence[Mapping[str, Condition]] = ()
    after: Mapping[str, Condition] | None = None
    unleased: Sequence[str] = ()
    gap_cpu: tuple[CpuUse, CpuUse] | None = None
    in_reader: bool = False
    clock_u_ns: float = 0.0
    marking_u_ns: float = 0.0
    requests: tuple[RequestSpan, ...] = ()
    failure: BaseException | None = None

    @property
    def has_busy_gap(self) -> bool:
        """Whether others used the host in a gap, so that its power is not the idle power."""
        return any(gap.busy for gap in self.gap_cpu or ())

    @property
    def temperature_start_c(self) -> float | None:
        """Temperature of the hottest board at the start (°C)."""
        temperatures_c = [each.temperature_c for each in (self.before or {}).values()]
        return max((value for value in temperatures_c if value is not None), default=None)


def required_gap_s(domains: Sequence[DomainFacts], least_s: float) -> float:
    """Return how long a quiet gap must be to give the idle power of every counter (seconds)."""
    if domains and all(domain.rests for domain in domains):
        # These count nothing but the work: there is no idle power to measure.
        return RESTING_GAP_S
    return max([least_s, *(domain.lag_s + GAP_TICKS * domain.period_s for domain in domains)])


def run_round(
    workload: Workload, iterations: int, gap_s: float, dither: PhaseDither, hosts: Sequence[HostMeters]
) -> MeasuredRound:
    """Run one round while the meters are read; the calling thread sleeps or blocks throughout.

    Args:
        workload: The work.
        iterations: Repetitions of the work.
        gap_s: Length of each quiet gap (seconds).
        dither: Chooses the phase at which the round starts.
        hosts: The meters.

    Returns:
        The round. If its work failed, it holds the error, and the meters were read to its end nevertheless.
    """
    __tracebackhide__ = True
    timeline: Timeline | None = None
    failure: BaseException | None = None
    workload.prepare_round()
    for host in hosts:
        host.begin_gap()
    gap_start_ns = real_time.monotonic_ns()
    real_time.sleep(gap_s)
    references = [reference for host in hosts if (reference := host.tick_reference()) is not None]
    dither.wait(max(references, key=attrgetter("period_ns"), default=None))
    for host in hosts:
        host.prepare_work()
    for host in hosts:
        host.begin_work()
    start_ns = real_time.monotonic_ns()
    try:
        workload.work(iterations)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # outcomes such as those of pytest.fail and pytest-timeout, too
        failure = error
    end_ns = real_time.monotonic_ns()
    for host in hosts:
        host.end_work()
    real_time.sleep(gap_s)
    gap_end_ns = min((host.end_gap() for host in hosts), default=real_time.monotonic_ns())
    try:
        timeline = workload.timeline() if failure is None else None
    except Exception as error:
        failure = error
    if timeline is None:
        work = Iteration(start_ns=start_ns, end_ns=end_ns, repeats=iterations)
        timeline = Timeline(ranks=(RankTimeline(rank=0, iterations=(work,), cpu_time_s=0.0),))
    return MeasuredRound(
        timeline=timeline,
        gap_start_ns=gap_start_ns,
        gap_end_ns=gap_end_ns,
        in_reader=isinstance(workload, CallWorkload),
        failure=failure,
    )
