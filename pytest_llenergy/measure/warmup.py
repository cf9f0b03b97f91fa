# SPDX-License-Identifier: Apache-2.0
"""Warm-up: until duration and power have settled, or a cap is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_llenergy.measure.progress import Step, Tell, nobody
from pytest_llenergy.measure.rounds import Workload
from pytest_llenergy.meters.edges import power_between
from pytest_llenergy.meters.sampler import Sampler

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
    workload: Workload, given: int | None, budget_s: float, sampler: Sampler, tell: Tell = nobody
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
