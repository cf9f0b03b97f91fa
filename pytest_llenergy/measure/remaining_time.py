# SPDX-License-Identifier: Apache-2.0
"""Progress and remaining time of a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pytest_llenergy.record.metrics import relative_uncertainty
from pytest_llenergy.record.record import Round


@dataclass(frozen=True)
class Step:
    """A step that begins: a block of the warm-up, or a round.

    Attributes:
        stage: What begins.
        number: Its number, from 1.
        of: Smallest total number of steps of this stage, if known.
        energy_j: Joules of the rounds so far, if any.
        estimated: Whether these joules are estimated.
        reached: Relative standard uncertainty so far.
        target: The uncertainty to reach.
        left_s: Most seconds to the end of the measurement, including this step, if known.
    """

    stage: Literal["warm-up", "round"]
    number: int
    of: int | None = None
    energy_j: float | None = None
    estimated: bool = False
    reached: float | None = None
    target: float | None = None
    left_s: float | None = None


#: Called before each step, never during a measurement.
StepCallback: TypeAlias = Callable[[Step], None]


def ignore_step(step: Step) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Forecast:
    """Estimate of the remaining time of a measurement.

    Attributes:
        least: Smallest number of rounds.
        target: Relative standard uncertainty to reach.
        budget_s: Seconds after which no further round is added.
        round_s: Estimated seconds of a round with its quiet gaps; ``None`` without a warm-up.
        coverage: Share of the time in which the sensors sample.
        planned: Number of rounds from which on more are added; None if none are.
    """

    least: int
    target: float
    budget_s: float
    round_s: float | None
    coverage: float = 1.0
    planned: int | None = None

    def next_round(self, rounds: Sequence[Round], spent_s: float) -> Step:
        """Return the step of the round that follows ``rounds``, which took ``spent_s`` seconds."""
        joules = [round_.energy_j for round_ in rounds if round_.energy_j is not None]
        reached = relative_uncertainty(rounds, self.coverage, self.planned)
        return Step(
            "round",
            len(rounds) + 1,
            self.least,
            math.fsum(joules) if joules else None,
            any(domain.kind == "estimated" for round_ in rounds for domain in round_.by_domain.values()),
            reached,
            self.target,
            self._left_s(len(rounds), spent_s),
        )

    def _left_s(self, done: int, spent_s: float) -> float | None:
        each_s = spent_s / done if done else self.round_s
        if each_s is None:
            return None
        # At most: rounds end earlier if they meet the target.
        budget_s = self.budget_s - spent_s if done >= self.least else 0.0
        return max(max(1, self.least - done) * each_s, budget_s)
