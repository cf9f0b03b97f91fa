# SPDX-License-Identifier: Apache-2.0
"""Measure rounds that another benchmark tool chooses and times itself.

There are no quiet gaps between them, and a round may last microseconds. Rounds that are long enough for the
counters are measured one by one. Consecutive shorter rounds are joined into stretches that are long enough.
Between the rounds of a stretch, the tool's loop and set-up run; that time is assumed to draw the mean power
of the stretch. Its true power lies between nothing and twice the mean, or closer to the mean if nothing but
the tool's loop runs; these limits are part of the absolute uncertainty of the rounds. The idle power is no
lower limit, because a board may draw more in the gaps than between the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from pytest_llenergy.energy.attribution import PACKAGE_RATIO, Split, attribution_flags, choose_split
from pytest_llenergy.energy.host_window import trace_flags
from pytest_llenergy.energy.quiet_gaps import Quiet, idle_power, quiet_power
from pytest_llenergy.energy.trace import Mark, Series, Trace
from pytest_llenergy.energy.uncertainty import (
    Power,
    Variances,
    WindowEnergy,
    absolute_uncertainty_j,
    domain_energy,
    sum_energies,
)
from pytest_llenergy.energy.window_arithmetic import energy_between, energy_between_readings
from pytest_llenergy.measure.quality import energy_flags, use_flags
from pytest_llenergy.measure.rounds import (
    MeasuredRound,
)
from pytest_llenergy.record.metrics import ROUND_METRICS, compute_metrics, round_values
from pytest_llenergy.record.quantity import RESOLVABLE
from pytest_llenergy.record.record import DomainEnergy, Flag, Metric, Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.round_statistics import weighted_median

#: Shortest stretch: in ticks of the slowest counter, in greatest ages of its readings, and in seconds. The
#: last stretch needs the share ``ENOUGH`` of that, since stretches end at the end of a round.
STRETCH_TICKS, STRETCH_AGES, STRETCH_S, ENOUGH = 2.0, 10.0, 0.05, 0.75

#: Largest number of stretches.
MOST = 10

#: A process that uses no more cores than this, apart from the readings at either end (seconds), is busy in
#: one thread at a time.
ONE_CORE, READINGS_S = 1.1, 0.001

#: Rounds are joined only if they take at least this share of the time from the first to the last.
DENSE = 0.9


@dataclass(frozen=True)
class ForeignRounds:
    """Rounds as the other tool reports them.

    Attributes:
        durations_s: Duration of each round by the timer of the tool.
        iterations: Iterations of the work in each round.
        ends: Ends of the first round, the last round and some in between, each as the number of finished
            rounds and the moment (monotonic nanoseconds).
        begin_ns: A moment before the first round.
        timer: Name of a timer that may not report wall-clock time; then the durations are not used.
        plain: Whether only the tool's own loop runs between the rounds, and no set-up of the user.
    """

    durations_s: Sequence[float]
    iterations: int
    ends: Sequence[tuple[int, int]]
    begin_ns: int
    timer: str | None = None
    plain: bool = False


@dataclass(frozen=True)
class Stretch:
    """One or more consecutive rounds (monotonic nanoseconds). ``timed_s`` is the sum of their durations."""

    start_ns: int
    end_ns: int
    rounds: int
    iterations: int
    timed_s: float

    @property
    def share(self) -> float:
        """Share of the time that the rounds took."""
        return min(1.0, self.timed_s * 1e9 / max(1, self.end_ns - self.start_ns))


def min_stretch_s(trace: Trace) -> float:
    """Return how long a stretch must be for its joules to be measured (seconds)."""
    ticks = [STRETCH_TICKS * (series.period_s or 0.0) + series.smear_s for series in trace]
    ages = [STRETCH_AGES * (series.domain.max_age_s or 0.0) for series in trace]
    return max([STRETCH_S, *ticks, *ages])


def marks_of(stretches: Sequence[Stretch]) -> list[Mark]:
    """Return the starts and ends of all stretches in time order; their edges may share ticks."""
    starts = [Mark(each.start_ns, begins=True, name="round") for each in stretches]
    return sorted(starts + [Mark(each.end_ns, begins=False, name="round") for each in stretches])


def split_into_stretches(reported: ForeignRounds, least_s: float) -> list[Stretch]:
    """Return each round as a stretch if all are long enough or far apart, else join them."""
    every_end_is_known = len(reported.ends) == len(reported.durations_s)
    if reported.timer is None and every_end_is_known:
        alone = _cut(reported, range(len(reported.ends)))
        whole = _cut(reported, [len(reported.ends) - 1])[0]
        if min(reported.durations_s) >= least_s or whole.share < DENSE:
            return alone
    return _cut(reported, _borders(reported, least_s))


def _borders(reported: ForeignRounds, least_s: float) -> list[int]:
    """Return indices of ``ends`` that divide the rounds into stretches of about equal length."""
    start_ns, last = reported.begin_ns, len(reported.ends) - 1
    if reported.timer is None:
        start_ns = reported.ends[0][1] - round(reported.durations_s[0] * 1e9)
    total_ns = reported.ends[last][1] - start_ns
    wanted = max(1, min(MOST, int(total_ns / 1e9 / least_s)))
    borders: list[int] = []
    for index, (_, end_ns) in enumerate(reported.ends[:-1]):
        due_ns = start_ns + (len(borders) + 1) * total_ns / wanted
        left_ns = reported.ends[last][1] - end_ns
        if len(borders) < wanted - 1 and end_ns >= due_ns and left_ns >= ENOUGH * least_s * 1e9:
            borders.append(index)
    return [*borders, last]


def _cut(reported: ForeignRounds, borders: Sequence[int]) -> list[Stretch]:
    """Return the stretches that end at these indices of ``ends``."""
    stretches: list[Stretch] = []
    known_ends = dict(reported.ends)
    finished, before_ns = 0, reported.begin_ns
    for border in borders:
        count, end_ns = reported.ends[border]
        durations_s = reported.durations_s[finished:count]
        start_ns = before_ns
        if reported.timer is None and finished + 1 in known_ends:
            start_ns = max(before_ns, known_ends[finished + 1] - round(durations_s[0] * 1e9))
        timed_s = sum(durations_s) if reported.timer is None else (end_ns - start_ns) / 1e9
        rounds = count - finished
        stretches.append(Stretch(start_ns, end_ns, rounds, rounds * reported.iterations, timed_s))
        finished, before_ns = count, end_ns
    return stretches


def account_stretch(
    stretch: Stretch,
    whole: MeasuredRound,
    trace: Trace,
    reasons: Sequence[str] = (),
    *,
    plain: bool = False,
    marks: Sequence[Mark] = (),
) -> Round:
    """Return the record of a stretch: the joules of its rounds, without the joules between them.

    Args:
        stretch: The stretch.
        whole: All work of the tool, with the quiet gaps around it.
        trace: One series for each domain.
        reasons: Why meters could not be opened.
        plain: Whether only the tool's own loop runs between the rounds.
        marks: Starts and ends of all stretches.
    """
    powers: list[Power | None] = [_idle(series, whole) for series in trace]
    rounds = {
        series.domain.name: _scale_energy(_energy(stretch, series, whole, marks), stretch.share)
        for series in trace
    }
    splits: list[Split] = []
    rest: dict[str, Power] = {}
    by_domain: dict[str, DomainEnergy] = {}
    for index, series in enumerate(trace):
        name = series.domain.name
        split = _split(series, rounds[name], stretch, whole, rest)
        part = split.part(rounds[name], stretch.timed_s) if split is not None else None
        if split is not None and part is not None:
            rounds[name], powers[index] = part.energy, split.idle
            splits.append(split)
        elif series.domain.cpu_ratio is not None and whole.has_busy_gap:
            powers[index] = rest.get(name)
        by_domain[name] = domain_energy(rounds[name], series, stretch.timed_s, part)
    total = sum_energies(list(rounds.values()), reasons)
    idle_known = all(power is not None for power in powers) and bool(powers)
    between_u_j = _between_u_j(stretch, total)
    if plain:
        between_u_j *= _loop_spread(whole, trace)
    total = _require_distinct(total, between_u_j)
    u_absolute_j = absolute_uncertainty_j(total, list(by_domain.values()))
    return Round(
        start_s=stretch.start_ns / 1e9,
        duration_s=stretch.timed_s,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=math.hypot(u_absolute_j, between_u_j) if u_absolute_j is not None else None,
        iterations=stretch.iterations,
        terms=total.variances.terms() if total.energy_j is not None else None,
        idle_power_w=sum(power.watts for power in powers if power) if idle_known else None,
        idle_power_u_w=math.hypot(*(power.u_watts for power in powers if power)) if idle_known else None,
        by_domain=by_domain,
        temperature_start_c=whole.temperature_start_c,
        own_cpu_s=whole.own_cpu_s * _part(stretch, whole),
        other_cpu_s=whole.other_cpu_s * _part(stretch, whole),
        stolen_cpu_s=whole.stolen_cpu_s * _part(stretch, whole),
        flags=[
            *energy_flags(total),
            *trace_flags(trace, stretch.start_ns, stretch.end_ns),
            # Use by others is known only for the whole work.
            *use_flags(whole),
            *attribution_flags(splits),
        ],
        reason=total.reason,
    )


def are_far_apart(stretches: Sequence[Stretch]) -> bool:
    """Return whether rounds take less than the share ``DENSE`` of the time from the first to the last."""
    span_s = (stretches[-1].end_ns - stretches[0].start_ns) / 1e9
    return sum(each.timed_s for each in stretches) < DENSE * span_s


def foreign_round_flags(reported: ForeignRounds, stretches: Sequence[Stretch]) -> list[Flag]:
    """Return flags that explain how the tool's rounds became the rounds of the record."""
    flags: list[Flag] = []
    rounds = len(reported.durations_s)
    if reported.timer is not None:
        detail = (
            f"{reported.timer} may not report wall-clock time: the joules are those of everything from the "
            "first of its rounds to the last"
        )
        flags.append(Flag(name="doubtful", severity="warning", detail=detail))
    if rounds > len(stretches) and reported.timer is None:
        mean_s = sum(reported.durations_s) / rounds
        share = sum(each.timed_s for each in stretches) / sum(
            (each.end_ns - each.start_ns) / 1e9 for each in stretches
        )
        detail = (
            f"{rounds} rounds of {mean_s * 1e3:.3g} ms are joined into {len(stretches)}, since each is too "
            f"short for the meters; rounds took {share:.0%} of that time and are assigned that share of its "
            "joules"
        )
        flags.append(Flag(name="meter", severity="note", detail=detail))
    return flags


