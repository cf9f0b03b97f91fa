# SPDX-License-Identifier: Apache-2.0
"""Correct the verdicts of a suite for the number of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llenergy.compare.statistics import Estimate

#: Suites with fewer comparisons are not corrected, since they have few chances for false alarms.
MIN_TESTS_TO_CORRECT = 10


def correct_multiple_comparisons(estimates: Sequence[Estimate], q: float = 0.10) -> list[Estimate]:
    """Correct the verdicts of a suite for the number of comparisons.

    Changes that are not significant among so many comparisons become ``inconclusive``. At most the share
    ``q`` of the changes that remain is expected to be false: Y. Benjamini, Y. Hochberg, "Controlling the
    false discovery rate", J. R. Stat. Soc. B 57 (1995). Regressions and improvements are two families, each
    over all comparisons that have a p-value.

    Returns:
        The estimates in the order given.
    """
    known = [each for each in estimates if each.p is not None]
    if len(known) < MIN_TESTS_TO_CORRECT:
        return list(estimates)
    bounds = {
        "regressed": _largest_significant([each.p for each in known if each.p is not None], q),
        "improved": _largest_significant(
            [each.p_improved for each in known if each.p_improved is not None], q
        ),
    }
    return [_correct(each, bounds, len(known), q) for each in estimates]


def _largest_significant(p_values: Sequence[float], q: float) -> float:
    """Return the largest p-value that is still significant, or -1.0 if none is."""
    ordered = sorted(p_values)
    return max((p for i, p in enumerate(ordered, 1) if p <= q * i / len(ordered)), default=-1.0)


def _correct(estimate: Estimate, bounds: dict[str, float], count: int, q: float) -> Estimate:
    verdict = estimate.verdict
    p = estimate.p if verdict == "regressed" else estimate.p_improved
    if verdict not in bounds or p is None or p <= bounds[verdict]:
        return estimate
    reason = f"{verdict} by itself, but p {p:.2g} is not significant among {count} comparisons (q {q:g})"
    return replace(estimate, verdict="inconclusive", reason=f"{reason}; {estimate.reason}")
