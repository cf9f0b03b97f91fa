# SPDX-License-Identifier: Apache-2.0
"""The tables of a page: tests, verdicts, and the numbers, rounds and settings of each test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.load_curve import LoadCurve
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Record, Round
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.served_metrics import ATTRIBUTED
from pytest_llenergy.record.text import one_line, shorten
from pytest_llenergy.report.columns import column_of, format_window_energy, number_types, scales_differ
from pytest_llenergy.report.html.figures import look_of
from pytest_llenergy.report.layout import DEFAULT_LAYOUT
from pytest_llenergy.report.loads import load_columns
from pytest_llenergy.report.names import list_names, record_labels
from pytest_llenergy.report.notes import list_missing
from pytest_llenergy.report.rounds import round_columns
from pytest_llenergy.report.text_tables import Column, with_values
from pytest_llenergy.report.text_tables import Row as AnyRow
from pytest_llenergy.report.verdicts import COLUMNS, explain_verdicts, names_metrics, texts_of

#: Most characters of a setting, since a parameter may be a whole prompt, and of the tests with one reason.
MAX_LENGTH = 300


class Cell(NamedTuple):
    """A cell. ``look`` names style classes, ``target`` is an anchor of the page to link to."""

    text: str
    look: str = ""
    target: str = ""


class Table(NamedTuple):
    """A table with headings, each with whether its column holds numbers."""

    label: str
    heads: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str | Cell]]


def text_table(label: str, heads: Iterable[str], rows: Sequence[Sequence[str | Cell]]) -> list[Table]:
    """Return a table of texts, or none without rows."""
    return [Table(label, [(head, False) for head in heads], rows)] if rows else []


def column_table(
    label: str,
    names: Sequence[str],
    leads: Iterable[Sequence[str | Cell]],
    columns: Sequence[Column[AnyRow]],
    rows: Sequence[AnyRow],
) -> list[Table]:
    """Return a table of the columns that have values, after leading cells; or none without rows."""
    kept = with_values(columns, rows)
    heads = [*((name, False) for name in names), *((each.head, each.is_number) for each in kept)]
    cells = [[*lead, *(each.cell(row) for each in kept)] for lead, row in zip(leads, rows, strict=True)]
    return [Table(label, heads, cells)] if rows else []


def text_cell(text: str, look: str = "") -> Cell:
    """Return a cell whose text wraps."""
    return Cell(shorten(one_line(text), MAX_LENGTH), f"text {look}".strip())


def state_cell(state: str) -> Cell:
    """Return a cell with a verdict or a status in its colour."""
    return Cell(state, f"state {look_of(state)}")


def state_of(record: Record) -> str:
    """Return the status of a record, or the kind of its energy, such as ``estimated``, if it has a result."""
    return (record.kind if record.status == "measured" else None) or record.status


def tests(records: Sequence[Record], anchors: Mapping[str, str]) -> list[Table]:
    """List every test of one report in the columns of the terminal, and with power, time and rounds."""
    columns, absolute = DEFAULT_LAYOUT.columns_of(records), scales_differ(records)
    heads = {column.head for column in columns}
    further = (column_of(name, absolute=absolute) for name in ("mean_power_w", "duration_s", "rounds"))
    columns += [each for each in further if each.head not in heads]
    labels = record_labels(records)
    leads = [
        (Cell(labels[each.id], "name", anchors[each.id]), state_cell(state_of(each))) for each in records
    ]
    return column_table("Tests", ("test", "energy"), leads, columns, records)


def windows(records: Sequence[Record], anchors: Mapping[str, str]) -> list[Table]:
    """List the named windows of the ``energy_meter`` fixture."""
    absolute, labels = scales_differ(records), record_labels(records)
    rows = [
        (
            Cell(labels[each.id], "name", anchors[each.id]),
            window.name,
            text_cell(format_window_energy(window, absolute=absolute)),
        )
        for each in records
        for window in each.windows
    ]
    return text_table("Windows of energy_meter", ("test", "window", "energy"), rows)


def reasons(comparisons: Sequence[Comparison], records: Sequence[Record]) -> list[Table]:
    """List why tests have which verdict or no result, each reason once with its tests."""
    found = [*explain_verdicts(comparisons, texts_of), *list_missing(records)]
    rows = [(state_cell(state), Cell(text, "text"), text_cell(tests)) for state, tests, text in found]
    return text_table("Why", ("", "reason", "tests"), rows)


def verdicts(comparisons: Sequence[Comparison], anchors: Mapping[str, str]) -> list[Table]:
    """List every comparison, most urgent first."""
    names = list_names([each.id for each in comparisons])
    leads = [
        [state_cell(each.verdict), Cell(name, "name", anchors.get(each.id, ""))]
        for name, each in zip(names, comparisons, strict=True)
    ]
    metric = Column[Comparison]("metric", lambda each: one_line(each.metric), is_number=False)
    columns = [*([metric] if names_metrics(comparisons) else []), *COLUMNS]
    metrics = ", ".join(dict.fromkeys(each.metric for each in comparisons))
    label = f"Verdicts, {metrics}; head is base times the estimated change"
    return column_table(label, ("verdict", "test"), leads, columns, comparisons)


def metrics(sides: Mapping[str, Record]) -> list[Table]:
    """List the metrics of a test side by side, those without a value last, with the reason."""
    names = dict.fromkeys(name for record in sides.values() for name in record.metrics)
    known = [name for name in names if any(each.value_of(name) is not None for each in sides.values())]
    rows: list[list[str | Cell]] = [
        [_metric_name(sides, name), *(_metric(each, name) for each in sides.values())]
        for name in dict.fromkeys([*known, *names])
    ]
    return text_table("Metrics", ("metric", *sides), rows)


def _metric_name(sides: Mapping[str, Record], name: str) -> str:
    sources = [each.metrics[name].source for each in sides.values() if name in each.metrics]
    return f"{name} (attributed)" if ATTRIBUTED in sources else name


def _metric(record: Record, name: str) -> Cell:
    metric = record.metrics.get(name)
    if metric is None or metric.value is None:
        return text_cell((metric.reason if metric is not None else None) or "-", "muted")
    return Cell(format_quantity(metric.value, metric.uncertainty, metric.unit), "left")


def rounds(record: Record, side: str) -> list[Table]:
    """List the rounds of a test; energy and time are of the whole round."""
    details = Column[Round]("detail", _describe_flags, is_number=False)
    numbers = [[str(number)] for number in range(1, len(record.rounds) + 1)]
    columns = [*round_columns(record), details]
    return column_table(f"Rounds{side}", ["round"], numbers, columns, record.rounds)


def _describe_flags(each: Round) -> str:
    flags = dict.fromkeys(flag.detail for flag in each.flags)
    return one_line("; ".join(filter(None, [each.reason, *flags])))


def loads(curve: LoadCurve, side: str) -> list[Table]:
    """List the loads of a test by rate."""
    points = curve.by_rate()
    rates = [[f"{point.request_rate:.3g}"] for point in points]
    return column_table(f"Loads{side}", ["sent/s"], rates, load_columns(curve), points)


def settings_of(record: Record) -> dict[str, str]:
    """Return how a test was run and measured."""
    facts = {
        "parameter": record.params,
        "extra info": record.extra_info,
        "backend": record.backend,
        "number types": number_types(record) if record.backend is not None else None,
        "devices": record.devices,
        "rank": record.ranks if len(record.ranks) > 1 else None,
        "GPU settings": record.gpu_settings,
        "fallback": record.fallback,
        "procedure": record.procedure,
        "time": record.times,
    }
    return dict(_flatten(facts))


def machine_of(report: Report) -> dict[str, str]:
    """Return code, run and machine of a report, without its command line."""
    run = msgspec.structs.replace(report.run, argv=[])
    facts = {"source": report.source, "run": run, "tool": report.tool, "machine": report.environment}
    return dict(_flatten(facts))


def side_by_side(label: str, sides: Mapping[str, Mapping[str, str]]) -> list[Table]:
    """List facts of each side, and mark those that differ."""
    rows = []
    for name in dict.fromkeys(name for each in sides.values() for name in each):
        values = [each.get(name, "-") for each in sides.values()]
        look = "differs" if len(set(values)) > 1 else ""
        rows.append([text_cell(name), *(text_cell(each, look) for each in values)])
    return text_table(label, ("setting", *sides), rows)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact below a value; names of fields become words."""
    if isinstance(value, msgspec.Struct):
        fields = {field.replace("_", " "): getattr(value, field) for field in value.__struct_fields__}
        value = {field: found for field, found in fields.items() if found is not msgspec.UNSET}
    if isinstance(value, list) and any(isinstance(each, msgspec.Struct | dict | list) for each in value):
        value = {str(number): each for number, each in enumerate(value)}
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flatten(each, f"{name} {key}".strip())
    elif value not in (None, []):
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield name, f"{value:.6g}" if isinstance(value, float) else text


def facts_table(label: str, things: Iterable[Any]) -> list[Table]:
    """List things, such as meters, in a row each: a column for each of their fields."""
    facts = [dict(_flatten(each)) for each in things]
    names = list(dict.fromkeys(name for each in facts for name in each))
    return text_table(label, names, [[text_cell(each.get(name, "-")) for name in names] for each in facts])
