# SPDX-License-Identifier: Apache-2.0
"""Outlier sessions and change points of a series of sessions.

1. Sessions are clipped to the median of their neighbours ± 4 scaled MADs: F. R. Hampel, "The Influence Curve
   and Its Role in Robust Estimation", JASA 69 (1974). One bad session is then not a change.
2. The scatter is the long-run variance, which grows with correlation between sessions. It is estimated from
   differences between adjacent blocks, which overlap here: W. B. Wu, Z. Zhao, "Inference of trends in time
   series", J. R. Statist. Soc. B 69 (2007).
3. Levels are found by optimal partitioning, at least squares: B. Jackson et al., "An algorithm for optimal
   partitioning of data on an interval", IEEE Signal Processing Letters 12 (2005). A first search finds the
   large steps, without which the long-run variance is then estimated.

All on the logarithms. ``docs/history.md`` has the share of false and of missed changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, inf, log
from statistics import median

from pytest_llenergy.compare.limits import MAD_TO_SIGMA

#: Fewest sessions for change points, and fewest on either side of one.
MIN_SESSIONS, MIN_SEGMENT = 8, 3

#: Smallest relative change that counts.
MIN_CHANGE = 0.015

#: Squared error that a change must save, in long-run variances times log(n). Schwarz's criterion for a level
#: and a position is 2.
PENALTY = 5.0

#: Smallest relative scatter to assume, since sessions may agree by chance.
MIN_SCATTER = 0.002

#: Sessions on each side of one that its rolling median includes, and from how many scaled MADs on it is an
#: outlier.
NEIGHBOURS, OUTLIER_SIGMAS = 3, 4.0

#: The first search assumes that the long-run variance is so many times the variance between neighbours.
FIRST_RATIO = 5.0

#: Largest logarithm of a step; ``exp`` overflows above 709.
MAX_LOG = 700.0


def find_change_points(values: Sequence[float]) -> list[int]:
    """Return the indices at which a new level begins; empty for few values. Only positive values count."""
    kept = _positive(values)
    if len(kept) < MIN_SESSIONS:
        return []
    logs = [log(values[place]) for place in kept]
    clipped = [min(max(each, low), high) for each, (low, high) in zip(logs, _clip_limits(logs), strict=True)]
    unit = PENALTY * log(len(clipped))
    first = _partition(clipped, unit * FIRST_RATIO * _block_variance(clipped, 1))
    borders = [0, *first, len(clipped)]
    rest = [
        each - median(clipped[start:end]) for start, end in pairwise(borders) for each in clipped[start:end]
    ]
    found = _drop_small_steps(clipped, _partition(clipped, unit * _long_run_variance(rest)))
    return [kept[place] for place in found]


def find_outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of sessions far from their neighbours; empty for few values.

    Values that are not positive are outliers too.
    """
    kept = _positive(values)
    if len(kept) < MIN_SESSIONS:
        return []
    logs = [log(values[place]) for place in kept]
    limits = zip(kept, logs, _clip_limits(logs), strict=True)
    inside = {place for place, each, (low, high) in limits if low <= each <= high}
    return [place for place in range(len(values)) if place not in inside]


def step_sizes(values: Sequence[float], places: Sequence[int]) -> list[float]:
    """Return the relative change of the median level at each change point."""
    kept = _positive(values)
    logs = [log(values[place]) for place in kept]
    steps = _log_steps(logs, [bisect_left(kept, place) for place in places])
    return [exp(min(each, MAX_LOG)) - 1 for each in steps]


def _positive(values: Sequence[float]) -> list[int]:
    return [place for place, value in enumerate(values) if value > 0]


def _clip_limits(logs: Sequence[float]) -> list[tuple[float, float]]:
    """The rolling median of each session, minus and plus the distance from which it is an outlier."""
    size = 2 * NEIGHBOURS + 1
    # At both ends the window is as long as elsewhere, so that two outliers there are not its majority.
    starts = [min(max(0, place - NEIGHBOURS), len(logs) - size) for place in range(len(logs))]
    medians = [median(logs[start : start + size]) for start in starts]
    spread = MAD_TO_SIGMA * median(abs(each - middle) for each, middle in zip(logs, medians, strict=True))
    reach = OUTLIER_SIGMAS * max(MIN_SCATTER, spread)
    return [(middle - reach, middle + reach) for middle in medians]


def _long_run_variance(logs: Sequence[float]) -> float:
    """Estimate the variance of a long mean times its length, at least that between neighbours."""
    return max(_block_variance(logs, size) for size in (1, int(len(logs) ** (1 / 3))))


def _block_variance(logs: Sequence[float], size: int) -> float:
    """Estimate the variance of the mean of ``size`` neighbours, times ``size``, robust to few steps."""
    sums = [0.0, *accumulate(logs)]
    means = [(end - start) / size for start, end in zip(sums, sums[size:], strict=False)]
    steps = [abs(after - before) for before, after in zip(means, means[size:], strict=False)]
    return max(MIN_SCATTER**2, size / 2 * (MAD_TO_SIGMA * median(steps)) ** 2)


def _partition(logs: Sequence[float], penalty: float) -> list[int]:
    """Return where levels begin so that the squared error plus a penalty for each is the least."""
    import numpy as np

    centred = np.array(logs) - median(logs)
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (centred, centred**2))
    count = len(logs)
    least = np.full(count + 1, inf)
    least[0] = 0.0
    starts = [0] * (count + 1)
    for end in range(MIN_SEGMENT, count + 1):
        before = np.arange(end - MIN_SEGMENT + 1)
        errors = squares[end] - squares[before] - (sums[end] - sums[before]) ** 2 / (end - before)
        totals = least[before] + errors + penalty
        starts[end] = int(totals.argmin())
        least[end] = totals[starts[end]]
    places = []
    end = starts[count]
    while end:
        places.append(end)
        end = starts[end]
    return places[::-1]


def _log_steps(logs: Sequence[float], places: Sequence[int]) -> list[float]:
    borders = [0, *places, len(logs)]
    levels = [median(logs[start:end]) for start, end in pairwise(borders)]
    return [after - before for before, after in pairwise(levels)]


def _drop_small_steps(logs: Sequence[float], places: list[int]) -> list[int]:
    """Remove the smallest step repeatedly until all that remain are large enough."""
    while places:
        steps = [abs(each) for each in _log_steps(logs, places)]
        smallest = min(range(len(places)), key=steps.__getitem__)
        if steps[smallest] >= log(1 + MIN_CHANGE):
            break
        del places[smallest]
    return places
