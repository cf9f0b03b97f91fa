# SPDX-License-Identifier: Apache-2.0
"""How to measure: how many rounds of which length, and when they are enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pytest_llenergy.measure.host_meters import DomainFacts
from pytest_llenergy.record.defaults import Sharing
from pytest_llenergy.record.goodput import has_flag
from pytest_llenergy.record.metrics import relative_uncertainty
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.served import CUT_SHORT

#: Seconds of rounds that are enough for an estimate, whose model has wider limits than any scatter. After
#: these seconds there are still as many rounds as a comparison needs (``compare.statistics.MIN_ROUNDS``), if
#: the budget allows.
ESTIMATE_S, ESTIMATE_ROUNDS = 2.0, 4


@dataclass(frozen=True)
class RoundPlan:
    """How to measure. Iterations and rounds are added until the target is met or the budget is spent.

    Attributes:
        rounds: Smallest number of rounds if the budget allows.
        warmup: Number of warm-up iterations; ``None`` warms up until stable.
        gap_s: Shortest quiet gap; slow counters extend it.
        target: Relative standard uncertainty of the energy.
        budget_s: Seconds from the start of the warm-up after which no round starts.
        iterations: Iterations of each round; ``None`` calibrates them.
        warmup_block: Iterations that run back to back in a warm-up of given length.
        exact: Whether to measure ``rounds`` rounds and add none.
        floor: Smallest number of rounds even if the budget is spent; ``None`` for all of ``rounds``.
        is_estimate: Whether all meters estimate, so that no rounds are added and fewer are enough.
        requests: How requests share the energy of a round, if each of them is to be in the record.
    """

    rounds: int
    warmup: int | None
    gap_s: float
    target: float
    budget_s: float
    iterations: int | None = None
    warmup_block: int = 1
    exact: bool = False
    floor: int | None = None
    is_estimate: bool = False
    requests: Sharing | None = None

    @property
    def least(self) -> int:
        """Smallest number of rounds, whatever they take."""
        return self.rounds if self.floor is None or self.exact else min(self.floor, self.rounds)

    @property
    def warmup_budget_s(self) -> float:
        """Seconds that the warm-up may take: for an estimate, as long as all its rounds."""
        return min(self.budget_s, ESTIMATE_S) if self.is_estimate else self.budget_s


def least_gap_s(budget_s: float) -> float:
    """Return the shortest quiet gap (seconds), so that gaps do not use up a short budget."""
    return min(0.25, max(0.1, budget_s / 20))


def plan_for_meters(plan: RoundPlan, domains: Sequence[DomainFacts]) -> RoundPlan:
    """Return the plan for these meters: further rounds cannot improve an estimate by much."""
    estimates = bool(domains) and all(domain.kind == "estimated" for domain in domains)
    return replace(plan, is_estimate=estimates)


@dataclass(frozen=True)
class Step:
    """A step that begins: a block of the warm-up, or a round.

    Attributes:
        stage: What begins.
        number: Its number, from 1.
        of: Smallest total number of steps of this stage, if known.
        reached: Relative standard uncertainty so far.
        target: The uncertainty to reach.
        left_s: Most seconds to the end of the measurement, including this step, if known.
    """

    stage: Literal["warm-up", "round"]
    number: int
    of: int | None = None
    reached: float | None = None
    target: float | None = None
    left_s: float | None = None


#: Called before each step, never during a measurement.
StepCallback: TypeAlias = Callable[[Step], None]


def ignore_step(step: Step) -> None:
    """Do nothing."""


def next_round(
    rounds: Sequence[Round],
    plan: RoundPlan,
    warmup_s: float,
    spent_s: float,
    coverage: float,
    round_s: float | None,
) -> Step:
    """Return the step of the round that follows ``rounds``.

    Args:
        rounds: The rounds so far.
        plan: How to measure.
        warmup_s: Time from the start of the warm-up to its end (seconds).
        spent_s: Time since then.
        coverage: Share of the time in which the sensors sample.
        round_s: What the first round takes with its quiet gaps, if known.
    """
    made = len(rounds)
    budget_s = 0.0 if plan.exact else max(0.0, plan.budget_s - warmup_s)
    left_s = (min(budget_s, ESTIMATE_S) if plan.is_estimate else budget_s) - spent_s
    round_s = spent_s / made if made else round_s
    least, most_s = plan.rounds, None
    if round_s is not None:
        if not plan.exact:
            fitting = max(made + math.ceil(left_s / round_s), ESTIMATE_ROUNDS if plan.is_estimate else 0)
            least = max(plan.least, min(plan.rounds, fitting))
        # At most: rounds end earlier if they meet the target.
        adds = made >= least and not plan.is_estimate
        most_s = max(max(1, least - made) * round_s, left_s if adds else 0.0)
    reached = relative_uncertainty(rounds, coverage, plan.rounds)
    return Step("round", made + 1, least, reached, plan.target, most_s)


def is_finished(
    rounds: Sequence[Round], plan: RoundPlan, warmup_s: float, spent_s: float, coverage: float
) -> bool:
    """Return whether to stop: the target is met, the budget is spent, or rounds give no energy.

    A load that ended early decides by itself.
    """
    made = len(rounds)
    if rounds and is_valid(rounds[-1]) and has_flag(rounds[-1], *CUT_SHORT):
        return True
    if made < plan.least:
        return False
    if plan.exact or plan.rounds == 1 or warmup_s + spent_s >= plan.budget_s:
        return True
    if made < plan.rounds:
        return plan.is_estimate and spent_s >= ESTIMATE_S and made >= ESTIMATE_ROUNDS
    reached = relative_uncertainty(rounds, coverage, plan.rounds)
    return plan.is_estimate or reached is None or reached <= plan.target
