# SPDX-License-Identifier: Apache-2.0
"""Exact rank statistics of two samples, using only the standard library.

Sources: H. B. Mann, D. R. Whitney, "On a test of whether one of two random variables is stochastically larger
than the other", Ann. Math. Stat. 18 (1947); J. L. Hodges, E. L. Lehmann, "Estimates of location based on rank
tests", Ann. Math. Stat. 34 (1963); M. Hollander, D. A. Wolfe, E. Chicken, "Nonparametric Statistical
Methods", 3rd ed. (2014), sections 3.1 to 3.3 and 4.1 to 4.3 for the confidence limits and 8.5 for Spearman's
coefficient.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import comb, sqrt
from statistics import NormalDist

#: Largest sample size for which the exact distribution is computed. Beyond it, the normal approximation is
#: within 1e-3.
EXACT_UP_TO = 50


@lru_cache(maxsize=256)
def _cumulative_counts(n: int, m: int) -> tuple[int, ...]:
    """Count the orderings of n and m values with U at most 0, 1, 2, ..., up to half the range of U.

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
    """Return P(U <= u) for samples of n and m values from one population, without ties.

    Args:
        u: Value of the statistic.
        n: Number of values in one sample.
        m: Number of values in the other.
    """
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
    """Return which of the n * m ordered differences is the lower confidence limit of the shift.

    This is the largest k with P(U <= k - 1) <= alpha: the shift lies below the k-th smallest difference with
    a probability of at most ``alpha``. The upper limit is the k-th largest difference.

    Args:
        n: Number of values in one sample.
        m: Number of values in the other.
        alpha: One-sided error probability of the limit.

    Returns:
        The rank, counted from 1, or 0 if there are too few values for any limit at this ``alpha``.
    """
    k = 0
    while mann_whitney_cdf(k, n, m) <= alpha:
        k += 1
    return k


def pairwise_differences(base: Sequence[float], head: Sequence[float]) -> list[float]:
    """Return all head_i - base_j in ascending order.

    Their median is the Hodges-Lehmann estimate of the shift. Sorted input makes this fastest.
    """
    descending = base[::-1]
    return sorted([h - b for h in head for b in descending])


def one_sided_p_values(ordered: Sequence[float], n: int, m: int) -> tuple[float, float]:
    """Return the p-values of the rank test for "head is not larger" and for "head is not smaller".

    Ties count in favour of both hypotheses, so they can only make p larger.

    Args:
        ordered: The result of ``pairwise_differences``.
        n: Number of base values.
        m: Number of head values.
    """
    not_larger = mann_whitney_cdf(bisect_right(ordered, 0.0), n, m)
    not_smaller = mann_whitney_cdf(n * m - bisect_left(ordered, 0.0), n, m)
    return not_larger, not_smaller


@lru_cache(maxsize=256)
def _signed_rank_counts(n: int) -> tuple[int, ...]:
    """Count the subsets of 1, 2, ..., n whose sum is at most 0, 1, 2, ..."""
    counts = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return tuple(accumulate(counts))


@lru_cache(maxsize=16384)
def signed_rank_cdf(w: int, n: int) -> float:
    """Return P(W <= w) for Wilcoxon's signed-rank statistic of n symmetric differences, without ties."""
    if w < 0:
        return 0.0
    if n > EXACT_UP_TO:
        scale = sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return NormalDist().cdf((w + 0.5 - n * (n + 1) / 4) / scale)
    counts = _signed_rank_counts(n)
    return counts[min(w, len(counts) - 1)] / (1 << n)


@lru_cache(maxsize=4096)
def signed_rank_limit(n: int, alpha: float) -> int:
    """Return which of the ordered Walsh averages of n differences is the lower confidence limit.

    As ``confidence_limit_rank``: the largest k with P(W <= k - 1) <= alpha. It is 0 if n is too small for a
    limit at this alpha.
    """
    k = 0
    while signed_rank_cdf(k, n) <= alpha:
        k += 1
    return k


def walsh_averages(differences: Sequence[float]) -> list[float]:
    """Return the means of all pairs of differences, each with itself too, in ascending order."""
    ordered = sorted(differences)
    return sorted([(a + b) / 2 for i, a in enumerate(ordered) for b in ordered[i:]])
