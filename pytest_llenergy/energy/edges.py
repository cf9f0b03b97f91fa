# SPDX-License-Identifier: Apache-2.0
"""Cumulative energy at the edges of a window, from a counter that moves in ticks.

A counter read at the two ends of a window is wrong by up to a tick at either end. Instead, the cumulative
energy *at* each edge is inferred from the ticks around it (``energy_at``):

- A **quiet edge** has idle power on its outer side, measured in the quiet gap there (``quiet_gaps.py``).
- An **edge under load** lies between two ticks, and only the mean power between them is known. The powers of
  the neighbouring ticks are extrapolated to the edge from both sides, of which the nearer one counts more.
- A counter that is **updated all the time** is read at the edge.
- A **running average** at t is the mean power over the s seconds (``Domain.smear_s``) before t, so that the
  integral I of the readings is the energy E as it was on average over the last s. If power is steady at P on
  one side of the edge,

      E(t) = I(t) + P s/2        steady from t - s to t
      E(t) = I(t + s) - P s/2    steady from t to t + s

  whatever it does on the other side, so that a window may be shorter than s. If it is steady on neither side,
  the mean powers P₀ in the s before and P₁ in the s after t give

      E(t) = I(t + s/2) - (P₁ - P₀) s/8

  which is exact if power changed once, at t. In a window shorter than s, P₀ or P₁ is a mean over both edges
  and says nothing. The most certain of the three counts.

A **short window** with fewer than two ticks inside is treated as a whole, since its two edges depend on the
same ticks. The counter gives the joules from the last tick before it to the first one after it. Power
that was steady on either side need not be so up to the edges: the joules that it does not explain may lie in
the window, all of them, none, or in proportion to its share of the time. Those are the limits. Windows that
are repeated are solved together instead (``joint_solution.py``).

The remaining uncertainty is kept by cause (``Variances``) and combined by the GUM (JCGM 100:2008): limits
±a of a quantity with no preferred value give a/√3 (4.3.7), and the time of a tick, known within an interval
of length g, gives P · g/√12.
"""

from __future__ import annotations

import math
from itertools import pairwise

from pytest_llenergy.energy.quiet_gaps import Quiet, energy_beside, quiet_power, resolution_variance
from pytest_llenergy.energy.trace import NEIGHBOURS, Series, Tick
from pytest_llenergy.energy.uncertainty import Reading, Variances, WindowEnergy

#: Share of the worst shape of power between two ticks that is taken as the limit of an edge under load. The
#: worst is one full swing exactly at the edge, which the distance of both sides shows; this is for the rest.
SHAPE = 0.5

#: Share by which power may go up and down unobserved between two ticks, at an edge under load.
HIDDEN = 0.6

#: From this many ticks inside a window on, its edges are independent.
INSIDE = 2

#: A reading of a fresh counter counts as made at an edge if it is this share of the window away.
AROUND = 1 / 16

#: Averaged power is steady if the readings of this share of the averaging time fluctuate by no more than this
#: share.
OBSERVED, STEADY = 0.5, 0.03


def energy_at(
    series: Series, time_ns: int, quiet: Quiet | None, *, starts: bool, long: bool
) -> Reading | None:
    """Return the energy at the start or the end of a window, ``None`` where nothing shows it.

    Args:
        series: Trace of the domain.
        time_ns: The edge (monotonic nanoseconds).
        quiet: The quiet gap on its outer side, if there is one.
        starts: Whether the window starts there.
        long: Whether the window is longer than running averages are, so that those inside it count.
    """
    if quiet is not None:
        return energy_beside(series, time_ns, quiet, starts=starts)
    if series.smear_ns:
        return average_at(series, time_ns, before=starts or long, after=not starts or long)
    return energy_under_load(series, time_ns)


def average_at(series: Series, time_ns: int, *, before: bool, after: bool) -> Reading | None:
    """Return the energy at an edge under load from averages, ``None`` if no side that counts is steady."""
    smear_ns, found = series.smear_ns, []
    left = quiet_power(series, time_ns - 2 * smear_ns, time_ns)
    right = quiet_power(series, time_ns, time_ns + 2 * smear_ns)
    if before and left is not None and _is_steady(series, left):
        away_s = (time_ns - left.last.time_ns) / 1e9
        found.append(_widen(series, left, energy_beside(series, time_ns, left, starts=True), away_s))
    if after and right is not None and _is_steady(series, right):
        away_s = (right.first.time_ns - time_ns) / 1e9 - series.smear_s
        found.append(_widen(series, right, energy_beside(series, time_ns, right, starts=False), away_s))
    middle = energy_under_load(series, time_ns) if before and after else None
    if middle is not None:
        found.append(_between(series, time_ns, middle))
    return min(found, key=lambda reading: reading.variances.total, default=None)