def _energy(stretch: Stretch, series: Series, whole: MeasuredRound, marks: Sequence[Mark]) -> WindowEnergy:
    """Return the most certain energy of a stretch: from its own edges, or from those of the whole work.

    The energy at an edge next to a quiet gap is much more certain than at an edge under load.
    """
    before, after = _gaps(series, whole)
    start_ns, end_ns = whole.quiet_before_ns, whole.timeline.end_ns
    starts = [(stretch.start_ns, None), *([(start_ns, before)] if before else [])]
    ends = [(stretch.end_ns, None), *([(end_ns, after)] if after else [])]
    candidates = [
        _stretch_share(
            energy_between(series, first_ns, last_ns, left, right, marks), stretch, last_ns - first_ns
        )
        for first_ns, left in starts
        for last_ns, right in ends
    ]
    if series.domain.rests:
        # It was read right before and after the whole work, by the thread that does it.
        whole_ns = (whole.timeline.start_ns, whole.timeline.end_ns)
        between = energy_between_readings(series, *whole_ns)
        candidates.append(_stretch_share(between, stretch, whole_ns[1] - whole_ns[0]))
    available = [each for each in candidates if each.u_j is not None]
    return min(available, key=lambda each: each.u_j or 0.0) if available else candidates[0]


def _stretch_share(energy: WindowEnergy, stretch: Stretch, length_ns: int) -> WindowEnergy:
    """Return a stretch's share of a longer window, with the uncertainty of the energy of the rest.

    The power of the rest lies between 0 and twice the mean: a board that still drew more than its idle power
    in the gap before, because of another test, may have come to rest since.
    """
    rest = 1 - (stretch.end_ns - stretch.start_ns) / length_ns
    if energy.energy_j is None or rest <= 0:
        return energy
    outside = (rest * max(0.0, energy.energy_j)) ** 2 / 3
    shared = _scale_energy(energy, 1 - rest)
    return shared.widen(Variances(outside=outside))


