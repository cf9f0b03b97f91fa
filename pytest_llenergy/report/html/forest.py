# SPDX-License-Identifier: Apache-2.0
"""Verdicts as intervals, the worst on top, with the threshold and the tolerance that they were held to; and
how small a change could have been found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import exp, log, log1p
from typing import TYPE_CHECKING

from pytest_llenergy.model.comparison import AppliedRule, Comparison
from pytest_llenergy.report.html.plot import Key, Plot, short_name
from pytest_llenergy.report.html.svg import COLOURS, Sheet, titled
from pytest_llenergy.report.verdicts import change, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Rows that a person looks at; the tables have all.
MOST_ROWS = 60

#: Height of a row and of what is around all rows (CSS pixels).
ROW, AROUND = 32, 60

#: The axis ends at a factor of this, and no sooner than at a factor of that.
WIDEST, NARROWEST = 2.0, 1.08

COLOUR_OF = {"regressed": "regressed", "improved": "improved", "inconclusive": "inconclusive"}


def forest(sheet: Sheet, comparisons: Sequence[Comparison], name: str) -> Plot | None:
    """The ratio of each test with its limits; ``None`` where nothing was judged."""
    rows = [each for each in comparisons if each.ratio is not None and each.ratio > 0]
    shown = rows[:MOST_ROWS]
    if not shown:
        return None
    drawn, axes = sheet.figure(AROUND + ROW * len(shown), left=14)
    reach = _reach(shown)
    _bands(axes, shown)
    axes.axvline(0, color=COLOURS["muted"], linewidth=1)
    several = len({each.metric for each in shown}) > 1
    tips: dict[str, list[str]] = {}
    for row, each in enumerate(shown):
        _row(axes, row, each, reach, several=several)
        tips[f"row{row}"] = [f"{each.id}: {change(each)} ({interval(each)}), {each.verdict}"]
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(shown) - 0.25, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(
        [log(1 + tick) for tick in _ticks(reach)], [f"{tick:+.0%}" if tick else "0" for tick in _ticks(reach)]
    )
    titled(axes, "head against base")
    caption = "Dot: estimate of the ratio; line: its limits."
    if len(rows) > len(shown):
        caption += f" The first {len(shown)} of {len(rows)}; the table has all of them."
    keys = [Key(state, state) for state in dict.fromkeys(each.verdict for each in shown)]
    keys += [Key("threshold", "threshold"), Key("band", "tolerance")]
    return Plot(sheet.inline(drawn, name, "Ratios with their limits", tips), "Verdicts", caption, keys)


def _row(axes: Axes, row: int, each: Comparison, reach: float, *, several: bool) -> None:
    assert each.ratio is not None
    colour = COLOURS[COLOUR_OF.get(each.verdict, "unchanged")]
    middle = log(each.ratio)
    if each.low and each.high:
        axes.plot([log(each.low), log(each.high)], [row, row], color=colour, linewidth=2.5, clip_on=True)
    beyond = abs(middle) > reach
    axes.plot(
        [min(max(middle, -reach), reach)],
        [row],
        marker=(">" if middle > 0 else "<") if beyond else "o",
        markersize=6.5,
        color=colour,
        linestyle="none",
        clip_on=False,
        gid=f"row{row}",
    )
    label = short_name(each.id) + (f" · {each.metric}" if several else "")
    axes.text(-reach, row - 0.42, label, fontsize=10, va="center", ha="left")


def _bands(axes: Axes, rows: Sequence[Comparison]) -> None:
    """For each stretch of rows with one rule its tolerance and threshold."""
    numbered = enumerate(rows)
    for key, group in groupby(numbered, key=lambda each: (each[1].rule, each[1].better)):
        places = [place for place, _ in group]
        rule, better = key
        if rule is None:
            continue
        top, bottom = places[0] - 0.75, places[-1] + 0.25
        tolerance = log1p(rule.tolerance)
        axes.fill_between([-tolerance, tolerance], top, bottom, color=COLOURS["band"], linewidth=0)
        for sign in (-1, 1):
            bad = (sign > 0) == (better == "less")
            at = sign * log1p(rule.threshold)
            colour = COLOURS["regressed" if bad else "improved"]
            axes.plot([at, at], [top, bottom], color=colour, linewidth=1, linestyle=(0, (3, 3)))


def _reach(rows: Sequence[Comparison]) -> float:
    """Half of the width of the axis, on the logarithm."""
    found = [abs(log(value)) for each in rows for value in (each.ratio, each.low, each.high) if value]
    found += [log1p(each.rule.tolerance) for each in rows if each.rule is not None]
    return min(max([log(NARROWEST), *found]) * 1.08, log(WIDEST))


def _ticks(reach: float) -> list[float]:
    """Round changes on both sides of none."""
    widest = exp(reach) - 1
    step = next(each for each in (0.02, 0.05, 0.1, 0.2, 0.5) if widest / each <= 4)
    ticks = [step * count for count in range(-8, 9)]
    return [tick for tick in ticks if tick > -1 and abs(log1p(tick)) <= reach]


def detectability(sheet: Sheet, comparisons: Sequence[Comparison], name: str) -> Plot | None:
    """Noise of the rounds and the least change that could have been found; ``None`` where nobody knows."""
    rows = [each for each in comparisons if each.noise is not None and each.detectable is not None]
    shown = rows[:MOST_ROWS]
    if not shown:
        return None
    drawn, axes = sheet.figure(AROUND + ROW * len(shown), left=14)
    rules: set[AppliedRule] = {each.rule for each in shown if each.rule is not None}
    for threshold in sorted({rule.threshold for rule in rules}):
        axes.axvline(threshold * 100, color=COLOURS["regressed"], linewidth=1, linestyle=(0, (3, 3)))
    noise = [(each.noise or 0.0) * 100 for each in shown]
    finds = [(each.detectable or 0.0) * 100 for each in shown]
    places = range(len(shown))
    axes.hlines(places, noise, finds, color=COLOURS["grid"], linewidth=1.5)
    axes.scatter(noise, places, s=34, color=COLOURS["muted"], gid="noise", zorder=3)
    axes.scatter(finds, places, s=34, color=COLOURS["head"], marker="D", gid="finds", zorder=3)
    for row, each in enumerate(shown):
        axes.text(0, row - 0.42, short_name(each.id), fontsize=10, va="center", ha="left")
    axes.set_xlim(0, max([*finds, *noise, *(rule.threshold * 100 for rule in rules)]) * 1.08 or 1.0)
    axes.set_ylim(len(shown) - 0.25, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    titled(axes, "%")
    tips = {
        "noise": [f"{each.id}: noise {each.noise:.2%}" for each in shown],
        "finds": [f"{each.id}: finds {each.detectable:.2%}" for each in shown],
    }
    caption = "A change of the size of the diamond is found in nine of ten comparisons such as this one."
    if len(rows) > len(shown):
        caption += f" The first {len(shown)} of {len(rows)}; the table has all of them."
    keys = [
        Key("dot muted", "noise of the rounds"),
        Key("diamond head", "finds"),
        Key("threshold", "threshold"),
    ]
    return Plot(
        sheet.inline(drawn, name, "Noise and minimum detectable change", tips),
        "What it can find",
        caption,
        keys,
    )
