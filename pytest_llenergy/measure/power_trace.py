# SPDX-License-Identifier: Apache-2.0
"""Power over time in one round, for charts.

Power is known only from tick to tick of a counter, and a round begins and ends between two ticks. At its
edges the energy comes from the window arithmetic, so that the power adds up to the joules of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from pytest_llenergy.energy.quiet_gaps import Quiet, energy_at_end, energy_at_start, quiet_power
from pytest_llenergy.energy.trace import Series, Trace
from pytest_llenergy.measure.host_meters import HostMeters
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.power_trace import DomainPower, PhaseSpan, PowerTrace
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid

#: Largest number of steps of a domain; more could not be distinguished in a chart and would enlarge the
#: report.
MAX_STEPS = 120

#: Largest number of phases; more could not be distinguished in a chart.
MAX_SPANS = 100

#: Part of each quiet gap that is kept: as a share of the round, and at least (seconds).
GAP_SHARE, MIN_GAP_S = 0.25, 0.1

#: Shortest step (nanoseconds); edges are stored to the microsecond.
MIN_STEP_NS = 10_000

#: Significant digits of a power, and hence of its joules.
DIGITS = 7

Point = tuple[int, float]


def median_round_index(rounds: Sequence[Round]) -> int | None:
    """Return the index of the valid round with the (lower) median energy; ``None`` without energy."""
    ordered = sorted(
        (round_.energy_j, index)
        for index, round_ in enumerate(rounds)
        if is_valid(round_) and round_.energy_j is not None
    )
    return ordered[(len(ordered) - 1) // 2][1] if ordered else None


def power_trace(measured: MeasuredRound, hosts: Sequence[HostMeters]) -> PowerTrace | None:
    """Return the power over time of each domain with two quiet gaps; ``None`` without such a domain."""
    timeline = measured.timeline
    start_ns = timeline.start_ns
    by_domain = {name: power for host in hosts for name, power in host.power_steps(measured).items()}
    if not by_domain:
        return None
    spans = [
        PhaseSpan(name=name, start_s=round((a - start_ns) / 1e9, 6), end_s=round((b - start_ns) / 1e9, 6))
        for name, parts in phase_spans(timeline).items()
        for a, b in parts
    ]
    return PowerTrace(
        start_s=start_ns / 1e9,
        duration_s=timeline.duration_s,
        by_domain=by_domain,
        spans=sorted(spans, key=lambda span: span.start_s) if len(spans) <= MAX_SPANS else [],
    )


def power_steps(measured: MeasuredRound, trace: Trace) -> dict[str, DomainPower]:
    """Return the power over time of each domain of this host with two quiet gaps, by name."""
    return {
        series.domain.name: DomainPower(kind=series.domain.kind, edges_s=edges_s, power_w=power_w)
        for series in trace
        for edges_s, power_w in [_power_steps(measured, series)]
        if power_w
    }


def _power_steps(measured: MeasuredRound, series: Series) -> tuple[list[float], list[float]]:
    """Return edges (seconds from the start) and the powers between them (W); empty without two quiet gaps."""
    start_ns, end_ns = measured.timeline.start_ns, measured.timeline.end_ns
    before = quiet_power(series, measured.gap_start_ns, start_ns)
    after = quiet_power(series, end_ns, measured.gap_end_ns)
    if before is None or after is None or end_ns - start_ns < MIN_STEP_NS:
        return [], []
    first = (start_ns, energy_at_start(series, start_ns, before).energy_j)
    last = (end_ns, energy_at_end(series, end_ns, after).energy_j)
    parts = (
        [*_quiet(series, measured.gap_start_ns, start_ns, before), first],
        [first, *_inside(series, first, last), last],
        [last, *_quiet(series, end_ns, measured.gap_end_ns, after)],
    )
    reach_ns = round(max(GAP_SHARE * (end_ns - start_ns), MIN_GAP_S * 1e9))
    # Leave out ticks far from the round, but keep three: the nearest one may be too near for a step.
    lead = [point for point in parts[0][:-3] if start_ns - point[0] <= reach_ns] + parts[0][-3:]
    trail = parts[2][:3] + [point for point in parts[2][3:] if point[0] - end_ns <= reach_ns]
    least_ns = _shortest_step_ns(lead, parts[1], trail)
    points = [
        *_thin(lead, least_ns)[:-1],
        *_thin(parts[1], least_ns),
        *_thin(trail, least_ns)[1:],
    ]
    edges_s = [round((time_ns - start_ns) / 1e9, 6) for time_ns, _ in points]
    power_w = [
        float(f"{(high_j - low_j) / (b - a):.{DIGITS}g}")
        for (a, b), ((_, low_j), (_, high_j)) in zip(pairwise(edges_s), pairwise(points), strict=True)
    ]
    return edges_s, power_w


def _quiet(series: Series, start_ns: int, end_ns: int, quiet: Quiet) -> list[Point]:
    """Return the ticks of a gap from which its power was computed."""
    ticks = series.without_common_delay(series.ticks_between(start_ns + series.smear_ns, end_ns))
    inside = [tick for tick in ticks if quiet.first.time_ns <= tick.time_ns <= quiet.last.time_ns]
    return [(tick.time_ns, tick.energy_j) for tick in inside]


def _inside(series: Series, first: Point, last: Point) -> list[Point]:
    """Return the ticks within the round, except those that contradict the energy at its edges.

    A running average over s lags by s/2.
    """
    lag_ns = series.smear_ns // 2
    ticks = series.ticks_between(first[0] + lag_ns + 1, last[0] + lag_ns - 1)
    return [(tick.time_ns - lag_ns, tick.energy_j) for tick in ticks if first[1] <= tick.energy_j <= last[1]]


def _shortest_step_ns(*parts: Sequence[Point]) -> int:
    """Return the shortest step: half the median, and long enough for at most ``MAX_STEPS`` steps."""
    steps = [b - a for points in parts for (a, _), (b, _) in pairwise(points)]
    span_ns = parts[-1][-1][0] - parts[0][0][0]
    return max(span_ns // (MAX_STEPS - len(parts)), round(median(steps) / 2), MIN_STEP_NS)


def _thin(points: Sequence[Point], least_ns: int) -> list[Point]:
    """Keep the first and the last point, and points between them that are ``least_ns`` or more apart."""
    kept = [points[0]]
    for point in points[1:-1]:
        if point[0] - kept[-1][0] >= least_ns and points[-1][0] - point[0] >= least_ns:
            kept.append(point)
    return [*kept, points[-1]]
