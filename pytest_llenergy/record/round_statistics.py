# SPDX-License-Identifier: Apache-2.0
"""Statistics over rounds: the value of a metric, its uncertainty, and drift.

The value is the median, which one slow round in six does not move. The meters' errors at the edges of a round
differ from round to round, because rounds start in shuffled phase to the ticks. The errors therefore show in
the scatter of the rounds, from which the standard uncertainty is taken, unless the rounds happen to agree
better than the meter can measure: then it is the meter's uncertainty over √n, times √(π/2) for a median. The
uncertainty from what a part-time sensor did not sample counts in full, unless the starts of the rounds cover
the whole tick. The value is then the mean: each round sees another part of the load, so that only their sum
is the load. ``uncertainty_absolute`` adds the accuracy of the source, which does not shrink with n.

Few rounds say little about their own scatter. Uncertainties from it are therefore half of an interval that
contains the truth with p = 95.45 % if the scatter is normal: twice the stated value covers what two standard
deviations of a normal distribution cover, for any number of rounds (GUM 6.3.3, G.3). If rounds were added
because the first ones scattered too much, ``ADDED`` widens it further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, linear_regression, median, quantiles, stdev

import msgspec

from pytest_llenergy.record.record import Metric

#: How much larger the standard error of a median is than that of a mean if the scatter is normal.
MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)

#: Half of Student's t for p = 95.45 % by degrees of freedom: GUM (JCGM 100:2008), table G.2.
HALF_STUDENT = {1: 6.985, 2: 2.265, 3: 1.655, 4: 1.435, 5: 1.325, 6: 1.26, 7: 1.215, 8: 1.185, 9: 1.16}

#: The same for a median and the order statistics of ``_interval_of_median``, by the number of values. From
#: nine values on, the interval needs no assumption, and the factor only centres it on the median: at most the
#: last, from 12 values on. ``benchmarks/plugin/coverage/rounds_run.py --factors`` computes them.
HALF_INTERVAL = {3: 1.62, 4: 1.175, 5: 1.075, 6: 1.375, 7: 1.205, 8: 1.08, 9: 1.055, 10: 0.98, 11: 0.98}
HALF_INTERVAL_OF_MANY = 1.08

#: Factor of the uncertainty if rounds were added to so many first ones until it met a target. Rounds end when
#: their scatter happens to be small, so that an interval for a given number would cover too seldom. As with
#: repeated confidence intervals (Jennison and Turnbull, J. R. Stat. Soc. B 51 (1989)), one factor for every
#: look keeps 95 % wherever the rounds end. Found by simulation, for normal scatter of any size relative to
#: the target: ``benchmarks/plugin/coverage/rounds_run.py`` checks it.
ADDED, ADDED_TO_FEW = 1.45, {2: 2.6, 3: 1.9, 4: 1.75}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of one or more values.

    Uses linear interpolation between order statistics (definition 7 of Hyndman and Fan, 1996), the
    default of ``numpy.percentile``, which the benchmarks of vLLM and ML.ENERGY use.
    """
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


class RoundValue(msgspec.Struct, frozen=True, gc=False):
    """Value of a metric in one round.

    Attributes:
        value: The value, in the unit of the metric.
        meter: Standard uncertainty from the edges of the round.
        unsampled: Standard uncertainty from what a part-time sensor did not sample.
        accuracy: Standard uncertainty from the accuracy of the source.
        phase: Phase of the tick in which the round started.
        shape: Standard uncertainty that all rounds share: from the course of power between ticks, and from
            the offsets between the clocks of hosts.
    """

    value: float
    meter: float = 0.0
    unsampled: float = 0.0
    accuracy: float = 0.0
    phase: float | None = None
    shape: float = 0.0

    def scale(self, factor: float) -> RoundValue:
        """Return the value and its uncertainties, multiplied by a factor."""
        return RoundValue(
            self.value * factor,
            self.meter * factor,
            self.unsampled * factor,
            self.accuracy * factor,
            self.phase,
            self.shape * factor,
        )


def summarize_rounds(
    values: Sequence[RoundValue],
    unit: str,
    coverage: float = 1.0,
    *,
    gross: bool,
    is_rate: bool = False,
    added_to: int | None = None,
) -> Metric:
    """Return a metric from its values in the valid rounds.

    Args:
        values: One or more values.
        unit: Unit of the metric.
        coverage: Share of the time in which the sensors sample.
        gross: Whether a value of zero or less is impossible.
        is_rate: Whether the values are counts over times.
        added_to: Number of values to which the others were added to meet a target; None if none were.
    """
    n, numbers = len(values), [each.value for each in values]
    phases = [each.phase for each in values]
    unsampled = fmean(each.unsampled for each in values)
    dithered = n > 1 and unsampled > 0 and phases_cover_tick(phases, coverage)
    value = fmean(numbers) if dithered else middle_rate(numbers) if is_rate else median(numbers)
    if gross and value <= 0:
        kind = "mean" if dithered else "median"
        reason = f"not resolvable: the {kind} of {n} rounds is {value:.2g} J"
        return Metric(value=None, unit=unit, n=n, reason=reason)
    if n == 1:
        reason = "one round shows no scatter: uncertainty unknown"
        return Metric(value=value, unit=unit, n=1, reason=reason)
    meter = math.sqrt(fmean(each.meter**2 for each in values) / n)
    if dithered:
        scatter = uncertainty_of_dithered_mean(numbers, [phase or 0.0 for phase in phases])
        unsampled = 0.0
    else:
        scatter = uncertainty_of_median(numbers)
        meter *= MEDIAN_TO_MEAN if n > 2 else 1.0
    shape = fmean(each.shape for each in values)
    uncertainty = math.hypot(max(scatter * widening(added_to), meter), unsampled, shape)
    # As the value: an outlying round must not change it.
    accuracy = (fmean if dithered else median)([each.accuracy for each in values])
    return Metric(
        value=value,
        unit=unit,
        uncertainty=uncertainty,
        spread=scatter,
        uncertainty_absolute=math.hypot(uncertainty, accuracy),
        n=n,
    )


