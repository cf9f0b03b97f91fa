# SPDX-License-Identifier: Apache-2.0
"""Charts of comparisons: verdicts, and what they can detect."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p
from typing import TYPE_CHECKING

from pytest_llenergy.record.comparison import AppliedRule, Comparison
from pytest_llenergy.report.html.bars import BAR_AT, BAR_THICKNESS, row_figure, write_row
from pytest_llenergy.report.html.parts import LegendEntry, Plot
from pytest_llenergy.report.html.svg import COLOURS, WIDE, WIDTH, Sheet, label_axes, plot_label
from pytest_llenergy.report.verdicts import LARGE, format_change, format_change_and_limits, format_size

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes


#: Most rows of a chart; the tables list all of them.
MAX_ROWS = 60

#: Largest and smallest ratio at which the axis of the verdicts may end.
WIDEST, NARROWEST = 2.0, 1.08

VERDICT_COLOURS = {
    "regressed": "regressed",
    "improved": "improved",
    "worse": "inconclusive",
    "inconclusive": "inconclusive",
    "invalid": "invalid",
    "not comparable": "invalid",
}


def forest_plot(sheet: Sheet, comparisons: Sequence[Comparison], name: str) -> Plot | None:
    """Plot the ratio of each test with its limits; return None if there are no ratios."""
    rows = [each for each in comparisons if each.ratio is not None and each.ratio > 0]
    shown = rows[:MAX_ROWS]
    if not shown:
        return None
    reach = _axis_reach(shown)
    several = len({each.metric for each in shown}) > 1

    def draw(width: int) -> Markup:
        drawn, axes = row_figure(sheet, len(shown), width)
        axes.grid(visible=False)
        tips: dict[str, list[str]] = {}
        for row, each in enumerate(shown):
            _draw_row(axes, row, each, reach)
            change = format_change_and_limits(each)
            value = change if width == WIDE else format_change(each)
            write_row(axes, row, plot_label(each.id, 200), value, width, each.metric if several else "")
            subject = f"{each.id}: {each.metric}" if several else each.id
            tips[f"row{row}"] = [f"{subject}: {change}, {each.verdict}"]
        axes.set_xlim(-reach, reach)
        axes.set_xticks(
            [log(1 + tick) for tick in _ticks(reach)],
            [f"{tick:+.0%}" if tick else "0" for tick in _ticks(reach)],
        )
        label_axes(axes, "change")
        alt = "Changes with their limits: " + "; ".join(tip for (tip,) in tips.values())
        return sheet.inline(drawn, f"{name}{width}", alt, tips)

    narrow, wide = draw(WIDTH), draw(WIDE)
    caption = "Dot: estimate of the change; line: its limits."
    if len(rows) > len(shown):
        caption += f" The first {len(shown)} of {len(rows)}; the table has all of them."
    legend = [
        LegendEntry(f"dot {state.replace(' ', '-')}", state)
        for state in dict.fromkeys(each.verdict for each in shown)
    ]
    legend += [LegendEntry("threshold", "threshold"), LegendEntry("band", "tolerance")]
    return Plot(narrow, "Verdicts", caption, legend, wide)


def _draw_row(axes: Axes, row: int, each: Comparison, reach: float) -> None:
    """Draw one change below the name of its row, with the rule behind its verdict."""
    assert each.ratio is not None
    at, top, bottom = row + BAR_AT, row + BAR_AT - BAR_THICKNESS, row + BAR_AT + BAR_THICKNESS / 2
    if each.rule is not None:
        tolerance = log1p(each.rule.tolerance)
        axes.fill_between([-tolerance, tolerance], top, bottom, color=COLOURS["band"], linewidth=0)
        for sign in (-1, 1):
            bad = (sign > 0) == (each.better == "less")
            place = sign * log1p(each.rule.threshold)
            colour = COLOURS["regressed" if bad else "improved"]
            axes.plot([place, place], [top, bottom], color=colour, linewidth=1, linestyle=(0, (2, 2)))
    axes.plot([0, 0], [top, bottom], color=COLOURS["muted"], linewidth=1)
    colour = COLOURS[VERDICT_COLOURS.get(each.verdict, "unchanged")]
    middle = log(each.ratio)
    if each.low is not None and each.high is not None and each.high > 0:
        # A limit of 0, or below in a report from elsewhere, is beyond the axis.
        low = log(each.low) if each.low > 0 else -2 * reach
        axes.plot([low, log(each.high)], [at, at], color=colour, linewidth=2.5, clip_on=True)
    beyond = abs(middle) > reach
    axes.plot(
        [min(max(middle, -reach), reach)],
        [at],
        marker=(">" if middle > 0 else "<") if beyond else "o",
        markersize=7,
        color=colour,
        linestyle="none",
        clip_on=False,
        gid=f"row{row}",
    )


def _axis_reach(rows: Sequence[Comparison]) -> float:
    """Return the logarithm of the ratio at the end of the axis."""
    values = [value for each in rows for value in (each.ratio, each.low, each.high)]
    extents = [abs(log(value)) for value in values if value is not None and value > 0]
    # The logarithm of 0 is as far as the axis can reach.
    extents += [log(WIDEST) for value in values if value is not None and value <= 0]
    extents += [log1p(each.rule.tolerance) for each in rows if each.rule is not None]
    return min(max([log(NARROWEST), *extents]) * 1.08, log(WIDEST))


def _ticks(reach: float) -> list[float]:
    """Return the changes to label: round numbers on both sides of zero."""
    widest = exp(reach) - 1
    step = next(each for each in (0.02, 0.05, 0.1, 0.2, 0.5) if widest / each <= 4)
    ticks = [step * count for count in range(-8, 9)]
    return [tick for tick in ticks if tick > -1 and abs(log1p(tick)) <= reach]


def detectability_plot(sheet: Sheet, comparisons: Sequence[Comparison], name: str) -> Plot | None:
    """Plot the noise of the rounds and the smallest detectable change; return None if both are unknown."""
    rows = [each for each in comparisons if each.noise is not None and each.detectable is not None]
    shown = rows[:MAX_ROWS]
    if not shown:
        return None
    rules: set[AppliedRule] = {each.rule for each in shown if each.rule is not None}
    noise = [(each.noise or 0.0) * 100 for each in shown]
    detectable = [min(each.detectable or 0.0, LARGE) * 100 for each in shown]
    places = [row + BAR_AT for row in range(len(shown))]
    drawn, axes = row_figure(sheet, len(shown), WIDTH)
    axes.grid(visible=False)
    for row, each in enumerate(shown):
        write_row(
            axes,
            row,
            plot_label(each.id, 200),
            f"{each.noise:.1%}, {format_size(each.detectable or 0.0)}",
            WIDTH,
        )
        if each.rule is not None:
            at, ends = (
                each.rule.threshold * 100,
                (row + BAR_AT - BAR_THICKNESS, row + BAR_AT + BAR_THICKNESS / 2),
            )
            axes.plot([at, at], ends, color=COLOURS["regressed"], linewidth=1, linestyle=(0, (2, 2)))
    axes.hlines(places, noise, detectable, color=COLOURS["grid"], linewidth=1.5)
    axes.scatter(noise, places, s=34, color=COLOURS["muted"], gid="noise", zorder=3)
    axes.scatter(detectable, places, s=34, color=COLOURS["head"], marker="D", gid="detectable", zorder=3)
    axes.set_xlim(0, max([*detectable, *noise, *(rule.threshold * 100 for rule in rules)]) * 1.08 or 1.0)
    label_axes(axes, "%")
    tips = {
        "noise": [f"{each.id}: noise {each.noise:.2%}" for each in shown],
        "detectable": [f"{each.id}: detectable {format_size(each.detectable or 0.0)}" for each in shown],
    }
    caption = "Such a comparison finds a change of the size of the diamond nine times in ten."
    if len(rows) > len(shown):
        caption += f" The first {len(shown)} of {len(rows)}; the table has all of them."
    legend = [
        LegendEntry("dot muted", "noise of the rounds"),
        LegendEntry("diamond head", "detectable"),
        LegendEntry("threshold", "threshold"),
    ]
    return Plot(
        sheet.inline(drawn, name, "Noise and minimum detectable change", tips),
        "What it can find",
        caption,
        legend,
    )
