# SPDX-License-Identifier: Apache-2.0
"""Percentiles of latencies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

#: Those that are told of every latency of a served load.
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: int) -> float:
    """By ``statistics.quantiles(method="inclusive")``; needs one value.

    That is linear interpolation between order statistics (definition 7 of Hyndman and Fan, 1996), the default
    of ``numpy.percentile``, which the benchmarks of vLLM and ML.ENERGY use.
    """
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]
