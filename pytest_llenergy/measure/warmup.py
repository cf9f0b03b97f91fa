# SPDX-License-Identifier: Apache-2.0
"""Warm up until stable, then calibrate the iterations of a round."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from pytest_llenergy.measure.remaining_time import Step, StepCallback, ignore_step
from pytest_llenergy.measure.rounds import Workload
from pytest_llenergy.meters.edges import power_between, quiet_power
from pytest_llenergy.meters.sampler import Sampler
from pytest_llenergy.meters.trace import Series

# Warm-up: until duration and power have settled, or a cap is reached.

#: Two blocks in a row may differ by this much to count as settled.
SETTLED = 0.05

#: A block shorter than this (seconds), or than so many ticks, is not judged; it is made longer.
LEAST_BLOCK_S = 0.05
BLOCK_TICKS = 3.5

#: Ticks in a block from which on its power counts.
LEAST_TICKS = 3

#: Blocks after which the warm-up ends in any case.
MOST_BLOCKS = 10

#: Share of the budget after which the warm-up ends in any case.
MOST_OF_BUDGET = 0.5

CRITERION = (
    f"duration and power of two blocks in a row within {SETTLED:.0%}, at most {MOST_BLOCKS} blocks or "
    f"{MOST_OF_BUDGET:.0%} of the budget"
)
GIVEN = "number of iterations given"


@dataclass(frozen=True)
class WarmUp:
    """What it took. ``iteration_s`` and ``power_w`` are those of its last block, where they are known."""

    iterations: int
    settled: bool | None
    criterion: str
    iteration_s: float | None
    power_w: float | None


@dataclass(frozen=True)
class _Block:
    iterations: int
    duration_s: float
    power_w: float | None
    blur: float

    @property
    def iteration_s(self) -> float:
        return self.duration_s / self.iterations

    def like(self, other: _Block) -> bool:
        """Whether both differ by no more than the criterion; a power that is not known does not count.

        ``blur`` is the share of a power that the times of the ticks leave open.
        """
        settled = abs(self.iteration_s - other.iteration_s) <= SETTLED * max(
            self.iteration_s, other.iteration_s
        )
        if self.power_w is None or other.power_w is None:
            return settled
        allowed = SETTLED + self.blur + other.blur
        return settled and abs(self.power_w - other.power_w) <= allowed * max(self.power_w, other.power_w)


def warm_up(
    workload: Workload, given: int | None, budget_s: float, sampler: Sampler, tell: StepCallback = ignore_step
) -> WarmUp:
    """Run ``given`` iterations, or without a number until the work has settled."""
    if given is not None:
        blocks = []
        for number in range(1, given + 1):
            tell(Step("warm-up", number, given))
            blocks.append(_block(workload, 1, sampler))
        last = blocks[-1] if blocks else None
        return WarmUp(given, None, GIVEN, last.iteration_s if last else None, last.power_w if last else None)
    least_s = max([LEAST_BLOCK_S, *(BLOCK_TICKS * (series.period_s or 0.0) for series in sampler.series)])
    tell(Step("warm-up", 1))
    block, total, spent_s = _block(workload, 1, sampler), 1, 0.0
    for number in range(2, MOST_BLOCKS + 1):
        spent_s += block.duration_s
        if spent_s > MOST_OF_BUDGET * budget_s:
            break
        iterations = block.iterations
        if block.duration_s < least_s:
            iterations = math.ceil(iterations * min(10.0, 1.2 * least_s / block.duration_s))
        tell(Step("warm-up", number))
        following = _block(workload, iterations, sampler)
        total += iterations
        if iterations == block.iterations and following.like(block):
            return WarmUp(total, True, CRITERION, following.iteration_s, following.power_w)
        block = following
    return WarmUp(total, False, CRITERION, block.iteration_s, block.power_w)


def _block(workload: Workload, iterations: int, sampler: Sampler) -> _Block:
    workload.ready()
    with sampler.at_work():
        workload.work(iterations)
    timeline = workload.timeline()
    power_w, blur = 0.0, 0.0
    for series in sampler.series:
        ticks = series.between(timeline.start_ns, timeline.end_ns)
        if len(ticks) < LEAST_TICKS:
            return _Block(iterations, timeline.duration_s, None, 0.0)
        first, last = ticks[0], ticks[-1]
        power_w += power_between(first, last)
        blur = max(blur, (first.gap_s + last.gap_s) / ((last.time_ns - first.time_ns) / 1e9))
    return _Block(iterations, timeline.duration_s, power_w if sampler.series else None, blur)


# How many iterations a round needs so that what the meters cannot know stays below the target.

#: Ticks that a round should hold, so that the power inside it is seen.
ROUND_TICKS = 3

#: Share of the target that is left to the meters; the rest is for the scatter of the work itself.
METER_SHARE = 0.5


def calibrate_iterations(
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
        required_round_s(series, start_ns, end_ns, warmup.power_w, rounds, target)
        for series in sampler.series
    ]
    needed_s = max(needed, default=0.0)
    allowed_s = max(0.0, budget_s / rounds - 2 * gap_s)
    return max(1, math.ceil(min(needed_s, allowed_s) / warmup.iteration_s - 1e-6))


def required_round_s(
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
