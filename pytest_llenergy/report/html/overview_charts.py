# SPDX-License-Identifier: Apache-2.0
"""Charts over the tests of one run: energy against speed, and over parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.quantity import format_quantity, scale_of
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.report import SideName
from pytest_llenergy.record.text import short_test_name, unique_function_names
from pytest_llenergy.report.html.cases import (
    PER_ITERATION,
    PER_TOKEN,
    TestSection,
    format_metric_of,
    metric_of_all,
    value_and_u,
)
from pytest_llenergy.report.html.labels import case_facts, describe_facts, fit, name_cases, varying_facts
from pytest_llenergy.report.html.parts import Cell, LegendEntry, Plot, Row, Table, table
from pytest_llenergy.report.html.scatter import (
    MARKERS,
    UNNAMED_CAPTION,
    ScatterPoint,
    describe_front,
    ends_of,
    front_entries,
    front_of,
    scatter,
    series_entries,
    series_of,
    set_scale,
)
from pytest_llenergy.report.html.svg import COLOURS, SERIES, WIDE, WIDTH, Sheet, label_axes
from pytest_llenergy.report.verdicts import format_value

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

THROUGHPUT = "output_tokens_per_s"

#: Height of a chart of all tests on wide and on narrow screens, and of a small one (CSS pixels).
WIDE_HEIGHT, NARROW_HEIGHT, SMALL_HEIGHT = 380, 320, 230

#: Most charts of parameters.
MAX_PARAMETER_PLOTS = 12

#: Times that a test may trade for energy.
LATENCIES = ("inter_token_latency_s", "end_to_end_latency_p50_s", "duration_s")


def energy_speed_plot(sheet: Sheet, cases: Sequence[TestSection], name: str) -> Plot | None:
    """Plot energy per token against throughput; a line joins the sides of a test.

    Returns None if fewer than two tests count tokens, since one point shows nothing.
    """
    shown = [case for case in cases if any(map(_has_speed, case.records.values()))]
    sides = {side for case in shown for side in case.records}
    if len(shown) < (2 if sides == {"head"} else 1):
        return None
    colours, legend = series_of(shown)
    names = name_cases(shown, frozenset({legend.fact} if legend.fact else ()))
    points = [
        point for case in shown if (point := _speed_point(case, names[case.anchor], *colours[case.anchor]))
    ]
    power, prefix = scale_of("J", *(each.y for each in points))
    has_base = any(each.base is not None for each in points)
    front = [] if has_base else front_of(points, more_is_better=True)
    entries = [*legend.entries, *front_entries(front)]
    entries += [LegendEntry("ring muted", "base"), LegendEntry("dot muted", "head")] if has_base else []

    def draw(width: int) -> tuple[Markup, int]:
        drawn, axes = sheet.figure(WIDE_HEIGHT if width == WIDE else NARROW_HEIGHT, width=width)
        tips, left_out = scatter(axes, points, front, 10.0**power, width)
        label_axes(axes, "tokens/s", f"{prefix}J/token")
        alt = f"Joules per token against tokens per second of {len(points)} tests. {_extremes(points)}"
        return sheet.inline(drawn, f"{name}{width}", alt, tips), left_out

    (narrow, left_out), (wide, _) = draw(WIDTH), draw(WIDE)
    captions = ["Down is thriftier, right is faster.", describe_front(front, points)]
    captions += ["A line joins the two sides of a test."] if has_base else []
    captions += [UNNAMED_CAPTION] if left_out else []
    caption = " ".join(filter(None, captions))
    return Plot(narrow, "Energy against speed", caption, entries, wide, _speed_table(shown))


def _has_speed(record: Record) -> bool:
    with_values = all(value_and_u(record, name) is not None for name in (PER_TOKEN, THROUGHPUT))
    return with_values and metric_of_all([record]) == PER_TOKEN


def _speed_point(case: TestSection, name: str, colour: str, marker: str) -> ScatterPoint | None:
    both: dict[SideName, tuple[tuple[float, float], tuple[float, float]]] = {
        side: (speed, energy)
        for side, record in case.records.items()
        if (speed := value_and_u(record, THROUGHPUT)) and (energy := value_and_u(record, PER_TOKEN))
    }
    if not both:
        return None
    side: SideName = "head" if "head" in both else "base"
    (x, x_u), (y, y_u) = both[side]
    suffix = f", {side}" if len(case.records) > 1 else ""
    tip = f"{case.id}{suffix}: {_describe_pair(x, y)}"
    if len(both) < 2:
        return ScatterPoint(name, tip, x, y, x_u, y_u, colour, marker)
    (base_x, _), (base_y, _) = both["base"]
    base_tip = f"{case.id}, base: {_describe_pair(base_x, base_y)}"
    return ScatterPoint(name, tip, x, y, 0.0, 0.0, colour, marker, (base_x, base_y), base_tip)


def _describe_pair(speed: float, energy: float) -> str:
    return f"{format_value(speed, 'token/s')}, {format_quantity(energy, None, 'J/token')}"


def _extremes(points: Sequence[ScatterPoint]) -> str:
    thriftiest, fastest = min(points, key=lambda each: each.y), max(points, key=lambda each: each.x)
    return f"Thriftiest: {thriftiest.tip}. Fastest: {fastest.tip}."


def _speed_table(cases: Sequence[TestSection]) -> Table:
    rows: list[Row] = [
        [
            Cell(short_test_name(case.id), "name"),
            side if len(case.records) > 1 else "",
            format_value(record.value_of(THROUGHPUT)),
            format_metric_of(record, PER_TOKEN),
        ]
        for case in cases
        for side, record in case.records.items()
        if _has_speed(record)
    ]
    return table("Energy against speed", ("test", "side", "#tokens/s", "#energy"), rows)


def parameter_plots(sheet: Sheet, cases: Sequence[TestSection], name: str) -> list[Plot]:
    """Plot energy over each parameter of parametrised functions, and against latency."""
    functions = unique_function_names(case.id for case in cases)
    groups: dict[str, list[TestSection]] = {}
    for case in cases:
        if value_and_u(case.records["head"], PER_ITERATION) is not None:
            groups.setdefault(functions[case.id], []).append(case)
    plots: list[Plot | None] = []
    for number, (function, group) in enumerate(groups.items()):
        facts = [case_facts(case, function) for case in group]
        varying = varying_facts(facts)
        # A model that differs by backend is no parameter of its own.
        parameters = [
            each for each in varying if each in group[0].records["head"].params or each == "backend"
        ]
        for place, parameter in enumerate(parameters):
            others = [each for each in parameters if each != parameter]
            plots.append(
                _parameter_plot(sheet, function, group, facts, parameter, others, f"{name}{number}-{place}")
            )
        plots.append(_latency_plot(sheet, function, group, f"{name}{number}-latency"))
    return [each for each in plots if each is not None][:MAX_PARAMETER_PLOTS]


def _parameter_plot(
    sheet: Sheet,
    function: str,
    cases: Sequence[TestSection],
    facts: Sequence[dict[str, str]],
    parameter: str,
    others: Sequence[str],
    name: str,
) -> Plot | None:
    """Plot energy over one parameter; return None if no two tests differ in this parameter alone."""
    metric = metric_of_all([case.records["head"] for case in cases])
    unit = ROUND_METRICS[metric].unit
    values = _in_order({each.get(parameter, "-") for each in facts})
    lines: dict[str, dict[str, tuple[float, float]]] = {}
    for case, each in zip(cases, facts, strict=True):
        known = value_and_u(case.records["head"], metric)
        if known is not None:
            lines.setdefault(describe_facts(each, others), {})[each.get(parameter, "-")] = known
    if all(len(line) < 2 for line in lines.values()):
        return None
    power, prefix = scale_of(unit, *(value for line in lines.values() for value, _ in line.values()))
    coloured = len(lines) <= len(SERIES)
    drawn, axes = sheet.figure(SMALL_HEIGHT)
    tips = {}
    for number, (series, line) in enumerate(lines.items()):
        found = [(place, *line[value]) for place, value in enumerate(values) if value in line]
        places, joules, u = ([each[part] for each in found] for part in range(3))
        joules, u = ([each / 10.0**power for each in part] for part in (joules, u))
        colour = COLOURS[SERIES[number] if coloured else "muted"]
        axes.errorbar(
            places,
            joules,
            u,
            color=colour,
            ecolor=colour,
            elinewidth=1,
            linewidth=1.2,
            alpha=0.8 if coloured else 0.4,
        )
        axes.scatter(
            places,
            joules,
            s=30,
            color=colour,
            marker=MARKERS[number] if coloured else MARKERS[0],
            linewidths=0,
            gid=f"line{number}",
            zorder=3,
        )
        tips[f"line{number}"] = [
            f"{parameter}={values[place]} {series}: {format_quantity(value, value_u, unit)}"
            for place, value, value_u in found
        ]
    ends = [end for line in lines.values() for known in line.values() for end in ends_of(*known)]
    set_scale(axes, "y", [end / 10.0**power for end in ends])
    axes.set_xlim(-0.4, len(values) - 0.6)
    _name_values(axes, values)
    label_axes(axes, fit(parameter, 200), f"{prefix}{unit}")
    legend = series_entries(list(lines)) if coloured and others else []
    caption = "" if coloured else "A line joins tests that differ in this parameter alone."
    rows = [
        [value, series, format_quantity(*line[value], unit)]
        for value in values
        for series, line in lines.items()
        if value in line
    ]
    numbers = table(f"{function} by {parameter}", (parameter, "others", "#energy"), rows)
    alt = f"Energy of {function} by {parameter}: " + "; ".join(" ".join(row) for row in rows[:20])
    return Plot(
        sheet.inline(drawn, name, alt, tips), f"{function} by {parameter}", caption, legend, None, numbers
    )


def _in_order(values: set[str]) -> list[str]:
    """Sort numbers by value and other texts by the alphabet."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return sorted(values)


