# SPDX-License-Identifier: Apache-2.0
"""Charts of one test: its rounds, and power over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.power_trace import DomainPower, PowerTrace
from pytest_llenergy.record.quantity import format_quantity, scale_of
from pytest_llenergy.record.record import Record, domain_kind
from pytest_llenergy.record.report import SideName
from pytest_llenergy.report.html.cases import OrderedRound, TestSection
from pytest_llenergy.report.html.labels import axis_unit
from pytest_llenergy.report.html.parts import LegendEntry, Plot
from pytest_llenergy.report.html.svg import COLOURS, Sheet, label_axes
from pytest_llenergy.report.verdicts import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Height of each chart (CSS pixels).
HEIGHT = 220

SIDES: tuple[SideName, ...] = ("base", "head")

#: Width of the names of constant powers (CSS pixels).
POWER_ROOM = 52

#: Line styles that distinguish the kinds of domains.
DASHES: tuple[object, ...] = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


def rounds_plot(sheet: Sheet, case: TestSection, ordered: Sequence[OrderedRound], name: str) -> Plot | None:
    """Plot a metric and the temperature round by round; return None if no round has the metric."""
    metric, unit = case.metric, ROUND_METRICS[case.metric].unit
    known = [(turn, value) for turn in ordered if (value := turn.value(metric)) is not None]
    if not known:
        return None
    temperatures = [
        (turn.place, at_c) for turn in ordered if (at_c := turn.round.temperature_start_c) is not None
    ]
    power, prefix = scale_of(unit, *(value.value for _, value in known))
    step = 10.0**power
    drawn, axes = sheet.figure(HEIGHT, right=34 if temperatures else 14)
    tips: dict[str, list[str]] = {}
    for side in SIDES:
        of_side = [(turn, value) for turn, value in known if turn.side == side]
        valid = [(turn, value) for turn, value in of_side if turn.valid]
        if valid:
            places, values = [turn.place for turn, _ in valid], [value.value / step for _, value in valid]
            errors = [value.meter / step for _, value in valid]
            axes.errorbar(
                places, values, yerr=errors, fmt="none", ecolor=COLOURS[side], elinewidth=1, alpha=0.6
            )
            axes.scatter(places, values, s=30, color=COLOURS[side], gid=f"valid-{side}", zorder=3)
            axes.hlines(
                median(values), places[0] - 0.4, places[-1] + 0.4, color=COLOURS[side], linewidth=1, alpha=0.7
            )
            tips[f"valid-{side}"] = [
                _describe_round(turn, format_quantity(value.value, None, unit)) for turn, value in valid
            ]
        invalid = [(turn, value) for turn, value in of_side if not turn.valid]
        if invalid:
            axes.scatter(
                [turn.place for turn, _ in invalid],
                [value.value / step for _, value in invalid],
                s=34,
                marker="x",
                color=COLOURS["muted"],
                gid=f"invalid-{side}",
                zorder=3,
            )
            tips[f"invalid-{side}"] = [
                _describe_round(turn, f"{format_quantity(value.value, None, unit)}, invalid")
                for turn, value in invalid
            ]
    above = axis_unit(metric, unit, prefix)
    label_axes(axes, "round", above, "°C" if temperatures else "")
    axes.set_xlim(0.4, len(ordered) + 0.6)
    axes.locator_params(axis="x", nbins=8, integer=True)
    if temperatures:
        hot = axes.twinx()
        hot.plot(*zip(*temperatures, strict=True), color=COLOURS["hot"], linewidth=1, linestyle=(0, (2, 2)))
        hot.tick_params(length=0, labelcolor=COLOURS["hot"])
        hot.grid(visible=False)
        hot.locator_params(axis="y", nbins=5)
    legend = _legend(case)
    if any(not turn.valid for turn, _ in known):
        legend.append(LegendEntry("cross muted", "invalid"))
    if temperatures:
        legend.append(LegendEntry("line hot", "temperature at the start"))
    caption = "Bars: uncertainty of the meter; lines: medians of the valid rounds."
    return Plot(
        sheet.inline(drawn, name, f"Rounds in order, {above}", tips),
        "Rounds in order",
        caption,
        legend,
    )


def energy_time_plot(
    sheet: Sheet, case: TestSection, ordered: Sequence[OrderedRound], name: str
) -> Plot | None:
    """Plot energy against duration of an iteration, with lines of constant power.

    Returns None if no valid round has energy.
    """
    known = [
        (turn, value.value, turn.round.duration_s / turn.round.iterations)
        for turn in ordered
        if turn.valid and (value := turn.value("energy_j")) is not None and value.value > 0
    ]
    if not known:
        return None
    power, prefix = scale_of("J", *(each[1] for each in known))
    unit = 10.0**power
    drawn, axes = sheet.figure(HEIGHT, right=POWER_ROOM)
    tips = {}
    for side in SIDES:
        of_side = [each for each in known if each[0].side == side]
        if of_side:
            seconds, joules = [each[2] for each in of_side], [each[1] / unit for each in of_side]
            axes.scatter(seconds, joules, s=30, color=COLOURS[side], gid=f"of-{side}", zorder=3)
            tips[f"of-{side}"] = [
                _describe_round(
                    turn,
                    f"{format_quantity(energy, None, 'J')}, {format_value(time, 's')}, "
                    f"{format_value(energy / time, 'W')}",
                )
                for turn, energy, time in of_side
            ]
    ranges = _padded_range([each[2] for each in known]), _padded_range([each[1] / unit for each in known])
    axes.set_xlim(*ranges[0])
    axes.set_ylim(*ranges[1])
    for watts in _constant_powers(*ranges, unit):
        left, right = ranges[0]
        axes.plot(
            [left, right],
            [watts / unit * left, watts / unit * right],
            color=COLOURS["muted"],
            linewidth=0.8,
            alpha=0.6,
        )
    _name_powers(axes, ranges, _constant_powers(*ranges, unit), unit)
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", nbins=6)
    # Times below a second have the steps of joules.
    slowest = max(each[2] for each in known)
    time_power, time_prefix = scale_of("J", slowest) if slowest < 1 else (0, "")
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / 10**time_power:.6g}")
    label_axes(axes, f"{time_prefix}s per iteration", f"{prefix}J per iteration")
    caption = "Power is constant along a line; rounds above it drew more."
    return Plot(
        sheet.inline(drawn, name, "Energy against time", tips), "Energy against time", caption, _legend(case)
    )


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values with a margin, never empty."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), 0.01 * high)
    return max(low - room, low / 2), high + room


def _name_powers(
    axes: Axes, ranges: tuple[tuple[float, float], tuple[float, float]], powers: Sequence[float], unit: float
) -> None:
    """Name the lines of constant power that end at the right edge, outside the axes."""
    (_, right), (low, high) = ranges
    free = low
    for watts in powers:
        end = watts / unit * right
        if free <= end <= high:
            text = f" {format_value(watts, 'W')}"
            axes.text(right, end, text, fontsize=9, va="center", color=COLOURS["muted"])
            free = end + 0.08 * (high - low)


def _constant_powers(seconds: tuple[float, float], joules: tuple[float, float], unit: float) -> list[float]:
    """Return round powers (W) whose lines cross axes with seconds and with joules in ``unit``."""
    from matplotlib.ticker import MaxNLocator

    lowest, highest = joules[0] * unit / seconds[1], joules[1] * unit / seconds[0]
    levels = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(lowest, highest)
    return [float(watts) for watts in levels if lowest < watts < highest]


def _legend(case: TestSection) -> list[LegendEntry]:
    return [LegendEntry(f"dot {side}", side) for side in case.records] if len(case.records) > 1 else []


def _describe_round(turn: OrderedRound, what: str) -> str:
    return f"{turn.side} round {turn.number}: {what}"


@dataclass(frozen=True)
class PowerCurve:
    """Power of one kind of domain on one side: steps between edges (seconds from the start of the round)."""

    side: SideName
    label: str
    kind: str
    edges_s: Sequence[float]
    power_w: Sequence[float]


def power_curves(case: TestSection) -> list[PowerCurve]:
    """Return the power curves of each side that has a trace. Domains of one kind are summed."""
    return [
        curve
        for side, record in case.records.items()
        if record.power_trace is not None
        for curve in _side_curves(side, record.power_trace)
    ]


def _side_curves(side: SideName, trace: PowerTrace) -> list[PowerCurve]:
    kinds: dict[str, list[str]] = {}
    for name in (name for name, power in trace.by_domain.items() if _can_be_drawn(power)):
        kinds.setdefault(domain_kind(name), []).append(name)
    curves = []
    for kind, names in kinds.items():
        label = names[0] if len(names) == 1 else f"{kind} ({len(names)} domains)"
        steps = [(trace.by_domain[name].edges_s, trace.by_domain[name].power_w) for name in names]
        edges_s, power_w = sum_step_functions(steps)
        estimated = any(trace.by_domain[name].kind == "estimated" for name in names)
        curves.append(PowerCurve(side, label, "estimated" if estimated else "measured", edges_s, power_w))
    return curves


def _can_be_drawn(power: DomainPower) -> bool:
    """Whether the edges and powers of a file, which may hold anything, form a step function."""
    edges = power.edges_s
    return len(edges) == len(power.power_w) + 1 > 1 and all(a < b for a, b in pairwise(edges))


def sum_step_functions(
    steps: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[float], list[float]]:
    """Add step functions over the range that all of them cover."""
    if len(steps) == 1:
        return list(steps[0][0]), list(steps[0][1])
    begin, end = max(edges[0] for edges, _ in steps), min(edges[-1] for edges, _ in steps)
    edges_s = sorted({edge for edges, _ in steps for edge in edges if begin <= edge <= end})
    power_w = [0.0] * (len(edges_s) - 1)
    for edges, powers in steps:
        step = 0
        for place, start_s in enumerate(edges_s[:-1]):
            while edges[step + 1] <= start_s:
                step += 1
            power_w[place] += powers[step]
    return edges_s, power_w


def power_plot(sheet: Sheet, case: TestSection, curves: Sequence[PowerCurve], name: str) -> Plot | None:
    """Plot power curves with the edges, phases and windows of the round; return None if there are none."""
    if not curves:
        return None
    drawn, axes = sheet.figure(HEIGHT)
    traces: Mapping[SideName, PowerTrace] = {
        side: record.power_trace for side, record in case.records.items() if record.power_trace is not None
    }
    shown = traces.get("head") or next(iter(traces.values()))
    _draw_phases(axes, shown)
    for side, trace in traces.items():
        for at_s in (0.0, trace.duration_s):
            axes.axvline(at_s, color=COLOURS[side], linewidth=1, linestyle=(0, (3, 3)))
    labels = list(dict.fromkeys(each.label for each in curves))
    tips = {}
    for place, each in enumerate(curves):
        dash = DASHES[labels.index(each.label) % len(DASHES)]
        axes.stairs(
            each.power_w,
            each.edges_s,
            baseline=None,
            color=COLOURS[each.side],
            linestyle=dash,
            linewidth=1.4,
            gid=f"curve{place}",
        )
        tips[f"curve{place}"] = [f"{each.side} {each.label} ({each.kind})"]
    windows = _draw_windows(axes, case.records.get("head"), shown)
    axes.set_xlim(min(each.edges_s[0] for each in curves), max(each.edges_s[-1] for each in curves))
    axes.set_ylim(0, max(watts for each in curves for watts in each.power_w) * 1.08 or 1)
    axes.locator_params(axis="x", nbins=6)
    axes.locator_params(axis="y", nbins=6)
    label_axes(axes, "s from the start of the round", "W")
    legend = [LegendEntry(f"line {side}", side) for side in traces] if len(case.records) > 1 else []
    if len(labels) > 1:
        legend += [LegendEntry(f"line muted dash{i % len(DASHES)}", label) for i, label in enumerate(labels)]
    legend += [LegendEntry("edge", "edges of the round")]
    legend += [LegendEntry("phase", "prefill")] if any(span.name == "prefill" for span in shown.spans) else []
    estimated = any(each.kind == "estimated" for each in curves)
    caption = (
        "The round of median energy." if len(traces) == 1 else "The round of median energy of each side."
    )
    caption += f" Windows of energy_meter in it: {', '.join(windows)}." if windows else ""
    title = "Power in a round" + (", estimated" if estimated else "")
    return Plot(sheet.inline(drawn, name, title, tips), title, caption, legend)


def _draw_phases(axes: Axes, trace: PowerTrace) -> None:
    for span in trace.spans:
        if span.name == "prefill":
            axes.axvspan(span.start_s, span.end_s, color=COLOURS["phase"], linewidth=0, zorder=0)


def _draw_windows(axes: Axes, record: Record | None, trace: PowerTrace) -> list[str]:
    """Mark the named windows that overlap the round, and return their names."""
    names = []
    for window in record.windows if record is not None else ():
        start_s = window.start_s - trace.start_s
        if start_s < trace.duration_s and start_s + window.duration_s > 0:
            axes.axvspan(start_s, start_s + window.duration_s, 0.96, 1, color=COLOURS["muted"], linewidth=0)
            names.append(window.name)
    return names
