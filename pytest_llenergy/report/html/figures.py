# SPDX-License-Identifier: Apache-2.0
"""The figures of a page: energy against speed, bars, verdicts and trends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from pytest_llenergy.compare.history import Series, find_levels
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.metrics import is_prefill_only
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.columns import backend_name, model_name, scales_differ
from pytest_llenergy.report.html.axes import Axis, Chart, Key, Mark, Row, RowChart
from pytest_llenergy.report.names import list_names, record_labels, unique_function_names
from pytest_llenergy.report.verdicts import LARGE, format_change, format_limits, format_value

PER_TOKEN, PER_ITERATION, THROUGHPUT = "energy_per_output_token_j", "energy_j", "output_tokens_per_s"

#: Number of colours and forms; most rows of a chart, sessions of a trend, points of a line, and marks.
SERIES, MAX_ROWS, MAX_SESSIONS, MAX_POINTS, MAX_MARKS = 6, 40, 200, 100, 1000

#: Pixels down between two names.
NAME_HEIGHT = 13


def writes_tokens(record: Record) -> bool:
    """Whether a test has an energy per token; that of a prefill would be the energy of its prompt."""
    return record.value_of(PER_TOKEN) is not None and not is_prefill_only(record.rounds)


def look_of(state: str | None) -> str:
    """Return the class of the style sheet for a verdict or a status."""
    return (state or "").replace(" ", "-")


def _with_energy(records: Sequence[Record], name: str) -> list[tuple[Record, float, float]]:
    """Return the valid records with a positive energy, each with its value and standard uncertainty."""
    records = [each for each in records if each.counts]
    absolute = scales_differ(records)
    found = []
    for record in records:
        metric = record.metrics.get(name)
        if metric is not None and metric.value is not None and metric.value > 0:
            u = metric.uncertainty_absolute if absolute else metric.uncertainty
            found.append((record, metric.value, u or 0.0))
    return found


def _ends(values: Iterable[tuple[float, float]]) -> list[float]:
    """Return what an axis of values with uncertainties must show; a logarithmic one has no place below 0."""
    return [end for value, u in values for end in (value - u, value, value + u) if end > 0]


def _more(shown: Sequence[object], found: Sequence[object]) -> str:
    return f" {len(shown)} of {len(found)} are drawn." if len(shown) < len(found) else ""


def energy_against_speed(records: Sequence[Record]) -> list[Chart]:
    """Plot energy per token against throughput, if at least two tests write tokens.

    Tests that no other beats in both have their names, where these do not cover each other.
    """
    found = [
        (record, speed, energy, u)
        for record, energy, u in _with_energy(records, PER_TOKEN)
        if writes_tokens(record) and (speed := record.value_of(THROUGHPUT) or 0.0) > 0
    ]
    if len(found) < 2:
        return []
    front, least = set(), inf
    for record, _, energy, _ in sorted(found, key=lambda each: (-each[1], each[2])):
        front |= {record.id} if energy < least else set()
        least = min(least, energy)
    shown = sorted(found, key=lambda each: each[0].id not in front)[:MAX_MARKS]
    speeds, energies = [each[1] for each in shown], _ends(each[2:] for each in shown)
    chart = Chart("Energy against speed", Axis(speeds, "token/s"), Axis(energies, "J/token"), height=320)
    chart.caption = "Down is thriftier, right is faster. Point at a mark for its test." + _more(shown, found)
    series = _series([each[0] for each in shown])
    kinds = sorted(set(series.values()))
    chart.legend = [(f"s{place}", place, text) for place, text in enumerate(kinds) if text]
    labels = record_labels([each[0] for each in shown], brief=True)
    heights: list[float] = []
    for record, speed, energy, u in shown:
        height = chart.height * chart.y.share(energy)
        is_named = record.id in front and all(abs(height - each) > NAME_HEIGHT for each in heights)
        heights += [height] * is_named
        tip = f"{record.id}: {format_value(speed, 'token/s')}, {format_quantity(energy, u, 'J/token')}"
        shape = kinds.index(series[record.id])
        name = labels[record.id] * is_named
        chart.marks.append(Mark(speed, energy, tip, f"s{shape}", shape, u, name=name))
    return [chart]


def _series(records: Sequence[Record]) -> dict[str, str]:
    """Return the fact by which tests have different colours: backend, model or function."""
    functions = unique_function_names(each.id for each in records)
    facts: tuple[Callable[[Record], str], ...] = (backend_name, model_name, lambda each: functions[each.id])
    found = ({each.id: fact(each) for each in records} for fact in facts)
    alike = dict.fromkeys(functions, "")
    return next((each for each in found if 1 < len(set(each.values())) <= SERIES), alike)


def energy_by_parameter(records: Sequence[Record]) -> list[Chart]:
    """Plot energy per token over each parameter that is a number: a small chart for each function.

    The other parameters have a line each. All charts have the same axis of energy.
    """
    found = [each for each in _with_energy(records, PER_TOKEN) if writes_tokens(each[0])]
    functions = unique_function_names(each[0].id for each in found)
    energy_axis = Axis(_ends(each[1:] for each in found), "J/token")
    numbers = (name for each in found for name in each[0].params if _number_of(each[0], name) is not None)
    charts = []
    for name in dict.fromkeys(numbers):
        series: dict[str, dict[str, list[tuple[float, float, float, str]]]] = {}
        for record, energy, u in found:
            if (number := _number_of(record, name)) is not None:
                others = ", ".join(str(each) for key, each in record.params.items() if key != name)
                lines = series.setdefault(functions[record.id], {})
                lines.setdefault(others, []).append((number, energy, u, record.id))
        for function, lines in series.items():
            drawn = {text: sorted(each) for text, each in lines.items() if len({x for x, *_ in each}) > 2}
            drawn = {text: each[:MAX_POINTS] for text, each in drawn.items()}
            kept = sorted(drawn)[:SERIES]
            if not kept:
                continue
            places = Axis([x for text in kept for x, *_ in drawn[text]], one_line(name))
            chart = Chart(f"{function}: energy per token by {name}", places, energy_axis)
            chart.caption = "Whiskers: standard uncertainty (k = 1)." + _more(kept, list(drawn))
            for place, text in enumerate(kept):
                look = f"s{place}"
                chart.legend += [(look, place, text)] * bool(text)
                chart.lines.append(([(x, energy) for x, energy, *_ in drawn[text]], look, False))
                for x, energy, u, test in drawn[text]:
                    tip = f"{test}: {format_quantity(energy, u, 'J/token')}"
                    chart.marks.append(Mark(x, energy, tip, look, place, u))
            charts.append(chart)
    return charts[:SERIES]


def _number_of(record: Record, name: str) -> float | None:
    """Return a parameter of a test if it is a number."""
    value = record.params.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def energy_bars(records: Sequence[Record], anchors: Mapping[str, str]) -> list[RowChart]:
    """Plot energies with their uncertainties, largest first: per token, or of an iteration without."""
    tokens = [each for each in _with_energy(records, PER_TOKEN) if writes_tokens(each[0])]
    others = [each for each in _with_energy(records, PER_ITERATION) if not writes_tokens(each[0])]
    return [
        *_bars("Energy per token", "J/token", tokens, anchors),
        *_bars("Energy of an iteration", "J", others, anchors),
    ]


def _bars(
    title: str, unit: str, found: Sequence[tuple[Record, float, float]], anchors: Mapping[str, str]
) -> list[RowChart]:
    shown = sorted(found, key=lambda each: -each[1])[:MAX_ROWS]
    if len(shown) < 2:
        return []
    labels = record_labels([record for record, *_ in shown], brief=True)
    rows = []
    for record, value, u in shown:
        text = format_quantity(value, u, unit) + (f" ({record.kind})" if record.kind != "measured" else "")
        look = "estimated" if record.kind == "estimated" else "head"
        name, tip, target = labels[record.id], f"{record.id}: {text}", anchors[record.id]
        rows.append(Row(name, target, text, look, tip, value - u, value, value + u))
    axis = Axis([0.0, *_ends(each[1:] for each in shown)], unit)
    caption = "Whiskers: standard uncertainty (k = 1)." + _more(shown, found)
    return [RowChart(title, rows, axis, caption, is_bars=True)]


def verdict_intervals(comparisons: Sequence[Comparison], anchors: Mapping[str, str]) -> list[RowChart]:
    """Plot the change of each test with its limits, if there are any."""
    found = [each for each in comparisons if each.ratio is not None]
    shown, several = found[:MAX_ROWS], len({each.metric for each in found}) > 1
    if not shown:
        return []
    # Limits that say little end at the edge of the axis, so that the changes have room.
    most = max(100.0, *(1.2 * _percent(each.ratio) for each in shown))
    rows = []
    for name, each in zip(list_names([each.id for each in shown]), shown, strict=True):
        change, limits = format_change(each.ratio), f"({format_limits(each)})" * (each.low is not None)
        low, value, high = (
            min(_percent(each.ratio if end is None else end), most)
            for end in (each.low, each.ratio, each.high)
        )
        label = f"{name}: {each.metric}" if several else name
        tip = f"{each.id}: {each.metric} {change} {limits}, {each.verdict}"
        target, look = anchors.get(each.id, ""), look_of(each.verdict)
        row = Row(label, target, change, look, tip, low, value, high, limits)
        if each.rule is not None:
            worse = 1 + each.rule.threshold if each.better == "less" else 1 / (1 + each.rule.threshold)
            band = _percent(1 / (1 + each.rule.tolerance)), _percent(1 + each.rule.tolerance)
            dashes = [("regressed", _percent(worse)), ("improved", _percent(1 / worse))]
            row = row._replace(band=band, dashes=dashes)
        rows.append(row)
    ends = [end for row in rows for end in (row.low, row.value, row.high, *(row.band or ()))]
    legend: list[Key] = [(look_of(each), 0, each) for each in dict.fromkeys(each.verdict for each in shown)]
    legend += [("regressed", "dash", "threshold"), ("base", "area", "tolerance")]
    caption = "Dot: estimate of the change; line: its limits." + _more(shown, found)
    return [RowChart("Verdicts", rows, Axis(ends, "change, %", log=False), caption, legend)]


def _percent(ratio: float | None) -> float:
    """Return a ratio as a change in percent; one that says only that it is large ends at the edge."""
    return 100 * min(max((ratio or 0.0) - 1, -1.0), LARGE)


def trend_chart(series: Series) -> list[Chart]:
    """Plot the sessions of a test, with each level and its band, and where the level changed."""
    levels = find_levels([each.value for each in series])
    first = max(0, len(series) - MAX_SESSIONS)
    shown = series[first:]
    names = [(each.commit or "?")[:7] for each in shown]
    bands = [end for level in levels for end in (level.middle - level.half, level.middle + level.half)]
    places = Axis([-0.5, len(shown) - 0.5], "commit", log=False, names=names)
    chart = Chart(f"Trend of {shown[0].metric}", places, Axis(bands, shown[0].unit, log=False))
    for level in levels:
        if level.end <= first:
            continue
        begin = max(level.start - first, 0)
        ends = begin - 0.5, level.end - first - 0.5
        low, high = level.middle - level.half, level.middle + level.half
        band = [(ends[0], low), (ends[1], low), (ends[1], high), (ends[0], high)]
        chart.lines.append((band, "head", True))
        chart.lines.append(([(end, level.middle) for end in ends], "muted", False))
        changed = level.start > first
        chart.rules += [("regressed", ends[0], "")] * changed
        for place, each in enumerate(shown[begin : level.end - first], begin):
            tip = (
                f"{each.time} {(each.commit or '')[:10]}".strip() + f": {format_value(each.value, each.unit)}"
            )
            tip += ", change point" * (changed and place == begin)
            chart.marks.append(Mark(place, each.value, tip, "head", hollow=not low <= each.value <= high))
    chart.legend = [("head", 0, "session"), ("head", "area", "band"), ("muted", "line", "median")]
    chart.legend += [("regressed", "dash", "change point")]
    caption = f"{shown[0].time} to {shown[-1].time}. Hollow: outside the band, at the edge if it is beyond."
    chart.caption = caption + _more(shown, series)
    return [chart]
