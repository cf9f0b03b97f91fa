# SPDX-License-Identifier: Apache-2.0
"""The tables of a page: tests, verdicts, and the numbers, rounds and settings of each test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.quantity import format_quantity
from pytest_llenergy.record.record import Coordinates, Record, Round
from pytest_llenergy.record.report import Report
from pytest_llenergy.record.served_metrics import ATTRIBUTED
from pytest_llenergy.record.text import one_line, short_test_name, shorten
from pytest_llenergy.report.columns import column_of, format_window_energy, number_types, scales_differ
from pytest_llenergy.report.hosts import describe_devices, list_hosts, place_of, sum_by_host
from pytest_llenergy.report.html.figures import look_of
from pytest_llenergy.report.layout import DEFAULT_LAYOUT, record_labels
from pytest_llenergy.report.verdicts import (
    columns_of,
    format_value,
    name_column,
    names_metrics,
    needs_reason,
)

#: Most characters of a setting, since a parameter may be a whole prompt, and of the tests with one reason.
MAX_LENGTH = 300


class Cell(NamedTuple):
    """A cell. ``look`` names style classes, ``target`` is an anchor of the page to link to."""

    text: str
    look: str = ""
    target: str = ""


Cells = Sequence[str | Cell]


class Table(NamedTuple):
    """A table. Columns whose names begin with ``#`` hold numbers."""

    label: str
    columns: Sequence[str]
    rows: Sequence[Cells]


def table(label: str, columns: Sequence[str], rows: Iterable[Cells]) -> list[Table]:
    """Return a table without empty columns, or none without rows."""
    rows = list(rows)
    empty = ("", "-", Cell("", "text"), Cell("-", "text"))
    kept = [place for place in range(len(columns)) if any(row[place] not in empty for row in rows)]
    names = [columns[place] for place in kept]
    return [Table(label, names, [[row[place] for place in kept] for row in rows])] if rows else []


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
    rows: list[Cells] = []
    for each in records:
        name = Cell(labels[each.id], "name", anchors[each.id])
        rows.append([name, state_cell(state_of(each)), *(column.cell(each) for column in columns)])
    names = [f"#{each.head}" if each.is_number else each.head for each in columns]
    return table("Tests", ("test", "energy", *names), rows)


def windows(records: Sequence[Record], anchors: Mapping[str, str]) -> list[Table]:
    """List the named windows of the ``energy_meter`` fixture."""
    absolute, found = scales_differ(records), [each for each in records if each.windows]
    labels = record_labels(found)
    rows: list[Cells] = []
    for each in found:
        for window in each.windows:
            text = text_cell(format_window_energy(window, absolute=absolute))
            rows.append([Cell(labels[each.id], "name", anchors[each.id]), window.name, text])
    return table("Windows of energy_meter", ("test", "window", "energy"), rows)


def reasons(comparisons: Sequence[Comparison], records: Sequence[Record]) -> list[Table]:
    """List why tests have which verdict or no result, each reason once with the names of its tests."""
    found: list[tuple[str, str, str]] = [
        (each.verdict, "; ".join([each.reason, *each.notes, *each.differences]), each.id)
        for each in comparisons
        if needs_reason(each) or each.notes
    ]
    found += [(each.status, each.reason or "", each.id) for each in records if each.status != "measured"]
    alike: dict[tuple[str, str], list[str]] = {}
    for state, text, test in found:
        alike.setdefault((state, text), []).append(short_test_name(test))
    rows = [
        [state_cell(state), Cell(text, "text"), text_cell(", ".join(names))]
        for (state, text), names in alike.items()
    ]
    return table("Why", ("", "reason", "tests"), rows)


def verdicts(comparisons: Sequence[Comparison], anchors: Mapping[str, str]) -> list[Table]:
    """List every comparison, most urgent first."""
    with_metric = names_metrics(comparisons)
    names = name_column([each.id for each in comparisons]).cells
    columns = columns_of("page")
    rows: list[Cells] = [
        [
            state_cell(each.verdict),
            Cell(name, "name", anchors.get(each.id, "")),
            each.metric if with_metric else "",
            *(column.cell(each) for column in columns),
        ]
        for name, each in zip(names, comparisons, strict=True)
    ]
    metrics = "" if with_metric else f", {', '.join(dict.fromkeys(each.metric for each in comparisons))}"
    label = f"Verdicts{metrics}; head is base times the estimated change"
    return table(label, ("verdict", "test", "metric", *(f"#{each.head}" for each in columns)), rows)