def _gaps(series: Series, whole: MeasuredRound) -> tuple[Quiet | None, Quiet | None]:
    before = quiet_power(series, whole.gap_start_ns, whole.quiet_before_ns)
    return before, quiet_power(series, whole.timeline.end_ns, whole.gap_end_ns)


def _idle(series: Series, whole: MeasuredRound) -> Power | None:
    before, after = _gaps(series, whole)
    return idle_power(before, after) if before and after else None


def _split(
    series: Series, energy: WindowEnergy, stretch: Stretch, whole: MeasuredRound, rest: dict[str, Power]
) -> Split | None:
    """Return how to split the energy of a stretch by CPU time, known of the whole work; ``None`` if not.

    The power of a gap in which others were quiet is added to ``rest``.
    """
    if energy.energy_j is None or whole.gap_cpu is None or stretch.timed_s <= 0:
        return None
    gaps = list(zip(_gaps(series, whole), whole.gap_cpu, strict=True))
    return choose_split(series.domain, whole.cpu, gaps, rest)


def _scale_energy(energy: WindowEnergy, share: float) -> WindowEnergy:
    if energy.energy_j is None:
        return energy
    return energy._replace(energy_j=share * energy.energy_j, variances=energy.variances.scale(share**2))


def _between_u_j(stretch: Stretch, rounds: WindowEnergy) -> float:
    """Return the uncertainty of the joules between rounds, with limits of nothing and twice the power."""
    if rounds.energy_j is None or stretch.timed_s <= 0:
        return 0.0
    return (1 / stretch.share - 1) * max(0.0, rounds.energy_j) / math.sqrt(3)


