# SPDX-License-Identifier: Apache-2.0
"""Compare maximum loads: a search is one result with its bounds, however many rounds repeat it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, sqrt

from pytest_llenergy.compare.rule import Rule
from pytest_llenergy.compare.statistics import STORED, Estimate, Sample, compare_samples
from pytest_llenergy.record.load_curve import MaxLoad
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.round_metric import is_valid

MAX_LOAD = "max_load_requests_per_s"


def sample_searches(record: Record, unit: str) -> Sample:
    """Return the maxima of a record that has one of each session."""
    found = [
        (session, each, each.requests_per_s)
        for session, each in _searches(record)
        if each is not None and each.requests_per_s is not None
    ]
    return Sample(
        values=tuple([value for _, _, value in found]),
        unit=unit,
        # The scatter of sessions shows all but the bracket, of which both sides may have the same.
        shared=tuple([_bracket(each, value) for _, each, value in found]),
        # Sessions are numbered over both sides.
        pairs=tuple([((session or 1) - 1) // 2 for session, _, _ in found]),
        results_u=tuple([value * _relative_u(each) for _, each, value in found]),
    )


def decide_by_bounds(
    base: Record, head: Record, rule: Rule, decide: Callable[[Sample, Sample], Estimate]
) -> Estimate | None:
    """Compare searches of which one found only a bound, where the bounds decide.

    Args:
        base: The record of the baseline.
        head: The record to compare with it.
        rule: When a change counts.
        decide: Decides the verdict on two samples.

    Returns:
        An estimate with the verdict ``regressed`` or ``improved`` for the smallest change that the bounds
        allow; ``None`` if all searches found a maximum, or the bounds do not decide.
    """
    sides = [[found for _, found in _searches(record)] for record in (base, head)]
    if all(each and each.requests_per_s is not None for side in sides for each in side):
        return None
    (base_low, base_high), (head_low, head_high) = map(_bounds, sides)
    for verdict, least, most, names in (
        ("regressed", base_low, head_high, ("base", "head")),
        ("improved", head_low, base_high, ("head", "base")),
    ):
        if not 0 < most < least < inf:
            continue
        samples = [
            Sample((rate,), results_u=(rate * max(map(_relative_u, side), default=0.0),))
            for rate, side in zip((least, most) if names[0] == "base" else (most, least), sides, strict=True)
        ]
        # A ``decide`` of stages would measure more pairs for bounds that can never decide.
        if compare_samples(samples[0], samples[1], rule, "more", STORED).verdict == verdict:
            estimate = decide(*samples)
            reason = f"{names[0]} holds {least:.3g} request/s, {names[1]} not even {most:.3g}"
            return replace(estimate, reason=reason) if estimate.verdict == verdict else None
    return None


def _searches(record: Record) -> list[tuple[int | None, MaxLoad | None]]:
    """Return the session and the result of each search, in order: the rounds of a session repeat it."""
    return list(dict.fromkeys((each.session, each.max_load) for each in record.rounds if is_valid(each)))


def _bracket(found: MaxLoad, value: float) -> float:
    """Return the standard uncertainty due to the distance of the bounds alone."""
    below = found.below_requests_per_s
    return max(below - value, 0.0) / sqrt(3) if below is not None else found.u_requests_per_s or 0.0


def _relative_u(found: MaxLoad | None) -> float:
    if found is None or not found.requests_per_s:
        return 0.0
    return (found.u_requests_per_s or 0.0) / found.requests_per_s


def _bounds(found: Sequence[MaxLoad | None]) -> tuple[float, float]:
    """Return the rate that every search holds, and the one that none of them does."""
    lows = [each.at_least_requests_per_s if each is not None else None for each in found]
    highs = [each.below_requests_per_s if each is not None else None for each in found]
    low = min((each if each is not None else 0.0 for each in lows), default=0.0)
    return low, max((each if each is not None else inf for each in highs), default=inf)
