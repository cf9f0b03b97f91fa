# SPDX-License-Identifier: Apache-2.0
"""A metric from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llenergy.report.html.plot import Key, Plot
from pytest_llenergy.report.html.svg import COLOURS, Sheet, titled
from pytest_llenergy.report.verdicts import value

HEIGHT = 220

#: Points that a figure has room for: the latest.
MOST_POINTS = 200


@dataclass(frozen=True)
class TrendPoint:
    """One run. ``time`` is RFC 3339, ``low`` and ``high`` are limits of ``value`` in the unit of the trend.

    ``changed`` says that the level is another one from here on, ``broke`` that these are other devices than
    before.
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
    """The runs of one metric of one test, the oldest first."""

    id: str
    metric: str
    unit: str
    points: Sequence[TrendPoint]


def trend_plot(sheet: Sheet, trend: Trend, name: str) -> Plot | None:
    """The points in their order, one step apart whatever time has passed; ``None`` without any."""
    points = trend.points[-MOST_POINTS:]
    if not points:
        return None
    drawn, axes = sheet.figure(HEIGHT)
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
    tips = {"runs": [f"{_run(each)}: {value(each.value, trend.unit)}" for each in points]}
    axes.set_xlim(0.4, len(points) + 0.6)
    axes.locator_params(axis="x", nbins=8, integer=True)
    axes.locator_params(axis="y", nbins=6)
    titled(axes, "run", f"{trend.metric}, {trend.unit}")
    keys = [Key("threshold", "change point")] if any(each.changed for each in points) else []
    keys += [Key("edge", "other devices")] if any(each.broke for each in points) else []
    caption = f"{points[0].time} to {points[-1].time}."
    if len(points) < len(trend.points):
        caption += f" The latest {len(points)} of {len(trend.points)} runs; the table has all of them."
    return Plot(sheet.inline(drawn, name, f"{trend.metric} from run to run", tips), "Trend", caption, keys)


def _run(point: TrendPoint) -> str:
    return f"{point.time} {(point.commit or '')[:10]}".strip()
