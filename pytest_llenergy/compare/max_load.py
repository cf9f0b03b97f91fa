# SPDX-License-Identifier: Apache-2.0
"""Compare maximum loads of which a search found only one bound, where the bounds decide."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pytest_llenergy.compare.rule import Rule, RuleVerdict
from pytest_llenergy.measure.round_metric import is_valid
from pytest_llenergy.model.record import Record, Round

MAX_LOAD = "max_load_requests_per_s"


def decide_by_bounds(base: Record, head: Record, rule: Rule) -> tuple[RuleVerdict, str] | None:
    """Return the verdict on maximum loads, ``regressed`` or ``improved``, and its reason.

    Returns:
        ``None`` if both sides have a value, which the statistical rule compares, or the bounds do not decide.
    """
    rounds = [[round_ for round_ in record.rounds if is_valid(round_)] for record in (base, head)]
    if all(each.max_load and each.max_load.requests_per_s is not None for side in rounds for each in side):
        return None
    (base_low, base_high), (head_low, head_high) = map(_bounds, rounds)
    least = (1 + rule.threshold, rule.threshold_absolute)
    if _is_above(base_low, head_high, least):
        return "regressed", f"base holds {base_low:.3g} request/s, head not even {head_high:.3g}"
    if _is_above(head_low, base_high, least):
        return "improved", f"head holds {head_low:.3g} request/s, base not even {base_high:.3g}"
    return None


def _bounds(rounds: Sequence[Round]) -> tuple[float, float]:
    """Return the rate that every search holds, and the one that none of them does."""
    found = [round_.max_load for round_ in rounds]
    lows = [each.at_least_requests_per_s if each is not None else None for each in found]
    highs = [each.below_requests_per_s if each is not None else None for each in found]
    low = min((each if each is not None else 0.0 for each in lows), default=0.0)
    return low, max((each if each is not None else inf for each in highs), default=inf)


def _is_above(low: float, high: float, least: tuple[float, float]) -> bool:
    factor, difference = least
    return low >= high * factor and low - high >= difference
