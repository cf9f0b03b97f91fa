# SPDX-License-Identifier: Apache-2.0
"""Energy of a window from power readings that are running averages.

A reading at t is the mean power over the s seconds (``Domain.smear_s``) before t. The integral I of the
readings is therefore the energy E as it was on average over the last s. If power is steady at P on one side
of a moment t,

    E(t) = I(t) + P s/2        steady from t - s to t
    E(t) = I(t + s) - P s/2    steady from t to t + s

whatever it does on the other side, so that a window may be shorter than s. If it is steady on neither side,
the mean powers P₀ in the s before and P₁ in the s after t give

    E(t) = I(t + s/2) - (P₁ - P₀) s/8

which is exact if power changed once, at t. In a window shorter than s, P₀ or P₁ is a mean over both edges and
says nothing. The most certain of the three counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pytest_llenergy.energy.edges import HIDDEN, energy_under_load, mean_powers
from pytest_llenergy.energy.quiet_gaps import (
    Quiet,
    energy_at_end,
    energy_at_start,
    quiet_power,
    resolution_variance,
)
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.uncertainty import Reading, Variances, WindowEnergy

#: Power is steady if the readings of this share of the averaging time fluctuate by no more than this share.
OBSERVED, STEADY = 0.5, 0.03


def averaged_energy(
    series: Series, start_ns: int, end_ns: int, before: Quiet | None, after: Quiet | None
) -> WindowEnergy:
    """Return the energy of a window from running averages, or a reason.

    Args:
        series: Trace of the domain.
        start_ns: Start of the window (monotonic nanoseconds).
        end_ns: End of the window (monotonic nanoseconds).
        before: Quiet gap before the window, if there is one.
        after: Quiet gap after the window, if there is one.
    """
    long = end_ns - start_ns >= series.smear_ns
    starts = [_beside(series, start_ns, before, energy_at_start, in_gap=True)] if before else []
    ends = [_beside(series, end_ns, after, energy_at_end, in_gap=True)] if after else []
    starts = starts or _readings(series, start_ns, before=True, after=long)
    ends = ends or _readings(series, end_ns, before=long, after=True)
    if not starts or not ends:
        side = "after" if starts else "before"
        reason = (
            f"not resolvable: {(end_ns - start_ns) / 1e6:.3g} ms window, power averaged over "
            f"{series.smear_s * 1e3:.0f} ms and not steady {side} the window"
        )
        return WindowEnergy(None, reason=reason)
    start, start_w = min(starts, key=_variance)
    end, end_w = min(ends, key=_variance)
    # If all readings are equally late, the error depends only on the powers at the edges.
    shifted_j = (end_w - start_w) * series.shift_s
    common = Variances(outside=shifted_j**2 / 12, resolution=resolution_variance(series))
    return WindowEnergy(end.energy_j - start.energy_j, start.variances + end.variances + common)


def _variance(found: tuple[Reading, float]) -> float:
    return found[0].variances.total


def _readings(series: Series, time_ns: int, *, before: bool, after: bool) -> list[tuple[Reading, float]]:
    """Return the energy at a moment, with the power (W) there, from the sides that may be used."""
    smear_ns, found = series.smear_ns, []
    left = quiet_power(series, time_ns - 2 * smear_ns, time_ns)
    right = quiet_power(series, time_ns, time_ns + 2 * smear_ns)
    if before and left is not None and _is_steady(series, left):
        found.append(_beside(series, time_ns, left, energy_at_start))
    if after and right is not None and _is_steady(series, right):
        found.append(_beside(series, time_ns, right, energy_at_end))
    middle = energy_under_load(series, time_ns) if before and after else None
    return [*found, *([_between(series, time_ns, middle)] if middle else [])]


def _is_steady(series: Series, side: Quiet) -> bool:
    return side.length_s >= OBSERVED * series.smear_s and side.fluctuation_w <= STEADY * side.watts


def _beside(
    series: Series,
    time_ns: int,
    side: Quiet,
    reading: Callable[[Series, int, Quiet], Reading],
    in_gap: bool = False,
) -> tuple[Reading, float]:
    """Return the energy at a moment, and the power (W), from one side.

    Power that goes up and down there lags by another time than s/2. Outside a quiet gap it may do so although
    the readings are steady, if its period divides s, and may have changed since the nearest reading that
    averages over this side alone.
    """
    smear_s = series.smear_s
    # Averages that rise or fall show a change long ago, not a trend at the edge.
    found = reading(series, time_ns, side._replace(steps=()))
    away_s = max((time_ns - side.last.time_ns) / 1e9, (side.first.time_ns - time_ns) / 1e9 - smear_s)
    hidden_s = 0.0 if in_gap else math.hypot(away_s, smear_s / 8)
    outside = (side.fluctuation_w * smear_s) ** 2 + (HIDDEN * side.watts * hidden_s) ** 2 / 3
    energy_j = found.energy_j + side.watts * smear_s / 2
    return Reading(energy_j, found.variances + Variances(outside=outside)), side.watts


def _between(series: Series, time_ns: int, middle: Reading) -> tuple[Reading, float]:
    """Return the energy at a moment, and the power (W), from both sides.

    ``middle`` is the energy in the middle of the readings that average over both. Power that did not change
    once, at the moment, is off by up to an eighth of the range of the readings times s.
    """
    smear_s = series.smear_s
    powers_w = mean_powers(series, time_ns - series.smear_ns // 4, time_ns + series.smear_ns * 5 // 4)
    if not powers_w:
        return middle, 0.0
    step_w, range_w = powers_w[-1] - powers_w[0], max(powers_w) - min(powers_w)
    shape = Variances(edges=(range_w * smear_s / 8) ** 2)
    reading = Reading(middle.energy_j - step_w * smear_s / 8, middle.variances + shape)
    return reading, (powers_w[0] + powers_w[-1]) / 2
