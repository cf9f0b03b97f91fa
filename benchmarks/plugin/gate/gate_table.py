# SPDX-License-Identifier: Apache-2.0
"""Error rates of the gates as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import NormalDist
from typing import Any

from pytest_llenergy.compare.stages import DEFAULT_STAGES

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


def _alarms(tally: Mapping[str, Any], suite: int, digits: int = 3) -> str:
    hits, count = tally["verdicts"].get("regressed", 0), tally["benchmarks"]
    low, high = wilson_interval(hits, count)
    shown = [f"{suite * each:.{digits}f}" for each in (hits / count, low, high)]
    return f"{shown[0]} ({shown[1]} … {shown[2]})"


def _share(tally: Mapping[str, Any], effect: float) -> str:
    if effect < 0 and set(tally["verdicts"]) <= {"regressed", "unchanged"}:
        return "not asked"
    verdict = "regressed" if effect > 0 else "improved"
    hits, count = tally["verdicts"].get(verdict, 0), tally["benchmarks"]
    low, high = wilson_interval(hits, count)
    return f"{hits / count:.1%} ± {(high - low) / 2:.1%}"


#: Rules of the short tables, by their title there.
SHORT = {
    "mean:5%": "mean:5%, 12 pairs",
    "Welch": "Welch, 12 pairs",
    "Mann–Whitney": "Mann-Whitney, 12 pairs",
    "asv 1.05": "asv, factor 1.05, 12 pairs",
    "CodSpeed 3 %": "CodSpeed, 3%, 12 pairs",
}
STAGED = {"`6+6`": "ours, 6+6", "**default**": f"ours, {'+'.join(map(str, DEFAULT_STAGES.pairs))}"}
STORED = {f"ours, {rounds} rounds": f"ours, stored, {rounds} rounds" for rounds in (6, 12)}


def summary(content: Mapping[str, Any]) -> str:
    """Render the tables of ``docs/gating.md``."""
    pairs = [cell for cell in content["cells"] if cell["order"] != "stored"]
    stored = [cell for cell in content["cells"] if cell["order"] == "stored"]
    rules = {**SHORT, **STAGED}
    lines = [["machine", *rules]]
    for cell in pairs:
        lines.append(
            [_name(cell), *(_short(cell["contenders"][rule], "0.03", "0.05") for rule in rules.values())]
        )
    rules = {name: rule for name, rule in SHORT.items() if name != "asv 1.05"} | STORED
    sessions = [["sessions", *rules, "unchanged, 12", "+10 %, 12"]]
    for cell in stored:
        last = cell["contenders"][STORED["ours, 12 rounds"]]
        sessions.append(
            [
                _name(cell),
                *(_short(cell["contenders"][rule], "0.05") for rule in rules.values()),
                _percent(last["0"], "unchanged"),
                _percent(last["0.1"]),
            ]
        )
    return "\n\n".join(map(_table, (lines, sessions))) + "\n"


def _name(cell: Mapping[str, Any]) -> str:
    return str(cell["cell"]).removesuffix(", in pairs").removesuffix(", stored")


def _short(tallies: Mapping[str, Any], *effects: str) -> str:
    """Return alarms per suite of 50, and how many of 100 changes are found."""
    hits = tallies["0"]["verdicts"].get("regressed", 0) / tallies["0"]["benchmarks"] * 50
    alarms = f"{hits:.0f}" if hits >= 10 else f"{hits:.2f}" if hits >= 0.1 else f"{hits:.3f}"
    return " / ".join([alarms, *(_percent(tallies[effect]).removesuffix(" %") for effect in effects)])


def _percent(tally: Mapping[str, Any], verdict: str = "regressed", digits: int = 0) -> str:
    share = 100 * tally["verdicts"].get(verdict, 0) / tally["benchmarks"]
    # Not rounded to certainty.
    digits = 1 if 99.5 <= share < 99.95 else digits
    return f"{share:.{digits}f} %" if share < 99.95 else "100 %"


def _table(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"|{'|'.join(row)}|" for row in (rows[0], rule, *rows[1:]))
