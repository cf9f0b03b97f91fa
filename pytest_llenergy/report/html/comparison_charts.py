# SPDX-License-Identifier: Apache-2.0
"""Charts over tests and runs: verdicts, energy against speed, trends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log, log1p
from typing import TYPE_CHECKING, Literal

from pytest_llenergy.model.comparison import AppliedRule, Comparison
from pytest_llenergy.model.record import Record
from pytest_llenergy.report.html.cases import PER_TOKEN, Case
from pytest_llenergy.report.html.svg import COLOURS, LegendEntry, Plot, Sheet, label_axes, plot_label
from pytest_llenergy.report.verdicts import format_change, format_interval, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Most rows of a chart; the tables list all of them.
MAX_ROWS = 60

#: Height of a row, and of the margins above and below all rows together (CSS pixels).
ROW_HEIGHT, MARGINS_HEIGHT = 32, 60

#: Largest and smallest ratio at which the axis of the verdicts may end.
WIDEST, NARROWEST = 2.0, 1.08

#: Height of the charts without rows (CSS pixels).
SPEED_HEIGHT, TREND_HEIGHT = 300, 220

#: An axis is logarithmic if its values differ by more than this factor.
LOG_SCALE_RATIO = 5.0

#: Most runs of a trend that a chart shows, the latest ones.
MAX_POINTS = 200

VERDICT_COLOURS = {"regressed": "regressed", "improved": "improved", "inconclusive": "inconclusive"}


def forest_plot(sheet: Sheet, comparisons: Sequence[Comparison], name: str) -> Plot | None:
    """Plot the ratio of each test with its limits; return None if there are no ratios."""
    rows = [each for each in comparisons if each.ratio is not None and each.ratio > 0]
    shown = rows[:MAX_ROWS]
    if not shown:
        return None
    drawn, axes = sheet.figure(MARGINS_HEIGHT + ROW_HEIGHT * len(shown), left=14)
    reach = _axis_reach(shown)
    _draw_bands(axes, shown)
    axes.axvline(0, color=COLOURS["muted"], linewidth=1)
    several = len({each.metric for each in shown}) > 1
    tips: dict[str, list[str]] = {}
    for row, each in enumerate(shown):
        _draw_row(axes, row, each, reach, several=several)
        tips[f"row{row}"] = [f"{each.id}: {format_change(each)} ({format_interval(each)}), {each.verdict}"]
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(shown) - 0.25, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(
        [log(1 + tick) for tick in _ticks(reach)], [f"{tick:+.0%}" if tick else "0" for tick in _ticks(reach)]
    )
    label_axes(axes, "head against base")
    caption = "Dot: estimate of the ratio; line: its limits."
    if len(rows) > len(shown):
        caption += f" The first {len(shown)} of {len(rows)}; the table has all of them."
    legend = [LegendEntry(state, state) for state in dict.fromkeys(each.verdict for each in shown)]
    legend += [LegendEntry("threshold", "threshold"), LegendEntry("band", "tolerance")]
    return Plot(sheet.inline(drawn, name, "Ratios with their limits", tips), "Verdicts", caption, legend)


def _draw_row(axes: Axes, row: int, each: Comparison, reach: float, *, several: bool) -> None:
    assert each.ratio is not None
    colour = COLOURS[VERDICT_COLOURS.get(each.verdict, "unchanged")]
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
    label = plot_label(each.id) + (f" · {each.metric}" if several else "")
    axes.text(-reach, row - 0.42, label, fontsize=10, va="center", ha="left")


def _draw_bands(axes: Axes, rows: Sequence[Comparison]) -> None:
    """Draw tolerance and threshold behind each group of adjacent rows with the same rule."""
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


def _axis_reach(rows: Sequence[Comparison]) -> float:
    """Return the logarithm of the ratio at the end of the axis."""
    extents = [abs(log(value)) for each in rows for value in (each.ratio, each.low, each.high) if value]
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
    drawn, axes = sheet.figure(MARGINS_HEIGHT + ROW_HEIGHT * len(shown), left=14)
    rules: set[AppliedRule] = {each.rule for each in shown if each.rule is not None}
    for threshold in sorted({rule.threshold for rule in rules}):
        axes.axvline(threshold * 100, color=COLOURS["regressed"], linewidth=1, linestyle=(0, (3, 3)))
    noise = [(each.noise or 0.0) * 100 for each in shown]
    detectable = [(each.detectable or 0.0) * 100 for each in shown]
    places = range(len(shown))
    axes.hlines(places, noise, detectable, color=COLOURS["grid"], linewidth=1.5)
    axes.scatter(noise, places, s=34, color=COLOURS["muted"], gid="noise", zorder=3)
    axes.scatter(detectable, places, s=34, color=COLOURS["head"], marker="D", gid="detectable", zorder=3)
    for row, each in enumerate(shown):
        axes.text(0, row - 0.42, plot_label(each.id), fontsize=10, va="center", ha="left")
    axes.set_xlim(0, max([*detectable, *noise, *(rule.threshold * 100 for rule in rules)]) * 1.08 or 1.0)
    axes.set_ylim(len(shown) - 0.25, -0.75)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    label_axes(axes, "%")
    tips = {
        "noise": [f"{each.id}: noise {each.noise:.2%}" for each in shown],
        "detectable": [f"{each.id}: detectable {each.detectable:.2%}" for each in shown],
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


def speed_and_energy(record: Record | None) -> tuple[float, float] | None:
    """Return tokens per second and joules per token, or None unless the record has both."""
    if record is None:
        return None
    speed, energy = record.metrics.get("output_tokens_per_s"), record.metrics.get(PER_TOKEN)
    if speed is None or energy is None or not speed.value or not energy.value or energy.value < 0:
        return None
    return speed.value, energy.value


def energy_speed_plot(sheet: Sheet, cases: Sequence[Case], name: str) -> Plot | None:
    """Plot energy per token against throughput, which shows whether energy was saved at the cost of speed.

    A line joins the sides of a test. Returns None if no test counts tokens.
    """
    pairs = [
        (case, speed_and_energy(case.records.get("base")), speed_and_energy(case.records.get("head")))
        for case in cases
    ]
    pairs = [each for each in pairs if each[1] is not None or each[2] is not None]
    if not pairs:
        return None
    drawn, axes = sheet.figure(SPEED_HEIGHT)
    tips: dict[str, list[str]] = {"from": [], "to": []}
    old, new = [], []
    for case, before, after in pairs:
        colour = COLOURS[VERDICT_COLOURS.get(case.state, "unchanged" if case.comparisons else "head")]
        if before is not None:
            old.append((*before, colour))
            tips["from"].append(_describe_point(case, "base", before))
        if after is not None:
            new.append((*after, colour))
            tips["to"].append(_describe_point(case, "head" if before else "", after))
        if before is not None and after is not None:
            axes.plot([before[0], after[0]], [before[1], after[1]], color=colour, linewidth=1.2, zorder=2)
    if old:
        axes.scatter(
            [each[0] for each in old],
            [each[1] for each in old],
            s=34,
            facecolors=COLOURS["page"],
            edgecolors=[each[2] for each in old],
            gid="from",
            zorder=3,
        )
    if new:
        axes.scatter(
            [each[0] for each in new],
            [each[1] for each in new],
            s=34,
            c=[each[2] for each in new],
            gid="to",
            zorder=4,
        )
    both = [*old, *new]
    _scale(axes, "x", [each[0] for each in both])
    _scale(axes, "y", [each[1] for each in both])
    label_axes(axes, "tokens/s", "J/token")
    legend = [LegendEntry("ring muted", "base"), LegendEntry("dot muted", "head")] if old else []
    caption = "Down is thriftier, right is faster." + (
        " A line joins the two sides of a test." if old else ""
    )
    return Plot(
        sheet.inline(drawn, name, "Joules per token against tokens per second", tips),
        "Energy against speed",
        caption,
        legend,
    )


def _scale(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Scale an axis: linear with round numbers, or logarithmic if values are far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = min(values), max(values)
    if high / low > LOG_SCALE_RATIO:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.3, high * 1.3)})
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.set_tick_params(which="minor", length=0)
    else:
        room = max(0.1 * (high - low), 0.02 * high)
        axes.set(**{f"{which}lim": (low - room, high + room)})
        axes.locator_params(axis=which, nbins=5)


def _describe_point(case: Case, side: str, point: tuple[float, float]) -> str:
    suffix = f", {side}" if side else ""
    return f"{case.id}{suffix}: {format_value(point[0], 'token/s')}, {format_value(point[1], 'J/token')}"


@dataclass(frozen=True)
class TrendPoint:
    """One run of a trend.

    Attributes:
        time: Start of the run (RFC 3339).
        value: Value in the unit of the trend, with limits ``low`` and ``high``.
        changed: Whether the level changes at this run.
        broke: Whether the devices differ from those of the previous run.
    """

    time: str
    commit: str | None
    value: float
    low: float | None = None
    high: float | None = None
    changed: bool = False
    broke: bool = False


@dataclass(frozen=True)
class Trend:
    """One metric of one test over runs, oldest first."""

    id: str
    metric: str
    unit: str
    points: Sequence[TrendPoint]


def trend_plot(sheet: Sheet, trend: Trend, name: str) -> Plot | None:
    """Plot the runs of a trend at equal distances; return None if there are no runs."""
    points = trend.points[-MAX_POINTS:]
    if not points:
        return None
    drawn, axes = sheet.figure(TREND_HEIGHT)
    places = range(1, len(points) + 1)
    values = [each.value for each in points]
    for place, each in zip(places, points, strict=True):
        if each.low is not None and each.high is not None:
            axes.plot([place, place], [each.low, each.high], color=COLOURS["head"], linewidth=1, alpha=0.6)
        if each.changed:
            axes.axvline(place - 0.5, color=COLOURS["regressed"], linewidth=1.2, linestyle=(0, (3, 3)))
        if each.broke:
            axes.axvline(place - 0.5, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (1, 2)))
    axes.plot(places, values, color=COLOURS["head"], linewidth=1, alpha=0.5)
    axes.scatter(places, values, s=20, color=COLOURS["head"], gid="runs", zorder=3)
    tips = {"runs": [f"{_describe_run(each)}: {format_value(each.value, trend.unit)}" for each in points]}
    axes.set_xlim(0.4, len(points) + 0.6)
    axes.locator_params(axis="x", nbins=8, integer=True)
    axes.locator_params(axis="y", nbins=6)
    label_axes(axes, "run", f"{trend.metric}, {trend.unit}")
    legend = [LegendEntry("threshold", "change point")] if any(each.changed for each in points) else []
    legend += [LegendEntry("edge", "other devices")] if any(each.broke for each in points) else []
    caption = f"{points[0].time} to {points[-1].time}."
    if len(points) < len(trend.points):
        caption += f" The latest {len(points)} of {len(trend.points)} runs; the table has all of them."
    return Plot(sheet.inline(drawn, name, f"{trend.metric} from run to run", tips), "Trend", caption, legend)


def _describe_run(point: TrendPoint) -> str:
    return f"{point.time} {(point.commit or '')[:10]}".strip()