def _loop_spread(whole: MeasuredRound, trace: Trace) -> float:
    """Return how far the power of the tool's loop may lie from the mean, as a share of the mean.

    A loop in the interpreter keeps one core busy. If the process uses no more than one in all, so does the
    work, and a second of one costs about as much as one of the other. To a model of CPU time it is the same.
    """
    if whole.own_cpu_s > ONE_CORE * whole.timeline.duration_s + READINGS_S:
        return 1.0
    return 0.0 if all(series.domain.rests for series in trace) else PACKAGE_RATIO - 1


def _require_distinct(total: WindowEnergy, between_u_j: float) -> WindowEnergy:
    """Drop an energy most of which may have been used between the rounds."""
    if total.energy_j is None or between_u_j <= RESOLVABLE * total.energy_j:
        return total
    reason = (
        "not resolvable: the rounds are too short to be separated from what runs between them; make them "
        "longer (iterations, min_time), or set up less for each"
    )
    return WindowEnergy(None, reason=reason)


def _part(stretch: Stretch, whole: MeasuredRound) -> float:
    return (stretch.end_ns - stretch.start_ns) / max(1, whole.timeline.end_ns - whole.timeline.start_ns)


def foreign_metrics(
    rounds: Sequence[Round], stretches: Sequence[Stretch], coverage: float = 1.0
) -> dict[str, Metric]:
    """Return every metric, as a median weighted by iterations, of which stretches have different numbers.

    The meters' uncertainty counts in full if rounds are far apart: their starts are not shuffled, so they may
    all fall into the same part of a tick and have the same error. If stretches share an edge, an error there
    is added to one and subtracted from the other.

    Args:
        rounds: The record of each stretch.
        stretches: The stretches.
        coverage: Share of the time in which the sensors sample.
    """
    metrics = {
        name: _weight_by_iterations(name, metric, rounds)
        for name, metric in compute_metrics(rounds, None, coverage).items()
    }
    if not are_far_apart(stretches):
        return metrics
    return {name: _count_in_full(name, metric, rounds) for name, metric in metrics.items()}


def _weight_by_iterations(name: str, metric: Metric, rounds: Sequence[Round]) -> Metric:
    if metric.value is None or name not in ROUND_METRICS:
        return metric
    figure = ROUND_METRICS[name]
    weighted = [
        (value.value, round_.duration_s if figure.unit == "W" else round_.iterations)
        for round_ in rounds
        if is_valid(round_) and not isinstance(value := figure.of(round_), str)
    ]
    if not weighted or figure.pooled is not None:
        return metric
    return msgspec.structs.replace(metric, value=weighted_median(*zip(*weighted, strict=True)))


def drop_unresolvable(rounds: Sequence[Round], stretches: Sequence[Stretch]) -> list[Round]:
    """Return the rounds, but without their joules if the mean is not resolvable.

    Dropping single rounds would drop those that are too low by chance, which biases the mean.
    """
    measured = [each for each in rounds if each.energy_j is not None and each.energy_u_j is not None]
    if not measured:
        return list(rounds)
    u_j = math.sqrt(fmean((each.energy_u_j or 0.0) ** 2 for each in measured))
    if not are_far_apart(stretches):
        u_j /= math.sqrt(len(measured))
    if u_j <= RESOLVABLE * fmean(each.energy_j or 0.0 for each in measured):
        return list(rounds)
    mean_s = fmean(each.duration_s for each in measured)
    reason = f"not resolvable: {len(measured)} windows of {mean_s * 1e3:.3g} ms"
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


def _count_in_full(name: str, metric: Metric, rounds: Sequence[Round]) -> Metric:
    if metric.uncertainty is None or metric.uncertainty_absolute is None or name not in ROUND_METRICS:
        return metric
    values, _ = round_values(name, rounds)
    in_full = max(metric.uncertainty, math.sqrt(fmean(each.meter**2 for each in values)))
    accuracy = math.sqrt(max(0.0, metric.uncertainty_absolute**2 - metric.uncertainty**2))
    absolute = math.hypot(in_full, accuracy)
    return msgspec.structs.replace(metric, uncertainty=in_full, uncertainty_absolute=absolute)
