# SPDX-License-Identifier: Apache-2.0
"""The figures of a page: energy against speed, bars, verdicts, loads and trends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from statistics import median

from pytest_llenergy.compare.history.trend import Trend, TrendPoint
from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.load_curve import LoadCurve
from pytest_llenergy.record.metrics import ROUND_METRICS, is_prefill_only
from pytest_llenergy.record.quantity import format_quantity, scale_of, shown_unit
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import unique_function_names
from pytest_llenergy.report.columns import backend_name, model_name
from pytest_llenergy.report.html.charts import Axis, Chart, Key, Mark, Row, RowChart
from pytest_llenergy.report.layout import record_labels
from pytest_llenergy.report.load_curves import describe_curve, describe_result
from pytest_llenergy.report.verdicts import format_change, format_interval, format_value, name_column

PER_TOKEN, PER_ITERATION, THROUGHPUT = "energy_per_output_token_j", "energy_j", "output_tokens_per_s"

#: Number of colours and forms; most rows of a chart, sessions of a trend, marks, and marks with all names.
SERIES, MAX_ROWS, MAX_SESSIONS, MAX_MARKS, MAX_NAMED = 6, 40, 200, 1000, 20


def writes_tokens(record: Record) -> bool:
    """Whether a test has an energy per token; that of a prefill would be the energy of its prompt."""
    return record.value_of(PER_TOKEN) is not None and not is_prefill_only(record.rounds)


def look_of(state: str | None) -> str:
    """Return the class of the style sheet for a verdict or a status."""
    return (state or "").replace(" ", "-")


def _value_and_u(record: Record, name: str, *, absolute: bool) -> tuple[float, float] | None:
    """Return a positive value of a metric and its standard uncertainty, or None."""
    metric = record.metrics.get(name)
    if metric is None or metric.value is None or metric.value <= 0:
        return None
    return metric.value, (metric.uncertainty_absolute if absolute else metric.uncertainty) or 0.0


def _step_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Return the step in which a chart shows values, and its unit."""
    power, prefix = scale_of(unit, *values)
    return 10.0**power, f"{prefix}{shown_unit(unit)}"


def _ends(values: Iterable[tuple[float, float]], step: float = 1.0) -> list[float]:
    """Return what an axis of values with uncertainties must show; a logarithmic one has no place below 0."""
    return [end / step for value, u in values for end in (value - u, value, value + u) if end > 0]


def energy_against_speed(records: Sequence[Record], *, absolute: bool) -> list[Chart]:
    """Plot energy per token against throughput, if at least two tests write tokens."""
    found = [
        (each, speed, *pair)
        for each in filter(writes_tokens, records)
        if (speed := each.value_of(THROUGHPUT) or 0.0) > 0
        and (pair := _value_and_u(each, PER_TOKEN, absolute=absolute))
    ]
    if len(found) < 2:
        return []
    front, least = set(), inf
    for record, _, energy, _ in sorted(found, key=lambda each: (-each[1], each[2])):
        front |= {record.id} if energy < least else set()
        least = min(least, energy)
    shown = sorted(found, key=lambda each: each[0].id not in front)[:MAX_MARKS]
    step, unit = _step_of("J/token", [energy for _, _, energy, _ in shown])
    axes = Axis(speed for _, speed, *_ in shown), Axis(_ends((each[2:] for each in shown), step))
    chart = Chart("Energy against speed", *axes, "token/s", unit, height=320)
    chart.caption = "Down is thriftier, right is faster. Point at a mark for its test." + _more(shown, found)
    series = _series([each[0] for each in shown])
    kinds = list(dict.fromkeys(series.values()))
    chart.legend = [(f"s{place}", place, text) for place, text in enumerate(kinds) if text]
    labels = _short_labels([each[0] for each in shown])
    # Named are tests that no other beats in both, and of few all, where names cover neither marks nor names.
    places = [(chart.x.share(each[1]), chart.height * chart.y.share(each[2] / step)) for each in shown]
    heights: list[float] = []
    for (record, speed, energy, u), (x, height) in zip(shown, places, strict=True):
        name = labels[record.id] if record.id in front or len(shown) <= MAX_NAMED else ""
        side = 1 if x <= 0.5 else -1
        near = (side * (each - x) for each, y in places if name and abs(y - height) < 10)
        name *= all(abs(height - each) > 16 for each in heights) and not any(0 < each < 0.4 for each in near)
        heights += [height] if name else []
        tip = f"{record.id}: {format_value(speed, 'token/s')}, {format_quantity(energy, u, 'J/token')}"
        shape = kinds.index(series[record.id])
        chart.marks.append(Mark(speed, energy / step, tip, f"s{shape}", shape, u / step, name=name))
    return [chart]


