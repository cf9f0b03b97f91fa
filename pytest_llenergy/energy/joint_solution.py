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

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
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

#: The same for how a window may differ from others of its name: not at all, or by any power.
UNLIKE = 1.0

#: Power of the likelihood by which sizes are weighted. Real power is not Gaussian, and full weights would be
#: too sure of one size (Holmes and Walker, *Biometrika* 104, 2017, on general Bayesian updating).
CAUTION = 0.5

#: Sizes with less weight than this are left out.
NEGLIGIBLE = 1e-8

#: Standard deviation of the mean power of a label, as a multiple of the highest power of a tick, and of its
#: change from the start of each segment of the label to the end.
ANY_POWER, ANY_TREND = 3.0, 0.6

#: Shortest window or phase that is solved, in ticks.
SHORTEST_TICKS = 1 / 20

#: Widths of the parts into which the course is divided from either end of a segment, in ticks.
WIDTHS = (SHORTEST_TICKS, 1 / 10, 1 / 5, 2 / 5)

#: Ticks that are kept on either side of a mark; those further inside a segment tell nothing about its ends.
KEPT_TICKS = 4

#: Ticks that are solved at once. Their matrices take time with the third power of it. Where larger matrices
#: are multiplied, ``einsum`` does it in one thread: threads of a BLAS library wait for one another.
BLOCK_TICKS = 64

#: A rest between two windows that is shorter than this many ticks shares its power with other such rests.
REST_TICKS = 2.0

#: Windows that begin within ``SHARED_TICKS`` are solved from one stretch, which reaches ``NEAR_TICKS`` beyond
#: them, or less far if it would hold more than ``MOST_MARKS``. Longer ones than that have a stretch alone.
SHARED_TICKS, NEAR_TICKS, MOST_MARKS = 20, 14, 600

#: Windows that are solved at once, for the same reason.
TOGETHER = 40

