# SPDX-License-Identifier: Apache-2.0
"""Warm up until an iteration takes a stable time, then choose the iterations of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_llenergy.energy.joint_solution import SHORTEST_TICKS
from pytest_llenergy.measure.host_meters import DomainFacts, HostMeters, enter_all
from pytest_llenergy.measure.phases import phase_spans
from pytest_llenergy.measure.round_plan import RoundPlan, Step, StepCallback, ignore_step
from pytest_llenergy.measure.rounds import Workload
from pytest_llenergy.record.metrics import PHASE_ITERATIONS

#: Consecutive blocks whose iterations take times that differ by no more than this are settled.
SETTLED = 0.05

#: Shortest block that is compared, in seconds and in ticks of the slowest counter.
MIN_BLOCK_S, BLOCK_TICKS = 0.05, 3.5

#: Largest number of blocks.
MAX_BLOCKS = 10

#: Share of the budget after which the warm-up ends.
MAX_BUDGET_SHARE = 0.5

CRITERION = (
    f"times of two blocks in a row within {SETTLED:.0%}, at most {MAX_BLOCKS} blocks or "
    f"{MAX_BUDGET_SHARE:.0%} of the budget"
)
GIVEN = "number of iterations given"

#: Ticks that a round should contain, so that the power inside it is observed.
ROUND_TICKS = 3

#: Shortest round (seconds), whatever the budget, and where a counter has a period of ``SLOW_TICK_S``. Shorter
#: ones scatter with every interruption.
MIN_ROUND_S, MIN_SLOW_ROUND_S, SLOW_TICK_S = 0.1, 0.2, 0.05

#: A phase shorter than this many ticks needs ``PHASE_ITERATIONS``.
SHORT_PHASE_TICKS = 2.0

#: Share of the target for the uncertainty of the meters; the rest is for the spread of the work itself.
METER_SHARE = 0.5


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up.

    Attributes:
        iterations: How many were run.
        settled: Whether the work has settled; None if the number of iterations was given.
        criterion: What decided, for the record.
        iteration_s: Time of an iteration in the last block, if there was one.
        phases_s: Mean length of each phase in the last block.
    """

    iterations: int
    settled: bool | None
    criterion: str
    iteration_s: float | None = None
    phases_s: tuple[float, ...] = ()


def warm_up(
    workload: Workload,
    plan: RoundPlan,
    hosts: Sequence[HostMeters],
    on_step: StepCallback = ignore_step,
) -> WarmUp:
    """Run the iterations that the plan names, or run until the work has settled if it names none.

    Args:
        workload: The work.
        plan: How to measure.
        hosts: The meters.
        on_step: Called before each block.
    """
    __tracebackhide__ = True
    if plan.warmup is not None:
        count, last = plan.warmup // plan.warmup_block, WarmUp(0, None, GIVEN)
        for number in range(1, count + 1):
            on_step(Step("warm-up", number, count))
            last = _run_block(workload, plan.warmup_block, hosts)
        return WarmUp(plan.warmup, None, GIVEN, last.iteration_s, last.phases_s)
    periods_s = [domain.period_s for host in hosts for domain in host.domains()]
    least_s = max([MIN_BLOCK_S, *(BLOCK_TICKS * period_s for period_s in periods_s)])
    block, total, spent_s, iterations = WarmUp(0, False, CRITERION), 0, 0.0, 1
    comparable, settled = False, False
    for number in range(1, MAX_BLOCKS + 1):
        on_step(Step("warm-up", number))
        before_s, block = block.iteration_s or 0.0, _run_block(workload, iterations, hosts)
        each_s = block.iteration_s or 0.0
        total, spent_s = total + iterations, spent_s + each_s * iterations
        settled = comparable and abs(each_s - before_s) <= SETTLED * max(each_s, before_s)
        comparable = each_s * iterations >= least_s
        if not comparable:
            # Blocks of another length follow.
            iterations = math.ceil(iterations * min(10.0, 1.2 * least_s / max(each_s * iterations, 1e-9)))
        if settled or spent_s + iterations * each_s > MAX_BUDGET_SHARE * plan.warmup_budget_s:
            break
    return WarmUp(total, settled, CRITERION, block.iteration_s, block.phases_s)


def _run_block(workload: Workload, iterations: int, hosts: Sequence[HostMeters]) -> WarmUp:
    __tracebackhide__ = True
    workload.prepare_round()
    with enter_all(host.at_work() for host in hosts):
        workload.work(iterations)
    timeline = workload.timeline()
    spans = phase_spans(timeline).values()
    phases_s = tuple(fmean(end - start for start, end in parts) / 1e9 for parts in spans)
    return WarmUp(iterations, None, CRITERION, timeline.duration_s / iterations, phases_s)


def choose_iterations(
    warmup: WarmUp, plan: RoundPlan, gap_s: float, budget_s: float, domains: Sequence[DomainFacts]
) -> int:
    """Return the iterations of each round, as many as the meters need and the budget allows.

    Rounds last at least 100 ms, 200 ms with a slow counter, and have at least one iteration. If a phase is
    shorter than two ticks, all rounds together have 20 iterations. Returns 1 without a warm-up, since the
    duration of an iteration is then unknown.

    Args:
        warmup: Result of the warm-up.
        plan: How to measure.
        gap_s: Length of each quiet gap (seconds).
        budget_s: Time that the rounds may take (seconds).
        domains: What is read.
    """
    if not warmup.iteration_s:
        return 1
    rounds = plan.rounds
    needed_s = max((_required_round_s(each, rounds, plan.target) for each in domains), default=0.0)
    slowest_s = max((each.period_s for each in domains if each.ticks), default=0.0)
    if any(SHORTEST_TICKS * slowest_s <= each < SHORT_PHASE_TICKS * slowest_s for each in warmup.phases_s):
        needed_s = max(needed_s, math.ceil(PHASE_ITERATIONS / rounds) * warmup.iteration_s)
    allowed_s = max(0.0, budget_s / rounds - 2 * gap_s)
    round_s = max(min(needed_s, allowed_s), MIN_SLOW_ROUND_S if slowest_s >= SLOW_TICK_S else MIN_ROUND_S)
    return max(1, math.ceil(round_s / warmup.iteration_s - 1e-6))


def _required_round_s(domain: DomainFacts, rounds: int, target: float) -> float:
    """Return how long a round must be for a meter to meet its share of the target (seconds).

    A full-time sensor needs some ticks. What a part-time sensor does not see of two steps of power does not
    depend on the length of the round (see ``window_arithmetic.coverage_variance``).
    """
    least_s = ROUND_TICKS * domain.period_s if domain.ticks else domain.period_s
    unseen_s = (1 - domain.coverage) * domain.period_s / math.sqrt(6)
    return max(least_s, unseen_s / (target * METER_SHARE * math.sqrt(rounds)))
