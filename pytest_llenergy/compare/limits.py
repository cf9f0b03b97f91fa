# SPDX-License-Identifier: Apache-2.0
"""How much the head differs from the baseline, with confidence limits, from logarithms of rounds.

Rounds of two sides are two samples: the estimate is the Hodges-Lehmann shift, and its limits are the order
statistics of the Mann-Whitney test. Where rounds were measured in alternating pairs, the differences within
pairs may scatter less, because what changes slowly is the same for both rounds of a pair. Then the estimate
is the median of their Walsh averages, with the limits of Wilcoxon's signed-rank test.

Sources: H. B. Mann, D. R. Whitney, Ann. Math. Stat. 18 (1947); J. L. Hodges, E. L. Lehmann, Ann. Math. Stat.
34 (1963); M. Hollander, D. A. Wolfe, E. Chicken, "Nonparametric Statistical Methods", 3rd ed. (2014),
sections 3.1 to 3.3 and 4.1 to 4.3.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import hypot, pi, sqrt
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Logarithms of rounds. Lists, since most comparisons have a dozen, for which arrays are slower.
Logs = Sequence[float]

#: Largest sample for which the distribution is counted. Beyond, the normal approximation is within 1e-3;
#: below, it would find the same changes in ``benchmarks/plugin/gate``, in 7 to 25 % more pairs.
EXACT_UP_TO = 50

#: Pairs are used only if their interval is narrower than that of the samples by this factor: two intervals
#: are two chances for an alarm. ``benchmarks/plugin/gate`` finds no more alarms with it than without pairs.
PAIRS_NARROWER = 0.85

#: Standard deviation of a normal distribution over its median absolute deviation: 1 / Phi^-1(3/4).
MAD_TO_SIGMA = 1.4826

#: Factors that make the spread of few rounds right on average, by their number; n / (n - 0.8) from ten on.
#: C. Croux, P. J. Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale", COMPSTAT
#: (1992).
FEW_ROUNDS = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}

#: Standard error of a rank estimate over that of a mean if the scatter is normal (Lehmann, "Nonparametrics",
#: 1975).
RANKS_TO_MEAN = sqrt(pi / 3)

#: The standard normal distribution.
NORMAL = NormalDist()


@lru_cache(maxsize=512)
def _exact_distribution(n: int, m: int | None) -> Logs:
    """P(statistic <= 0), P(statistic <= 1) and so on, of ``rank_cdf``."""
    import numpy as np

    # Integers of Python, which are exact at any size.
    counts: npt.NDArray[Any] = np.zeros((n * m if m is not None else n * (n + 1) // 2) + 1, dtype=object)
    counts[0] = 1
    for i in range(1, n + 1):
        if m is None:
            # Subsets of 1, 2, ..., n by their sum.
            counts[i:] = counts[i:] + counts[:-i]
            continue
        # The Gaussian binomial coefficient: the product over i of (1 - q^(m+i)) / (1 - q^i).
        counts[m + i :] = counts[m + i :] - counts[: -m - i]
        for rest in range(i):
            counts[rest::i] = np.cumsum(counts[rest::i])
    found: list[float] = (np.cumsum(counts) / counts.sum()).tolist()
    return found


def rank_cdf(statistic: int, n: int, m: int | None = None) -> float:
    """Return the probability of at most this statistic if nothing differs, and no values are equal.

    It is Mann and Whitney's U of two samples; without ``m``, Wilcoxon's W of ``n`` differences.
    """
    if statistic < 0:
        return 0.0
    if max(n, m or 0) <= EXACT_UP_TO:
        exact = _exact_distribution(n, m)
        return exact[min(statistic, len(exact) - 1)]
    if m is None:
        mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
    else:
        mean, variance = n * m / 2, n * m * (n + m + 1) / 12
    return NORMAL.cdf((statistic + 0.5 - mean) / sqrt(variance))


@lru_cache(maxsize=4096)
def limit_rank(alpha: float, n: int, m: int | None = None) -> int:
    """Return which of the ordered differences, or Walsh averages, is the lower confidence limit.

    This is the largest k with P(statistic <= k - 1) <= alpha, counted from 1: the shift lies below the k-th
    smallest difference with a probability of at most ``alpha``. 0 if no limit has this ``alpha``.
    """
    k = 0
    while rank_cdf(k, n, m) <= alpha:
        k += 1
    return k


class Shift(NamedTuple):
    """The shift of logarithms from baseline to head, with one-sided limits."""

    value: float
    low: float | None  # None if the rounds are too few for limits at this alpha
    high: float | None
    p_more: float  # p-value of the rank test against "the head is not larger"; ties make it larger
    p_less: float  # the same against "the head is not smaller"
    error: float  # standard error if the scatter is normal

    def widen_in_quadrature(self, by: float) -> Shift:
        """Combine the distance of each limit from the estimate with another, independent one."""
        if self.low is None or self.high is None or not by:
            return self
        low, high = hypot(self.value - self.low, by), hypot(self.high - self.value, by)
        return self._replace(low=self.value - low, high=self.value + high)


def relative_spread(logs: Logs) -> float:
    """Return the robust relative scatter of rounds, given as logarithms.

    This is the median absolute deviation from their median, scaled to the standard deviation of a normal
    distribution.
    """
    n, centre = len(logs), median(logs)
    few = FEW_ROUNDS.get(n) or n / (n - 0.8)
    return few * MAD_TO_SIGMA * median([abs(value - centre) for value in logs])


def standard_error(noise: float, n: int, m: int) -> float:
    """Return the standard error of the shift of ``n`` and ``m`` rounds with normal scatter ``noise``."""
    return RANKS_TO_MEAN * noise * sqrt(1 / n + 1 / m)


def shift_of_samples(base: Logs, head: Logs, alpha: float, noise: float) -> Shift:
    """Compare all rounds of both sides."""
    import numpy as np

    differences = np.subtract.outer(head, base).ravel()
    n, m = len(base), len(head)
    return _find_shift(differences, alpha, standard_error(noise, n, m), n, m)


def shift_of_pairs(differences: Logs, alpha: float) -> Shift:
    """Compare the rounds of each pair, given as head minus baseline."""
    import numpy as np

    n = len(differences)
    averages = np.add.outer(differences, differences)[np.triu_indices(n)] / 2
    return _find_shift(averages, alpha, RANKS_TO_MEAN * relative_spread(differences) / sqrt(n), n)


def _find_shift(
    differences: npt.NDArray[np.float64], alpha: float, error: float, n: int, m: int | None = None
) -> Shift:
    differences.sort()
    ordered = differences.tolist()
    k, count = limit_rank(alpha, n, m), len(ordered)
    low, high = (ordered[k - 1], ordered[-k]) if k else (None, None)
    p_more = rank_cdf(bisect_right(ordered, 0.0), n, m)
    p_less = rank_cdf(count - bisect_left(ordered, 0.0), n, m)
    value = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Shift(value, low, high, p_more, p_less, error)


def prefer_pairs(samples: Shift, differences: Logs, alpha: float) -> Shift:
    """Return the shift of the pairs if their interval is clearly narrower, otherwise that of the samples."""
    if len(differences) < 2 or samples.low is None or samples.high is None:
        return samples
    pairs = shift_of_pairs(differences, alpha)
    if pairs.low is None or pairs.high is None:
        return samples
    narrower = pairs.high - pairs.low < PAIRS_NARROWER * (samples.high - samples.low)
    return pairs if narrower else samples


@lru_cache(maxsize=256)
def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal distribution."""
    return NORMAL.inv_cdf(p)
