# SPDX-License-Identifier: Apache-2.0
"""Tests of random rounds, whose number the plugin's own rule decides in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from pytest_llenergy.measure.round_plan import is_finished
from pytest_llenergy.record.metrics import compute_metrics
from pytest_llenergy.record.record import Round

from .plans import round_plan

#: Energy of a round, without the scatter.
TRUTH_J = 10.0

#: A short round with its two quiet gaps, and the default budget of a test (seconds).
ROUND_S, BUDGET_S = 0.6, 20.0

#: Returns the energy of a round relative to the truth, by its number from 0.
Scatter: TypeAlias = Callable[[Random, int], float]


def normal(sigma: float) -> Scatter:
    """Normal scatter."""
    return lambda rng, _: rng.gauss(1, sigma)


def delays(rng: Random, _: int) -> float:
    """Skewed, with a heavy tail: lognormal delays of 5 % on both sides of the usual one."""
    return 1 + 0.05 * (math.exp(rng.gauss(0, 1)) - 1)


def cold_start(rng: Random, number: int) -> float:
    """The first round takes 20 % more, the second 10 %; normal scatter of 2 %."""
    return rng.gauss(1 + (0.2, 0.1, 0.0)[min(number, 2)], 0.02)


@dataclass(frozen=True)
class Outcome:
    """The energy of many tests: shares within 2u and with a met target, mean rounds and mean u/value."""

    within: float
    met: float
    rounds: float
    u: float


def repeat(scatter: Scatter, rounds: int, *, added: bool, repeats: int, target: float = 0.02) -> Outcome:
    """Measure tests of at least ``rounds`` rounds, or exactly so many unless ``added``."""
    rng, plan = Random(rounds), round_plan(rounds=rounds, target=target, budget_s=BUDGET_S, exact=not added)
    energies = []
    for _ in range(repeats):
        made: list[Round] = []
        while not is_finished(made, plan, 0.0, ROUND_S * len(made), 1.0):
            made.append(_round(TRUTH_J * scatter(rng, len(made))))
        energies.append(compute_metrics(made, None, planned=plan.rounds)["energy_j"])
    errors_and_u = [(abs((each.value or 0) - TRUTH_J), each.uncertainty or 0.0) for each in energies]
    relative = [(each.uncertainty or 0.0) / (each.value or 1.0) for each in energies]
    return Outcome(
        within=_mean([error <= 2 * u for error, u in errors_and_u]),
        met=_mean([each <= target for each in relative]),
        rounds=_mean([each.n for each in energies]),
        u=_mean(relative),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _round(energy_j: float) -> Round:
    return Round(
        start_s=0.0,
        duration_s=0.1,
        energy_j=energy_j,
        energy_u_j=0.0,
        energy_u_absolute_j=0.0,
        idle_power_w=None,
        idle_power_u_w=None,
        by_domain={},
    )
