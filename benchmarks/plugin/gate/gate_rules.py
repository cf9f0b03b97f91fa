# SPDX-License-Identifier: Apache-2.0
"""Rules by which other tools flag a benchmark, and the plugin's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import comb, exp, lgamma, log, sqrt
from statistics import fmean, median, variance

from pytest_llenergy.compare.limits import rank_cdf

#: True if the head is called worse than the baseline.
IsRed = Callable[[Sequence[float], Sequence[float]], bool]


def mean_5_percent(base: Sequence[float], head: Sequence[float]) -> bool:
    """Apply pytest-benchmark's ``--benchmark-compare-fail=mean:5%``."""
    return fmean(head) > 1.05 * fmean(base)


def welch(base: Sequence[float], head: Sequence[float]) -> bool:
    """Apply Welch's t test: two-sided p below .05 and the head is higher."""
    of_base, of_head = variance(base) / len(base), variance(head) / len(head)
    if not of_base + of_head:
        return fmean(head) > fmean(base)
    t = (fmean(head) - fmean(base)) / sqrt(of_base + of_head)
    degrees = (of_base + of_head) ** 2 / (of_base**2 / (len(base) - 1) + of_head**2 / (len(head) - 1))
    return t > 0 and two_sided_p(t, degrees) < 0.05


def mann_whitney(base: Sequence[float], head: Sequence[float]) -> bool:
    """Apply google/benchmark's ``compare.py``: exact Mann-Whitney p below .05 and the head is higher."""
    return _rank_p(base, head) < 0.05


def asv(base: Sequence[float], head: Sequence[float], factor: float = 1.1) -> bool:
    """Apply asv 0.6: medians differ by ``factor`` (``--factor``) and Mann-Whitney's p is below .002.

    With six values per side the smallest such p is .0022, so asv can never flag a change. With fewer values
    asv decides by its intervals instead, which this function does not implement.
    """
    if comb(len(base) + len(head), len(base)) <= 1 / 0.002:
        raise ValueError(f"{len(base)} values per side are too few for asv's test")
    return median(head) > factor * median(base) and _rank_p(base, head) < 0.002


def asv_5_percent(base: Sequence[float], head: Sequence[float]) -> bool:
    """Apply the same with ``--factor 1.05``."""
    return asv(base, head, factor=1.05)


def codspeed(base: Sequence[float], head: Sequence[float], threshold: float = 0.10) -> bool:
    """Apply a threshold to the change of one value per benchmark, as CodSpeed does by default (10 %).

    The median stands for the value, which CodSpeed computes on its server.
    """
    return median(head) > (1 + threshold) * median(base)


def codspeed_3_percent(base: Sequence[float], head: Sequence[float]) -> bool:
    """Apply the same with a threshold of 3 %."""
    return codspeed(base, head, threshold=0.03)


def _rank_p(base: Sequence[float], head: Sequence[float]) -> float:
    """Return the two-sided Mann-Whitney p; 1.0 if the head is not higher."""
    n, m = len(base), len(head)
    ordered = sorted(base)
    lower = sum(n - bisect_left(ordered, h) for h in head)
    return 1.0 if 2 * lower >= n * m else min(1.0, 2 * rank_cdf(lower, n, m))


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability of a t at least this far from 0 (regularised incomplete beta function)."""
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction (Abramowitz and Stegun 26.5.8) by Lentz's method, for 0 <= x <= 1."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1 - x)
    scale = exp(_log_beta(a, b) + a * log(x) + b * log(1 - x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for i in range(1, 300):
        for term in (
            i * (b - i) * x / ((a + 2 * i - 1) * (a + 2 * i)),
            -(a + i) * (a + b + i) * x / ((a + 2 * i) * (a + 2 * i + 1)),
        ):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return scale * fraction


@lru_cache(maxsize=65536)
def _log_beta(a: float, b: float) -> float:
    return lgamma(a + b) - lgamma(a) - lgamma(b)
