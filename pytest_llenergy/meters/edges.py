# SPDX-License-Identifier: Apache-2.0
"""Joules between two moments, from a counter that only moves in ticks.

A counter read at the two ends of a window is wrong by up to a tick at either end. Instead, the value of
the cumulative energy *at* each edge is inferred:

- A quiet edge has idle power on its outer side. The nearest tick outside the window is taken, and the
  idle power between it and the edge is accounted for:  E(t) = E(tick) ± P_idle · |t − tick|.
- An inner edge (the border of two phases) has load on both sides. E(t) is interpolated between the ticks
  around it; with power between P_idle and P_max on either side the error is at most T/4 · (P_max − P_idle).

Uncertainties are standard uncertainties combined by the GUM (JCGM 100:2008): limits ±a of a quantity
with no preferred value give a/√3, and the time of a tick, known within a reader gap g, gives P · g/√12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from pytest_llenergy.meters.trace import Series

#: Ticks needed inside a quiet gap before its power is believed.
MIN_GAP_TICKS = 2


@dataclass(frozen=True)
class Power:
    """Watts and their standard uncertainty."""

    watts: float
    u_watts: float


@dataclass(frozen=True)
class Reading:
    """The cumulative energy at one moment, with the variance (J²) of that knowledge."""

    energy_j: float
    variance: float


@dataclass(frozen=True)
class Energy:
    """Joules of a window, their standard uncertainty, or the reason why there are none."""

    energy_j: float | None
    u_j: float | None
    reason: str | None = None


def quiet_power(series: Series, start_ns: int, end_ns: int) -> Power | None:
    """Mean power between the first and the last tick inside a quiet gap; ``None`` with too few ticks."""
    ticks = series.between(start_ns, end_ns)
    if len(ticks) < MIN_GAP_TICKS:
        return None
    first, last = ticks[0], ticks[-1]
    elapsed_s = (last.time_ns - first.time_ns) / 1e9
    watts = (last.energy_j - first.energy_j) / elapsed_s
    variance = _tick_variance(watts, first.gap_s, series) + _tick_variance(watts, last.gap_s, series)
    return Power(watts, math.sqrt(variance) / elapsed_s)


def at_start(series: Series, time_ns: int, idle: Power) -> Reading | None:
    """The energy at the start of a window that follows a quiet gap."""
    tick = series.before(time_ns)
    if tick is None:
        return None
    head_s = (time_ns - tick.time_ns) / 1e9
    variance = _edge_variance(idle, tick.gap_s, head_s, series)
    return Reading(tick.energy_j + idle.watts * head_s, variance)


def at_end(series: Series, time_ns: int, idle: Power) -> Reading | None:
    """The energy at the end of a window that a quiet gap follows."""
    tick = series.after(time_ns)
    if tick is None:
        return None
    tail_s = (tick.time_ns - time_ns) / 1e9
    variance = _edge_variance(idle, tick.gap_s, tail_s, series)
    return Reading(tick.energy_j - idle.watts * tail_s, variance)


def inside(series: Series, time_ns: int, highest_w: float, lowest_w: float) -> Reading | None:
    """The energy at a moment under load, whose power may change there between the two bounds."""
    before, after = series.before(time_ns), series.after(time_ns)
    if before is None or after is None:
        return None
    if before.time_ns == after.time_ns:
        return Reading(before.energy_j, _tick_variance(highest_w, before.gap_s, series))
    width_s = (after.time_ns - before.time_ns) / 1e9
    share = (time_ns - before.time_ns) / 1e9 / width_s
    energy_j = before.energy_j + share * (after.energy_j - before.energy_j)
    bound_j = width_s / 4 * max(0.0, highest_w - lowest_w)
    ticks = (1 - share) ** 2 * _tick_variance(highest_w, before.gap_s, series)
    ticks += share**2 * _tick_variance(highest_w, after.gap_s, series)
    return Reading(energy_j, bound_j**2 / 3 + ticks)


def powers(series: Series, start_ns: int, end_ns: int) -> tuple[float, float]:
    """Highest and lowest mean power (W) between neighbouring ticks of an interval; zeros without any."""
    ticks = series.between(start_ns, end_ns)
    steps = [(b.energy_j - a.energy_j) / ((b.time_ns - a.time_ns) / 1e9) for a, b in pairwise(ticks)]
    return max(steps, default=0.0), min(steps, default=0.0)


def between(start: Reading | None, end: Reading | None, series: Series) -> Energy:
    """The energy of a window whose two edges were read independently."""
    if series.reason is not None:
        return Energy(None, None, series.reason)
    if start is None or end is None:
        side = "before" if start is None else "after"
        return Energy(None, None, f"{series.meter}: {series.domain.name} did not tick {side} the window")
    return Energy(end.energy_j - start.energy_j, math.sqrt(start.variance + end.variance))


def _edge_variance(idle: Power, gap_s: float, distance_s: float, series: Series) -> float:
    # The idle power was taken from the same tick, so the two errors go together and are added as they are.
    return (math.sqrt(_tick_variance(idle.watts, gap_s, series)) + idle.u_watts * distance_s) ** 2


def _tick_variance(watts: float, gap_s: float, series: Series) -> float:
    return (watts * gap_s) ** 2 / 12 + series.domain.resolution_j**2 / 12
