# SPDX-License-Identifier: Apache-2.0
"""Windows with hardly a tick inside: their two edges cannot be found one without the other.

The counter tells the joules from the last tick before such a window to the first one after it, and the
window is only a part of that. If power was steady on either side, it is taken to have been so up to the
edges, as in a quiet gap. If it was not, the joules that the power on the two sides does not explain may
lie in the window, all of them, none, or as many as is its share of the time: those are the limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pytest_llenergy.meters.edges import (
    HIDDEN,
    Quiet,
    meeting,
    power_between,
    quiet_edge,
    quiet_from,
    resolution_variance,
)
from pytest_llenergy.meters.quantities import Energy, Variances
from pytest_llenergy.meters.trace import NEIGHBOURS, Mark, Series, Tick

#: Ticks inside a window from which on its edges stand for themselves.
INSIDE = 2

#: Moments that are no further apart count as one (nanoseconds).
SAME_NS = 1_000_000

#: Share by which power may differ from tick to tick and still be called steady.
STEADY = 0.05


def is_short(series: Series, start_ns: int, end_ns: int) -> bool:
    """Whether fewer than ``INSIDE`` ticks lie in a window and the counter was not read at its edges."""
    if len(series.between(start_ns, end_ns)) >= INSIDE:
        return False
    return meeting(series, start_ns) is None or meeting(series, end_ns) is None


def short_window(series: Series, start_ns: int, end_ns: int, marks: Sequence[Mark] = ()) -> Energy:
    """The energy of a short window. ``marks`` are other moments at which power may have changed."""
    lefts, rights = series.around(start_ns, NEIGHBOURS)[0], series.around(end_ns, NEIGHBOURS)[1]
    if not lefts or not rights:
        side = "after" if lefts else "before"
        return Energy(None, reason=f"{series.meter}: {series.domain.name} did not tick {side} the window")
    before, after = lefts[-1], rights[0]
    left, right = _steady(series, lefts), _steady(series, rights)
    alone = not any(_outside(mark, before, after, start_ns, end_ns) for mark in marks)
    if alone and left is not None and right is not None and _alike(left, right):
        return _between_quiet(series, start_ns, end_ns, (before, left), (after, right))
    mean_w = power_between(before, after)
    left_w = power_between(lefts[-2], before) if len(lefts) > 1 else mean_w
    right_w = power_between(after, rights[1]) if len(rights) > 1 else mean_w
    middle = series.between(start_ns, end_ns)
    if middle:
        limits = [
            _limits(before, middle[0], start_ns, middle[0].time_ns, (left_w, None)),
            _limits(middle[0], after, middle[0].time_ns, end_ns, (None, right_w)),
        ]
    else:
        limits = [_limits(before, after, start_ns, end_ns, (left_w, right_w))]
    energy_j = sum((low_j + high_j) / 2 for low_j, high_j in limits)
    # The usual case is one of the limits and not the middle: u is half of the width over √2, as for the
    # U-shaped distribution (JCGM 101:2008, 6.4.6).
    variance = sum((high_j - low_j) ** 2 / 8 for low_j, high_j in limits)
    ticks = (mean_w * before.gap_s) ** 2 / 12 + (mean_w * after.gap_s) ** 2 / 12
    return Energy(energy_j, Variances(edges=variance + ticks, resolution=resolution_variance(series)))


def _outside(mark: Mark, before: Tick, after: Tick, start_ns: int, end_ns: int) -> bool:
    """Whether something else began or ended between the ticks around a window, but not within it.

    What begins at its end, or ends at its start, lies outside too.
    """
    if not before.earliest_ns < mark.time_ns < after.latest_ns:
        return False
    earliest_ns = start_ns - SAME_NS if mark.begins else start_ns + SAME_NS
    latest_ns = end_ns - SAME_NS if mark.begins else end_ns + SAME_NS
    return not earliest_ns <= mark.time_ns <= latest_ns


def _steady(series: Series, ticks: Sequence[Tick]) -> Quiet | None:
    """The power of neighbouring ticks, if it is the same from one to the next."""
    if len(ticks) < NEIGHBOURS:
        return None
    steps = [power_between(a, b) for a, b in pairwise(ticks)]
    blur = max(tick.gap_s for tick in ticks) / ((ticks[1].time_ns - ticks[0].time_ns) / 1e9)
    highest_w = max(steps)
    return quiet_from(series, ticks) if highest_w - min(steps) <= (STEADY + blur) * highest_w else None


def _alike(left: Quiet, right: Quiet) -> bool:
    """Power that is another after the window than before may have changed at any moment in between."""
    blur_w = 2 * math.hypot(left.u_watts, right.u_watts)
    return abs(left.watts - right.watts) <= STEADY * max(left.watts, right.watts) + blur_w


def _between_quiet(
    series: Series, start_ns: int, end_ns: int, before: tuple[Tick, Quiet], after: tuple[Tick, Quiet]
) -> Energy:
    (first, left), (last, right) = before, after
    head_s, tail_s = (start_ns - first.time_ns) / 1e9, (last.time_ns - end_ns) / 1e9
    energy_j = last.energy_j - first.energy_j - left.watts * head_s - right.watts * tail_s
    variances = quiet_edge(series, left, first, left.first, head_s)
    variances += quiet_edge(series, right, last, right.last, tail_s)
    # What goes up and down faster than the counter ticks looks steady.
    inside_s = (end_ns - start_ns) / 1e9
    lever_s = inside_s * (head_s + tail_s) / (inside_s + head_s + tail_s)
    variances += Variances(edges=(HIDDEN * (left.watts + right.watts) / 2 * lever_s) ** 2 / 3)
    return Energy(energy_j, variances + Variances(resolution=resolution_variance(series)))


def _limits(
    first: Tick, last: Tick, start_ns: int, end_ns: int, outside_w: tuple[float | None, float | None]
) -> tuple[float, float]:
    """Lowest and highest energy of a window, or a part of one, that lies between two ticks.

    ``outside_w`` is the power on its left and on its right, where that is outside.
    """
    head_s, inside_s = (start_ns - first.time_ns) / 1e9, (end_ns - start_ns) / 1e9
    tail_s = (last.time_ns - end_ns) / 1e9
    total_j = last.energy_j - first.energy_j
    everything_j = total_j - (outside_w[0] or 0.0) * head_s - (outside_w[1] or 0.0) * tail_s
    as_outside = [watts * inside_s for watts in outside_w if watts is not None]
    found = (everything_j, total_j * inside_s / (head_s + inside_s + tail_s), *as_outside)
    return max(0.0, min(found)), min(total_j, max(found))