def _short_labels(records: Sequence[Record]) -> dict[str, str]:
    """Return the labels of the terminal, without the function if all tests have the same."""
    labels, functions = record_labels(records), unique_function_names(each.id for each in records)
    common = next(iter(functions.values())) if len(set(functions.values())) == 1 else ""
    return {test: label.removeprefix(common).strip() or label for test, label in labels.items()}


def _series(records: Sequence[Record]) -> dict[str, str]:
    """Return the fact by which tests have different colours: backend, model or function."""
    functions = unique_function_names(each.id for each in records)
    facts: tuple[Callable[[Record], str], ...] = (backend_name, model_name, lambda each: functions[each.id])
    found = ({each.id: fact(each) for each in records} for fact in facts)
    alike = dict.fromkeys(functions, "")
    return next((each for each in found if 1 < len(set(each.values())) <= SERIES), alike)


def energy_bars(
    records: Sequence[Record], metric: str, anchors: Mapping[str, str], *, absolute: bool
) -> list[RowChart]:
    """Plot energies with their uncertainties, largest first, if there are at least two."""
    found = [(each, known) for each in records if (known := _value_and_u(each, metric, absolute=absolute))]
    shown = sorted(found, key=lambda each: -each[1][0])[:MAX_ROWS]
    if len(shown) < 2:
        return []
    step, unit = _step_of(ROUND_METRICS[metric].unit, [value for _, (value, _) in shown])
    labels = _short_labels([each[0] for each in shown])
    rows = []
    for record, (value, u) in shown:
        text = format_quantity(value, u, ROUND_METRICS[metric].unit)
        text += f" ({record.kind})" if record.kind != "measured" else ""
        look = "estimated" if record.kind == "estimated" else "head"
        ends = (value - u) / step, value / step, (value + u) / step
        rows.append(Row(labels[record.id], anchors[record.id], text, look, f"{record.id}: {text}", *ends))
    axis = Axis([0.0, *_ends((each[1] for each in shown), step)])
    caption = "Whiskers: standard uncertainty (k = 1)." + _more(shown, found)
    title = "Energy per token" if metric == PER_TOKEN else "Energy of an iteration"
    return [RowChart(title, rows, axis, unit, caption, is_bars=True)]


def _more(shown: Sequence[object], found: Sequence[object]) -> str:
    return f" {len(shown)} of {len(found)} are drawn." if len(shown) < len(found) else ""


def verdict_intervals(comparisons: Sequence[Comparison], anchors: Mapping[str, str]) -> list[RowChart]:
    """Plot the change of each test with its limits, if there are any."""
    found = [each for each in comparisons if each.ratio is not None]
    shown, several = found[:MAX_ROWS], len({each.metric for each in found}) > 1
    rows = []
    for name, each in zip(name_column([each.id for each in shown]).cells, shown, strict=True):
        limits = f"({format_interval(each)})" if each.low is not None else ""
        label = f"{name}: {each.metric}" if several else name
        tip = f"{each.id}: {each.metric} {format_change(each)} {limits}, {each.verdict}"
        low, value, high = (
            _percent(each.ratio if end is None else end) for end in (each.low, each.ratio, each.high)
        )
        look = look_of(each.verdict)
        row = Row(label, anchors.get(each.id, ""), format_change(each), look, tip, low, value, high, limits)
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
    axis = Axis(ends, log=False)
    return [RowChart("Verdicts", rows, axis, "change, %", caption, legend)] if rows else []


