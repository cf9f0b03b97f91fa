# SPDX-License-Identifier: Apache-2.0
"""Disturbances that the code under test cannot cause: correct rounds for them, or hold a verdict back.

Other processes and other guests of the hypervisor change the energy of a round. Where rounds show how much,
the effect is regressed out, as in an analysis of covariance (R. A. Fisher, "Statistical Methods for Research
Workers", 4th ed. (1932)). Without this, one core of others in two rounds hides a change of 3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from pytest_llenergy.compare.limits import Logs
from pytest_llenergy.record.comparison import CORRECTED
from pytest_llenergy.record.record import Flag, Record, Round, domain_kind

#: A slope counts from so many standard errors on, which chance reaches in less than 1 of 100 comparisons.
MIN_T = 4.0
#: Fewest rounds of both sides together for a slope.
MIN_SLOPE_ROUNDS = 8

#: A disturbance of more than this share of the rounds of a side matters.
MAJORITY = 0.5

#: Causes of throttling that are not part of the workload. A board at its power cap works as configured.
HEAT = ("thermal", "power-brake")


def load_of_others(rounds: Sequence[Round]) -> tuple[float, ...]:
    """Return the cores that other processes and guests used in each round; empty if that is unknown."""
    loads = []
    for each in rounds:
        if each.other_cpu_s is None or each.duration_s <= 0:
            return ()
        loads.append((each.other_cpu_s + (each.stolen_cpu_s or 0.0)) / each.duration_s)
    return tuple(loads)


class Correction(NamedTuple):
    """Logarithms of the rounds of both sides, as they would be at the mean load of others."""

    base: Logs
    head: Logs
    error: float = 0.0  # standard error of the difference between the sides that is due to that of the slope
    note: str = ""  # what was corrected, in words
    apart: bool = False  # whether the load matters, but differs too much between the sides for a correction


def correct_for_load(
    base: Logs, head: Logs, of_base: Sequence[float], of_head: Sequence[float]
) -> Correction:
    """Regress out the load of others if its effect is known well enough.

    The slope is that of least squares within the sides, so that a difference between them is not mistaken
    for an effect of the load.
    """
    same = Correction(base, head)
    degrees = len(base) + len(head) - 3
    if not of_base or not of_head or degrees < MIN_SLOPE_ROUNDS - 3:
        return same
    import numpy as np

    loads = np.array(of_base), np.array(of_head)
    logs = np.array(base), np.array(head)
    x = np.concatenate([each - each.mean() for each in loads])
    y = np.concatenate([each - each.mean() for each in logs])
    squares = float(x @ x)
    if squares <= 1e-12 * float(loads[0] @ loads[0] + loads[1] @ loads[1]):
        return same
    slope = float(x @ y) / squares
    rest = y - slope * x
    u = sqrt(float(rest @ rest) / degrees / squares)
    if abs(slope) < MIN_T * u:
        return same
    means = float(loads[0].mean()), float(loads[1].mean())
    # A slope says nothing about a load beyond that of the rounds.
    if not all(min(own) <= mean <= max(own) for own, mean in ((of_base, means[1]), (of_head, means[0]))):
        return Correction(base, head, apart=True)
    middle = float(np.concatenate(loads).mean())
    corrected: list[list[float]] = [
        (each - slope * (cores - middle)).tolist() for each, cores in zip(logs, loads, strict=True)
    ]
    note = f"{CORRECTED}CPU use of other processes ({abs(slope):.1%} per core)"
    return Correction(corrected[0], corrected[1], u * abs(means[1] - means[0]), note)


def find_disturbance(base: Record, head: Record, *, load_matters: bool) -> str | None:
    """Return why most rounds of a side cannot support a verdict, or ``None`` if they can.

    The load does not matter if rounds alternate, so that both sides are disturbed alike, or if it was
    corrected for. To work on GPUs alone it never matters.
    """
    for side, record in (("base", base), ("head", head)):
        flagged = [each.flags for each in record.rounds if each.flags]
        hot = sum(any(_is_heat(flag) for flag in flags) for flags in flagged)
        busy = sum(any(flag.name == "contended" for flag in flags) for flags in flagged)
        share = f"of {len(record.rounds)} rounds of {side}"
        if hot > MAJORITY * len(record.rounds):
            return f"a GPU was throttled by heat during {hot} {share}"
        if load_matters and busy > MAJORITY * len(record.rounds) and _uses_cpu(record):
            return (
                f"others used the CPU during {busy} {share} (llenergy ab, which measures in turn, can decide)"
            )
    return None


def _is_heat(flag: Flag) -> bool:
    return flag.name == "throttled" and any(cause in flag.detail for cause in HEAT)


def _uses_cpu(record: Record) -> bool:
    """Whether a meter reads more than GPUs; without meters, whether the test ran on the CPU."""
    domains = {domain_kind(meter.domain) for meter in record.meters}
    return domains != {"gpu"} if domains else record.devices == ["cpu"]
