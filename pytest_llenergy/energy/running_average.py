# SPDX-License-Identifier: Apache-2.0
"""Energy at an edge from power readings that are running averages.

A reading at t is the mean power over the s seconds (``Domain.smear_s``) before t. The integral I of the
readings is therefore the energy E as it was on average over the last s. If power is steady at P on one side
of a moment t,

    E(t) = I(t) + P s/2        steady from t - s to t
    E(t) = I(t + s) - P s/2    steady from t to t + s

whatever it does on the other side, so that a window may be shorter than s (``quiet_gaps``). If it is steady
on neither side, the mean powers P₀ in the s before and P₁ in the s after t give

    E(t) = I(t + s/2) - (P₁ - P₀) s/8

which is exact if power changed once, at t. In a window shorter than s, P₀ or P₁ is a mean over both edges and
says nothing. The most certain of the three counts.
"""

from __future__ import annotations

import math

from pytest_llenergy.energy.edges import HIDDEN, energy_under_load, mean_powers
from pytest_llenergy.energy.quiet_gaps import Quiet, energy_at_end, energy_at_start, quiet_power
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import Reading, Variances

#: Power is steady if the readings of this share of the averaging time fluctuate by no more than this share.
OBSERVED, STEADY = 0.5, 0.03


def average_at(series: Series, time_ns: int, *, before: bool, after: bool) -> Reading | None:
    """Return the energy at a moment without a quiet gap, ``None`` if power is steady on no side that counts.

    Args:
        series: Trace of the domain.
        time_ns: The moment (monotonic nanoseconds).
        before: Whether the power before it counts.
        after: Whether the power after it counts.
    """
    smear_ns, found = series.smear_ns, []
    left = quiet_power(series, time_ns - 2 * smear_ns, time_ns)
    right = quiet_power(series, time_ns, time_ns + 2 * smear_ns)
    if before and left is not None and _is_steady(series, left):
        away_s = (time_ns - left.last.time_ns) / 1e9
        found.append(_widen(series, left, energy_at_start(series, time_ns, left), away_s))
    if after and right is not None and _is_steady(series, right):
        away_s = (right.first.time_ns - time_ns) / 1e9 - series.smear_s
        found.append(_widen(series, right, energy_at_end(series, time_ns, right), away_s))
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
