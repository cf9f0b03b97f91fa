# SPDX-License-Identifier: Apache-2.0
"""Disturbances that the code under test cannot cause: correct rounds for them, or hold a verdict back.

Other processes and other guests of the hypervisor change the energy of a round. Where rounds show how much,
the effect is regressed out, as in an analysis of covariance (R. A. Fisher, "Statistical Methods for Research
Workers", 4th ed. (1932)). Without this, one core of others in two rounds hides a change of 3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from pytest_llenergy.compare.limits import relative_spread
from pytest_llenergy.record.comparison import CORRECTED
from pytest_llenergy.record.record import Record, Round, domain_kind

#: A slope counts from so many standard errors on, which chance reaches in less than 1 of 100 comparisons.
MIN_T = 4.0
#: Correcting must reduce the spread of the rounds at least by this factor.
SPREAD_REDUCED = 0.8
#: Fewest rounds of both sides together for a slope.
MIN_SLOPE_ROUNDS = 8

#: A disturbance of more than this share of the rounds of a side matters.
MAJORITY = 0.5

#: Causes of throttling that are not part of the workload. A board at its power cap works as configured.
HEAT = ("thermal", "power-brake")

#: Flags of disturbed rounds, and what they say.
CAUSES = {
    "throttled": "a GPU was throttled by heat",
    "contended": "others used the CPU",
}


def load_of_others(rounds: Sequence[Round]) -> tuple[float, ...]:
    """Return the cores that other processes and guests used in each round; empty if that is unknown."""
    if any(each.other_cpu_s is None or each.duration_s <= 0 for each in rounds):
        return ()
    return tuple(
        [((each.other_cpu_s or 0.0) + (each.stolen_cpu_s or 0.0)) / each.duration_s for each in rounds]
    )


@dataclass(frozen=True)
class Correction:
    """Logarithms of the rounds of both sides, as they would be at the mean load of others.

    Attributes:
        error: Standard error of the difference between the sides that is due to that of the slope.
        note: What was corrected, in words.
        apart: Whether the load matters, but differs too much between the sides for a correction.
    """

    base: Sequence[float]
    head: Sequence[float]
    error: float = 0.0
    note: str = ""
    apart: bool = False


def correct_for_load(
    base: Sequence[float], head: Sequence[float], of_base: Sequence[float], of_head: Sequence[float]
) -> Correction:
    """Regress out the load of others if its effect is known well enough.

    The slope is that of least squares within the sides, so that a difference between them is not mistaken
    for an effect of the load.

    Args:
        base: Logarithms of the rounds of the baseline.
        head: Logarithms of the rounds of the head.
        of_base: The load in each round of the baseline (cores); empty if unknown.
        of_head: The load in each round of the head.
    """
    same = Correction(base, head)
    degrees = len(base) + len(head) - 3
    if not of_base or not of_head or degrees < MIN_SLOPE_ROUNDS - 3:
        return same
    x = [each - fmean(side) for side in (of_base, of_head) for each in side]
    y = [each - fmean(side) for side in (base, head) for each in side]
    squares = sum(each * each for each in x)
    if squares <= 1e-12 * sum(each * each for each in (*of_base, *of_head)):
        return same
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / squares
    u = sqrt(sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / degrees / squares)
    if abs(slope) < MIN_T * u:
        return same
    # A slope says nothing about a load beyond that of the rounds.
    if not all(min(a) <= fmean(b) <= max(a) for a, b in ((of_base, of_head), (of_head, of_base))):
        return Correction(base, head, apart=True)
    middle = fmean([*of_base, *of_head])
    corrected = [
        [log - slope * (cores - middle) for log, cores in zip(logs, loads, strict=True)]
        for logs, loads in ((base, of_base), (head, of_head))
    ]
    before, after = max(map(relative_spread, (base, head))), max(map(relative_spread, corrected))
    if after > SPREAD_REDUCED * before:
        return same
    note = (
        f"{CORRECTED}CPU use of other processes ({abs(slope):.1%} per core), which reduced the noise from "
        f"{before:.1%} to {after:.1%}"
    )
    error = u * abs(fmean(of_head) - fmean(of_base))
    return Correction(corrected[0], corrected[1], error, note)


def find_disturbance(base: Record, head: Record, *, load_matters: bool) -> str | None:
    """Return why most rounds of a side cannot support a verdict, or ``None`` if they can.

    Args:
        base: The record of the baseline.
        head: The record of the head.
        load_matters: Whether other processes and guests count. They do not if rounds alternate, so that both
            sides are disturbed alike, or if they were corrected for. To work on GPUs alone they never matter.
    """
    flagged = {
        side: (record, [each for each in record.rounds if each.flags])
        for side, record in (("base", base), ("head", head))
    }
    for name, cause in CAUSES.items():
        for side, (record, rounds) in flagged.items():
            if not rounds or (name != "throttled" and not (load_matters and _uses_cpu(record))):
                continue
            count = sum(_is_disturbed(each, name) for each in rounds)
            if count > MAJORITY * len(record.rounds):
                remedy = "" if name == "throttled" else " (llenergy ab, which measures in turn, can decide)"
                return f"{cause} during {count} of {len(record.rounds)} rounds of {side}{remedy}"
    return None


def _uses_cpu(record: Record) -> bool:
    """Whether a meter reads more than GPUs; without meters, whether the test ran on the CPU."""
    domains = {domain_kind(meter.domain) for meter in record.meters}
    return domains != {"gpu"} if domains else record.devices == ["cpu"]


def _is_disturbed(round_: Round, name: str) -> bool:
    return any(
        flag.name == name and (name != "throttled" or any(cause in flag.detail for cause in HEAT))
        for flag in round_.flags
    )
