# SPDX-License-Identifier: Apache-2.0
"""The rounds of one test: in their order, with the temperature; and their energy against their time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pytest_llenergy.measure.metrics import FIGURES
from pytest_llenergy.report.html.cases import Case, SideName, Turn
from pytest_llenergy.report.html.plot import Key, Plot
from pytest_llenergy.report.html.svg import COLOURS, Sheet, titled
from pytest_llenergy.report.verdicts import value

HEIGHT = 220

SIDES: tuple[SideName, ...] = ("base", "head")


def in_order(sheet: Sheet, case: Case, found: Sequence[Turn], name: str) -> Plot | None:
    """Its metric round by round; ``None`` where no round has it."""
    metric, unit = case.metric, FIGURES[case.metric].unit
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
            tips[f"valid-{side}"] = [_told(turn, value(said.value, unit)) for turn, said in valid]
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
                _told(turn, f"{value(said.value, unit)}, invalid") for turn, said in spoiled
            ]
    titled(axes, "round", unit, "°C" if warm else "")
    axes.set_xlim(0.4, len(found) + 0.6)
    axes.locator_params(axis="x", nbins=8, integer=True)
    if warm:
        hot = axes.twinx()
        hot.plot(*zip(*warm, strict=True), color=COLOURS["hot"], linewidth=1, linestyle=(0, (2, 2)))
        hot.tick_params(length=0, labelcolor=COLOURS["hot"])
        hot.grid(visible=False)
        hot.locator_params(axis="y", nbins=5)
    keys = _keys(case)
    if any(not turn.valid for turn, _ in known):
        keys.append(Key("cross muted", "invalid"))
    if warm:
        keys.append(Key("line hot", "temperature at its start"))
    caption = "Bars: what the meter cannot know of a round; lines: medians of the valid ones."
    return Plot(sheet.inline(drawn, name, f"Rounds in order, {unit}", tips), "Rounds in order", caption, keys)


def against_time(sheet: Sheet, case: Case, found: Sequence[Turn], name: str) -> Plot | None:
    """Joules against seconds of an iteration, with lines of constant power; ``None`` without joules."""
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
                _told(turn, f"{value(energy, 'J')}, {value(time, 's')}, {value(energy / time, 'W')}")
                for turn, energy, time in mine
            ]
    widths = _range([each[2] for each in known]), _range([each[1] for each in known])
    axes.set_xlim(*widths[0])
    axes.set_ylim(*widths[1])
    for watts in _powers(*widths):
        left, right = widths[0]
        axes.plot(
            [left, right], [watts * left, watts * right], color=COLOURS["muted"], linewidth=0.8, alpha=0.6
        )
        # Where the line leaves the axes.
        at = min(right, widths[1][1] / watts)
        share = (at - left) / (right - left)
        if share > 0.12:
            axes.annotate(
                value(watts, "W"),
                (at, watts * at),
                xytext=(-3, -9 if at < right else 3),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                color=COLOURS["muted"],
            )
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", nbins=6)
    titled(axes, "s per iteration", "J per iteration")
    caption = "Along a line the power is the same: rounds above it drew more."
    return Plot(
        sheet.inline(drawn, name, "Energy against time", tips), "Energy against time", caption, _keys(case)
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The range with some room, and never empty."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), 0.01 * high)
    return max(low - room, low / 2), high + room


def _powers(seconds: tuple[float, float], joules: tuple[float, float]) -> list[float]:
    """Round powers whose lines cross the axes."""
    from matplotlib.ticker import MaxNLocator

    lowest, highest = joules[0] / seconds[1], joules[1] / seconds[0]
    found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(lowest, highest)
    return [float(watts) for watts in found if lowest < watts < highest]


def _keys(case: Case) -> list[Key]:
    return [Key(f"dot {side}", side) for side in case.records] if len(case.records) > 1 else []


def _told(turn: Turn, what: str) -> str:
    return f"{turn.side} round {turn.number}: {what}"