def widening(added_to: int | None) -> float:
    """Return the factor of an uncertainty if rounds were added to so many first ones; ``None`` if not."""
    return 1.0 if added_to is None else ADDED_TO_FEW.get(added_to, ADDED)


def middle_rate(values: Sequence[float]) -> float:
    """Return the median of rates as the inverse of the median time for one count.

    With an even number of rounds, the count and the time are then those of the same two middle rounds.
    """
    if len(values) % 2 or min(values) <= 0:
        return median(values)
    return 1 / median(1 / value for value in values)


def uncertainty_of_median(values: Sequence[float]) -> float:
    """Return half of the interval that contains the median with p = 95.45 %; needs two values.

    The distance between two order statistics, over the normal quantile of the probability that they enclose
    the median, which is binomial whatever the distribution: McKean and Schrader, "A comparison of methods for
    studentizing the sample median", Commun. Stat. B 13 (1984). Two values have the interval of their mean.
    """
    n = len(values)
    if n == 2:
        return stdev(values) / math.sqrt(2) * half_student(1)
    ordered = sorted(values)
    place, z = _interval_of_median(n)
    factor = HALF_INTERVAL.get(n, HALF_INTERVAL_OF_MANY)
    return (ordered[n - place] - ordered[place - 1]) / (2 * z) * factor


@lru_cache(maxsize=256)
def _interval_of_median(n: int) -> tuple[int, float]:
    """Return the place of the lower order statistic, from 1, and the normal quantile of the interval.

    The narrowest interval of at least 95 %. With six to eight values it is narrower, so that one outlier on
    either side does not widen it.
    """
    place = max(2 if n >= 6 else 1, math.floor((n + 1) / 2 - NormalDist().inv_cdf(0.975) * math.sqrt(n) / 2))
    # Integers, since 2**n may exceed the largest float.
    outside = sum(math.comb(n, below) for below in range(place)) / (1 << n)
    return place, NormalDist().inv_cdf(1 - outside)


def half_student(degrees: float) -> float:
    """Return half of Student's t for p = 95.45 %; beyond the table, by Abramowitz and Stegun 26.7.5."""
    return HALF_STUDENT.get(int(degrees), 1 + 1.25 / degrees + 1.53 / degrees**2)


def uncertainty_of_dithered_mean(values: Sequence[float], phases: Sequence[float]) -> float:
    """Return half of the interval (p = 95.45 %) of a mean of values, each taken in a stratum of the phase.

    Only the scatter between neighbouring strata counts; slow changes over the phase average out. Uses the
    successive differences in the order of phase, a closed ring (Wolter, Introduction to Variance Estimation,
    2nd ed., chapter 8), which are worth two thirds as many independent values.
    """
    n = len(values)
    ordered = [value for _, value in sorted(zip(phases, values, strict=True))]
    squares = sum((b - a) ** 2 for a, b in zip(ordered, [*ordered[1:], ordered[0]], strict=True))
    return math.sqrt(squares / 2) / n * half_student(max(1, (n - 1) * 2 / 3))


def phases_cover_tick(phases: Sequence[float | None], coverage: float) -> bool:
    """Return whether the starts of the rounds cover the whole tick, so that their mean covers every phase.

    A sensor that samples the share ``coverage`` of each tick samples part of any load, however short, unless
    no round starts within a stretch of the tick of that length.
    """
    starts = sorted(phase for phase in phases if phase is not None)
    if not starts or len(starts) < len(phases):
        return False
    holes = [b - a for a, b in zip(starts, [*starts[1:], starts[0] + 1], strict=True)]
    return max(holes) <= coverage


def linear_drift(values: Sequence[float]) -> tuple[float, float] | None:
    """Fit a line to at least four values; ``None`` for fewer.

    Returns:
        The change from the first to the last value relative to the mean, and its t value.
    """
    n = len(values)
    if n < 4:
        return None
    mean, order = fmean(values), range(n)
    slope, start = linear_regression(order, values)
    rest = sum((value - start - slope * index) ** 2 for index, value in enumerate(values))
    error = math.sqrt(rest / (n - 2) / sum((index - (n - 1) / 2) ** 2 for index in order))
    change = slope * (n - 1) / mean if mean else 0.0
    return change, slope / error if error else math.copysign(math.inf, slope) if slope else 0.0
