# SPDX-License-Identifier: Apache-2.0
"""How long rounds must be for the energies of their phases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from pytest_llenergy.measure.accounting import RESOLVED_WELL, required_lengths
from pytest_llenergy.measure.host_meters import HostMeters
from pytest_llenergy.measure.round_plan import RoundPlan
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.metrics import unresolved_phases
from pytest_llenergy.record.quantity import RESOLVABLE
from pytest_llenergy.record.record import Round

#: Rounds that are tried at most to find how long they must be for the energies of phases, and how much longer
#: the second is at most.
PHASE_TRIALS, TRIED_LENGTH = 2, 16


def lengthen_for_phases(
    try_round: Callable[[int], MeasuredRound],
    iterations: int,
    plan: RoundPlan,
    gap_s: float,
    left_s: float,
    hosts: Sequence[HostMeters],
) -> tuple[int, dict[str, str]]:
    """Return how many iterations a round needs for the energies of the phases that are asked for.

    Measures a round and, if that was too short, a longer one.

    Args:
        try_round: Measures a round of so many iterations.
        iterations: Iterations that the energy of the whole needs.
        plan: How to measure.
        gap_s: Length of each quiet gap (seconds).
        left_s: Time that is left of the budget (seconds).
        hosts: The meters.

    Returns:
        The iterations, at most what the budget allows, and how long rounds would have to be for phases that
        need more, by their names.
    """
    rounds = plan.sharing_rounds
    unresolved: dict[str, str] = {}
    for number in range(PHASE_TRIALS):
        begin_s = time.monotonic()
        trial = try_round(iterations)
        left_s -= time.monotonic() - begin_s
        iteration_s = trial.timeline.duration_s / iterations
        limit = RESOLVABLE if number else RESOLVED_WELL
        lengths = required_lengths(trial, hosts, plan.phases, rounds, limit)
        if not number:
            # Few iterations may lie between the same readings, and others between different ones.
            lengths = {name: each if each < math.inf else TRIED_LENGTH for name, each in lengths.items()}
        lengths = {name: each for name, each in lengths.items() if each < math.inf}
        most, unresolved = _fit_lengths(lengths, iterations, iteration_s, plan, gap_s, left_s)
        longest = min(most, math.ceil(iterations * max(lengths.values(), default=1)))
        if not number:
            longest = min(longest, TRIED_LENGTH * iterations)
        if longest <= iterations:
            break
        iterations = longest
    return iterations, unresolved


def lengthen_again(
    rounds: Sequence[Round], iterations: int, plan: RoundPlan, gap_s: float, left_s: float
) -> tuple[int, dict[str, str]]:
    """Return how many iterations a round gets for phases that these rounds leave unresolved.

    Returns as many as before if longer rounds that fit into the budget cannot be enough, and the reasons.
    """
    lengths = unresolved_phases(rounds, plan.phases)
    iteration_s = math.fsum(round_.duration_s for round_ in rounds) / (iterations * len(rounds))
    most, reasons = _fit_lengths(lengths, iterations, iteration_s, plan, gap_s, left_s)
    return min(most, TRIED_LENGTH * iterations) if lengths.keys() - reasons.keys() else iterations, reasons


def _fit_lengths(
    lengths: Mapping[str, float],
    iterations: int,
    iteration_s: float,
    plan: RoundPlan,
    gap_s: float,
    left_s: float,
) -> tuple[int, dict[str, str]]:
    """Return how many iterations a round can have in the time that is left, and which phases need more, why.

    A round keeps the ``iterations`` that it has, whatever they take. ``lengths`` are how many times longer
    rounds must be, by the names of phases.
    """
    rounds = plan.sharing_rounds
    fitting = int((left_s / rounds - 2 * gap_s) / iteration_s)
    most = max(iterations, fitting)
    allows = f"allows {_two_digits(fitting * iteration_s)} s" if fitting >= iterations else "is spent before"
    reasons: dict[str, str] = {}
    for name, length in lengths.items():
        round_s = math.ceil(iterations * length) * iteration_s
        # A trial of this length comes before the rounds.
        enough_s = plan.budget_s - left_s + (rounds + 1) * (round_s + 2 * gap_s)
        if iterations * length > most:
            reasons[name] = (
                f"{name} needs rounds of about {_two_digits(round_s)} s, but the budget of "
                f"{plan.budget_s:g} s (--energy-budget) {allows}; try {math.ceil(enough_s)} s"
            )
    return most, reasons


def _two_digits(seconds: float) -> str:
    return f"{float(f'{seconds:.2g}'):g}"
