# SPDX-License-Identifier: Apache-2.0
"""Where a series changed its level: hints for people, never a gate.

Optimal partitioning of the logarithms by their squared distance from the mean of their segment: ``ruptures``,
C. Truong, L. Oudre, N. Vayatis, "Selective review of offline change point detection methods", Signal
Processing 167 (2020). A change must be worth its penalty, of which the scatter between neighbours is the
scale, and be large enough to care about.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, sqrt
from statistics import median

from pytest_llenergy.compare.statistics import MAD_TO_SIGMA
from pytest_llenergy.errors import PlanError

#: Sessions below which nothing is looked for, and the fewest on either side of a change.
FEWEST_SESSIONS, FEWEST_BESIDE = 8, 3

#: Relative changes below it are none.
SMALLEST_CHANGE = 0.02

#: Times sigma^2 log(n): what a change must save. 2 is Schwarz's criterion for a mean and a place.
PENALTY = 5.0

#: Relative scatter that is taken for granted: sessions that happen to agree are not that exact.
LEAST_NOISE = 0.002


def change_points(values: Sequence[float]) -> list[int]:
    """Indices of the first values of a new level; empty for few values, and for any that is not positive.

    Raises ``PlanError`` where ``ruptures`` is not installed.
    """
    if len(values) < FEWEST_SESSIONS or min(values) <= 0:
        return []
    try:
        import numpy as np
        import ruptures
    except ImportError:
        raise PlanError("changes need ruptures; pip install 'pytest-llenergy[history]'") from None
    logs = [log(value) for value in values]
    penalty = PENALTY * _noise(logs) ** 2 * log(len(logs))
    search = ruptures.KernelCPD(kernel="linear", min_size=FEWEST_BESIDE)
    found = search.fit(np.array(logs).reshape(-1, 1)).predict(pen=penalty)
    return _large(logs, [int(place) for place in found[:-1]])


def sizes(values: Sequence[float], places: Sequence[int]) -> list[float]:
    """The relative change at each place: of the median of its level from that of the level before."""
    logs = [log(value) for value in values]
    return [exp(each) - 1 for each in _steps(logs, places)]


def _noise(logs: Sequence[float]) -> float:
    """Scatter of neighbours, in which a change counts once."""
    steps = [abs(after - before) for before, after in pairwise(logs)]
    return max(LEAST_NOISE, MAD_TO_SIGMA * median(steps) / sqrt(2))


def _steps(logs: Sequence[float], places: Sequence[int]) -> list[float]:
    borders = [0, *places, len(logs)]
    levels = [median(logs[start:end]) for start, end in pairwise(borders)]
    return [after - before for before, after in pairwise(levels)]


def _large(logs: Sequence[float], places: list[int]) -> list[int]:
    """Without the smallest, one after the other, until all that are left count."""
    while places:
        steps = [abs(each) for each in _steps(logs, places)]
        smallest = min(range(len(places)), key=steps.__getitem__)
        if steps[smallest] >= log(1 + SMALLEST_CHANGE):
            break
        del places[smallest]
    return places
