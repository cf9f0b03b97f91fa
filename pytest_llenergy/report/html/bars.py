# SPDX-License-Identifier: Apache-2.0
"""Charts with a row for each test or window: its name and value, and below them its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_llenergy.record.quantity import format_quantity, scale_of
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.html.cases import PER_ITERATION, TestSection, value_and_u
from pytest_llenergy.report.html.labels import FONT_SIZE, fit, name_cases, text_width
from pytest_llenergy.report.html.parts import Plot
from pytest_llenergy.report.html.scatter import ends_of, set_scale
from pytest_llenergy.report.html.svg import BELOW, COLOURS, WIDE, WIDTH, Sheet, label_axes

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Most rows of a chart with bars; the table lists all.
MAX_BARS = 30

#: Height of a row: a line with its name and value, and below it a bar (CSS pixels).
ROW_HEIGHT = 34

#: Distance from the top of a row to the middle of its name and of its bar, as shares of its height.
NAME_AT, BAR_AT, BAR_THICKNESS = 0.3, 0.76, 0.26

#: Bars become dots on a logarithmic axis if their values differ by more than this factor.
LOG_BARS_RATIO = 200.0


@dataclass(frozen=True)
class Bar:
    """One row of a chart with bars, in the unit of the chart."""

    name: str
    value: float
    u: float | None
    is_estimated: bool = False


def row_figure(sheet: Sheet, count: int, width: int, *, above: int = 4) -> tuple[Figure, Axes]:
    """Create a figure with ``count`` rows, the first on top; row numbers are the y coordinate."""
    height = above + ROW_HEIGHT * count + BELOW
    drawn, axes = sheet.figure(height, left=10, right=10, width=width)
    drawn.subplots_adjust(top=1 - above / height)
    axes.set_ylim(count, 0)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    return drawn, axes


def write_row(axes: Axes, row: int, name: str, value: str, width: int, metric: str = "") -> None:
    """Write the name of a row on the left and its value on the right, above the data of the row.

    A name that is too long is shortened, and ``metric``, which follows it, is not.
    """
    suffix = f" · {metric}" if metric else ""
    room = width - 20 - text_width(value) - 12 - text_width(suffix)
    across = axes.get_yaxis_transform()
    axes.text(0, row + NAME_AT, fit(name, room) + suffix, fontsize=FONT_SIZE, va="center", transform=across)
    axes.text(
        1,
        row + NAME_AT,
        value,
        fontsize=FONT_SIZE,
        va="center",
        ha="right",
        color=COLOURS["muted"],
        transform=across,
    )


def bars_plot(sheet: Sheet, bars: Sequence[Bar], name: str, title: str, caption: str = "") -> Plot | None:
    """Plot joules as bars with their uncertainty; return None unless one is above zero."""
    rows = [each for each in bars if each.value > 0]
    shown = rows[:MAX_BARS]
    if not shown:
        return None
    ends = [each.value + (each.u or 0.0) for each in shown]
    power, prefix = scale_of("J", *(each.value for each in shown))
    unit = 10.0**power
    values = [format_quantity(each.value, each.u, "J") for each in shown]
    is_log = max(each.value for each in shown) > LOG_BARS_RATIO * min(each.value for each in shown)
    mixed = len({each.is_estimated for each in shown}) > 1

    def draw(width: int) -> Markup:
        drawn, axes = row_figure(sheet, len(shown), width)
        axes.grid(visible=False, axis="y")
        tips = {}
        for row, (each, value) in enumerate(zip(shown, values, strict=True)):
            at, joules = row + BAR_AT, each.value / unit
            alpha = 0.45 if mixed and each.is_estimated else 0.9
            colour, ink, gid = COLOURS["head"], COLOURS["text"], f"bar{row}"
            if is_log:
                # A bar has no length where the axis has no zero.
                axes.scatter(joules, at, s=40, color=colour, alpha=alpha, linewidths=0, gid=gid, zorder=3)
            else:
                axes.barh(at, joules, BAR_THICKNESS, color=colour, alpha=alpha, gid=gid)
            if each.u:
                u = each.u / unit
                axes.errorbar(joules, at, xerr=u, fmt="none", ecolor=ink, elinewidth=1, capsize=2.5)
            write_row(axes, row, each.name, value, width)
            tips[gid] = [f"{each.name}: {value}"]
        if is_log:
            set_scale(axes, "x", [end / unit for each in shown for end in ends_of(each.value, each.u or 0.0)])
        else:
            axes.set_xlim(0, max(ends) / unit * 1.03)
            axes.locator_params(axis="x", nbins=5)
        label_axes(axes, f"{prefix}J")
        alt = f"{title}: " + "; ".join(
            f"{each.name} {value}" for each, value in zip(shown, values, strict=True)
        )
        return sheet.inline(drawn, f"{name}{width}", alt, tips)

    narrow, wide = draw(WIDTH), draw(WIDE)
    said = [caption] if caption else []
    said += ["Line: standard uncertainty."] if any(each.u for each in shown) else []
    said += ["The axis is logarithmic."] if is_log else []
    said += ["Faint: estimated."] if mixed else []
    said += [f"The first {len(shown)} of {len(rows)}; the table has all."] if len(rows) > len(shown) else []
    return Plot(narrow, title, " ".join(said), (), wide)


def energy_bars(sheet: Sheet, cases: Sequence[TestSection], name: str) -> Plot | None:
    """Plot the energies of tests without tokens and of windows, largest first.

    Returns None without energies, and for a single one, which is shown as a number.
    """
    names = name_cases(cases) if cases else {}
    bars = []
    for case in cases:
        record = case.records["head"]
        estimated = record.kind == "estimated"
        known = value_and_u(record, PER_ITERATION)
        if known is not None:
            bars.append(Bar(names[case.anchor], *known, estimated))
        bars += [
            Bar(
                f"{names[case.anchor]} · {one_line(each.name)}",
                each.energy_j,
                each.energy_u_absolute_j,
                estimated,
            )
            for each in record.windows
            if each.energy_j is not None
        ]
    if len(bars) < 2:
        return None
    bars.sort(key=lambda each: -each.value)
    return bars_plot(sheet, bars, name, "Energy, largest first", "Per iteration of a test, or of one window.")


def windows_plot(sheet: Sheet, record: Record, name: str) -> Plot | None:
    """Plot the energies of a test's windows, in their order; return None if there are fewer than two."""
    bars = [
        Bar(one_line(each.name), each.energy_j, each.energy_u_absolute_j)
        for each in record.windows
        if each.energy_j is not None
    ]
    return bars_plot(sheet, bars, name, "Windows in order") if len(bars) > 1 else None