def _is_steady(series: Series, side: Quiet) -> bool:
    return side.length_s >= OBSERVED * series.smear_s and side.fluctuation_w <= STEADY * side.watts


def _widen(series: Series, side: Quiet, reading: Reading, away_s: float) -> Reading:
    """Widen the energy from a side that is no quiet gap.

    Power may go up and down there although the readings are steady, if its period divides s, and may have
    changed since the nearest reading that averages over this side alone, ``away_s`` ago.
    """
    hidden_s = math.hypot(max(away_s, 0.0), series.smear_s / 8)
    hidden = Variances(outside=(HIDDEN * side.watts * hidden_s) ** 2 / 3)
    return reading._replace(variances=reading.variances + hidden)


def _between(series: Series, time_ns: int, middle: Reading) -> Reading:
    """Return the energy at a moment from both sides.

    ``middle`` is the energy in the middle of the readings that average over both. Power that did not change
    once, at the moment, is off by up to an eighth of the range of the readings times s.
    """
    smear_s = series.smear_s
    powers_w = mean_powers(series, time_ns - series.smear_ns // 4, time_ns + series.smear_ns * 5 // 4)
    if not powers_w:
        return middle._replace(watts=0.0)
    step_w, range_w = powers_w[-1] - powers_w[0], max(powers_w) - min(powers_w)
    shape = Variances(edges=(range_w * smear_s / 8) ** 2)
    watts = (powers_w[0] + powers_w[-1]) / 2
    return Reading(middle.energy_j - step_w * smear_s / 8, middle.variances + shape, watts)


def energy_under_load(series: Series, time_ns: int) -> Reading | None:
    """Return the energy at a moment with unknown power on both sides.

    ``None`` unless there is a tick on each side.

    A running average over s lags by s/2, and rounds off a step of ΔP at the moment by up to ΔP s/8.
    """
    time_ns += series.smear_ns // 2
    lefts, rights = series.ticks_around(time_ns, NEIGHBOURS)
    if not lefts or not rights:
        return None
    lowest_w, highest_w = _swing(series, lefts[0].earliest_ns, rights[-1].latest_ns)
    before, after = lefts[-1], rights[0]
    # A step at the edge, the usual case, is the worst; and both edges of a window err the same way.
    smear = 2 * ((highest_w - lowest_w) * series.smear_s / 8) ** 2
    tick = find_tick_at(series, time_ns)
    if tick is not None:
        return Reading(tick.energy_j, Variances(edges=(highest_w * tick.gap_s) ** 2 / 12 + smear))
    head_s, tail_s = (time_ns - before.time_ns) / 1e9, (after.time_ns - time_ns) / 1e9
    mean_w = after.watts_since(before)
    left_w = before.watts_since(lefts[-2]) if len(lefts) > 1 else mean_w
    right_w = rights[1].watts_since(after) if len(rights) > 1 else mean_w
    from_left, from_right = before.energy_j + left_w * head_s, after.energy_j - right_w * tail_s
    share = head_s / (head_s + tail_s)
    energy_j = from_left - share * (from_left - from_right)
    energy_j = min(max(energy_j, before.energy_j), after.energy_j)
    # Power between its bounds on both sides of the moment cannot take the counter further off than this.
    lever_s = head_s * tail_s / (head_s + tail_s)
    swing_w = max(highest_w - lowest_w, 2 * HIDDEN * mean_w)
    shape = (SHAPE * swing_w * lever_s) ** 2 / 3
    # The two sides disagree most about the middle, and hardly at all about a moment next to a tick.
    apart = (4 * share * (1 - share) * (from_left - from_right)) ** 2 / 12
    ticks = ((1 - share) * mean_w * before.gap_s) ** 2 / 12 + (share * mean_w * after.gap_s) ** 2 / 12
    return Reading(energy_j, Variances(edges=shape + apart + ticks + smear))


def mean_powers(series: Series, start_ns: int, end_ns: int) -> list[float]:
    """Return the mean power (W) between neighbouring ticks of an interval, in time order."""
    return [b.watts_since(a) for a, b in pairwise(series.ticks_between(start_ns, end_ns))]


def find_tick_at(series: Series, time_ns: int) -> Tick | None:
    """Return the tick of a counter that was read at exactly this moment, if there is one."""
    before, after = series.tick_before(time_ns), series.tick_after(time_ns)
    if before is None or after is None:
        return None
    straddling = series.ticks_between(before.latest_ns + 1, after.earliest_ns - 1)
    if not straddling:
        return None
    width_s = (after.time_ns - before.time_ns) / 1e9
    return straddling[0] if straddling[0].gap_s < width_s / 8 else None


def _swing(series: Series, start_ns: int, end_ns: int) -> tuple[float, float]:
    """Return the lowest and the highest power that are possible around a moment, from the ticks there."""
    powers_w = mean_powers(series, start_ns, end_ns)
    lowest_w, highest_w = min(powers_w, default=0.0), max(powers_w, default=0.0)
    margin_w = (highest_w - lowest_w) / 2
    return max(0.0, lowest_w - margin_w), highest_w + margin_w


def is_short_window(series: Series, start_ns: int, end_ns: int) -> bool:
    """Return whether a window holds fewer than ``INSIDE`` ticks and was not read at its edges."""
    if len(series.ticks_between(start_ns, end_ns)) >= INSIDE:
        return False
    return not all(_is_read_at(series, time_ns, end_ns - start_ns) for time_ns in (start_ns, end_ns))


def _is_read_at(series: Series, time_ns: int, length_ns: int) -> bool:
    """Return whether a counter was read at an edge, or a fresh one shortly before and shortly after it."""
    if find_tick_at(series, time_ns) is not None:
        return True
    before, after = series.tick_before(time_ns), series.tick_after(time_ns)
    if series.domain.max_age_s is None or before is None or after is None:
        return False
    # A reading next to the edge decides; the other one only bounds the power in between.
    nearest_ns = min(time_ns - before.time_ns, after.time_ns - time_ns)
    return nearest_ns <= AROUND * length_ns


def short_window_energy(series: Series, start_ns: int, end_ns: int) -> WindowEnergy:
    """Return the energy of a short window, between what it may hold at least and at most."""
    lefts, rights = series.ticks_around(start_ns, NEIGHBOURS)[0], series.ticks_around(end_ns, NEIGHBOURS)[1]
    if not lefts or not rights:
        side = "after" if lefts else "before"
        return WindowEnergy(
            None, reason=f"{series.meter}: {series.domain.name} did not tick {side} the window"
        )
    before, after = lefts[-1], rights[0]
    mean_w = after.watts_since(before)
    left_w = before.watts_since(lefts[-2]) if len(lefts) > 1 else mean_w
    right_w = rights[1].watts_since(after) if len(rights) > 1 else mean_w
    head_s, inside_s = (start_ns - before.time_ns) / 1e9, (end_ns - start_ns) / 1e9
    tail_s, total_j = (after.time_ns - end_ns) / 1e9, after.energy_j - before.energy_j
    around_s = head_s + inside_s + tail_s
    own_j = total_j - left_w * head_s - right_w * tail_s
    candidates_j = (own_j, mean_w * inside_s, left_w * inside_s, right_w * inside_s)
    low_j, high_j = max(0.0, min(candidates_j)), min(total_j, max(candidates_j))
    # The usual case is one of the limits and not the middle, and the same one at both ends: u is half of the
    # width over √2, as for the U-shaped distribution (JCGM 101:2008, 6.4.6).
    shape = (high_j - low_j) ** 2 / 8
    # Power that goes up and down faster than the counter ticks looks steady.
    shape += (HIDDEN * mean_w * inside_s * max(0.0, 1 - inside_s / around_s)) ** 2 / 3
    ticks = (mean_w * before.gap_s) ** 2 / 12 + (mean_w * after.gap_s) ** 2 / 12
    variances = Variances(edges=ticks, resolution=resolution_variance(series), shape=shape)
    return WindowEnergy((low_j + high_j) / 2, variances)