#: Stretches of a series that are kept: windows are mostly asked for in order.
KEPT_STRETCHES = 4

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

    @property
    def is_window(self) -> bool:
        """Whether windows with names were open."""
        return self.label == ANY_WINDOW or (isinstance(self.label, tuple) and bool(self.label))


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
    """
    tick_ns = (series.period_s or 0.0) * 1e9
    before, after = series.tick_before(start_ns), series.tick_after(end_ns)
    if before is None or after is None or not tick_ns or end_ns - start_ns < SHORTEST_TICKS * tick_ns:
        return None
    reach_ns, whole, shared_until_ns = _reach(marks, start_ns, end_ns, tick_ns)
    first, last = (
        bisect_left(marks, reach_ns[0], key=_time_ns),
        bisect_right(marks, reach_ns[1], key=_time_ns),
    )
    near = marks[first:last]
    edges_ns = [start_ns, end_ns, *(mark.time_ns for mark in (*near[:1], *near[-1:]))]
    lefts = series.ticks_around(min(edges_ns), KEPT_TICKS)[0] or series.ticks
    rights = series.ticks_around(max(edges_ns), KEPT_TICKS)[1] or series.ticks
    first_ns, last_ns = lefts[0].earliest_ns, rights[-1].latest_ns
    # Power is not even beyond the nearest marks that are not solved.
    if first > 0 and marks[first - 1].time_ns < before.earliest_ns:
        first_ns = max(first_ns, marks[first - 1].time_ns)
    if last < len(marks) and marks[last].time_ns > after.latest_ns:
        last_ns = min(last_ns, marks[last].time_ns)
    # Nor does a counter that was wrong show the energy of that time.
    first_ns = max([first_ns, *(each.end_ns for each in series.outages if each.end_ns <= start_ns)])
    last_ns = min([last_ns, *(each.start_ns for each in series.outages if each.start_ns >= end_ns)])
    own = [
        Mark(edge_ns, begins=edge_ns == start_ns)
        for edge_ns in (start_ns, end_ns)
        if not any(abs(mark.time_ns - edge_ns) <= SAME_NS for mark in _beside(near, edge_ns))
    ]
    for alike in (False, True):
        key = (first_ns, last_ns, whole, len(near), *own, series.ticks_seen, alike)
        known: Stretch | None = series.stretches.get(key)
        if known is None:
            while len(series.stretches) >= KEPT_STRETCHES:
                # Another thread may drop it, too.
                series.stretches.pop(next(iter(series.stretches)), None)
            segments = segments_between([*near, *own], first_ns, last_ns, tick_ns, whole)
            known = series.stretches[key] = Stretch(series, _alike(segments) if alike else segments)
        stretch = known
        target = stretch.segments_within(start_ns - SAME_NS, end_ns + SAME_NS)
        repeats = min((stretch.counts[stretch.segments[number].label] for number in target), default=0)
        if target and repeats >= REPEATED:
            break
    else:
        if not target or len(series.ticks_between(start_ns, end_ns)) < INSIDE:
            return None
    return widen_for_few(stretch.solve_window(target, shared_until_ns), repeats)


def _reach(
    marks: Sequence[Mark], start_ns: int, end_ns: int, tick_ns: float
) -> tuple[tuple[int, int], tuple[int, int], float]:
    """Return what is solved with a window, what of it is not divided, and until when others share it."""
    shared_ns, near_ns = SHARED_TICKS * tick_ns, NEAR_TICKS * tick_ns
    if end_ns - start_ns > near_ns:
        # The middle of a long window is known from its ticks, whatever happened in it.
        whole = (round(start_ns + near_ns), round(end_ns - near_ns))
        return (round(start_ns - near_ns), round(end_ns + near_ns)), whole, start_ns
    while True:
        begin_ns = start_ns // shared_ns * shared_ns
        longest_ns = near_ns / 8 if end_ns - start_ns < near_ns / 8 else near_ns
        first_ns, last_ns = round(begin_ns - near_ns), round(begin_ns + shared_ns + longest_ns + near_ns)
        count = bisect_right(marks, last_ns, key=_time_ns) - bisect_left(marks, first_ns, key=_time_ns)
        if count <= MOST_MARKS or near_ns < 2 * (end_ns - start_ns):
            return (first_ns, last_ns), (0, 0), begin_ns + shared_ns
        shared_ns, near_ns = shared_ns / 2, near_ns / 2


def _beside(marks: Sequence[Mark], time_ns: int) -> Sequence[Mark]:
    index = bisect_left(marks, time_ns, key=_time_ns)
    return marks[max(0, index - 1) : index + 1]


def _alike(segments: Sequence[Segment]) -> list[Segment]:
    """Label all windows alike: those of other names show as well how power changes at their edges."""
    return [each._replace(label=ANY_WINDOW) if each.is_window else each for each in segments]


def _time_ns(mark: Mark) -> int:
    return mark.time_ns


def widen_for_few(energy: WindowEnergy, repeats: int) -> WindowEnergy:
    """Widen the energy of work that was repeated a few times only.

    That does not show how power changes at its edges. What a tick at an edge holds beyond the powers on its
    sides then lies within the work or outside it, rather than half in each: the variance is up to twice that
    of a normal distribution.
    """
    factor = 1 + min(1.0, REPEATED / max(1, repeats))
    return energy._replace(variances=energy.variances._replace(shape=factor * energy.variances.shape))


def solve_jointly(
    series: Series, segments: Sequence[Segment], targets: Sequence[Sequence[int]]
) -> list[WindowEnergy]:
    """Return the energy of each target, a set of segments.

    Only ticks within the segments are used; there must be some before the first target and after the last.
    """
    energies = Stretch(series, segments).solve(targets)
    # Readings that stood still may have been out of date in any of the segments.
    stale = Variances(outside=series.stale_j(segments[0].start_ns, segments[-1].end_ns) ** 2)
    return [energy.widen(stale) for energy in energies]


class Stretch:
    """Consecutive segments with the ticks around them, from which any of the segments can be solved."""

    def __init__(self, series: Series, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.counts = Counter(segment.label for segment in segments)
        ticks = _ticks_near(series, segments)
        cells = _Cells(segments, ticks)
        count = -(-(len(ticks) - 1) // BLOCK_TICKS)
        cuts = [round(index * (len(ticks) - 1) / count) for index in range(count + 1)]
        # Blocks share the tick between them.
        self._blocks = [_Block(ticks[first : last + 1], cells, series) for first, last in pairwise(cuts)]
        self._windows: dict[int, WindowEnergy] = {}

    def segments_within(self, start_ns: int, end_ns: int) -> list[int]:
        """Return the indices of the segments within two moments (monotonic nanoseconds)."""
        first = bisect_left(self.segments, start_ns, key=lambda each: each.start_ns)
        last = bisect_right(self.segments, end_ns, key=lambda each: each.end_ns)
        return list(range(first, last))

    def solve_window(self, target: Sequence[int], until_ns: float) -> WindowEnergy:
        """Return the energy of a window. Those that begin after it until a moment are solved with it."""
        if len(target) > 1:
            return self.solve([target], unlike=True)[0]
        (number,) = target
        if number not in self._windows:
            later = range(number + 1, len(self.segments))
            shared = [each for each in later if self.segments[each].start_ns < until_ns]
            numbers = [number, *(each for each in shared if self.segments[each].is_window)][:TOGETHER]
            energies = self.solve([[each] for each in numbers], unlike=True)
            self._windows.update(zip(numbers, energies, strict=True))
        return self._windows[number]

    def solve(self, targets: Sequence[Sequence[int]], *, unlike: bool = False) -> list[WindowEnergy]:
        """Return the energy of each target, a set of segments.

        With ``unlike``, each may differ from other segments of its label by any power.
        """
        found = [WindowEnergy(0.0) for _ in targets]
        for block in self._blocks:
            parts = block.solve(targets, unlike)
            found = [
                WindowEnergy((a.energy_j or 0.0) + (b.energy_j or 0.0), a.variances + b.variances)
                for a, b in zip(found, parts, strict=True)
            ]
        return found


def _ticks_near(series: Series, segments: Sequence[Segment]) -> list[Tick]:
    """Return the ticks around a stretch, without those that are far from all marks."""
    ticks = series.ticks_between(segments[0].start_ns, segments[-1].end_ns)
    kept: set[int] = {0, len(ticks) - 1}
    for segment in segments[:-1]:
        index = bisect_left(ticks, segment.end_ns, key=lambda tick: tick.time_ns)
        kept.update(range(max(0, index - KEPT_TICKS), min(len(ticks), index + KEPT_TICKS)))
    return [ticks[index] for index in sorted(kept)]


class _Cells:
    """The parts of all segments within which power is taken as even, one row for each.

    Attributes:
        origin_ns: Moment from which times count (monotonic nanoseconds).
        tick_s: Period of the counter (seconds).
        starts_s: Start of each cell (seconds).
        ends_s: End of each cell (seconds).
        owners: Index of the segment of each cell.
    """

    def __init__(self, segments: Sequence[Segment], ticks: Sequence[Tick]) -> None:
        import numpy as np

        self.origin_ns = segments[0].start_ns
        steps = sorted(b.time_ns - a.time_ns for a, b in pairwise(ticks))
        self.tick_s = tick_s = steps[len(steps) // 2] / 1e9
        edges_ns = np.array([(each.start_ns, each.end_ns) for each in segments]) - self.origin_ns
        begins_s, spans_s = edges_ns[:, 0] / 1e9, (edges_ns[:, 1] - edges_ns[:, 0]) / 1e9
        # As many widths from either end as leave an inner part; ``depths`` count from the nearer end.
        widths_s, sides_s = np.array([*WIDTHS, 0.0]) * tick_s, np.cumsum([0.0, *WIDTHS]) * tick_s
        many = np.searchsorted(2 * sides_s[1:], spans_s)
        self.owners = owners = np.repeat(np.arange(len(segments)), 2 * many + 1)
        many, spans_s, begins_s = many[owners], spans_s[owners], begins_s[owners]
        parts = np.arange(len(owners)) - np.searchsorted(owners, owners)
        depths = np.minimum(parts, 2 * many - parts)
        lengths_s = np.where(depths == many, spans_s - 2 * sides_s[many], widths_s[depths])
        done_s = np.where(parts > depths, spans_s - sides_s[depths] - lengths_s, sides_s[depths])
        positions = (done_s + lengths_s / 2) / np.maximum(spans_s, 1e-9) - 0.5
        self.starts_s, self.ends_s = begins_s + done_s, begins_s + done_s + lengths_s
        # Rounding may leave nothing of the inner part.
        widths = np.maximum(lengths_s / tick_s, 1e-6)
        known = {label: number for number, label in enumerate({each.label: None for each in segments})}
        names = np.array([known[each.label] for each in segments])[owners]
        # Parts count from the start of the segment and, below zero, from its end.
        places = np.where(depths == many, len(WIDTHS), np.where(parts > depths, -1 - depths, depths))
        labels = _grouped(names)
        # What a value of one adds to the mean power of each cell: a deviation of a segment; a course of
        # independent parts, with the same energy in each width; a late step of one energy; mean and trend.
        self._effects = (
            ((_grouped(owners), np.ones(len(owners))),),
            ((_grouped(names * (2 * len(WIDTHS) + 1) + places), widths**-0.5),),
            ((labels, (parts == 0) / widths),),
            ((labels, np.full(len(owners), ANY_POWER)), (labels, ANY_TREND * positions)),
        )

    def shares_of(self, lengths_s: Any) -> list[Any]:
        """Return the energy of one watt of each effect, by kind, from the time of each row in each cell."""
        import numpy as np

        return [
            np.hstack(
                [
                    np.add.reduceat((lengths_s * weights)[:, order], starts, axis=1)
                    for (order, starts), weights in kind
                ]
            )
            for kind in self._effects
        ]


def _grouped(numbers: Any) -> tuple[Any, Any]:
    """Return an order of the cells in which equal numbers are neighbours, and where each of them begins."""
    import numpy as np

    order = np.argsort(numbers, kind="stable")
    return order, np.flatnonzero(np.diff(numbers[order], prepend=numbers.min() - 1))


class _Block:
    """Increments between consecutive ticks, with the inverse of their covariance for each of the sizes."""

    def __init__(self, ticks: Sequence[Tick], cells: _Cells, series: Series) -> None:
        import numpy as np

        self._cells = cells
        moments_s = np.array([(tick.time_ns - cells.origin_ns) / 1e9 for tick in ticks])
        increments_j, elapsed_s = np.diff([tick.energy_j for tick in ticks]), np.diff(moments_s)
        starts_s, ends_s = (
            np.clip(each, moments_s[0], moments_s[-1]) for each in (cells.starts_s, cells.ends_s)
        )
        self._inside_s = ends_s - starts_s
        self._overlaps_s = np.clip(
            np.minimum(moments_s[1:, None], ends_s) - np.maximum(moments_s[:-1, None], starts_s), 0.0, None
        )
        powers_w = increments_j / elapsed_s
        highest_w = max(float(powers_w.max()), 1e-9)
        tried = product(FLUCTUATIONS, DEVIATIONS, COURSES)
        self._sizes = np.array([(one, two, *course, 1.0) for one, two, course in tried]) ** 2 * highest_w**2
        self._own = (UNLIKE * highest_w) ** 2
        self._seen = cells.shares_of(self._overlaps_s)
        parts = np.array(
            [np.diag(elapsed_s) * cells.tick_s, *(np.einsum("ik,jk->ij", seen, seen) for seen in self._seen)]
        )
        self._noise = _tick_noise(ticks, powers_w, series)
        self._among = np.einsum("sk,kij->sij", self._sizes, parts) + sum(self._noise)
        # The prior mean of all powers is arbitrary, since labels may have any power.
        self._usual_w, self._total_j = float(np.median(powers_w)), float(increments_j.sum())
        self._surprises_j = increments_j - self._usual_w * elapsed_s

    def _evidence(self, seen_s: Any, unlike: bool) -> Any:
        """Return the log evidence of each size and target, below it that of targets with any power."""
        import numpy as np

        # In the factor L of a matrix with rows R added below, these are R L⁻ᵀ if the rest of its diagonal
        # is large enough. Sums of their products give all evidence, without an inverse for each size.
        among, own = self._among, math.sqrt(self._own)
        rows = np.vstack([self._surprises_j, own * seen_s.T]) if unlike else self._surprises_j[None]
        n, more = among.shape[1], len(rows)
        extended = np.zeros((len(among), n + more, n + more))
        extended[:, :n, :n], extended[:, n:, :n] = among, rows
        extended[:, range(n, n + more), range(n, n + more)] = 1e30
        factor = np.linalg.cholesky(extended)
        surprise, *_ = last = factor[:, n:, :n].transpose(1, 0, 2)
        log_root = np.log(np.diagonal(factor, axis1=1, axis2=2)[:, :n]).sum(1)
        evidence = np.repeat((-0.5 * (surprise**2).sum(1) - log_root)[:, None], seen_s.shape[1], 1)
        if not unlike:
            return evidence
        shown, spread = np.einsum("tsn,sn->st", last[1:], surprise), 1 + (last[1:] ** 2).sum(2).T
        return np.vstack([evidence, evidence + 0.5 * (shown**2 / spread - np.log(spread))])

    def solve(self, targets: Sequence[Sequence[int]], unlike: bool) -> list[WindowEnergy]:
        """Return the energy of each target within the block."""
        import numpy as np

        chosen = np.zeros((len(targets), int(self._cells.owners[-1]) + 1))
        for row, target in zip(chosen, targets, strict=True):
            row[list(target)] = 1.0
        inside_s = chosen[:, self._cells.owners] * self._inside_s
        seen_s = np.array([self._seen[0][:, target].sum(1) for target in targets]).T
        wanted = self._cells.shares_of(inside_s)
        duration_s = inside_s.sum(1)
        evidence = self._evidence(seen_s, unlike)
        credence = np.exp(CAUTION * (evidence - evidence.max(0)))
        credence = (credence / credence.sum(0)).reshape(-1, len(self._sizes), len(targets))
        tried = (credence > NEGLIGIBLE).any((0, 2))
        sizes, credence = self._sizes[tried], credence[:, tried].reshape(-1, len(targets))
        inverse = np.linalg.inv(self._among[tried])
        explained = inverse @ self._surprises_j
        # Covariances of the increments with the targets, and of the targets, for each size.
        shared = [np.einsum("nk,tk->nt", *each) for each in zip(self._seen, wanted, strict=True)]
        across = np.einsum("sk,knt->snt", sizes, np.array([seen_s * self._cells.tick_s, *shared]))
        alone = sizes @ np.array([duration_s * self._cells.tick_s, *((each**2).sum(1) for each in wanted)])
        weights = inverse @ across
        energies_j = np.einsum("snt,sn->st", across, explained)
        variances = alone - np.einsum("snt,snt->st", across, weights)
        if unlike:
            # A power of its own adds own * seen seenᵀ to the covariance: its inverse follows from the other.
            changed = inverse @ seen_s
            spread = 1 + self._own * np.einsum("nt,snt->st", seen_s, changed)
            gain = self._own * (duration_s - np.einsum("nt,snt->st", seen_s, weights)) / spread
            weights = np.concatenate([weights, weights + gain[:, None] * changed])
            energies_j = np.vstack(
                [energies_j, energies_j + gain * np.einsum("nt,sn->st", seen_s, explained)]
            )
            variances = np.vstack([variances, variances + gain**2 * spread / self._own])
        means_j = (credence * energies_j).sum(0)
        totals = (credence * (variances + energies_j**2)).sum(0) - means_j**2
        means_j += self._usual_w * duration_s
        used = np.einsum("st,snt->nt", credence, weights)
        by_ticks, by_steps = (((noise @ used) * used).sum(0) for noise in self._noise)
        return [
            WindowEnergy(
                float(min(max(mean_j, 0.0), self._total_j)),
                Variances(
                    edges=float(ticks_),
                    resolution=float(steps),
                    shape=max(0.0, float(total - ticks_ - steps)),
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