def _percent(ratio: float | None) -> float:
    """Return a ratio as a change in percent; larger ones end at the edge of the axis."""
    return min(max(100 * ((ratio or 0.0) - 1), -100.0), 100.0)


def load_chart(curve: LoadCurve, side: str) -> list[Chart]:
    """Plot the energy of a token of a served test over the request rate, if there is any."""
    found = [
        (each, value, each.energy_per_output_token_u_j or 0.0)
        for each in curve.by_rate()
        if each.request_rate > 0 and (value := each.energy_per_output_token_j or 0.0) > 0
    ]
    if not found:
        return []
    step, unit = _step_of("J/token", [value for _, value, _ in found])
    axes = Axis(each.request_rate for each, *_ in found), Axis(_ends((each[1:] for each in found), step))
    chart = Chart(f"Energy over load{side}", *axes, "request/s", unit)
    chart.caption = f"{describe_curve(curve)}. Hollow: not within it."
    chart.lines.append(([(each.request_rate, value / step) for each, value, _ in found], "head", False))
    for each, value, u in found:
        text = f"{each.request_rate:.3g} request/s: {format_quantity(value, u or None, 'J/token')}"
        tip, hollow = f"{text}, {describe_result(each)}", not each.within_slo
        chart.marks.append(Mark(each.request_rate, value / step, tip, "head", u=u / step, hollow=hollow))
    rate = curve.max_load_requests_per_s
    sign = "maximum" if curve.exceeded_at_requests_per_s is not None else "≥"
    chart.rules = [("muted", rate, f"{sign} {rate:.3g}")] if rate is not None else []
    return [chart]


def trend_chart(trend: Trend) -> list[Chart]:
    """Plot the sessions of a test with the limits of each as a band, and where the level changed."""
    points = trend.points[-MAX_SESSIONS:]
    step, unit = _step_of(trend.unit, [each.value for each in points])
    kept = [each for each in points if not each.outlier] or points
    ends = [value / step for each in kept for value in (each.low, each.value, each.high) if value is not None]
    places = Axis([-0.5, len(points) - 0.5], log=False, names=[(each.commit or "?")[:7] for each in points])
    chart = Chart(f"Trend of {trend.metric}", places, Axis(ends, log=False), "commit", unit or trend.metric)
    limits = [(place, each.low, each.high) for place, each in enumerate(points)]
    upper = [(place, high / step) for place, _, high in limits if high is not None]
    lower = [(place, low / step) for place, low, _ in reversed(limits) if low is not None]
    values = [(float(place), each.value / step) for place, each in enumerate(points)]
    chart.lines = [([*upper, *lower], "head", True), (values, "head", False)]
    changes = [place for place, each in enumerate(points) if each.changed and place]
    for start, end in pairwise([0, *changes, len(points)]):
        level = median(each.value for each in points[start:end]) / step
        chart.lines.append(([(start - 0.5, level), (end - 0.5, level)], "muted", False))
    chart.legend = [("head", 0, "session"), ("head", "area", "its limits"), ("muted", "line", "median")]
    chart.legend += [("regressed", "dash", "change point")]
    for place, each in enumerate(points):
        look = look_of(each.verdict) if each.verdict not in (None, "unchanged") else "head"
        tip = describe_session(each, trend.unit)
        chart.marks.append(Mark(place, each.value / step, tip, look, hollow=each.outlier))
        if each.changed:
            chart.rules.append(("regressed", place - 0.5, ""))
    outliers = " Hollow: outlier, at the edge if it is beyond." if len(kept) < len(points) else ""
    chart.caption = f"{points[0].time} to {points[-1].time}.{outliers}{_more(points, trend.points)}"
    return [chart]


def describe_session(point: TrendPoint, unit: str) -> str:
    """Return time, commit, value and events of a session."""
    text = f"{point.time} {(point.commit or '')[:10]}".strip() + f": {format_value(point.value, unit)}"
    if point.low is not None and point.high is not None:
        text += f" ({format_value(point.low)} to {format_value(point.high)})"
    events = ["change point"] * point.changed + ["outlier"] * point.outlier
    return ", ".join(filter(None, [text, point.verdict, *events]))
