# SPDX-License-Identifier: Apache-2.0
"""Error rates of the gates as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import NormalDist
from typing import Any

#: Changes for which the number of pairs is shown; the JSON has all.
PAIRS_SHOWN = ("0.03", "0.05")
#: Two-sided 95 % quantile of the normal distribution.
Z = NormalDist().inv_cdf(0.975)


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % limits of a share: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927)."""
    share, spread = hits / count, Z * Z / count
    centre = (share + spread / 2) / (1 + spread)
    half = Z * sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, centre - half) if hits else 0.0, min(1.0, centre + half) if hits < count else 1.0


def markdown(content: Mapping[str, Any]) -> str:
    """Render one table per cell, with 95 % limits of the detection and alarm rates."""
    return "\n\n".join(_cell(cell, content["suite"]) for cell in content["cells"]) + "\n"


def _cell(cell: Mapping[str, Any], suite: int) -> str:
    some = next(iter(cell["contenders"].values()))
    effects = [effect for effect in some if effect != "0"]
    titles = [
        "rule",
        f"alarms per suite of {suite}",
        "unchanged",
        "pairs",
        *(f"found {float(effect):+.0%}" for effect in effects),
        *(f"pairs at {float(effect):+.0%}" for effect in PAIRS_SHOWN),
    ]
    suites = " or ".join(map(str, sorted({one["0"]["suites"] for one in cell["contenders"].values()})))
    drawn = f"{suites} suites, {some[effects[0]]['benchmarks']} benchmarks of each change"
    lines = [f"**{cell['cell']}** ({cell['order']}; {drawn})", ""]
    lines += [f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]
    for name, by_effect in cell["contenders"].items():
        same = by_effect["0"]
        cells = [
            name,
            _alarms(same, suite),
            f"{same['verdicts'].get('unchanged', 0) / same['benchmarks']:.1%}",
            f"{same['mean_pairs']:.1f}",
            *(_share(by_effect[effect], float(effect)) for effect in effects),
            *(f"{by_effect[effect]['mean_pairs']:.1f}" for effect in PAIRS_SHOWN),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _alarms(tally: Mapping[str, Any], suite: int) -> str:
    hits, count = tally["verdicts"].get("regressed", 0), tally["benchmarks"]
    low, high = wilson_interval(hits, count)
    return f"{suite * hits / count:.3f} ({suite * low:.3f} … {suite * high:.3f})"


def _share(tally: Mapping[str, Any], effect: float) -> str:
    if effect < 0 and set(tally["verdicts"]) <= {"regressed", "unchanged"}:
        return "not asked"
    verdict = "regressed" if effect > 0 else "improved"
    hits, count = tally["verdicts"].get(verdict, 0), tally["benchmarks"]
    low, high = wilson_interval(hits, count)
    return f"{hits / count:.1%} ± {(high - low) / 2:.1%}"
