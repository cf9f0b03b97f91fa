# SPDX-License-Identifier: Apache-2.0
"""Quiet gaps around a round, and the cumulative energy at the edges next to them.

The power of a gap is measured between its first and its last tick. At an edge, the nearest tick of the gap is
taken, and the idle power between it and the edge accounted for: E(t) = C(tick) + P_idle (t − tick).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pvariance
from typing import NamedTuple

from pytest_llenergy.energy.trace import Series, Tick
from pytest_llenergy.energy.uncertainty import Power, Reading, Variances, student_factor

#: Ticks that a quiet gap needs for its power to count.
MIN_GAP_TICKS = 2

#: The power of a gap has a trend if it changes by more than this many times the blur from its ticks' times.
TREND = 4.0

#: Power next to the work differs from the rest of a quiet gap if by this many times their scatter.
UNSTEADY = 3.0


class Quiet(NamedTuple):
    """The power of a quiet gap, between its first and its last tick.

    Attributes:
        fluctuation_w: Standard deviation of the power from tick to tick that the ticks' times do not explain.
        steps: Mean power between neighbouring ticks (W).
        first_s: Time between the first two ticks (seconds).
        blur_w: Standard uncertainty of a step from the times of its ticks.
    """

    watts: float
    u_watts: float
    first: Tick
    last: Tick
    fluctuation_w: float
    steps: tuple[float, ...]
    first_s: float
    blur_w: float

    @property
    def length_s(self) -> float:
        """Time between the two ticks (seconds)."""
        return (self.last.time_ns - self.first.time_ns) / 1e9

    def power_at_edge(self, distance_s: float) -> float:
        """Return the power (W) between the end of the work and the first tick, ``distance_s`` after it.

        This is the mean of the gap, unless power still falls or rises by more than the times of the ticks
        explain, as while a board cools down or lowers its clock: then the trend is extrapolated to the edge.
        """
        steps = self.steps
        if len(steps) < 2 or abs(steps[0] - steps[1]) <= TREND * self.blur_w:
            return self.watts
        step_s = self.length_s / len(steps)
        return max(0.0, steps[0] + (steps[0] - steps[1]) * (1 + distance_s / step_s) / 2)


def quiet_power(series: Series, start_ns: int, end_ns: int) -> Quiet | None:
    """Return the mean power between the first and the last tick of a quiet gap; ``None`` with too few ticks.

    The readings of a running average belong to the gap only once its smear is over.
    """
    ticks = series.without_common_delay(series.ticks_between(start_ns + series.smear_ns, end_ns))
    if len(ticks) < MIN_GAP_TICKS:
        return None
    first, last = ticks[0], ticks[-1]
    watts = last.watts_since(first)
    elapsed_s = (last.time_ns - first.time_ns) / 1e9
    edges = (watts * first.gap_s) ** 2 / 12 + (watts * last.gap_s) ** 2 / 12 + resolution_variance(series)
    steps = tuple(b.watts_since(a) for a, b in pairwise(ticks))
    blur_w = watts * max(tick.gap_s for tick in ticks) * len(steps) / elapsed_s / math.sqrt(6)
    fluctuation_w = _fluctuation((steps,), blur_w, len(steps))
    first_s = (ticks[1].time_ns - first.time_ns) / 1e9
    return Quiet(watts, math.sqrt(edges) / elapsed_s, first, last, fluctuation_w, steps, first_s, blur_w)


def idle_power(before: Quiet, after: Quiet) -> Power:
    """Return the idle power around work, which may have changed from one gap to the other."""
    spread_w = abs(after.watts - before.watts) / math.sqrt(12)
    u_watts = math.hypot(before.u_watts / 2, after.u_watts / 2, spread_w)
    return Power((before.watts + after.watts) / 2, u_watts)


def energy_beside(series: Series, time_ns: int, quiet: Quiet, *, starts: bool) -> Reading:
    """Return the energy at an edge beside a quiet gap, after which a window starts, or before which it ends.

    Running averages over s lag by s/2, or otherwise if power varies.
    """
    near, far = (quiet.last, quiet.first) if starts else (quiet.first, quiet.last)
    away_s = (time_ns - near.time_ns) / 1e9
    # Averages that rise or fall show a change long ago, not a trend at the edge; nor is there one at a start.
    watts = quiet.watts if starts or series.smear_ns else quiet.power_at_edge(-away_s)
    energy_j = near.energy_j + watts * away_s + quiet.watts * series.smear_s / 2
    # The idle power depends on the near tick too: if that tick was later than assumed, the power is wrong as
    # well, in the direction that increases the error.
    reach = abs(away_s) / quiet.length_s
    # Fluctuations that are faster than the ticks are larger over a part of one.
    lasting_s = max(abs(away_s), quiet.length_s / len(quiet.steps))
    fluctuation = quiet.fluctuation_w**2 * (abs(away_s) * lasting_s + series.smear_s**2)
    variances = Variances(
        edges=(quiet.watts * near.gap_s * (1 + reach)) ** 2 / 12,
        outside=(quiet.watts * far.gap_s * reach) ** 2 / 12 + fluctuation,
        resolution=resolution_variance(series) * reach**2 / 2,
    )
    return Reading(energy_j, variances, quiet.watts)


def doubt_quiet_end(
    series: Series, start_ns: int, end_ns: int, before: Quiet, after: Quiet, variances: Variances
) -> tuple[float, str] | None:
    """Return the energy (J) of power that still fell after the work, and a sentence about it, if it shows.

    It shows as energy that neither the power of the work up to its end nor that of the gap explains: in the
    tick around the end, or in the first one after it. It matters if it is above two standard uncertainties.
    The start is not checked: work often begins with a peak, as prefill.
    """
    # A short gap is compared with the one on the other side.
    rest, first_s = after.steps[1:] or before.steps, after.first_s
    scatter_w = UNSTEADY / 2 * _scatter([rest, before.steps])
    found = [((after.steps[0] - fmean(rest)) * first_s, max(UNSTEADY * after.blur_w, scatter_w) * first_s)]
    inside = series.ticks_between(start_ns, end_ns)
    powers_w = [b.watts_since(a) for a, b in pairwise(inside)]
    if powers_w:
        last, highest_w = inside[-1], max(powers_w) + (max(powers_w) - min(powers_w)) / 2
        length_s = (end_ns - last.time_ns) / 1e9
        late_j = (
            energy_beside(series, end_ns, after, starts=False).energy_j - last.energy_j - highest_w * length_s
        )
        share = length_s * 1e9 / (last.time_ns - inside[-2].time_ns)
        found.append((late_j, highest_w * last.gap_s * (1 + share) / math.sqrt(12)))
    # Power that still falls fluctuates too: it must not hide itself.
    u_j = math.sqrt(variances.total - variances.outside)
    excess_j = sum(each_j for each_j, noise_j in found if each_j > 2 * math.hypot(u_j, noise_j))
    if not excess_j:
        return None
    return excess_j, f"power still fell after the work: {excess_j:.3g} J are beyond that before and after"


def share_fluctuation(before: Quiet, after: Quiet) -> tuple[Quiet, Quiet]:
    """Return both gaps around a window with the fluctuation that their steps show together."""
    first, second = (
        gap._replace(fluctuation_w=_fluctuation((before.steps, after.steps), gap.blur_w, len(gap.steps)))
        for gap in (before, after)
    )
    return first, second


def _fluctuation(groups: Sequence[Sequence[float]], blur_w: float, n: int) -> float:
    """Return the standard deviation (W) of the power from tick to tick that their times do not explain.

    Args:
        groups: Powers between the ticks of each gap, whose means may differ.
        blur_w: Standard uncertainty of a power from the times of its ticks.
        n: Number of powers in the gap next to the edge.
    """
    # The variance of the difference between one more step and the mean of the gap.
    unexplained = _scatter(groups) ** 2 * (1 + 1 / n) - blur_w**2
    return student_factor(sum(len(steps) - 1 for steps in groups)) * math.sqrt(max(0.0, unexplained))


def _scatter(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of values around the means of their groups, 0 without repeated values."""
    squares = sum(pvariance(values) * len(values) for values in groups if values)
    degrees = sum(len(values) - 1 for values in groups)
    return math.sqrt(squares / degrees) if degrees > 0 else 0.0


def resolution_variance(series: Series) -> float:
    """Return the variance (J²) of two readings, each truncated to a step of the counter."""
    return series.domain.resolution_j**2 / 6
