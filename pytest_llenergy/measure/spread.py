# SPDX-License-Identifier: Apache-2.0
"""What the scatter of the rounds says about their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, linear_regression, stdev

from pytest_llenergy.meters.student import student


def of_mean(values: Sequence[float]) -> float:
    """s/√n, widened for few values (GUM 4.2.3, G.3.2). Needs two values."""
    n = len(values)
    return stdev(values) / math.sqrt(n) * student(n - 1)


def of_dithered_mean(values: Sequence[float], phases: Sequence[float]) -> float:
    """The same for values of which each was taken in a stratum of its own.

    Only neighbouring strata differ by chance; what changes slowly over the phase is averaged out. Uses
    the successive differences in the order of phase, a closed ring (Wolter, Introduction to Variance
    Estimation, 2nd ed., chapter 8); these count for two thirds of as many independent values.
    """
    n = len(values)
    ordered = [value for _, value in sorted(zip(phases, values, strict=True))]
    squares = sum((b - a) ** 2 for a, b in zip(ordered, [*ordered[1:], ordered[0]], strict=True))
    return math.sqrt(squares / 2) / n * student(max(1, (n - 1) * 2 / 3))


def covers_tick(phases: Sequence[float | None], seen: float) -> bool:
    """Whether rounds started all over a tick, so that their mean is that of every phase.

    A sensor that sees the share ``seen`` of each tick sees something of any load, however short, unless
    all rounds miss a stretch of the tick as long as that.
    """
    known = sorted(phase for phase in phases if phase is not None)
    if not known or len(known) < len(phases):
        return False
    holes = [b - a for a, b in zip(known, [*known[1:], known[0] + 1], strict=True)]
    return max(holes) <= seen


def drift(values: Sequence[float]) -> tuple[float, float] | None:
    """Change from the first to the last value by a straight line, relative to their mean, and its t value.

    ``None`` below four values.
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
