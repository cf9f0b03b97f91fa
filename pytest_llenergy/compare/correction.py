# SPDX-License-Identifier: Apache-2.0
"""Many benchmarks, many chances of a false alarm: the correction for a suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llenergy.compare.statistics import Estimate

#: Suites below it are not corrected: a handful of benchmarks has a handful of chances.
FEWEST_BENCHMARKS = 10


def corrected(estimates: Sequence[Estimate], q: float = 0.10) -> list[Estimate]:
    """Keep of all changes those that hold among so many comparisons; the others become ``inconclusive``.

    At most the share ``q`` of the changes that are kept is expected to be false: Y. Benjamini, Y. Hochberg,
    "Controlling the false discovery rate", J. R. Stat. Soc. B 57 (1995). Regressions and improvements are two
    families, each over all benchmarks that have a p. In the order given.
    """
    known = [one for one in estimates if one.p is not None]
    if len(known) < FEWEST_BENCHMARKS:
        return list(estimates)
    bounds = {
        "regressed": _bound([one.p for one in known if one.p is not None], q),
        "improved": _bound([one.p_improved for one in known if one.p_improved is not None], q),
    }
    return [_kept(one, bounds, len(known), q) for one in estimates]


def _bound(chances: Sequence[float], q: float) -> float:
    """The largest p that is kept; -1.0 where none is."""
    ordered = sorted(chances)
    return max((p for i, p in enumerate(ordered, 1) if p <= q * i / len(ordered)), default=-1.0)


def _kept(one: Estimate, bounds: dict[str, float], count: int, q: float) -> Estimate:
    p = one.p if one.verdict == "regressed" else one.p_improved
    if one.verdict not in bounds or p is None or p <= bounds[one.verdict]:
        return one
    reason = (
        f"{one.verdict} alone, but p {p:.2g} is no discovery among {count} benchmarks (q {q:g}); {one.reason}"
    )
    return replace(one, verdict="inconclusive", reason=reason)