def _name_values(axes: Axes, values: Sequence[str]) -> None:
    """Label an axis with as many of the values as fit."""
    room = axes.get_window_extent().width / len(values) - 6
    every = 1
    while room * every < 30:
        every += 1
    places = range(0, len(values), every)
    axes.set_xticks(list(places), [fit(values[place], room * every) for place in places])


def _latency_plot(sheet: Sheet, function: str, cases: Sequence[TestSection], name: str) -> Plot | None:
    """Plot energy against latency of one function; return None if there are too few tests for a front."""
    metric = metric_of_all([case.records["head"] for case in cases])
    unit = ROUND_METRICS[metric].unit
    latency = next(
        (name for name in LATENCIES if all(value_and_u(case.records["head"], name) for case in cases)),
        LATENCIES[-1],
    )
    colours, legend = series_of(cases)
    names = name_cases(cases, frozenset({legend.fact} if legend.fact else ()))
    points, numbers = [], []
    for case in cases:
        time, energy = (value_and_u(case.records["head"], each) for each in (latency, metric))
        if time is None or energy is None:
            continue
        figures = [format_value(time[0] * 1e3), format_quantity(*energy, unit)]
        numbers.append([short_test_name(case.id), *figures])
        tip = f"{case.id}: {figures[0]} ms, {figures[1]}"
        x, x_u = (each * 1e3 for each in time)
        points.append(
            ScatterPoint(names[case.anchor], tip, x, energy[0], x_u, energy[1], *colours[case.anchor])
        )
    front = front_of(points, more_is_better=False)
    if not front:
        return None
    power, prefix = scale_of(unit, *(each.y for each in points))
    drawn, axes = sheet.figure(SMALL_HEIGHT)
    tips, left_out = scatter(axes, points, front, 10.0**power, WIDTH)
    what = latency.removesuffix("_s").replace("_", " ")
    label_axes(axes, f"{what}, ms", f"{prefix}{unit}")
    rows: list[Row] = [
        [Cell(test, "name"), *figures, "yes" if place in front else ""]
        for place, (test, *figures) in enumerate(numbers)
    ]
    title = f"{function}: energy against latency"
    captions = ["Down is thriftier, left is sooner.", describe_front(front, points)]
    captions += [UNNAMED_CAPTION] if left_out else []
    return Plot(
        sheet.inline(drawn, name, f"{title}. {len(points)} tests, {len(front)} on the Pareto front", tips),
        title,
        " ".join(captions),
        [*legend.entries, *front_entries(front)],
        None,
        table(title, ("test", f"#{what}, ms", "#energy", "front"), rows),
    )
