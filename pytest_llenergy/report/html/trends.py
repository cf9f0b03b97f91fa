# SPDX-License-Identifier: Apache-2.0
"""The chart and the table of one test over many runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from pytest_llenergy.compare.history.trend import Trend, TrendPoint
from pytest_llenergy.record.comparison import VERDICTS
from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.html.comparison_charts import VERDICT_COLOURS
from pytest_llenergy.report.html.parts import Cell, LegendEntry, Plot, Row, Table, table
from pytest_llenergy.report.html.svg import COLOURS, WIDE, WIDTH, Sheet, label_axes
from pytest_llenergy.report.verdicts import format_value

if TYPE_CHECKING:
    from markupsafe import Markup

#: Height of a trend (CSS pixels).
TREND_HEIGHT = 220

#: Most runs that a chart shows, the latest ones, and most on narrow screens.
MAX_POINTS, MAX_NARROW_POINTS = 200, 60

#: Distance of marks at the edge of the axes from it, as a share of the height.
EDGE = 0.03

#: Characters of a commit on the axis, and the room for them (CSS pixels).
SHORT_COMMIT, COMMIT_ROOM = 7, 62

#: Marks that differ from the dot of other verdicts, with their style in the legend.
MARKS = {"regressed": ("s", "square"), "improved": ("D", "diamond")}


def trend_plot(sheet: Sheet, trend: Trend, name: str) -> Plot | None:
    """Plot the runs of a trend at equal distances; return None if there are no runs."""
    points = trend.points[-MAX_POINTS:]
    if not points:
        return None
    legend = [LegendEntry("threshold", "change point")] if any(each.changed for each in points) else []
    legend += [LegendEntry("edge", "other devices")] if any(each.broke for each in points) else []
    legend += [LegendEntry("sign down", "accepted step")] if any(each.accepted for each in points) else []
    legend += [LegendEntry("ring muted", "outlier")] if any(each.outlier for each in points) else []
    verdicts = {each.verdict for each in points if not each.outlier}
    legend += [
        LegendEntry(f"{MARKS.get(each, ('', 'dot'))[1]} {each.replace(' ', '-')}", each)
        for each in VERDICTS
        if each in verdicts and each in VERDICT_COLOURS
    ]
    caption = f"{points[0].time} to {points[-1].time}."
    bottom, top = _limits(points)
    if any(not bottom <= each.value <= top for each in points):
        caption += " Outliers beyond the axis are drawn at its edge."
    if len(points) < len(trend.points):
        caption += f" The latest {len(points)} of {len(trend.points)} runs; the table has all of them."
    if len(points) > MAX_NARROW_POINTS:
        caption += f" Narrow screens show the latest {MAX_NARROW_POINTS}."
    narrow = _draw(sheet, trend, MAX_NARROW_POINTS, name, WIDTH)
    return Plot(narrow, "Trend", caption, legend, _draw(sheet, trend, MAX_POINTS, f"{name}-wide", WIDE))


def trend_table(trend: Trend) -> Table:
    """List the runs of a trend."""
    rows: list[Row] = [
        [
            each.time,
            (each.commit or "-")[:10],
            format_value(each.value),
            format_value(each.low),
            format_value(each.high),
            Cell(each.verdict or "", (each.verdict or "").replace(" ", "-")),
            _describe_events(each),
        ]
        for each in trend.points
    ]
    columns = ("time", "commit", "#value", "#low", "#high", "verdict", "")
    return table(f"Trend of {trend.title}", columns, rows)


def _draw(sheet: Sheet, trend: Trend, most: int, name: str, width: int) -> Markup:
    first = max(0, len(trend.points) - most)
    points = trend.points[first:]
    drawn, axes = sheet.figure(TREND_HEIGHT, width=width)
    bottom, top = _limits(points)
    edge = EDGE * (top - bottom)
    ranges = [
        (place, each.low, each.high)
        for place, each in enumerate(points)
        if each.low is not None and each.high is not None
    ]
    if ranges:
        axes.vlines(*zip(*ranges, strict=True), color=COLOURS["head"], linewidth=1, alpha=0.6)
    for start, end, level in _levels(trend.points):
        if end > first:
            ends = max(start - first, 0) - 0.5, end - first - 0.5
            axes.hlines(level, *ends, color=COLOURS["muted"], linewidth=1.2, alpha=0.7)
    for place, each in enumerate(points):
        if each.changed:
            axes.axvline(place - 0.5, color=COLOURS["regressed"], linewidth=1.2, linestyle=(0, (3, 3)))
        if each.broke:
            axes.axvline(place - 0.5, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (1, 2)))
    groups: dict[str, list[int]] = {}
    for place, each in enumerate(points):
        known = each.verdict if each.verdict in VERDICT_COLOURS else "head"
        groups.setdefault("outlier" if each.outlier else str(known), []).append(place)
    tips = {}
    for group, places in groups.items():
        gid = f"runs-{group.replace(' ', '-')}"
        colour = COLOURS["muted" if group == "outlier" else VERDICT_COLOURS.get(group, "head")]
        axes.scatter(
            places,
            [min(max(points[place].value, bottom + edge), top - edge) for place in places],
            s=26 if group in MARKS else 20,
            marker=MARKS.get(group, ("o", ""))[0],
            facecolor=COLOURS["page"] if group == "outlier" else colour,
            edgecolor=colour,
            linewidth=1.2 if group == "outlier" else 0,
            gid=gid,
            zorder=3,
        )
        tips[gid] = [_describe_run(points[place], trend.unit) for place in places]
    accepted = [place for place, each in enumerate(points) if each.accepted]
    if accepted:
        axes.scatter(
            accepted,
            [1 - EDGE] * len(accepted),
            s=34,
            marker="v",
            color=COLOURS["improved"],
            transform=axes.get_xaxis_transform(),
            gid="accepted",
        )
        tips["accepted"] = [f"accepted: {points[place].accepted}" for place in accepted]
    axes.set_ylim(bottom, top)
    axes.set_xlim(-0.6, len(points) - 0.4)
    every = ceil(len(points) * COMMIT_ROOM / axes.get_window_extent().width)
    ticks = range(0, len(points), every)
    axes.set_xticks(list(ticks), [one_line(points[place].commit or "?")[:SHORT_COMMIT] for place in ticks])
    axes.locator_params(axis="y", nbins=6)
    label_axes(axes, "commit", trend.title)
    return sheet.inline(drawn, name, f"{trend.metric} from run to run", tips)


def _limits(points: Sequence[TrendPoint]) -> tuple[float, float]:
    """Return the limits of the axis, which outliers do not widen."""
    kept = [each for each in points if not each.outlier] or points
    ends = [end for each in kept for end in (each.value, each.low, each.high) if end is not None]
    room = 0.08 * (max(ends) - min(ends)) or 0.02 * abs(max(ends)) or 1.0
    return min(ends) - room, max(ends) + room


def _levels(points: Sequence[TrendPoint]) -> list[tuple[int, int, float]]:
    """Return start, end and median of each level."""
    borders = sorted({0, len(points), *(place for place, each in enumerate(points) if each.changed)})
    return [
        (start, end, median(each.value for each in points[start:end])) for start, end in pairwise(borders)
    ]


def _describe_run(point: TrendPoint, unit: str) -> str:
    label = f"{point.time} {(point.commit or '')[:10]}".strip()
    value = format_value(point.value, unit)
    if point.low is not None and point.high is not None:
        value += f" ({format_value(point.low)} to {format_value(point.high)})"
    return ", ".join([f"{label}: {value}", *filter(None, [point.verdict, _describe_events(point)])])


def _describe_events(point: TrendPoint) -> str:
    events = ["change point"] * point.changed + ["other devices"] * point.broke + ["outlier"] * point.outlier
    return "; ".join([*events, *([f"accepted: {point.accepted}"] if point.accepted else [])])