def metrics(sides: Mapping[str, Record]) -> list[Table]:
    """List the metrics of a test side by side, those without a value last, with the reason."""
    names = dict.fromkeys(name for record in sides.values() for name in record.metrics)
    known = [name for name in names if any(each.value_of(name) is not None for each in sides.values())]
    rows = [
        [_metric_name(sides, name), *(_metric(each, name) for each in sides.values())]
        for name in dict.fromkeys([*known, *names])
    ]
    return table("Metrics", ("metric", *sides), rows)


def _metric_name(sides: Mapping[str, Record], name: str) -> str:
    sources = [each.metrics[name].source for each in sides.values() if name in each.metrics]
    return f"{name} (attributed)" if ATTRIBUTED in sources else name


def _metric(record: Record, name: str) -> str | Cell:
    metric = record.metrics.get(name)
    if metric is None or metric.value is None:
        return text_cell((metric.reason if metric is not None else None) or "-", "muted")
    return Cell(format_quantity(metric.value, metric.uncertainty, metric.unit), "left")


def rounds(sides: Mapping[str, Record]) -> list[Table]:
    """List the rounds of each side; energy and time are of one iteration."""
    rows = [
        [f"{side} {number}" if len(sides) > 1 else str(number), *_round(each, list_hosts(record))]
        for side, record in sides.items()
        for number, each in enumerate(record.rounds, 1)
    ]
    columns = "round|#start s|#s|#energy ± u|#W|#per token|#token/s|#idle W|#°C|hosts|notes"
    return table("Rounds", columns.split("|"), rows)


def _round(each: Round, hosts: Sequence[str]) -> list[str | Cell]:
    def energy(joules: float | None, u: float | None = None) -> str:
        return "-" if joules is None else format_quantity(joules, u, "J")

    def ratio(part: float | None, whole: float | None) -> float | None:
        return part / whole if part is not None and whole else None

    output = each.tokens.output if each.tokens is not None else None
    found = sum_by_host(hosts, each).items()
    flags = dict.fromkeys(f"{flag.name}: {flag.detail}" for flag in each.flags)
    return [
        f"{each.start_s:.3f}",
        format_value(each.duration_s / each.iterations),
        energy(ratio(each.energy_j, each.iterations), ratio(each.energy_u_j, each.iterations)),
        format_value(ratio(each.energy_j, each.duration_s)),
        energy(ratio(each.energy_j, output)),
        format_value(ratio(output, each.duration_s)),
        format_value(each.idle_power_w),
        format_value(each.temperature_start_c),
        text_cell(", ".join(f"{host} {part.reason or energy(part[0], part[1])}" for host, part in found)),
        text_cell("; ".join(filter(None, [each.reason, *flags]))),
    ]


def settings_of(record: Record) -> dict[str, str]:
    """Return how a test was run and measured."""
    degrees = [name for name in Coordinates.__struct_fields__ if getattr(record.parallel, name) > 1]
    ranks = {}
    for rank in record.ranks if degrees else ():
        part = ", ".join(f"{name} {getattr(rank.coordinates, name, '?')}" for name in degrees)
        ranks[f"rank {rank.rank}"] = f"{part} on {place_of(rank)}"
    facts = {
        "parameter": record.params,
        "extra info": record.extra_info,
        "backend": record.backend,
        "number types": number_types(record) if record.backend is not None else None,
        "devices": describe_devices(record),
        **ranks,
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
    return table(label, ("setting", *sides), rows)


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
    elif name.endswith(" bytes") and isinstance(value, int):
        yield name.removesuffix(" bytes"), f"{value / 2**30:.1f} GiB"
    elif value not in (None, []):
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield name, f"{value:.6g}" if isinstance(value, float) else text


def meters(records: Iterable[Record]) -> list[Table]:
    """List every meter once."""
    found = dict.fromkeys(meter for each in records for meter in each.meters)
    return _facts_table("Meters", [dict(_flatten(each)) for each in found])


def rules(comparisons: Sequence[Comparison]) -> list[Table]:
    """List the rules behind the verdicts."""
    found = dict.fromkeys((each.metric, each.better, each.rule) for each in comparisons if each.rule)
    rows = [{"metric": metric, "better": better, **dict(_flatten(rule))} for metric, better, rule in found]
    return _facts_table("Rule", rows)


def _facts_table(label: str, facts: Sequence[Mapping[str, str]]) -> list[Table]:
    names = list(dict.fromkeys(name for each in facts for name in each))
    return table(label, names, [[text_cell(each.get(name, "-")) for name in names] for each in facts])
