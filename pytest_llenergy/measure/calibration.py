# SPDX-License-Identifier: Apache-2.0
"""How many iterations a round needs so that what the meters cannot know stays below the target."""

from __future__ import annotations

import math
import time

from pytest_llenergy.measure.warmup import WarmUp
from pytest_llenergy.meters.edges import quiet_power
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.trace import Series

#: Ticks that a round should hold, so that the power inside it is seen.
ROUND_TICKS = 3

#: Share of the target that is left to the meters; the rest is for the scatter of the work itself.
METER_SHARE = 0.5


def iterations_for(
    warmup: WarmUp, rounds: int, gap_s: float, target: float, budget_s: float, sampler: Sampler
) -> int:
    """Iterations of each round, as many as the target needs and the budget allows, at least one.

    Measures a quiet gap for it. Without a warm-up the duration is not known and the answer is one.
    """
    if not warmup.iteration_s:
        return 1
    start_ns = time.monotonic_ns()
    with sampler.closely():
        time.sleep(gap_s)
    end_ns = time.monotonic_ns()
    needed = [
        round_needed_s(series, start_ns, end_ns, warmup.power_w, rounds, target) for series in sampler.series
    ]
    needed_s = max(needed, default=0.0)
    allowed_s = max(0.0, budget_s / rounds - 2 * gap_s)
    return max(1, math.ceil(min(needed_s, allowed_s) / warmup.iteration_s - 1e-6))


def round_needed_s(
    series: Series, start_ns: int, end_ns: int, busy_w: float | None, rounds: int, target: float
) -> float:
    """Seconds for which the bound of the mean over ``rounds`` rounds meets the target.

    The bound of a round does not depend on its length: the time of two ticks at idle power, and for a
    part-time sensor two steps from idle to busy power (see ``meters.windows.unseen_variance``).
    """
    period_s = series.period_s or 0.0
    least_s = ROUND_TICKS * period_s if series.domain.max_age_s is None else period_s
    quiet = quiet_power(series, start_ns, end_ns)
    if quiet is None or not busy_w:
        return least_s
    edges = 4 * (quiet.watts * max(quiet.first.gap_s, quiet.last.gap_s)) ** 2 / 12
    resolution = series.domain.resolution_j**2 / 6
    missed_s = (1 - series.domain.coverage) * period_s
    coverage = 2 * (missed_s * max(0.0, busy_w - quiet.watts)) ** 2 / 12
    bound_j = math.sqrt(edges + resolution + coverage)
    return max(least_s, bound_j / (busy_w * target * METER_SHARE * math.sqrt(rounds)))
