# SPDX-License-Identifier: Apache-2.0
"""Progress and remaining time of a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pytest_llenergy.measure.metrics import relative_uncertainty
from pytest_llenergy.model.record import Round


@dataclass(frozen=True)
class Step:
    """What begins now: the ``number``-th block of the warm-up, or round.

    ``of`` is how many there will be at least, ``None`` where that is not known. ``energy_j`` are the joules
    of the rounds so far, ``None`` before the first and without joules; ``estimated`` says what they are.
    ``reached`` is the relative standard uncertainty so far, to be held against ``target``. ``left_s`` is
    about how long it will take, this step included, ``None`` where nobody can tell.
    """

    stage: Literal["warm-up", "round"]
    number: int
    of: int | None = None
    energy_j: float | None = None
    estimated: bool = False
    reached: float | None = None
    target: float | None = None
    left_s: float | None = None


#: Called with each step before it begins, never while something is measured.
StepCallback: TypeAlias = Callable[[Step], None]


def ignore_step(step: Step) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Forecast:
    """What is known before the first round, to tell how long all of them will take.

    ``round_s`` is about how long one takes with its quiet gaps (seconds), ``None`` without a warm-up.
    ``least`` is the least number of them, ``budget_s`` the time after which none is added to these.
    """

    least: int
    target: float
    budget_s: float
    round_s: float | None
    coverage: float = 1.0

    def next_round(self, rounds: Sequence[Round], spent_s: float) -> Step:
        """The round that follows these, which took ``spent_s`` seconds."""
        joules = [round_.energy_j for round_ in rounds if round_.energy_j is not None]
        reached = relative_uncertainty(rounds, self.coverage)
        return Step(
            "round",
            len(rounds) + 1,
            self.least,
            math.fsum(joules) if joules else None,
            any(domain.kind == "estimated" for round_ in rounds for domain in round_.by_domain.values()),
            reached,
            self.target,
            self._left_s(len(rounds), spent_s, reached),
        )

    def _left_s(self, done: int, spent_s: float, reached: float | None) -> float | None:
        each_s = spent_s / done if done else self.round_s
        if each_s is None:
            return None
        surely_s = max(1, self.least - done) * each_s
        if reached is None or reached <= self.target or self.least == 1:
            return surely_s
        # The uncertainty of a mean goes with the root of the number of rounds.
        needed_s = (math.ceil(done * (reached / self.target) ** 2) - done) * each_s
        return max(surely_s, min(needed_s, self.budget_s - spent_s))
