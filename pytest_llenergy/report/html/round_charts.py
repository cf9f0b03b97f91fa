# SPDX-License-Identifier: Apache-2.0
"""Charts of one test: its rounds, and power over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from pytest_llenergy.measure.metrics import ROUND_METRICS
from pytest_llenergy.model.record import DomainPower, PowerTrace, Record
from pytest_llenergy.report.html.cases import Case, OrderedRound, SideName
from pytest_llenergy.report.html.svg import COLOURS, LegendEntry, Plot, Sheet, label_axes
from pytest_llenergy.report.verdicts import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Height of each chart (CSS pixels).
HEIGHT = 220

SIDES: tuple[SideName, ...] = ("base", "head")


def rounds_plot(sheet: Sheet, case: Case, found: Sequence[OrderedRound], name: str) -> Plot | None:
    """Plot a metric and the temperature round by round, or return None if no round has the metric."""
    metric, unit = case.metric, ROUND_METRICS[case.metric].unit
    known = [(turn, said) for turn in found if (said := turn.value(metric)) is not None]
    if not known:
        return None
    warm = [(turn.place, at) for turn in found if (at := turn.round.temperature_start_c) is not None]
    drawn, axes = sheet.figure(HEIGHT, right=34 if warm else 14)
    tips: dict[str, list[str]] = {}
    for side in SIDES:
        mine = [(turn, said) for turn, said in known if turn.side == side]
        valid = [(turn, said) for turn, said in mine if turn.valid]
        if valid:
            places, values = [turn.place for turn, _ in valid], [said.value for _, said in valid]
            errors = [said.meter for _, said in valid]
            axes.errorbar(
                places, values, yerr=errors, fmt="none", ecolor=COLOURS[side], elinewidth=1, alpha=0.6
            )
            axes.scatter(places, values, s=30, color=COLOURS[side], gid=f"valid-{side}", zorder=3)
            axes.hlines(
                median(values), places[0] - 0.4, places[-1] + 0.4, color=COLOURS[side], linewidth=1, alpha=0.7
            )
            tips[f"valid-{side}"] = [
                _describe_round(turn, format_value(said.value, unit)) for turn, said in valid
            ]
        spoiled = [(turn, said) for turn, said in mine if not turn.valid]
        if spoiled:
            axes.scatter(
                [turn.place for turn, _ in spoiled],
                [said.value for _, said in spoiled],
                s=34,
                marker="x",
                color=COLOURS["muted"],
                gid=f"invalid-{side}",
                zorder=3,
            )
            tips[f"invalid-{side}"] = [
                _describe_round(turn, f"{format_value(said.value, unit)}, invalid") for turn, said in spoiled
            ]
    label_axes(axes, "round", unit, "°C" if warm else "")
    axes.set_xlim(0.4, len(found) + 0.6)
    axes.locator_params(axis="x", nbins=8, integer=True)
    if warm:
        hot = axes.twinx()
        hot.plot(*zip(*warm, strict=True), color=COLOURS["hot"], linewidth=1, linestyle=(0, (2, 2)))
        hot.tick_params(length=0, labelcolor=COLOURS["hot"])
        hot.grid(visible=False)
        hot.locator_params(axis="y", nbins=5)
    legend = _legend(case)
    if any(not turn.valid for turn, _ in known):
        legend.append(LegendEntry("cross muted", "invalid"))
    if warm:
        legend.append(LegendEntry("line hot", "temperature at its start"))
    caption = "Bars: what the meter cannot know of a round; lines: medians of the valid ones."
    return Plot(
        sheet.inline(drawn, name, f"Rounds in order, {unit}", tips), "Rounds in order", caption, legend
    )


def energy_time_plot(sheet: Sheet, case: Case, found: Sequence[OrderedRound], name: str) -> Plot | None:
    """Plot energy against time of an iteration, with lines of constant power, or return None."""
    known = [
        (turn, said.value, turn.round.duration_s / turn.round.iterations)
        for turn in found
        if turn.valid and (said := turn.value("energy_j")) is not None and said.value > 0
    ]
    if not known:
        return None
    drawn, axes = sheet.figure(HEIGHT)
    tips = {}
    for side in SIDES:
        mine = [each for each in known if each[0].side == side]
        if mine:
            seconds, joules = [each[2] for each in mine], [each[1] for each in mine]
            axes.scatter(seconds, joules, s=30, color=COLOURS[side], gid=f"of-{side}", zorder=3)
            tips[f"of-{side}"] = [
                _describe_round(
                    turn,
                    f"{format_value(energy, 'J')}, {format_value(time, 's')}, "
                    f"{format_value(energy / time, 'W')}",
                )
                for turn, energy, time in mine
            ]
    widths = _padded_range([each[2] for each in known]), _padded_range([each[1] for each in known])
    axes.set_xlim(*widths[0])
    axes.set_ylim(*widths[1])
    for watts in _powers(*widths):
        left, right = widths[0]
        axes.plot(
            [left, right], [watts * left, watts * right], color=COLOURS["muted"], linewidth=0.8, alpha=0.6
        )
        # The end of the line at the edge of the axes.
        at = min(right, widths[1][1] / watts)
        share = (at - left) / (right - left)
        if share > 0.12:
            axes.annotate(
                format_value(watts, "W"),
                (at, watts * at),
                xytext=(-3, -9 if at < right else 3),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                color=COLOURS["muted"],
            )
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", nbins=6)
    label_axes(axes, "s per iteration", "J per iteration")
    caption = "Along a line the power is the same: rounds above it drew more."
    return Plot(
        sheet.inline(drawn, name, "Energy against time", tips), "Energy against time", caption, _legend(case)
    )


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values with a margin, never empty."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), 0.01 * high)
    return max(low - room, low / 2), high + room


def _powers(seconds: tuple[float, float], joules: tuple[float, float]) -> list[float]:
    """Return round powers whose lines cross the axes."""
    from matplotlib.ticker import MaxNLocator

    lowest, highest = joules[0] / seconds[1], joules[1] / seconds[0]
    found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(lowest, highest)
    return [float(watts) for watts in found if lowest < watts < highest]


def _legend(case: Case) -> list[LegendEntry]:
    return [LegendEntry(f"dot {side}", side) for side in case.records] if len(case.records) > 1 else []


def _describe_round(turn: OrderedRound, what: str) -> str:
    return f"{turn.side} round {turn.number}: {what}"


DASHES: tuple[object, ...] = ("solid", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True)
class PowerCurve:
    """Power of one kind of domain of one side, as steps between edges (seconds from the round's start)."""

    side: SideName
    label: str
    kind: str
    edges_s: Sequence[float]
    power_w: Sequence[float]


def power_curves(case: Case) -> list[PowerCurve]:
    """Return the power curves of each side with a trace. Domains of one kind are summed."""
    return [
        curve
        for side, record in case.records.items()
        if record.power_trace is not None
        for curve in _side_curves(side, record.power_trace)
    ]


def _side_curves(side: SideName, trace: PowerTrace) -> list[PowerCurve]:
    kinds: dict[str, list[str]] = {}
    for name in (name for name, power in trace.by_domain.items() if _can_be_drawn(power)):
        kinds.setdefault(name.partition(":")[0], []).append(name)
    found = []
    for kind, names in kinds.items():
        label = names[0] if len(names) == 1 else f"{kind} ({len(names)} domains)"
        steps = [(trace.by_domain[name].edges_s, trace.by_domain[name].power_w) for name in names]
        edges_s, power_w = sum_step_functions(steps)
        estimated = any(trace.by_domain[name].kind == "estimated" for name in names)
        found.append(PowerCurve(side, label, "estimated" if estimated else "measured", edges_s, power_w))
    return found


def _can_be_drawn(power: DomainPower) -> bool:
    """Whether it is a step function; the file may contain anything."""
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


def power_plot(sheet: Sheet, case: Case, found: Sequence[PowerCurve], name: str) -> Plot | None:
    """Plot the power curves with the edges, phases and windows of the round, or return None."""
    if not found:
        return None
    drawn, axes = sheet.figure(HEIGHT)
    ends: Mapping[SideName, PowerTrace] = {
        side: record.power_trace for side, record in case.records.items() if record.power_trace is not None
    }
    shown = ends.get("head") or next(iter(ends.values()))
    _phases(axes, shown)
    for side, trace in ends.items():
        for at_s in (0.0, trace.duration_s):
            axes.axvline(at_s, color=COLOURS[side], linewidth=1, linestyle=(0, (3, 3)))
    labels = list(dict.fromkeys(each.label for each in found))
    tips = {}
    for place, each in enumerate(found):
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
    windows = _windows(axes, case.records.get("head"), shown)
    axes.set_xlim(min(each.edges_s[0] for each in found), max(each.edges_s[-1] for each in found))
    axes.set_ylim(0, max(watts for each in found for watts in each.power_w) * 1.08 or 1)
    axes.locator_params(axis="x", nbins=6)
    axes.locator_params(axis="y", nbins=6)
    label_axes(axes, "s from the start of the round", "W")
    legend = [LegendEntry(f"line {side}", side) for side in ends] if len(case.records) > 1 else []
    if len(labels) > 1:
        legend += [LegendEntry(f"line muted dash{i % len(DASHES)}", label) for i, label in enumerate(labels)]
    legend += [LegendEntry("edge", "edges of the round")]
    legend += [LegendEntry("phase", "prefill")] if any(span.name == "prefill" for span in shown.spans) else []
    estimated = any(each.kind == "estimated" for each in found)
    caption = "The round of median energy." if len(ends) == 1 else "Of each side the round of median energy."
    caption += f" Windows of energy_meter in it: {', '.join(windows)}." if windows else ""
    title = "Power in a round" + (", estimated" if estimated else "")
    return Plot(sheet.inline(drawn, name, title, tips), title, caption, legend)


def _phases(axes: Axes, trace: PowerTrace) -> None:
    for span in trace.spans:
        if span.name == "prefill":
            axes.axvspan(span.start_s, span.end_s, color=COLOURS["phase"], linewidth=0, zorder=0)


def _windows(axes: Axes, record: Record | None, trace: PowerTrace) -> list[str]:
    """Mark the named windows that overlap the round, and return their names."""
    names = []
    for window in record.windows if record is not None else ():
        start_s = window.start_s - trace.start_s
        if start_s < trace.duration_s and start_s + window.duration_s > 0:
            axes.axvspan(start_s, start_s + window.duration_s, 0.96, 1, color=COLOURS["muted"], linewidth=0)
            names.append(window.name)
    return names
