# SPDX-License-Identifier: Apache-2.0
"""Find a trend over the rounds of a side: a machine that warms up, or a clock that falls.

Sources: M. Hollander, D. A. Wolfe, E. Chicken, "Nonparametric Statistical Methods", 3rd ed. (2014), section
8.5, for Spearman's coefficient; H. Theil (1950) and P. K. Sen, J. Am. Stat. Assoc. 63 (1968), for the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, sqrt
from operator import mul
from statistics import median

#: A trend over the rounds counts from this many standard deviations of Spearman's coefficient.
TREND_SIGMAS = 3.0
#: Spearman's coefficient from which the trend makes up most of the scatter.
STRONG_CORRELATION = 0.8


@dataclass(frozen=True)
class Drift:
    """The relative change of a trend from first to last round, and whether it dominates the scatter."""

    change: float
    strong: bool


def detect_drift(*logs: Sequence[float]) -> Drift | None:
    """Return the trend that all sides have in common, or ``None``. Values are logarithms in order."""
    totals, variances = zip(*map(rank_trend, logs), strict=True)
    total, variance = sum(totals), sum(variances)
    if not variance or abs(total) < TREND_SIGMAS * sqrt(variance):
        return None
    change = expm1(theil_sen_slope(logs) * (max(len(side) for side in logs) - 1))
    perfect = sum(sqrt(one * (len(side) - 1)) for one, side in zip(variances, logs, strict=True))
    return Drift(change, abs(total) >= STRONG_CORRELATION * perfect)


def rank_trend(values: Sequence[float]) -> tuple[float, float]:
    """Return the numerator of Spearman's coefficient between values and their order, and its variance.

    The numerator is the sum of products of both ranks, each relative to its mean. Without a trend its
    expectation is 0. Sums and variances of several samples can be added, so that a difference between the
    samples is not mistaken for a trend.
    """
    n = len(values)
    if n < 2:
        return 0.0, 0.0
    centre = (n - 1) / 2
    order_variation = n * (n * n - 1) / 12
    order = sorted(range(n), key=values.__getitem__)
    if len(set(values)) == n:
        total = sum(map(mul, range(n), order)) - n * centre * centre
        return total, order_variation * order_variation / (n - 1)
    ranks = _midranks(values, order)
    total = sum((rank - centre) * (i - centre) for i, rank in enumerate(ranks))
    return total, sum((rank - centre) ** 2 for rank in ranks) * order_variation / (n - 1)


def _midranks(values: Sequence[float], order: Sequence[int]) -> list[float]:
    """Ranks counted from 0; tied values share the mean of their ranks."""
    ranks = [0.0] * len(values)
    start = 0
    while start < len(values):
        end = start
        while end + 1 < len(values) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2
        start = end + 1
    return ranks


def theil_sen_slope(samples: Sequence[Sequence[float]]) -> float:
    """Return the median change per step over all pairs within each sample (Theil 1950, Sen 1968)."""
    slopes = [
        (values[j] - values[i]) / (j - i)
        for values in samples
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return median(slopes) if slopes else 0.0
