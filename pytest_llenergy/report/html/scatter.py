# SPDX-License-Identifier: Apache-2.0
"""Charts of two metrics: points with names, their colours, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Literal

from pytest_llenergy.record.text import short_test_name, unique_function_names
from pytest_llenergy.report.html.cases import TestSection
from pytest_llenergy.report.html.labels import case_facts, fit, place_names
from pytest_llenergy.report.html.parts import LegendEntry
from pytest_llenergy.report.html.svg import COLOURS, SERIES, WIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Marks of the series, which also differ in colour.
MARKERS = ("o", "s", "D", "^", "v", "P")

#: Facts that may give points their colour, first the one that says most.
SERIES_FACTS = ("backend", "model", "test")

#: Longest names of points on wide and on narrow screens (CSS pixels).
WIDE_NAME, NARROW_NAME = 240, 130

#: An axis is logarithmic if its values differ by more than this factor.
LOG_SCALE_RATIO = 5.0

#: Fewest points with a front.
MIN_FRONT = 3

FRONT_CAPTION = "No test beats one on the dashed line, the Pareto front, in both."

UNNAMED_CAPTION = "Points without a name are in the numbers below."


@dataclass(frozen=True)
class ScatterPoint:
    """One test in a chart of two metrics, with standard uncertainties and the place of its base, if any."""

    name: str
    tip: str
    x: float
    y: float
    x_u: float = 0.0
    y_u: float = 0.0
    colour: str = SERIES[0]
    marker: str = MARKERS[0]
    base: tuple[float, float] | None = None
    base_tip: str = ""


@dataclass(frozen=True)
class SeriesLegend:
    """What colours mean. ``fact`` differs between them, such as ``backend``; it is empty for verdicts."""

    fact: str
    entries: Sequence[LegendEntry]


def series_of(cases: Sequence[TestSection]) -> tuple[dict[str, tuple[str, str]], SeriesLegend]:
    """Return colour and mark of each test: by verdict, or by a fact with few values."""
    if any(case.comparisons for case in cases):
        coloured = {"regressed": "regressed", "improved": "improved"}
        coloured |= dict.fromkeys(("worse", "inconclusive"), "inconclusive")
        looks = {case.anchor: (coloured.get(case.state, "unchanged"), MARKERS[0]) for case in cases}
        return looks, SeriesLegend("", [LegendEntry(f"dot {each}", each) for each in _states(looks)])
    functions = unique_function_names(case.id for case in cases)
    facts = {case.anchor: case_facts(case, functions[case.id]) for case in cases}
    for fact in SERIES_FACTS:
        values = list(dict.fromkeys(each.get(fact, "-") for each in facts.values()))
        if 2 <= len(values) <= len(SERIES):
            looks = {
                anchor: (
                    SERIES[values.index(each.get(fact, "-"))],
                    MARKERS[values.index(each.get(fact, "-"))],
                )
                for anchor, each in facts.items()
            }
            return looks, SeriesLegend(fact, series_entries(values))
    return dict.fromkeys(facts, (SERIES[0], MARKERS[0])), SeriesLegend("", [])


def _states(looks: dict[str, tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(colour for colour, _ in looks.values()))


def series_entries(values: Sequence[str]) -> list[LegendEntry]:
    """Return a legend of the series, in the order of their colours."""
    return [
        LegendEntry(f"sign {look}", fit(value, WIDE_NAME))
        for look, value in zip(SERIES, values, strict=False)
    ]


def pareto_front(points: Sequence[tuple[float, float]], *, more_is_better: bool) -> list[int]:
    """Return the places of the points that no other point beats in both directions, by x.

    Args:
        points: Pairs of x and y. Less y is better.
        more_is_better: Whether more x is better.
    """
    sign = -1 if more_is_better else 1
    front: list[int] = []
    least = inf
    for place in sorted(range(len(points)), key=lambda each: (sign * points[each][0], points[each][1])):
        if points[place][1] < least:
            front.append(place)
            least = points[place][1]
    return sorted(front, key=lambda each: points[each][0])


def front_of(points: Sequence[ScatterPoint], *, more_is_better: bool) -> list[int]:
    """Return the places of the points on the Pareto front, none if there are too few points for one."""
    if len(points) < MIN_FRONT:
        return []
    return pareto_front([(each.x, each.y) for each in points], more_is_better=more_is_better)


def describe_front(front: Sequence[int], points: Sequence[ScatterPoint]) -> str:
    """Return a sentence about the front, or an empty string without one."""
    if len(front) == 1:
        test = points[front[0]].tip.rpartition(": ")[0]
        return f"{short_test_name(test)} is best in both."
    return FRONT_CAPTION if front else ""


def front_entries(front: Sequence[int]) -> list[LegendEntry]:
    """Return the legend of the front, if it is a line."""
    return [LegendEntry("line muted dash1", "Pareto front")] if len(front) > 1 else []


def scatter(
    axes: Axes, points: Sequence[ScatterPoint], front: Sequence[int], y_unit: float, width: int
) -> tuple[dict[str, list[str]], int]:
    """Draw points with names where there is room, those of the front first.

    Args:
        axes: Empty axes.
        points: The points.
        front: Places of the points on the front, in the order of x.
        y_unit: Unit of the y axis in the unit of the points.
        width: Width of the figure (CSS pixels).

    Returns:
        Tooltips by gid, and the number of points whose name found no room.
    """
    ends = [(each.x, each.y / y_unit) for each in points]
    starts = []
    lines = [(ends[a], ends[b]) for a, b in pairwise(front)]
    tips = {}
    for place, (each, (x, y)) in enumerate(zip(points, ends, strict=True)):
        colour = COLOURS[each.colour]
        if each.x_u or each.y_u:
            u = each.y_u / y_unit
            axes.errorbar(x, y, u, each.x_u, fmt="none", ecolor=colour, elinewidth=1, alpha=0.45)
            lines += [((x, y - u), (x, y + u)), ((x - each.x_u, y), (x + each.x_u, y))]
        if each.base is not None:
            base = each.base[0], each.base[1] / y_unit
            starts.append(base)
            lines.append((base, (x, y)))
            axes.plot([base[0], x], [base[1], y], color=colour, linewidth=1.2, zorder=2)
            axes.scatter(
                *base, s=34, facecolors=COLOURS["page"], edgecolors=colour, gid=f"from{place}", zorder=3
            )
            tips[f"from{place}"] = [each.base_tip]
        axes.scatter(x, y, s=40, color=colour, marker=each.marker, linewidths=0, gid=f"to{place}", zorder=4)
        tips[f"to{place}"] = [each.tip]
    if len(front) > 1:
        front_x, front_y = zip(*(ends[place] for place in front), strict=True)
        axes.plot(front_x, front_y, color=COLOURS["muted"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    across = [end for each in points for end in ends_of(each.x, each.x_u)]
    up = [end / y_unit for each in points for end in ends_of(each.y, each.y_u)]
    set_scale(axes, "x", [*across, *(x for x, _ in starts)])
    set_scale(axes, "y", [*up, *(y for _, y in starts)])
    order = sorted(range(len(points)), key=lambda place: (place not in front, place))
    room = WIDE_NAME if width == WIDE else NARROW_NAME
    names = [fit(points[place].name, room) for place in order]
    left_out = place_names(axes, [ends[place] for place in order], names, starts, lines)
    return tips, left_out


def ends_of(value: float, u: float) -> tuple[float, float]:
    """Return the ends of a value's uncertainty that an axis shows, above zero."""
    return max(value - u, value / 4), value + u


def set_scale(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Scale an axis: linear with round numbers, or logarithmic if values are far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = min(values), max(values)
    if low > 0 and high / low > LOG_SCALE_RATIO:
        room = (high / low) ** 0.08
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / room, high * room)})
        axis = axes.xaxis if which == "x" else axes.yaxis
        subs = (1, 2, 5) if high / low < 300 else (1,)
        axis.set_major_locator(LogLocator(10, subs=subs, numticks=8))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.set_tick_params(which="minor", length=0)
    else:
        room = max(0.12 * (high - low), 0.02 * high)
        axes.set(**{f"{which}lim": (low - room, high + room)})
        axes.locator_params(axis=which, nbins=5)
