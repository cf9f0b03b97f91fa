# SPDX-License-Identifier: Apache-2.0
"""Phases of a round: when they began and ended, and their energy."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from pytest_llenergy.energy.joint_solution import (
    SHORTEST_TICKS,
    Segment,
    solve_jointly,
    widen_for_few,
)
from pytest_llenergy.energy.quiet_gaps import Quiet
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import NOTHING, Variances, WindowEnergy, sum_energies
from pytest_llenergy.energy.window_arithmetic import energy_between
from pytest_llenergy.record.timeline import Timeline

#: Shortest phase that is solved, in ticks, if the sensor sees only a part of each tick.
SHORTEST_TICKS_PART_TIME = 1 / 2


def phase_spans(timeline: Timeline) -> dict[str, list[tuple[int, int]]]:
    """Return start and end of each phase by name, one span for each iteration (monotonic nanoseconds).

    Prefill ends and decode begins when the last rank has its first token. A served load reports its phases
    itself.
    """
    if timeline.served:
        return _reported_spans(timeline)
    borders = timeline.borders_ns
    if not borders:
        return {}
    ends = [*(start_ns for start_ns, _ in borders[1:]), timeline.end_ns]
    decode = [(border_ns, end_ns) for (_, border_ns), end_ns in zip(borders, ends, strict=True)]
    return {"prefill": list(borders), "decode": decode}


def _reported_spans(timeline: Timeline) -> dict[str, list[tuple[int, int]]]:
    """Return the phases that the serving rank reported; the last phase of an iteration ends with it."""
    iterations = timeline.ranks[0].iterations
    starts = [timeline.start_ns, *(each.start_ns for each in iterations[1:]), timeline.end_ns]
    spans: dict[str, list[tuple[int, int]]] = {}
    for number, iteration in enumerate(iterations):
        reported = iteration.spans or ()
        if not reported:
            # The energy of a part without phases would be missing from their sum.
            return {}
        for span in reported:
            start_ns = starts[number] if span is reported[0] else span.start_ns
            end_ns = starts[number + 1] if span is reported[-1] else span.end_ns
            spans.setdefault(span.name, []).append((start_ns, end_ns))
    return spans


def span_tokens(timeline: Timeline, name: str) -> int | None:
    """Return the output tokens of a phase, if the task reports them."""
    counts = [
        span.output_tokens
        for each in timeline.ranks[0].iterations
        for span in each.spans or ()
        if span.name == name
    ]
    reported = [count for count in counts if count is not None]
    return sum(reported) if counts and len(reported) == len(counts) else None


def phase_energies(
    series: Series,
    spans: Mapping[str, list[tuple[int, int]]],
    timeline: Timeline,
    whole: WindowEnergy,
    before: Quiet | None = None,
    after: Quiet | None = None,
) -> dict[str, WindowEnergy]:
    """Return the energy of each phase, summed over its iterations.

    Only the outermost edges of a round are quiet. A counter that ticks is solved for all phases together,
    and then a phase shorter than ``SHORTEST_TICKS``, or ``SHORTEST_TICKS_PART_TIME``, has no energy.
    """
    means_s = {name: fmean(end - start for start, end in parts) / 1e9 for name, parts in spans.items()}
    if spans and before is not None and after is not None and solved_together(series, timeline):
        energies = _solve_phases(series, spans, before, after, whole)
        tick_s = series.period_s or 0.0
        least = SHORTEST_TICKS if series.domain.coverage >= 1 else SHORTEST_TICKS_PART_TIME
        for name, mean_s in means_s.items():
            if 0 < mean_s < least * tick_s:
                reason = (
                    f"not resolvable: {mean_s * 1e3:.3g} ms phase, {tick_s * 1e3:.3g} ms tick, in which no "
                    f"number of iterations shows phases below {least * tick_s * 1e3:.3g} ms"
                )
                energies[name] = WindowEnergy(None, reason=reason)
    else:
        energies = {
            name: sum_energies(
                [
                    energy_between(
                        series,
                        start_ns,
                        end_ns,
                        before if start_ns == timeline.start_ns else None,
                        after if end_ns == timeline.end_ns else None,
                    )
                    for start_ns, end_ns in parts
                ]
            )
            for name, parts in spans.items()
        }
    # Whether they are resolvable is decided for all rounds together: see ``metrics.values_of_rounds``.
    return energies


def solved_together(series: Series, timeline: Timeline) -> bool:
    """Return whether phases share ticks of a counter, with none missing, so that they are solved together."""
    domain = series.domain
    # Readings of a counter that is always fresh are ticks, too; one that rests is read at the marks.
    ticks = domain.max_age_s is None or not (domain.rests or domain.integrated)
    ticks = ticks and not series.smear_ns
    return ticks and series.reason_between(timeline.start_ns, timeline.end_ns) is None


def _solve_phases(
    series: Series,
    spans: Mapping[str, list[tuple[int, int]]],
    before: Quiet,
    after: Quiet,
    whole: WindowEnergy,
) -> dict[str, WindowEnergy]:
    """Solve for all phases and for the power of the gaps around them."""
    parts = sorted((start, end, name) for name, several in spans.items() for start, end in several)
    segments = [
        Segment(before.first.earliest_ns, parts[0][0], 0),
        *(Segment(*part) for part in parts),
        Segment(parts[-1][1], after.last.latest_ns, 1),
    ]
    targets = [[number for number, each in enumerate(segments) if each.label == name] for name in spans]
    solved = {
        name: widen_for_few(energy, len(target))
        for name, energy, target in zip(spans, solve_jointly(series, segments, targets), targets, strict=True)
    }
    missed_s = (1 - series.domain.coverage) * (series.period_s or 0.0)
    if missed_s:
        # Each border is a step within a tick that the sensor sees in part, as in ``coverage_variance``.
        powers_w = [
            (solved[name].energy_j or 0.0) / (sum(end - start for start, end in several) / 1e9)
            for name, several in spans.items()
        ]
        step_w = max([before.watts, after.watts, *powers_w]) - min(powers_w)
        for name, several in spans.items():
            unseen = Variances(coverage=len(several) * (missed_s * step_w) ** 2 / 6)
            solved[name] = solved[name].widen(unseen)
    # A decode of one token has no length.
    last = min(parts, key=lambda part: (-part[1], part[0]))[2]
    return _add_up_to(whole, solved, last)


def _add_up_to(whole: WindowEnergy, phases: dict[str, WindowEnergy], last: str) -> dict[str, WindowEnergy]:
    """Return phases whose sum is the energy of the round, which its quiet gaps tell more closely.

    The difference goes to the phases by their variances. The ``last`` one may have that of power after the
    work, as the round does.
    """
    if whole.energy_j is None:
        return phases
    excess_j = whole.energy_j - sum(each.energy_j or 0.0 for each in phases.values())
    total = sum(each.variances.total for each in phases.values()) or 1.0
    tail = Variances(shape=whole.variances.shape)
    return {
        name: each._replace(
            energy_j=(each.energy_j or 0.0) + excess_j * each.variances.total / total,
            variances=each.variances + (tail if name == last else NOTHING),
        )
        for name, each in phases.items()
    }
