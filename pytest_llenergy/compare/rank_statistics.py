# SPDX-License-Identifier: Apache-2.0
"""Exact rank statistics of two samples. Standard library only.

Sources: H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is stochastically larger
than the other", Ann. Math. Stat. 18 (1947); J. L. Hodges, E. L. Lehmann, "Estimates of location based on rank
tests", Ann. Math. Stat. 34 (1963); M. Hollander, D. A. Wolfe, E. Chicken, "Nonparametric Statistical
Methods", 3rd ed. (2014), sections 4.1 to 4.3 for the limits and 8.5 for Spearman's coefficient.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import comb, sqrt
from operator import mul
from statistics import NormalDist, median

#: Up to so many values a side the distribution is counted out; beyond, the normal law is within 1e-3 of it.
EXACT_UP_TO = 50


@lru_cache(maxsize=256)
def _cumulative_counts(n: int, m: int) -> tuple[int, ...]:
    """In how many orders of n and m values U is at most 0, 1, 2, ... up to half of its range.

    The generating function is the Gaussian binomial coefficient: the product over i of (1 - q^(m+i)) / (1 -
    q^i).
    """
    size = n * m // 2 + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, n + 1):
        for u in range(size - 1, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, size):
            counts[u] += counts[u - i]
    return tuple(accumulate(counts))


@lru_cache(maxsize=65536)
def mann_whitney_cdf(u: int, n: int, m: int) -> float:
    """P(U <= u) where both samples, of n and m values, come from one population and no two are equal."""
    if u < 0:
        return 0.0
    if u >= n * m:
        return 1.0
    if max(n, m) > EXACT_UP_TO:
        scale = sqrt(n * m * (n + m + 1) / 12)
        return NormalDist().cdf((u + 0.5 - n * m / 2) / scale)
    counts = _cumulative_counts(n, m)
    total = comb(n + m, n)
    if u < len(counts):
        return counts[u] / total
    return (total - counts[n * m - u - 1]) / total


@lru_cache(maxsize=4096)
def confidence_limit_rank(n: int, m: int, alpha: float) -> int:
    """Which of the n * m ordered differences is the lower limit, counted from 1; 0 where none is sure enough.

    It is the largest k with P(U <= k - 1) <= alpha: the shift lies below the k-th smallest difference with a
    chance of at most ``alpha``. The upper limit is the k-th largest.
    """
    k = 0
    while mann_whitney_cdf(k, n, m) <= alpha:
        k += 1
    return k


def pairwise_differences(base: Sequence[float], head: Sequence[float]) -> list[float]:
    """All head_i - base_j, ordered. Their median is the Hodges-Lehmann estimate of the shift.

    Quickest where both are ordered already.
    """
    downwards = base[::-1]
    return sorted([h - b for h in head for b in downwards])


def middle(ordered: Sequence[float]) -> float:
    """The median of what is ordered already."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def one_sided_p_values(ordered: Sequence[float], n: int, m: int) -> tuple[float, float]:
    """One-sided p of the rank test for ``ordered`` differences: head is not larger, head is not smaller.

    Equal pairs count for either of these, so that ties make p larger, never smaller.
    """
    return mann_whitney_cdf(bisect_right(ordered, 0.0), n, m), mann_whitney_cdf(
        n * m - bisect_left(ordered, 0.0), n, m
    )


def rank_trend(values: Sequence[float]) -> tuple[float, float]:
    """How ranks of ``values`` go with their order: the sum of Spearman's coefficient, and its variance.

    The sum is of the products of both ranks, each from its mean; under no trend its expectation is 0. Sums
    and variances of several samples add up, which keeps a difference between samples out of the trend.
    """
    n = len(values)
    if n < 2:
        return 0.0, 0.0
    centre = (n - 1) / 2
    of_order = n * (n * n - 1) / 12
    order = sorted(range(n), key=values.__getitem__)
    if len(set(values)) == n:
        return sum(map(mul, range(n), order)) - n * centre * centre, of_order * of_order / (n - 1)
    ranks = _midranks(values, order)
    total = sum((rank - centre) * (i - centre) for i, rank in enumerate(ranks))
    return total, sum((rank - centre) ** 2 for rank in ranks) * of_order / (n - 1)


def _midranks(values: Sequence[float], order: Sequence[int]) -> list[float]:
    """Ranks from 0, where equal values share the mean of theirs."""
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
    """Median change from one value to the next, over all pairs within each sample (Theil 1950, Sen 1968)."""
    slopes = [
        (values[j] - values[i]) / (j - i)
        for values in samples
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return median(slopes) if slopes else 0.0
