# SPDX-License-Identifier: Apache-2.0
"""Rounds that another benchmark tool chose and timed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean, median_low

import msgspec

from pytest_llenergy.devices.cpu import load_average
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.measure.experiment import (
    FIRST_TICK_S,
    Experiment,
    meter_info,
    unread_meter_flags,
    watch_boards,
)
from pytest_llenergy.measure.metrics import (
    FIGURES,
    compute_metrics,
    is_valid,
    relative_uncertainty,
    round_values,
)
from pytest_llenergy.measure.quality import drift_flags, stretch_flags
from pytest_llenergy.measure.rounds import MeasuredRound, collect_conditions, required_gap_s
from pytest_llenergy.meters.edges import Quiet, quiet_power
from pytest_llenergy.meters.estimate import read_cpu_time
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.select import Selection
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.meters.uncertainty import (
    Energy,
    Power,
    Variances,
    absolute_uncertainty_j,
    domain_energy,
    sum_energies,
)
from pytest_llenergy.meters.window import synchronize_gpus
from pytest_llenergy.meters.window_arithmetic import RESOLVABLE, energy_between
from pytest_llenergy.model.record import Flag, Metric, Procedure, Round
from pytest_llenergy.model.timeline import Iteration, RankTimeline, RoundTimeline

# Rounds that the measured code chose and timed itself, such as those of another benchmark tool.
#
# Nobody stands between them: there are no quiet gaps, and a round may last microseconds. Rounds that are long
# enough for the counters are taken one by one. Shorter ones are joined, one straight after the other, into
# stretches that are. What lies between the rounds of a stretch is the tool's own loop and what it sets up; it
# is taken to have drawn the power of the whole. It may have drawn none above idle, or twice as much: these
# are limits of the joules of the rounds, and part of their absolute uncertainty.

#: Ticks of the slowest counter that a stretch lasts for, or times the age that a reading of it may have, and
#: seconds; the share of that which will do, as it ends where a round does.
STRETCH_TICKS, STRETCH_AGES, STRETCH_S, ENOUGH = 2.0, 10.0, 0.05, 0.75

#: Stretches into which rounds are joined at most.
MOST = 10

#: Share of the time between the first and the last round that must be theirs for them to be joined.
DENSE = 0.9


@dataclass(frozen=True)
class ForeignRounds:
    """What the code tells of its rounds.

    ``durations_s`` is how long each took by its own timer, ``iterations`` how often it did the work. ``ends``
    tell when some of the rounds had ended: how many were over, and the moment (monotonic nanoseconds), that
    of the first and of the last among them. ``begin_ns`` is a moment before the first.
    ``timer`` names one that is not known to tell wall-clock time; then the durations are not used.
    """

    durations_s: Sequence[float]
    iterations: int
    ends: Sequence[tuple[int, int]]
    begin_ns: int
    timer: str | None = None


@dataclass(frozen=True)
class Stretch:
    """One or more rounds in a row (monotonic nanoseconds). ``timed_s`` is how much of it they were."""

    start_ns: int
    end_ns: int
    rounds: int
    iterations: int
    timed_s: float

    @property
    def share(self) -> float:
        """Of its time, how much was rounds."""
        return min(1.0, self.timed_s * 1e9 / max(1, self.end_ns - self.start_ns))


def min_stretch_s(trace: Sequence[Series]) -> float:
    """How long a stretch must be for its joules to be told (seconds)."""
    ticks = [STRETCH_TICKS * (series.period_s or 0.0) + series.domain.smear_s for series in trace]
    ages = [STRETCH_AGES * (series.domain.max_age_s or 0.0) for series in trace]
    return max([STRETCH_S, *ticks, *ages])


def split_into_stretches(own: ForeignRounds, least_s: float) -> list[Stretch]:
    """The rounds one by one where each is long enough, or where much else lies between them; else joined."""
    every_end_is_known = len(own.ends) == len(own.durations_s)
    if own.timer is None and every_end_is_known:
        alone = _cut(own, range(len(own.ends)))
        whole = _cut(own, [len(own.ends) - 1])[0]
        if min(own.durations_s) >= least_s or whole.share < DENSE:
            return alone
    return _cut(own, _borders(own, least_s))


def _borders(own: ForeignRounds, least_s: float) -> list[int]:
    """Which of the known ends are those of stretches that are all about as long."""
    start_ns, last = own.begin_ns, len(own.ends) - 1
    if own.timer is None:
        start_ns = own.ends[0][1] - round(own.durations_s[0] * 1e9)
    total_ns = own.ends[last][1] - start_ns
    wanted = max(1, min(MOST, int(total_ns / 1e9 / least_s)))
    borders: list[int] = []
    for index, (_, end_ns) in enumerate(own.ends[:-1]):
        due_ns = start_ns + (len(borders) + 1) * total_ns / wanted
        left_ns = own.ends[last][1] - end_ns
        if len(borders) < wanted - 1 and end_ns >= due_ns and left_ns >= ENOUGH * least_s * 1e9:
            borders.append(index)
    return [*borders, last]


def _cut(own: ForeignRounds, borders: Sequence[int]) -> list[Stretch]:
    """Stretches that end at these of the known ends."""
    found: list[Stretch] = []
    known = dict(own.ends)
    over, before_ns = 0, own.begin_ns
    for border in borders:
        count, end_ns = own.ends[border]
        durations_s = own.durations_s[over:count]
        start_ns = before_ns
        if own.timer is None and over + 1 in known:
            start_ns = max(before_ns, known[over + 1] - round(durations_s[0] * 1e9))
        timed_s = sum(durations_s) if own.timer is None else (end_ns - start_ns) / 1e9
        found.append(Stretch(start_ns, end_ns, count - over, (count - over) * own.iterations, timed_s))
        over, before_ns = count, end_ns
    return found


def account_stretch(
    stretch: Stretch, whole: MeasuredRound, trace: Sequence[Series], reasons: Sequence[str] = ()
) -> Round:
    """Join a stretch with what the meters said: the joules of its rounds, without what lies between them.

    ``whole`` are the quiet gaps around all of the tool's work, and who else worked meanwhile; ``reasons`` say
    why meters could not be opened.
    """
    powers = [_idle(series, whole) for series in trace]
    idle_w = sum(power.watts for power in powers if power is not None)
    window = {series.domain.name: _energy(stretch, series, whole) for series in trace}
    rounds = {name: _times(energy, stretch.share) for name, energy in window.items()}
    by_domain = {
        series.domain.name: domain_energy(rounds[series.domain.name], series, stretch.timed_s)
        for series in trace
    }
    total = sum_energies(list(rounds.values()), reasons)
    between_u_j = _between_u_j(stretch, sum_energies(list(window.values())), idle_w)
    total = _told(total, between_u_j)
    known = all(power is not None for power in powers) and bool(powers)
    own_u_j = absolute_uncertainty_j(total, list(by_domain.values()))
    return Round(
        start_s=stretch.start_ns / 1e9,
        duration_s=stretch.timed_s,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=math.hypot(own_u_j, between_u_j) if own_u_j is not None else None,
        iterations=stretch.iterations,
        terms=total.variances.terms() if total.energy_j is not None else None,
        idle_power_w=idle_w if known else None,
        idle_power_u_w=math.hypot(*(power.u_watts for power in powers if power)) if known else None,
        by_domain=by_domain,
        temperature_start_c=whole.temperature_start_c,
        other_cpu_s=whole.other_cpu_s * _part(stretch, whole),
        stolen_cpu_s=whole.stolen_cpu_s * _part(stretch, whole),
        flags=stretch_flags(_measured(stretch, whole), whole, trace, total),
        reason=total.reason,
    )


def are_far_apart(found: Sequence[Stretch]) -> bool:
    """Whether much else ran between them."""
    span_s = (found[-1].end_ns - found[0].start_ns) / 1e9
    return sum(each.timed_s for each in found) < DENSE * span_s


def foreign_round_flags(own: ForeignRounds, found: Sequence[Stretch]) -> list[Flag]:
    """What a reader must know of how rounds became those of the record."""
    flags: list[Flag] = []
    rounds = len(own.durations_s)
    if own.timer is not None:
        detail = (
            f"{own.timer} is not known to tell wall-clock time: the joules are of all that ran from the "
            "first of its rounds to the last"
        )
        flags.append(Flag(name="own-timer", severity="warning", detail=detail))
    if rounds > len(found) and own.timer is None:
        mean_s = sum(own.durations_s) / rounds
        share = sum(each.timed_s for each in found) / sum(
            (each.end_ns - each.start_ns) / 1e9 for each in found
        )
        detail = (
            f"{rounds} rounds of {mean_s * 1e3:.3g} ms are joined into {len(found)}: the meters do not tell "
            f"them one by one; {share:.0%} of that time were rounds, and so much of its joules is theirs"
        )
        flags.append(Flag(name="joined-rounds", severity="note", detail=detail))
    return flags


def _energy(stretch: Stretch, series: Series, whole: MeasuredRound) -> Energy:
    """As the counter tells it, or from one of the gaps on or up to the other, without what lies in between.

    A gap tells the energy at an edge much better than a counter under load, if the edge is not far from it.
    """
    before, after = _gaps(series, whole)
    start_ns, end_ns = whole.timeline.start_ns, whole.timeline.end_ns
    idle = _idle(series, whole)
    starts = [(stretch.start_ns, None), *([(start_ns, before)] if before else [])]
    ends = [(stretch.end_ns, None), *([(end_ns, after)] if after else [])]
    found = [
        _part_of(energy_between(series, first_ns, last_ns, left, right), stretch, last_ns - first_ns, idle)
        for first_ns, left in starts
        for last_ns, right in ends
    ]
    known = [each for each in found if each.u_j is not None]
    return min(known, key=lambda each: each.u_j or 0.0) if known else found[0]


def _part_of(energy: Energy, stretch: Stretch, length_ns: int, idle: Power | None) -> Energy:
    """The share of a window that is longer; what the rest may have used, as between rounds."""
    rest = 1 - (stretch.end_ns - stretch.start_ns) / length_ns
    if energy.energy_j is None or rest <= 0:
        return energy
    idle_j = idle.watts * length_ns / 1e9 if idle is not None else 0.0
    outside = (rest * max(0.0, energy.energy_j - idle_j)) ** 2 / 3
    shared = _times(energy, 1 - rest)
    return replace(shared, variances=shared.variances + Variances(outside=outside))


def _gaps(series: Series, whole: MeasuredRound) -> tuple[Quiet | None, Quiet | None]:
    before = quiet_power(series, whole.gap_start_ns, whole.timeline.start_ns)
    return before, quiet_power(series, whole.timeline.end_ns, whole.gap_end_ns)


def _idle(series: Series, whole: MeasuredRound) -> Power | None:
    before, after = _gaps(series, whole)
    if before is None or after is None:
        return None
    spread = abs(after.watts - before.watts) / math.sqrt(12)
    u_watts = math.hypot(before.u_watts / 2, after.u_watts / 2, spread)
    return Power((before.watts + after.watts) / 2, u_watts)


def _times(energy: Energy, share: float) -> Energy:
    if energy.energy_j is None:
        return energy
    variances = energy.variances
    scaled = Variances(
        *(
            share**2 * each
            for each in (variances.edges, variances.outside, variances.resolution, variances.coverage)
        )
    )
    return replace(energy, energy_j=share * energy.energy_j, variances=scaled)


def _between_u_j(stretch: Stretch, window: Energy, idle_w: float) -> float:
    """What is not known of the joules between the rounds, within the limits of idle and of twice as much."""
    if window.energy_j is None:
        return 0.0
    above_idle_j = max(0.0, window.energy_j - idle_w * (stretch.end_ns - stretch.start_ns) / 1e9)
    return (1 - stretch.share) * above_idle_j / math.sqrt(3)


def _told(total: Energy, between_u_j: float) -> Energy:
    """No joules where most of them may have been used between the rounds."""
    if total.energy_j is None or between_u_j <= RESOLVABLE * total.energy_j:
        return total
    reason = (
        "not resolvable: the rounds are too short to be told from what runs between them; make them longer "
        "(iterations, min_time), or set up less for each"
    )
    return Energy(None, reason=reason)


def _part(stretch: Stretch, whole: MeasuredRound) -> float:
    return (stretch.end_ns - stretch.start_ns) / max(1, whole.timeline.end_ns - whole.timeline.start_ns)


def _measured(stretch: Stretch, whole: MeasuredRound) -> MeasuredRound:
    iteration = Iteration(start_ns=stretch.start_ns, end_ns=stretch.end_ns, repeats=stretch.iterations)
    rank = RankTimeline(rank=0, iterations=(iteration,), cpu_time_s=0.0)
    return replace(whole, timeline=RoundTimeline(ranks=(rank,)))


# The figures of rounds that the measured code chose itself.


def foreign_metrics(
    rounds: Sequence[Round], found: Sequence[Stretch], coverage: float = 1.0
) -> dict[str, Metric]:
    """Every figure, of all iterations alike: stretches have more or fewer of them.

    What the meters cannot know counts in full where rounds are far apart: nobody shuffles when they start, so
    they may all fall into the same part of a tick, and are then all wrong by the same. What is wrong at an
    edge that two stretches share is too much in one and too little in the other.
    """
    metrics = {
        name: _of_all(name, metric, rounds)
        for name, metric in compute_metrics(rounds, None, coverage).items()
    }
    if not are_far_apart(found):
        return metrics
    return {name: _in_full(name, metric, rounds) for name, metric in metrics.items()}


def _of_all(name: str, metric: Metric, rounds: Sequence[Round]) -> Metric:
    if metric.value is None or name not in FIGURES:
        return metric
    figure = FIGURES[name]
    weighted = [
        (value.value, round_.duration_s if figure.unit == "W" else round_.iterations)
        for round_ in rounds
        if is_valid(round_) and (value := figure.of(round_)) is not None
    ]
    total = sum(weight for _, weight in weighted)
    mean = sum(value * weight for value, weight in weighted) / total if total else metric.value
    return msgspec.structs.replace(metric, value=mean)


def drop_unresolvable(rounds: Sequence[Round], found: Sequence[Stretch]) -> list[Round]:
    """As they are, or none with joules where all together drown in what is not known.

    To leave out single ones would leave out those that happened to come out too low.
    """
    known = [each for each in rounds if each.energy_j is not None and each.energy_u_j is not None]
    if not known:
        return list(rounds)
    u_j = math.sqrt(fmean((each.energy_u_j or 0.0) ** 2 for each in known))
    if not are_far_apart(found):
        u_j /= math.sqrt(len(known))
    if u_j <= RESOLVABLE * fmean(each.energy_j or 0.0 for each in known):
        return list(rounds)
    reason = (
        f"not resolvable: {len(known)} windows of {fmean(each.duration_s for each in known) * 1e3:.3g} ms"
    )
    flag = Flag(name="unmeasured", severity="warning", detail=reason)
    return [
        msgspec.structs.replace(
            each,
            energy_j=None,
            energy_u_j=None,
            energy_u_absolute_j=None,
            terms=None,
            reason=each.reason or reason,
            flags=[flag, *(other for other in each.flags if other.name != "imprecise")],
        )
        for each in rounds
    ]


def _in_full(name: str, metric: Metric, rounds: Sequence[Round]) -> Metric:
    if metric.uncertainty is None or metric.uncertainty_absolute is None or name not in FIGURES:
        return metric
    values, _ = round_values(name, rounds)
    in_full = max(metric.uncertainty, math.sqrt(fmean(each.meter**2 for each in values)))
    own = math.sqrt(max(0.0, metric.uncertainty_absolute**2 - metric.uncertainty**2))
    return msgspec.structs.replace(metric, uncertainty=in_full, uncertainty_absolute=math.hypot(in_full, own))


# Measuring work that runs its own rounds: quiet gap, all of the work, quiet gap.
#
# Nothing is asked of the work but when its rounds ended, and nothing is done while one of them runs.

ForeignWork = Callable[[Callable[[], None]], ForeignRounds]
"""The work, which tells its rounds. What it is given is to be called between two, ever so often."""


def measure_foreign_rounds(
    work: ForeignWork, criterion: str, least_gap_s: float, target: float, selection: Selection, lease: Lease
) -> Experiment:
    """Let the work run and measure its rounds. Closes the meters, also when the work raises.

    ``criterion`` is what decided on rounds and iterations, ``target`` the relative standard uncertainty that
    is wished for; nothing is repeated to reach it.
    """
    __tracebackhide__ = True
    load = load_average()
    with ExitStack() as stack:
        sampler = stack.enter_context(Sampler(selection.meters))
        watch = stack.enter_context(watch_boards(lease.uuids))
        sampler.await_ticks(0, FIRST_TICK_S)
        gap_s = required_gap_s(sampler.series, least_gap_s)
        # What was queued before is not to be in the gap, nor what the rounds queue in the gap after them.
        synchronize_gpus()
        before = watch.read()
        gap_start_ns = time.monotonic_ns()
        with sampler.closely():
            time.sleep(gap_s)
            cpu_before, own_before_s = read_cpu_time(), _own_cpu_s()
        sampler.read_now()
        least_s = min_stretch_s(sampler.series)
        with sampler.at_work(), collect_conditions(watch) as during:
            start_ns = time.monotonic_ns()
            own = work(_Between(sampler, least_s))
            synchronize_gpus()
            end_ns = time.monotonic_ns()
        sampler.read_now()
        with sampler.closely():
            cpu_after, own_after_s = read_cpu_time(), _own_cpu_s()
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
    found = split_into_stretches(own, least_s)
    rounds = [account_stretch(stretch, whole, trace, selection.reasons) for stretch in found]
    rounds = drop_unresolvable(rounds, found)
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
    flags = [*foreign_round_flags(own, found), *drift_flags(rounds), *unread_meter_flags(selection.reasons)]
    infos = [meter_info(series) for series in trace]
    return Experiment(rounds, foreign_metrics(rounds, found, coverage), infos, load, procedure, flags)


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
