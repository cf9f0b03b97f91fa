# SPDX-License-Identifier: Apache-2.0
"""Energy of rounds that another benchmark tool chooses and times itself.

A round may last microseconds, and there are no quiet gaps between rounds. Rounds that are long enough for the
counters are windows of their own. Consecutive shorter rounds are joined into windows that are long enough.
Between the rounds of such a window, the tool's loop and set-up run; that time is assumed to draw the mean
power of the window. Its true power lies between nothing and twice the mean, or closer to the mean if only the
tool's loop runs: these limits are part of the absolute uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_llenergy.energy.attribution import Split, attribution_flags, choose_split
from pytest_llenergy.energy.host_window import trace_flags
from pytest_llenergy.energy.quiet_gaps import quiet_power
from pytest_llenergy.energy.trace import Mark, Series, Trace
from pytest_llenergy.energy.uncertainty import (
    Power,
    WindowEnergy,
    absolute_uncertainty_j,
    domain_energy,
    sum_energies,
)
from pytest_llenergy.energy.window_arithmetic import energy_between, energy_between_readings
from pytest_llenergy.measure.quality import energy_flags, use_flags
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.quantity import RESOLVABLE
from pytest_llenergy.record.record import DomainEnergy, Flag, Round

#: Shortest joined window: in ticks of the slowest counter, in greatest ages of its readings, and in seconds.
#: The last one needs the share ``ENOUGH`` of that, since windows end at the end of a round.
STRETCH_TICKS, STRETCH_AGES, STRETCH_S, ENOUGH = 2.0, 10.0, 0.05, 0.75

#: Largest number of joined windows.
MOST = 10

#: Rounds are joined only if they take at least this share of the time from the first to the last.
DENSE = 0.9

#: How far the power of the tool's own loop may lie from that of the work, as a share of the latter.
LOOP_SPREAD = 0.5

NOT_DISTINCT = (
    "not resolvable: the rounds are too short to be separated from what runs between them; make them longer "
    "(iterations, min_time), or set up less for each"
)


@dataclass(frozen=True)
class ForeignRounds:
    """Rounds as the other tool reports them.

    Attributes:
        durations_s: Duration of each round by the timer of the tool.
        iterations: Iterations of the work in each round.
        ends: Ends of the first round, the last round and some in between, each as the number of finished
            rounds and the moment (monotonic nanoseconds).
        begin_ns: A moment before the first round.
        plain: Whether only the tool's own loop runs between the rounds, and no set-up of the user.
    """

    durations_s: Sequence[float]
    iterations: int
    ends: Sequence[tuple[int, int]]
    begin_ns: int
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


def split_into_stretches(reported: ForeignRounds, least_s: float) -> list[Stretch]:
    """Return each round as a stretch if all are long enough or far apart, else join them."""
    if len(reported.ends) == len(reported.durations_s):
        whole = _cut(reported, [len(reported.ends) - 1])[0]
        if min(reported.durations_s) >= least_s or whole.share < DENSE:
            return _cut(reported, range(len(reported.ends)))
    return _cut(reported, _borders(reported, least_s))


def _borders(reported: ForeignRounds, least_s: float) -> list[int]:
    """Return indices of ``ends`` that divide the rounds into stretches of about equal length."""
    last = len(reported.ends) - 1
    last_ns, start_ns = reported.ends[last][1], reported.ends[0][1] - round(reported.durations_s[0] * 1e9)
    wanted = max(1, min(MOST, int((last_ns - start_ns) / 1e9 / least_s)))
    borders: list[int] = []
    for index, (_, end_ns) in enumerate(reported.ends[:-1]):
        due_ns = start_ns + (len(borders) + 1) * (last_ns - start_ns) / wanted
        enough_left = last_ns - end_ns >= ENOUGH * least_s * 1e9
        if len(borders) < wanted - 1 and end_ns >= due_ns and enough_left:
            borders.append(index)
    return [*borders, last]


def _cut(reported: ForeignRounds, borders: Sequence[int]) -> list[Stretch]:
    """Return the stretches that end at these indices of ``ends``."""
    stretches: list[Stretch] = []
    known_ends = dict(reported.ends)
    finished, start_ns = 0, reported.begin_ns
    for border in borders:
        count, end_ns = reported.ends[border]
        durations_s = reported.durations_s[finished:count]
        if finished + 1 in known_ends:
            start_ns = max(start_ns, known_ends[finished + 1] - round(durations_s[0] * 1e9))
        rounds = count - finished
        stretches.append(Stretch(start_ns, end_ns, rounds, rounds * reported.iterations, sum(durations_s)))
        finished, start_ns = count, end_ns
    return stretches


def account_stretches(
    stretches: Sequence[Stretch],
    whole: MeasuredRound,
    trace: Trace,
    reasons: Sequence[str] = (),
    rest: dict[str, Power] | None = None,
    *,
    plain: bool = False,
) -> list[Round]:
    """Return the record of each stretch: the joules of its rounds, without those between them.

    Args:
        stretches: All stretches of a benchmark, in time order.
        whole: All work of the tool, with the quiet gap after it.
        trace: One series for each domain.
        reasons: Why meters could not be opened.
        rest: Power of each domain in the last gap in which others were quiet. It is updated.
        plain: Whether only the tool's own loop runs between the rounds.
    """
    starts = [Mark(each.start_ns, begins=True, name="round") for each in stretches]
    marks = sorted(starts + [Mark(each.end_ns, begins=False, name="round") for each in stretches])
    rest = {} if rest is None else rest
    rounds: list[Round] = []
    for stretch in stretches:
        found = [_account_domain(series, stretch, whole, marks, rest) for series in trace]
        # To a model of CPU time, the tool's loop is like the work.
        alike = all(series.domain.rests for series in trace)
        between = (0.0 if alike else LOOP_SPREAD) if plain else 1.0
        rounds.append(_to_round(stretch, whole, trace, found, reasons, between))
    return rounds


class _DomainEnergy(NamedTuple):
    """Energy of one domain in a stretch, and its idle power."""

    energy: WindowEnergy
    record: DomainEnergy
    idle: Power | None
    split: Split | None


def _account_domain(
    series: Series,
    stretch: Stretch,
    whole: MeasuredRound,
    marks: Sequence[Mark],
    rest: dict[str, Power],
) -> _DomainEnergy:
    if series.domain.rests and len(marks) == 2:
        # It was read right before and after, by the thread that works.
        energy = energy_between_readings(series, stretch.start_ns, stretch.end_ns)
    else:
        energy = energy_between(series, stretch.start_ns, stretch.end_ns, marks=marks)
    if energy.energy_j is not None:
        variances = energy.variances.scale(stretch.share**2)
        energy = energy._replace(energy_j=stretch.share * energy.energy_j, variances=variances)
    gap, split, part = quiet_power(series, whole.timeline.end_ns, whole.gap_end_ns), None, None
    if energy.energy_j is not None and whole.gap_cpu is not None and stretch.timed_s > 0:
        # CPU time is known only for the whole work.
        split = choose_split(series.domain, whole.cpu, [(gap, whole.gap_cpu[1])], rest)
        part = split.part(energy, stretch.timed_s) if split is not None else None
    idle = Power(gap.watts, gap.u_watts) if gap is not None else None
    if series.domain.rests:
        idle = Power(0.0, 0.0)
    if split is not None or (series.domain.cpu_ratio is not None and whole.has_busy_gap):
        idle = rest.get(series.domain.name)
    energy = part.energy if part is not None else energy
    return _DomainEnergy(energy, domain_energy(energy, series, stretch.timed_s, part), idle, split)


def _to_round(
    stretch: Stretch,
    whole: MeasuredRound,
    trace: Trace,
    found: Sequence[_DomainEnergy],
    reasons: Sequence[str],
    between: float,
) -> Round:
    """Return the record of a stretch; ``between`` is how far the power between its rounds may be off."""
    total, between_u_j = sum_energies([each.energy for each in found], reasons), 0.0
    if total.energy_j is not None:
        between_u_j = between * (1 / max(stretch.share, 1e-9) - 1) * max(0.0, total.energy_j) / math.sqrt(3)
        if between_u_j > RESOLVABLE * total.energy_j:
            total = WindowEnergy(None, reason=NOT_DISTINCT)
    u_absolute_j = absolute_uncertainty_j(total, [each.record for each in found])
    idle = [each.idle for each in found if each.idle is not None]
    idle_known = bool(found) and len(idle) == len(found)
    part_of_time = (stretch.end_ns - stretch.start_ns) / 1e9 / whole.timeline.duration_s
    return Round(
        start_s=stretch.start_ns / 1e9,
        duration_s=stretch.timed_s,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=math.hypot(u_absolute_j, between_u_j) if u_absolute_j is not None else None,
        iterations=stretch.iterations,
        terms=total.variances.terms() if total.energy_j is not None else None,
        idle_power_w=sum(power.watts for power in idle) if idle_known else None,
        idle_power_u_w=math.hypot(*(power.u_watts for power in idle)) if idle_known else None,
        by_domain={series.domain.name: each.record for series, each in zip(trace, found, strict=True)},
        temperature_start_c=whole.temperature_start_c,
        own_cpu_s=whole.cpu.own_s * part_of_time,
        other_cpu_s=whole.cpu.other_s * part_of_time,
        stolen_cpu_s=whole.cpu.stolen_s * part_of_time,
        flags=[
            *energy_flags(total),
            *trace_flags(trace, stretch.start_ns, stretch.end_ns),
            *use_flags(whole),
            *attribution_flags([each.split for each in found if each.split is not None]),
        ],
        reason=total.reason,
    )


def joined_flags(reported: ForeignRounds, stretches: Sequence[Stretch]) -> list[Flag]:
    """Return a flag that explains how the tool's rounds became the rounds of the record, if they differ."""
    rounds = len(reported.durations_s)
    if rounds == len(stretches):
        return []
    mean_s = sum(reported.durations_s) / rounds
    share = sum(each.timed_s for each in stretches) / sum(
        (each.end_ns - each.start_ns) / 1e9 for each in stretches
    )
    detail = (
        f"{rounds} rounds of {mean_s * 1e3:.3g} ms are joined into {len(stretches)}, since each is too short "
        f"for the meters; rounds took {share:.0%} of that time and are assigned that share of its joules"
    )
    return [Flag(name="meter", severity="note", detail=detail)]
