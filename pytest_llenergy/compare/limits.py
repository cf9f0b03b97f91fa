# SPDX-License-Identifier: Apache-2.0
"""How much the head differs from the baseline, with confidence limits, from logarithms of rounds.

Rounds of two sides are compared as two samples: the estimate is the Hodges-Lehmann shift, and its limits are
the order statistics of the Mann-Whitney test. Where the rounds were measured in alternating pairs, the
differences within pairs may scatter less, because what changes slowly is the same for both rounds of a pair.
Then the estimate is the median of their Walsh averages, and its limits are the order statistics of Wilcoxon's
signed-rank test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import hypot, log1p, pi, sqrt
from statistics import NormalDist, fmean, median

from pytest_llenergy.compare.rank_statistics import (
    confidence_limit_rank,
    one_sided_p_values,
    pairwise_differences,
    signed_rank_cdf,
    signed_rank_limit,
    walsh_averages,
)

#: Pairs are used only if their interval is narrower than that of the samples by this factor: two intervals
#: are two chances for an alarm. ``benchmarks/plugin/gate`` finds no more alarms with it than without pairs.
PAIRS_NARROWER = 0.85

#: Standard deviation of a normal distribution over its median absolute deviation: 1 / Phi^-1(3/4).
MAD_TO_SIGMA = 1.4826

#: Factors that make the spread of few rounds right on average, by their number; n / (n - 0.8) from ten on.
#: C. Croux, P. J. Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale", COMPSTAT
#: (1992), as is the share of the degrees of freedom that a median absolute deviation is worth.
FEW_ROUNDS = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
MAD_EFFICIENCY = 0.37

#: Standard error of a rank estimate over that of a mean if the scatter is normal (Lehmann, "Nonparametrics",
#: 1975).
RANKS_TO_MEAN = sqrt(pi / 3)

#: Rounds of the head that are far above every round of the baseline make a second level, from this number
#: and this share on.
FAR_ROUNDS, FAR_SHARE = 4, 1 / 3
#: Fewest that are named.
FEWEST_FAR = 2
#: Distance to the highest round of the baseline that counts as far.
FAR = log1p(0.10)


@dataclass(frozen=True)
class Shift:
    """The shift of logarithms from baseline to head.

    Attributes:
        value: The estimate.
        low: One-sided lower limit; ``None`` if the rounds are too few for limits at this alpha.
        high: One-sided upper limit.
        p_more: P-value of the rank test against "the head is not larger".
        p_less: P-value against "the head is not smaller".
        error: Standard error if the scatter is normal.
        paired: Whether it is taken from the differences within pairs.
    """

    value: float
    low: float | None
    high: float | None
    p_more: float
    p_less: float
    error: float
    paired: bool = False

    def widen_in_quadrature(self, by: float) -> Shift:
        """Combine the distance of each limit from the estimate with another, independent one."""
        if self.low is None or self.high is None or not by:
            return self
        low, high = hypot(self.value - self.low, by), hypot(self.high - self.value, by)
        return replace(self, low=self.value - low, high=self.value + high)


def relative_spread(logs: Sequence[float]) -> float:
    """Return the robust relative scatter of rounds, given as logarithms.

    This is the median absolute deviation from their median, scaled to the standard deviation of a normal
    distribution.
    """
    n = len(logs)
    centre = median(logs)
    few = FEW_ROUNDS.get(n) or n / (n - 0.8)
    return few * MAD_TO_SIGMA * median([abs(value - centre) for value in logs])


def standard_error(noise: float, n: int, m: int) -> float:
    """Return the standard error of the shift of ``n`` and ``m`` rounds with normal scatter ``noise``."""
    return RANKS_TO_MEAN * noise * sqrt(1 / n + 1 / m)


def shift_of_samples(base: Sequence[float], head: Sequence[float], alpha: float, noise: float) -> Shift:
    """Compare all rounds of both sides, each in ascending order."""
    n, m = len(base), len(head)
    shifts = pairwise_differences(base, head)
    k = confidence_limit_rank(n, m, alpha)
    low, high = (shifts[k - 1], shifts[-k]) if k else (None, None)
    p_more, p_less = one_sided_p_values(shifts, n, m)
    return Shift(median(shifts), low, high, p_more, p_less, standard_error(noise, n, m))


def shift_of_pairs(differences: Sequence[float], alpha: float) -> Shift:
    """Compare the rounds of each pair.

    Args:
        differences: Head minus baseline of each pair.
        alpha: One-sided error probability of each limit.
    """
    n = len(differences)
    averages = walsh_averages(differences)
    k = signed_rank_limit(n, alpha)
    low, high = (averages[k - 1], averages[-k]) if k else (None, None)
    below = sum(each <= 0 for each in averages)
    above = sum(each >= 0 for each in averages)
    error = RANKS_TO_MEAN * relative_spread(differences) / sqrt(n)
    return Shift(
        median(averages), low, high, signed_rank_cdf(below, n), signed_rank_cdf(above, n), error, paired=True
    )


def prefer_pairs(samples: Shift, differences: Sequence[float], alpha: float) -> Shift:
    """Return the shift of the pairs if their interval is clearly narrower, otherwise that of the samples."""
    if len(differences) < 2 or samples.low is None or samples.high is None:
        return samples
    pairs = shift_of_pairs(differences, alpha)
    if pairs.low is None or pairs.high is None:
        return samples
    narrower = pairs.high - pairs.low < PAIRS_NARROWER * (samples.high - samples.low)
    return pairs if narrower else samples


def differences_of_pairs(base: Mapping[int, float], head: Mapping[int, float]) -> list[float]:
    """Return head minus baseline of each pair whose rounds are both valid. Keys number the pairs."""
    return [value - base[pair] for pair, value in head.items() if pair in base]


def widen_for_unequal_spread(
    shift: Shift, base: Sequence[float], head: Sequence[float], alpha: float
) -> Shift:
    """Return limits that are at least as wide as those of Welch's test with robust spreads.

    The rank test assumes that both sides scatter alike. If the side with fewer rounds scatters more, its
    limits are too narrow (B. L. Welch, Biometrika 34 (1947)); otherwise they stay as they are.
    """
    few, many = sorted((base, head), key=len)
    if shift.low is None or shift.high is None or len(few) == len(many):
        return shift
    if relative_spread(few) <= relative_spread(many):
        return shift
    squares = [relative_spread(side) ** 2 / len(side) for side in (base, head)]
    total = sum(squares)
    degrees = total**2 / sum(
        square**2 / (MAD_EFFICIENCY * (len(side) - 1))
        for square, side in zip(squares, (base, head), strict=True)
    )
    half = student_quantile(1 - alpha, degrees) * RANKS_TO_MEAN * sqrt(total)
    return replace(shift, low=min(shift.low, shift.value - half), high=max(shift.high, shift.value + half))


def student_quantile(p: float, degrees: float) -> float:
    """Return the quantile of Student's t (Abramowitz and Stegun 26.7.5); 3 % low at 4 degrees, p = 0.99."""
    z = normal_quantile(p)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


