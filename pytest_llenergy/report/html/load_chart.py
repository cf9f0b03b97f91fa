# SPDX-License-Identifier: Apache-2.0
"""Chart of the loads of one test: energy of a token and latencies over the request rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_llenergy.record.load_curve import LoadCurve, LoadPoint
from pytest_llenergy.record.quantity import format_quantity, scale_of
from pytest_llenergy.report.html.parts import LegendEntry, Plot, Table, table
from pytest_llenergy.report.html.scatter import MARKERS, ends_of, set_scale
from pytest_llenergy.report.html.svg import ABOVE, BELOW, COLOURS, SERIES, WIDE, WIDTH, Sheet
from pytest_llenergy.report.load_curves import HEADS, curve_rows, describe_curve, describe_result

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

#: Height of the figure, and of the room between its panels (CSS pixels).
HEIGHT, BETWEEN = 380, 36

#: Latencies: field of a point, name, and field of the SLO with the limit.
LATENCIES = (
    ("time_to_first_token_p99_s", "TTFT", "ttft_s"),
    ("time_per_output_token_p99_s", "TPOT", "tpot_s"),
    ("end_to_end_latency_p99_s", "E2E", "e2e_s"),
)

ENERGY = "head"


def load_plot(sheet: Sheet, curve: LoadCurve, name: str, side: str = "") -> Plot | None:
    """Plot joules of a token and 99th percentiles of latencies over the request rate.

    Returns None if no point has a latency.

    Args:
        sheet: Sheet of the page.
        curve: The loads.
        name: Name of the figure, unique in the page.
        side: Name of the side of a comparison.
    """
    points = [
        point
        for point in curve.by_rate()
        if point.request_rate > 0 and (point.end_to_end_latency_p99_s or 0) > 0
    ]
    if not points:
        return None
    shown = _shown_latencies(curve)
    is_bracketed = curve.exceeded_at_requests_per_s is not None
    sign, word = ("maximum", "maximum") if is_bracketed else ("≥", "highest")
    energies = [joules for each in points if (joules := each.energy_per_output_token_j or 0.0) > 0]
    power, prefix = scale_of("J", *energies)

    def draw(width: int) -> Markup:
        drawn, upper = sheet.figure(HEIGHT, width=width)
        half = (HEIGHT - ABOVE - BELOW - BETWEEN) / 2 / HEIGHT
        box = upper.get_position()
        upper.set_position((box.x0, box.y1 - half, box.width, half))
        lower = drawn.add_axes((box.x0, box.y0, box.width, half))
        lower.tick_params(length=0)
        tips = {**_draw_energy(upper, points, 10.0**power), **_draw_latencies(lower, points, curve, shown)}
        found, rates = curve.max_load_requests_per_s, [each.request_rate for each in points]
        for axes in (upper, lower):
            set_scale(axes, "x", rates)
            if found is not None and min(rates) <= found <= max(rates):
                _mark_maximum(axes, found, f"{sign} {found:.3g}" if axes is upper else "")
        upper.tick_params(labelbottom=False)
        for y, text in ((1 - 12 / HEIGHT, f"{prefix}J/token"), (box.y0 + half + 8 / HEIGHT, "p99, s")):
            drawn.text(4 / width, y, text, color=COLOURS["muted"], fontsize=10)
        drawn.text(0.5, 6 / HEIGHT, "request/s", color=COLOURS["muted"], fontsize=10, ha="center")
        return sheet.inline(drawn, f"{name}-{width}", _describe(curve, points, shown), tips)

    legend = [LegendEntry(f"dot {ENERGY}", "energy of an output token ± u")] if energies else []
    legend += [LegendEntry(f"sign {SERIES[number]}", f"{label} p99") for number, (_, label, _) in shown]
    if curve.slo is not None:
        legend.append(LegendEntry("line muted dash2", "limit of the SLO"))
    if curve.max_load_requests_per_s is not None:
        legend.append(LegendEntry("line dash1", f"{word} load{' within the SLO' if curve.slo else ''}"))
    if not all(point.within_slo for point in points):
        legend.append(LegendEntry("ring", "not within the SLO" if curve.slo is not None else "not sustained"))
    title = f"Energy and latency over load{f', {side}' if side else ''}"
    described = describe_curve(curve)
    caption = f"{described[0].upper()}{described[1:]}."
    return Plot(draw(WIDTH), title, caption, legend, draw(WIDE), load_table(curve, side))


def load_table(curve: LoadCurve, side: str = "") -> Table:
    """List the loads by rate; ``side`` as for ``load_plot``."""
    columns = [f"#{head}" for head in HEADS[:-1]]
    return table(f"Loads{f', {side}' if side else ''}", (*columns, HEADS[-1]), curve_rows(curve))


def _shown_latencies(curve: LoadCurve) -> list[tuple[int, tuple[str, str, str]]]:
    """Return the latencies with a limit, each with the number of its series; all without an SLO."""
    # The first series looks like the energy.
    numbered = list(enumerate(LATENCIES, 1))
    return [each for each in numbered if curve.slo is None or getattr(curve.slo, each[1][2]) is not None]


def _draw_energy(axes: Axes, points: Sequence[LoadPoint], unit: float) -> dict[str, list[str]]:
    known = [
        (point, joules / unit, (point.energy_per_output_token_u_j or 0.0) / unit)
        for point in points
        if (joules := point.energy_per_output_token_j or 0.0) > 0
    ]
    if not known:
        return {}
    rates, values = [each[0].request_rate for each in known], [each[1] for each in known]
    axes.plot(rates, values, color=COLOURS[ENERGY], linewidth=1, alpha=0.5)
    axes.errorbar(
        rates,
        values,
        [each[2] for each in known],
        fmt="none",
        ecolor=COLOURS[ENERGY],
        elinewidth=1,
        alpha=0.6,
    )
    set_scale(axes, "y", [end for _, value, u in known for end in ends_of(value, u)])
    texts = [format_quantity(value * unit, u * unit or None, "J/token") for _, value, u in known]
    ends = [(each[0], each[1]) for each in known]
    return _draw_points(axes, ends, ENERGY, MARKERS[0], "energy", texts)


def _mark_maximum(axes: Axes, rate: float, name: str = "") -> None:
    """Draw a line at the maximum load, with its name above it, on the side with more room."""
    axes.axvline(rate, color=COLOURS["text"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    place = axes.transAxes.inverted().transform(axes.transData.transform((rate, 1)))[0]
    in_left_half = place < 0.5
    axes.annotate(
        name,
        (rate, 1),
        (4 if in_left_half else -4, 4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset pixels",
        ha="left" if in_left_half else "right",
        color=COLOURS["text"],
        fontsize=10,
    )


def _draw_latencies(
    axes: Axes,
    points: Sequence[LoadPoint],
    curve: LoadCurve,
    shown: Sequence[tuple[int, tuple[str, str, str]]],
) -> dict[str, list[str]]:
    tips: dict[str, list[str]] = {}
    values: list[float] = []
    for number, (column, label, field) in shown:
        known = [(point, value) for point in points if (value := getattr(point, column) or 0.0) > 0]
        colour = COLOURS[SERIES[number]]
        axes.plot(
            [point.request_rate for point, _ in known],
            [value for _, value in known],
            color=colour,
            linewidth=1,
            alpha=0.5,
        )
        texts = [f"{label} p99 {value:.3g} s" for _, value in known]
        tips |= _draw_points(axes, known, SERIES[number], MARKERS[number], label, texts)
        values += [value for _, value in known]
        limit = getattr(curve.slo, field) if curve.slo is not None else None
        if limit is not None:
            axes.axhline(limit, color=colour, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
            values.append(limit)
    if values:
        set_scale(axes, "y", values)
    return tips


def _draw_points(
    axes: Axes,
    ends: Sequence[tuple[LoadPoint, float]],
    colour: str,
    marker: str,
    name: str,
    texts: Sequence[str],
) -> dict[str, list[str]]:
    """Draw filled marks for loads within the SLO and hollow ones for others; return tooltips."""
    tips: dict[str, list[str]] = {}
    for place, ((point, value), text) in enumerate(zip(ends, texts, strict=True)):
        face = COLOURS[colour] if point.within_slo else COLOURS["page"]
        gid = f"{name}{place}"
        axes.scatter(
            point.request_rate,
            value,
            s=34,
            marker=marker,
            facecolors=face,
            edgecolors=COLOURS[colour],
            gid=gid,
            zorder=3,
        )
        tips[gid] = [f"{point.request_rate:.3g} request/s: {text}, {describe_result(point)}"]
    return tips


def _describe(
    curve: LoadCurve, points: Sequence[LoadPoint], shown: Sequence[tuple[int, tuple[str, str, str]]]
) -> str:
    """Return the text alternative of the chart."""
    parts = []
    for point in points[:20]:
        joules = point.energy_per_output_token_j
        facts = [format_quantity(joules, None, "J/token")] if joules is not None else []
        latencies = ((label, getattr(point, column)) for _, (column, label, _) in shown)
        facts += [f"{label} p99 {value:.3g} s" for label, value in latencies if value is not None]
        parts.append(f"{point.request_rate:.3g} request/s: {', '.join([*facts, describe_result(point)])}")
    return f"Energy and latency over load. {describe_curve(curve)}. {'; '.join(parts)}"
