# SPDX-License-Identifier: Apache-2.0
"""How to measure: how many rounds of which length, and when they are enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_llenergy.measure.host_meters import DomainFacts
from pytest_llenergy.measure.remaining_time import Forecast
from pytest_llenergy.measure.warmup import WarmUp
from pytest_llenergy.record.defaults import Sharing
from pytest_llenergy.record.goodput import has_flag
from pytest_llenergy.record.metrics import relative_uncertainty
from pytest_llenergy.record.record import Round
from pytest_llenergy.record.round_metric import is_valid
from pytest_llenergy.record.served import CUT_SHORT

#: Relative standard uncertainty and seconds of rounds that are enough for an estimate, whose model has far
#: wider limits. After these seconds there are still as many rounds as a comparison needs
#: (``compare.statistics.MIN_ROUNDS``), if the budget allows.
ESTIMATE_TARGET, ESTIMATE_S, ESTIMATE_ROUNDS = 0.05, 2.0, 4

#: Standard uncertainty in watts that is enough for an estimate: a three-hundredth of a busy logical CPU. Work
#: that only waits is estimated at so few joules that its relative uncertainty stays large.
ESTIMATE_U_W = 0.01


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
        is_estimate: Whether all meters estimate, so that fewer rounds are enough.
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
    if not domains or any(domain.kind != "estimated" for domain in domains):
        return plan
    target = plan.target if plan.exact else max(plan.target, ESTIMATE_TARGET)
    return replace(plan, target=target, is_estimate=True)


def forecast(
    plan: RoundPlan, warmup: WarmUp, iterations: int, gap_s: float, warmup_s: float, coverage: float
) -> Forecast:
    """Return how many rounds will be made and how long they take, for the progress line.

    Args:
        plan: How to measure.
        warmup: The warm-up, whose iterations were timed.
        iterations: Iterations of each round.
        gap_s: Length of each quiet gap (seconds).
        warmup_s: Time from the start of the warm-up until now (seconds).
        coverage: Smallest coverage of a meter, from 0 to 1.
    """
    round_s = warmup.iteration_s * iterations + 2 * gap_s if warmup.iteration_s else None
    budget_s = 0.0 if plan.exact else max(0.0, plan.budget_s - warmup_s)
    left_s = min(budget_s, ESTIMATE_S) if plan.is_estimate else budget_s
    rounds = plan.rounds
    if round_s is not None and not plan.exact:
        fitting = math.ceil(left_s / round_s)
        if plan.is_estimate:
            fitting = max(fitting, min(ESTIMATE_ROUNDS, math.ceil(budget_s / round_s)))
        rounds = max(plan.least, min(rounds, fitting))
    return Forecast(rounds, plan.target, left_s, round_s, coverage, plan.rounds)


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
    if plan.is_estimate and spent_s >= ESTIMATE_S and made >= min(plan.rounds, ESTIMATE_ROUNDS):
        return True
    if made < plan.rounds:
        return False
    reached = relative_uncertainty(rounds, coverage, plan.rounds)
    return reached is None or reached <= plan.target or (plan.is_estimate and _is_fine(rounds, reached))


def _is_fine(rounds: Sequence[Round], reached: float) -> bool:
    """Return whether the mean power of the work is known to a few milliwatts."""
    joules = math.fsum(round_.energy_j or 0.0 for round_ in rounds)
    return reached * joules <= ESTIMATE_U_W * math.fsum(round_.duration_s for round_ in rounds)
