# SPDX-License-Identifier: Apache-2.0
"""Energy of windows and phases whose edges share ticks, solved together from the increments of a counter.

A tick that falls between two windows, or between prefill and decode, counts energy of both. One such tick
cannot be divided, but many can, if their phase to the marks varies. The power is therefore modelled over a
whole stretch as the sum of

- a mean power of each *label* (a phase, windows of one name, the rests between them), with a trend from the
  start of its segments to their end,
- a deviation of each *segment* from the mean of its label,
- a *course* within the segments of a label, the same in each of them: power that rises at their start, say,
- a step that comes later than its mark, by the same time in each segment of a label, and
- fluctuation, independent from moment to moment.

Each is Gaussian, so that the energy of any set of segments has a best linear prediction from the increments,
with a standard uncertainty that includes all correlations (kriging; Rasmussen and Williams, *Gaussian
Processes for Machine Learning*, 2006, sections 2.2 and 2.7). How large the parts are is unknown: predictions
under several sizes are averaged, weighted by how well each explains the increments (ibid., section 5.2).
Where the ticks tell little, as when iterations keep step with them, the uncertainty is that of all sizes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from pytest_llenergy.energy.edges import INSIDE
from pytest_llenergy.energy.trace import Mark, Series, Tick
from pytest_llenergy.energy.uncertainty import Variances, WindowEnergy

#: Standard deviations that are tried, in every combination, as shares of the highest power: of fluctuation,
#: averaged over a tick; of a segment against its label; and together, of the course within a label, averaged
#: over a tick, and of the time in ticks by which power may step after its mark.
FLUCTUATIONS, DEVIATIONS = (0.01, 0.05, 0.3), (0.02, 0.1, 0.3)
COURSES = ((0.01, 0.005), (0.01, 0.05), (0.05, 0.05), (0.2, 0.05), (0.7, 0.05))

#: The same for how a window may differ from others of its name: not at all, or by any power. That is tried
#: for windows of up to ``MOST_UNLIKE`` segments.
UNLIKE, MOST_UNLIKE = (0.0, 1.0), 4

#: Power of the likelihood by which sizes are weighted. Real power is not Gaussian, and full weights would be
#: too sure of one size (Holmes and Walker, *Biometrika* 104, 2017, on general Bayesian updating).
CAUTION = 0.5

#: Standard deviation of the mean power of a label, as a multiple of the highest power of a tick.
ANY_POWER = 3.0

#: The same for the change of power from the start of each segment of a label to its end.
ANY_TREND = 0.6

#: Shortest window or phase that is solved, in ticks.
SHORTEST_TICKS = 1 / 20

#: Widths of the parts into which the course is divided from either end of a segment, in ticks.
WIDTHS = (SHORTEST_TICKS, 1 / 10, 1 / 5, 2 / 5)

#: Ticks that are kept on either side of a mark; those further inside a segment tell nothing about its ends.
KEPT_TICKS = 3

#: Ticks that are solved at once. Their matrices take time with the third power of it.
BLOCK_TICKS = 64

#: A rest between two windows that is shorter than this many ticks shares its power with other such rests.
REST_TICKS = 2.0

#: Ticks on either side of an edge within which other windows are solved with it.
NEAR_TICKS = 24

#: Marks on either side of an edge that are solved with it.
MOST_MARKS = 100

#: Label of all windows, where those of one name are few.
ANY_WINDOW = "any window"

#: Segments of a label from which the course of power at its edges can be learned.
REPEATED = 4

#: Marks no further apart than this count as one (nanoseconds).
SAME_NS = 100_000


class Segment(NamedTuple):
    """A stretch between two marks (monotonic nanoseconds). Segments with one label use similar power."""

    start_ns: int
    end_ns: int
    label: Hashable


def segments_between(
    marks: Sequence[Mark], start_ns: int, end_ns: int, tick_ns: float, whole: tuple[int, int] = (0, 0)
) -> list[Segment]:
    """Return the segments of a stretch, labelled by the names of the windows that were open.

    The first segment, the last one and a long one in which no window was open have labels of their own.

    Args:
        marks: Starts and ends of windows in the stretch. Those without a name only divide.
        start_ns: Start of the stretch (monotonic nanoseconds).
        end_ns: End of the stretch (monotonic nanoseconds).
        tick_ns: Period of the counter (nanoseconds).
        whole: Start and end of a part that is not divided (monotonic nanoseconds).
    """
    ordered = [*sorted(marks), Mark(end_ns, begins=False)]
    segments: list[Segment] = []
    open_windows, balance = Counter[str](), Counter[str]()
    for mark in ordered:
        balance[mark.name] += 1 if mark.begins else -1
        # Windows that end here and did not begin here were open from the start.
        open_windows[mark.name] = max(open_windows[mark.name], -balance[mark.name])
    moment_ns = start_ns
    for mark in ordered:
        until_ns = min(max(mark.time_ns, start_ns), end_ns)
        divides = until_ns - moment_ns > SAME_NS and not whole[0] < until_ns < whole[1]
        if divides or (until_ns == end_ns and until_ns > moment_ns):
            label: Hashable = tuple(
                sorted(name for name, count in open_windows.items() if name and count > 0)
            )
            outermost = moment_ns == start_ns or until_ns == end_ns
            if outermost or (not label and until_ns - moment_ns > REST_TICKS * tick_ns):
                label = moment_ns
            segments.append(Segment(moment_ns, until_ns, label))
            moment_ns = until_ns
        open_windows[mark.name] += 1 if mark.begins else -1
    return segments


def window_energy(series: Series, start_ns: int, end_ns: int, marks: Sequence[Mark]) -> WindowEnergy | None:
    """Return the energy of a window, solved with the windows around it that share its ticks.

    Windows of other names count too if fewer than ``REPEATED`` have its own. Returns ``None`` without a tick
    on each side of the window, and for a window with fewer than ``INSIDE`` ticks inside and fewer than
    ``REPEATED`` windows around it.

    Args:
        series: Trace of the domain.
        start_ns: Start of the window (monotonic nanoseconds).
        end_ns: End of the window (monotonic nanoseconds).
        marks: Starts and ends of all windows, in time order.
    """
    period_s = series.period_s
    before, after = series.tick_before(start_ns), series.tick_after(end_ns)
    if period_s is None or before is None or after is None:
        return None
    tick_ns = period_s * 1e9
    if end_ns - start_ns < SHORTEST_TICKS * tick_ns:
        return None
    reach_ns = round(NEAR_TICKS * tick_ns)
    # The middle of a long window is known from its ticks, whatever happened in it.
    whole = (start_ns + reach_ns, end_ns - reach_ns)
    near = _marks_near(marks, start_ns, reach_ns)
    near += [
        mark for mark in _marks_near(marks, end_ns, reach_ns) if not near or mark.time_ns > near[-1].time_ns
    ]
    moments_ns = [start_ns, end_ns, *(mark.time_ns for mark in near)]
    lefts = series.ticks_around(min(moments_ns), KEPT_TICKS + 1)[0] or series.ticks
    rights = series.ticks_around(max(moments_ns), KEPT_TICKS + 1)[1] or series.ticks
    first_ns, last_ns = lefts[0].earliest_ns, rights[-1].latest_ns
    # Power is not even beyond the nearest marks that are not solved.
    first, last = (
        bisect_left(marks, min(moments_ns), key=_time_ns),
        bisect_right(marks, max(moments_ns), key=_time_ns),
    )
    if first > 0 and marks[first - 1].time_ns < before.earliest_ns:
        first_ns = max(first_ns, marks[first - 1].time_ns)
    if last < len(marks) and marks[last].time_ns > after.latest_ns:
        last_ns = min(last_ns, marks[last].time_ns)
    own = (Mark(start_ns, begins=True), Mark(end_ns, begins=False))
    segments = segments_between([*near, *own], first_ns, last_ns, tick_ns, whole)
    target = [
        number
        for number, segment in enumerate(segments)
        if segment.start_ns >= start_ns - SAME_NS and segment.end_ns <= end_ns + SAME_NS
    ]
    repeats = _count_alike(segments, target)
    if repeats < REPEATED:
        # Windows of other names show as well how power changes at the edges of windows.
        segments = [
            each._replace(label=ANY_WINDOW)
            if number in target or (isinstance(each.label, tuple) and each.label)
            else each
            for number, each in enumerate(segments)
        ]
        repeats = _count_alike(segments, target)
    if not target or (repeats < REPEATED and len(series.ticks_between(start_ns, end_ns)) < INSIDE):
        return None
    return solve_window(series, segments, target, repeats)


def _count_alike(segments: Sequence[Segment], target: Sequence[int]) -> int:
    """Return how many segments have the label of a target, of the rarest if it has several."""
    labels = Counter(segment.label for segment in segments)
    return min((labels[segments[number].label] for number in target), default=0)


def _marks_near(marks: Sequence[Mark], time_ns: int, reach_ns: int) -> list[Mark]:
    """Return the marks within reach of a moment, of very many only the nearest."""
    first = bisect_left(marks, time_ns - reach_ns, key=_time_ns)
    middle = bisect_left(marks, time_ns, key=_time_ns)
    last = bisect_right(marks, time_ns + reach_ns, key=_time_ns)
    return list(marks[max(first, middle - MOST_MARKS) : min(last, middle + MOST_MARKS)])


def _time_ns(mark: Mark) -> int:
    return mark.time_ns


def solve_window(
    series: Series, segments: Sequence[Segment], target: Sequence[int], repeats: int = 1
) -> WindowEnergy:
    """Return the energy of a target, with the width that few repetitions leave.

    Args:
        series: Trace of the domain.
        segments: Consecutive segments, from before the target until after it.
        target: Indices of its segments.
        repeats: Segments with the label of the target.
    """
    unlike = target if len(target) <= MOST_UNLIKE else ()
    (energy,) = solve_jointly(series, segments, [target], unlike)
    return widen_for_few(energy, repeats)


def widen_for_few(energy: WindowEnergy, repeats: int) -> WindowEnergy:
    """Widen the energy of work that was repeated a few times only.

    That does not show how power changes at its edges. What a tick at an edge holds beyond the powers on its
    sides then lies within the work or outside it, rather than half in each: the variance is up to twice that
    of a normal distribution.
    """
    factor = 1 + min(1.0, REPEATED / max(1, repeats))
    return replace(energy, variances=replace(energy.variances, shape=factor * energy.variances.shape))


def solve_jointly(
    series: Series,
    segments: Sequence[Segment],
    targets: Sequence[Sequence[int]],
    unlike: Sequence[int] = (),
) -> list[WindowEnergy]:
    """Return the energy of each target, a set of segments.

    Only ticks within the segments are used; there must be some before the first target and after the last.

    Args:
        series: Trace of the domain.
        segments: Consecutive segments, from before the first target until after the last.
        targets: Indices of segments, for each target.
        unlike: Indices of segments that may differ from others of their label by any power.
    """
    ticks = _ticks_near(series, segments)
    cells = _divide(segments, targets, unlike, _median_s(ticks))
    totals = [WindowEnergy(0.0) for _ in targets]
    for block in _blocks(ticks):
        parts = _solve_block(block, cells, series)
        totals = [_joined(total, part) for total, part in zip(totals, parts, strict=True)]
    return totals


def _joined(first: WindowEnergy, second: WindowEnergy) -> WindowEnergy:
    return WindowEnergy(
        (first.energy_j or 0.0) + (second.energy_j or 0.0), first.variances + second.variances
    )


def _ticks_near(series: Series, segments: Sequence[Segment]) -> list[Tick]:
    """Return the ticks around a stretch, without those that are far from all marks."""
    ticks = series.ticks_between(segments[0].start_ns, segments[-1].end_ns)
    borders = [each.end_ns for each in segments[:-1]]
    kept: set[int] = {0, len(ticks) - 1}
    index = 0
    for border_ns in borders:
        while index < len(ticks) and ticks[index].time_ns < border_ns:
            index += 1
        kept.update(range(max(0, index - KEPT_TICKS - 1), min(len(ticks), index + KEPT_TICKS + 1)))
    return [ticks[index] for index in sorted(kept)]


def _median_s(ticks: Sequence[Tick]) -> float:
    steps = sorted(b.time_ns - a.time_ns for a, b in pairwise(ticks))
    return steps[len(steps) // 2] / 1e9


def _blocks(ticks: Sequence[Tick]) -> list[Sequence[Tick]]:
    """Divide ticks into blocks of equal length that share the tick between them."""
    count = -(-(len(ticks) - 1) // BLOCK_TICKS)
    cuts = [round(index * (len(ticks) - 1) / count) for index in range(count + 1)]
    return [ticks[first : last + 1] for first, last in pairwise(cuts)]


class _Cells(NamedTuple):
    """The parts of all segments within which power is taken as even, one row for each.

    Attributes:
        origin_ns: Moment from which times count (monotonic nanoseconds).
        tick_s: Period of the counter (seconds).
        starts_s: Start of each cell (seconds).
        ends_s: End of each cell (seconds).
        effects: For each kind of effect (deviation, course, late step, unlike) a matrix with one
            column for each of its values: what a value of one adds to the mean power of each cell.
        free: The same for the mean powers and the trends of labels, which have one size.
        targets: Which targets contain a cell, one column for each target.
    """

    origin_ns: int
    tick_s: float
    starts_s: Any
    ends_s: Any
    effects: tuple[Any, Any, Any, Any]
    free: Any
    targets: Any


def _divide(
    segments: Sequence[Segment], targets: Sequence[Sequence[int]], unlike: Sequence[int], tick_s: float
) -> _Cells:
    import numpy as np

    origin_ns = segments[0].start_ns
    edges_s: list[tuple[float, float]] = []
    positions: list[float] = []
    owners: list[int] = []
    parts: list[int] = []
    for number, segment in enumerate(segments):
        start_s, end_s = ((moment_ns - origin_ns) / 1e9 for moment_ns in segment[:2])
        widths_s = [share * tick_s for share in WIDTHS]
        while widths_s and 2 * sum(widths_s) >= end_s - start_s:
            widths_s.pop()
        inner_s = end_s - start_s - 2 * sum(widths_s)
        # Parts are numbered from the start of the segment and, below zero, from its end.
        numbered = [*enumerate(widths_s), (len(WIDTHS), inner_s)]
        numbered += [(-1 - part, width_s) for part, width_s in reversed(list(enumerate(widths_s)))]
        middle_s, length_s = (start_s + end_s) / 2, end_s - start_s
        for part, width_s in numbered:
            edges_s.append((start_s, start_s + width_s))
            positions.append((start_s + width_s / 2 - middle_s) / (length_s or 1.0))
            owners.append(number)
            parts.append(part)
            start_s += width_s
    starts_s, ends_s = np.array(edges_s).T
    # Rounding may leave nothing of the inner part.
    widths = np.maximum((ends_s - starts_s) / tick_s, 1e-6)[:, None]
    names = [segments[owner].label for owner in owners]
    labels = _indicators(names)
    first = np.array([[owner != before] for before, owner in pairwise([-1, *owners])])
    # A course of independent parts has the same energy in each width; a late step has one energy.
    courses = _indicators(list(zip(names, parts, strict=True))) / np.sqrt(widths)
    contained = np.array([[float(owner in target) for target in targets] for owner in owners])
    own = np.array([[float(owner == number) for number in unlike] for owner in owners])
    effects = (_indicators(owners), courses, labels * first / widths, own)
    # Powers of any size, and trends as large as the power.
    free = np.hstack([ANY_POWER * labels, ANY_TREND * labels * np.array(positions)[:, None]])
    return _Cells(origin_ns, tick_s, starts_s, ends_s, effects, free, contained)


def _indicators(values: Sequence[Hashable]) -> Any:
    """Return a matrix with a column for each different value, which is 1 in the rows of that value."""
    import numpy as np

    columns = {value: column for column, value in enumerate(dict.fromkeys(values))}
    found = np.zeros((len(values), len(columns)))
    found[range(len(values)), [columns[value] for value in values]] = 1.0
    return found


def _solve_block(ticks: Sequence[Tick], cells: _Cells, series: Series) -> list[WindowEnergy]:
    """Return the energy of each target between the first and the last of some ticks."""
    import numpy as np

    moments_s = np.array([(tick.time_ns - cells.origin_ns) / 1e9 for tick in ticks])
    increments_j = np.diff([tick.energy_j for tick in ticks])
    starts_s = np.clip(cells.starts_s, moments_s[0], moments_s[-1])
    ends_s = np.clip(cells.ends_s, moments_s[0], moments_s[-1])
    overlaps_s = np.clip(
        np.minimum(moments_s[1:, None], ends_s) - np.maximum(moments_s[:-1, None], starts_s), 0.0, None
    )
    elapsed_s = np.diff(moments_s)
    powers_w = increments_j / elapsed_s
    highest_w = max(float(powers_w.max()), 1e-9)
    inside_s = (ends_s - starts_s)[:, None] * cells.targets

    timing, resolution = _tick_noise(ticks, powers_w, series)
    # Matrices of the increments, and of the increments with the targets, in units of the highest power.
    parts = [
        (
            np.diag(elapsed_s) * cells.tick_s,
            overlaps_s @ cells.targets * cells.tick_s,
            inside_s.sum(0) * cells.tick_s,
        )
    ]
    for effect in (*cells.effects, cells.free):
        seen, wanted = overlaps_s @ effect, inside_s.T @ effect
        parts.append((seen @ seen.T, seen @ wanted.T, (wanted**2).sum(1)))
    tried = product(FLUCTUATIONS, DEVIATIONS, COURSES, UNLIKE if cells.effects[3].size else (0.0,))
    sizes = np.array([(first, second, *course, own, 1.0) for first, second, course, own in tried])
    sizes = sizes**2 * highest_w**2
    among, across, alone = (
        np.tensordot(sizes, np.array([part[kind] for part in parts]), 1) for kind in range(3)
    )
    among += timing + resolution

    # The prior mean of all powers is arbitrary, since labels may have any power.
    usual_w = float(np.median(powers_w))
    surprises_j = increments_j - usual_w * elapsed_s
    weights = np.linalg.solve(among, across)
    explained = np.linalg.solve(among, np.broadcast_to(surprises_j[:, None], (len(sizes), len(elapsed_s), 1)))
    log_evidence = -0.5 * (explained[:, :, 0] @ surprises_j + np.linalg.slogdet(among)[1])
    credence = np.exp(CAUTION * (log_evidence - log_evidence.max()))
    credence /= credence.sum()
    energies_j = usual_w * inside_s.sum(0) + np.einsum("snt,n->st", weights, surprises_j)
    variances = alone - np.einsum("snt,snt->st", across, weights)
    means_j = credence @ energies_j
    totals = credence @ (variances + energies_j**2) - means_j**2
    weights_used = np.tensordot(credence, weights, 1)
    by_ticks, by_steps = (
        np.einsum("nt,nm,mt->t", weights_used, noise, weights_used) for noise in (timing, resolution)
    )
    return [
        WindowEnergy(
            float(min(max(mean_j, 0.0), increments_j.sum())),
            Variances(
                edges=float(ticks_), resolution=float(steps), shape=max(0.0, float(total - ticks_ - steps))
            ),
        )
        for mean_j, total, ticks_, steps in zip(means_j, totals, by_ticks, by_steps, strict=True)
    ]


def _tick_noise(ticks: Sequence[Tick], powers_w: Any, series: Series) -> tuple[Any, Any]:
    """Return covariances of the increments (J²) from the unknown times of ticks and from the counter's steps.

    A tick that came earlier takes from one increment what it gives to the next one.
    """
    import numpy as np

    near_w = np.maximum(np.append(powers_w[:1], powers_w), np.append(powers_w, powers_w[-1:]))
    times = (near_w * np.array([tick.gap_s for tick in ticks])) ** 2 / 12
    steps = np.full(len(ticks), series.domain.resolution_j**2 / 12)
    timing, resolution = (
        np.diag(each[:-1] + each[1:]) - np.diag(each[1:-1], 1) - np.diag(each[1:-1], -1)
        for each in (times, steps)
    )
    return timing, resolution