@lru_cache(maxsize=256)
def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(p)


def normal_cdf(z: float) -> float:
    """Return the probability of at most ``z`` standard deviations."""
    return NormalDist().cdf(z)


@dataclass(frozen=True)
class SecondLevel:
    """Rounds of the head that lie far above all of the baseline.

    Attributes:
        count: Their number.
        factor: Their mean over the median of the baseline, as a logarithm.
        mean: The mean of all rounds of the head, likewise.
        p: Probability of so many highest rounds on one side if both were alike.
        rare: Whether they are so few that chance may have put them on one side.
    """

    count: int
    factor: float
    mean: float
    p: float
    rare: bool


def find_second_level(base: Sequence[float], head: Sequence[float]) -> SecondLevel | None:
    """Find a second level that the median hides: five of twelve rounds may be three times as high.

    The count is the statistic of S. Rosenbaum, "Tables for a nonparametric test of location", Ann. Math.
    Stat. 25 (1954): the values of one sample above the maximum of the other.
    """
    highest = max(base) + FAR
    far = [value for value in head if value > highest]
    n, m, k = len(base), len(head), len(far)
    centre = median(base)
    if k < FEWEST_FAR or k == m:
        return None
    if median([value for value in head if value <= highest]) > centre + FAR / 2:
        # All rounds are higher, which is a shift.
        return None
    p = 1.0
    for i in range(k):
        p *= (m - i) / (n + m - i)
    rare = k < FAR_ROUNDS or k <= FAR_SHARE * m
    return SecondLevel(k, fmean(far) - centre, fmean(head) - centre, p, rare)
