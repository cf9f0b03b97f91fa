# SPDX-License-Identifier: Apache-2.0
"""Layout of the summary: which columns it has, and the order and labels of its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.record.custom_metrics import custom_metrics_of, is_custom_name
from pytest_llenergy.record.metrics import METRIC_NAMES
from pytest_llenergy.record.record import Record, Round
from pytest_llenergy.record.text import MAX_NAME_LENGTH, one_line, shorten, unique_function_names
from pytest_llenergy.report.columns import (
    COLUMNS,
    Column,
    column_of,
    device_names,
    main_columns,
    meter_names,
    number_types,
    scales_differ,
    short_types,
)

#: The column of number types.
TYPES = "types"

#: Columns of runs that record the energy of each request.
REQUESTS = ("energy_per_request_p50_j", "energy_per_request_p90_j")

#: If a parameter is a longer text, pytest's id of the parameters is shown instead.
MAX_PARAM_LENGTH = 40

#: Keys of ``--sort`` except metrics.
NAME_SORT_KEYS: dict[str, Callable[[Record], str]] = {
    "name": lambda record: _function_name(record.id),
    "fullname": lambda record: record.id,
}


@dataclass(frozen=True)
class Layout:
    """Layout of the summary.

    Attributes:
        columns: Names of columns. Empty: the main ones; meter, device and number types where they differ;
            custom metrics that have a value.
        sort: A key or a metric, with ``-`` in front for descending order. Empty: the order of the run.
    """

    columns: tuple[str, ...] = ()
    sort: str = ""

    def columns_of(self, records: Sequence[Record]) -> list[Column]:
        """Return the columns for the records of a run, the most important first."""
        absolute = scales_differ(records)
        records = list(filter(has_values, records))
        types = _types_that_differ(records)
        if self.columns:
            return [
                types if types and name == TYPES else column_of(name, absolute=absolute)
                for name in self.columns
            ]
        columns = main_columns(records, absolute=absolute)
        columns += [COLUMNS["meter"]] * (len({meter_names(each) for each in records if each.meters}) > 1)
        columns += [COLUMNS["device"]] * _devices_differ(records)
        columns += [column_of(name, absolute=absolute) for name in custom_metrics_of(records)]
        columns += [types] if types else []
        if any(each.request_energies and each.request_energies.energy_j for each in _rounds(records)):
            columns += [column_of(name, absolute=absolute) for name in REQUESTS]
        return [column for column in columns if any(column.cell(record) != "-" for record in records)]

    def missing_metrics(self, records: Sequence[Record], prefix: str = "--energy-") -> list[str]:
        """Return a line for each name that is neither built in nor a metric of any test.

        Args:
            records: The tests. If none has any metric, no name is missing.
            prefix: Beginning of the options.
        """
        known = {name for record in records for name in record.metrics}
        word = self.sort.removeprefix("-")
        named = {
            "columns": [name for name in self.columns if name not in COLUMNS],
            "sort": [word] if is_custom_name(word) else [],
        }
        return [
            f"no test has the metric {name} ({prefix}{option})"
            for option, names in named.items()
            for name in names
            if known and name not in known
        ]

    def rows(self, records: Sequence[Record], names: Mapping[str, str]) -> Iterator[tuple[str, str, Record]]:
        """Yield heading and label of each row: several tests of a function are together, under its name.

        Args:
            records: The sorted records of the table.
            names: The names of functions by test id.
        """
        functions: dict[str, list[Record]] = {}
        is_sorted = self.sort.removeprefix("-") not in ("", *NAME_SORT_KEYS)
        for record in records:
            # The order by a metric is kept.
            functions.setdefault(record.id if is_sorted else names[record.id], []).append(record)
        params = _params_labels(records, names)
        for first, *others in functions.values():
            name = names[first.id]
            if not others:
                yield "", _label(name, params[first.id]), first
            for number, record in enumerate([first, *others] if others else []):
                yield name * (not number), f"  {params[record.id] or name}", record

    def sort_records(self, records: Sequence[Record]) -> list[Record]:
        """Return the records in the order of the table."""
        word, largest_first = self.sort.removeprefix("-"), self.sort.startswith("-")
        if word in NAME_SORT_KEYS:
            return sorted(records, key=NAME_SORT_KEYS[word], reverse=largest_first)
        if not word:
            return list(records)
        # Records without a value come last in either order.
        sign = -1.0 if largest_first else 1.0
        return sorted(records, key=lambda record: sign * _value(record, word, missing=sign * math.inf))


DEFAULT_LAYOUT = Layout()


def has_values(record: Record) -> bool:
    """Whether the record has a row in the table."""
    return any(metric.value is not None for metric in record.metrics.values())


def record_labels(records: Sequence[Record]) -> dict[str, str]:
    """Return the label of each test by its id: function and parameters."""
    names = unique_function_names(record.id for record in records)
    params = _params_labels(records, names)
    return {record.id: _label(names[record.id], params[record.id]) for record in records}


def _label(name: str, params: str) -> str:
    return shorten(one_line(f"{name} {params}"), MAX_NAME_LENGTH)


def _params_labels(records: Sequence[Record], names: Mapping[str, str]) -> dict[str, str]:
    """Return a label of the parameters by test id: pytest's own where those of a function's tests repeat."""
    labels = {record.id: _params_label(record) for record in records}
    counts = Counter((names[test], label) for test, label in labels.items())
    return {
        test: label if counts[names[test], label] == 1 else _pytest_label(test) or label
        for test, label in labels.items()
    }


def _pytest_label(test: str) -> str:
    return shorten(one_line(test.partition("[")[2].removesuffix("]")), MAX_NAME_LENGTH)


def _params_label(record: Record) -> str:
    """Return ``openvino, batch_size=8, ranks=2``, or pytest's id of long parameters."""
    if any(isinstance(value, str) and len(value) > MAX_PARAM_LENGTH for value in record.params.values()):
        return _pytest_label(record.id)
    backend = [str(record.params["backend"])] if "backend" in record.params else []
    params = [f"{name}={value}" for name, value in record.params.items() if name != "backend"]
    ranks = [f"ranks={len(record.ranks)}"] * (len(record.ranks) > 1)
    return shorten(one_line(", ".join([*backend, *params, *ranks])), MAX_NAME_LENGTH)


def _devices_differ(records: Sequence[Record]) -> bool:
    """Whether tests ran on different devices. The number of ranks is shown elsewhere."""
    devices = {device_names(record) if record.boards else "cpu" for record in records if record.devices}
    return len(devices) > 1


def _rounds(records: Sequence[Record]) -> Iterator[Round]:
    return (round_ for record in records for round_ in record.rounds)


def _types_that_differ(records: Sequence[Record]) -> Column | None:
    """Return a column of number types if those of a function's tests differ, so that their joules are unlike.

    It shows all types if the short ones are equal although all are not.
    """
    found: dict[str, set[tuple[str, str]]] = {}
    for record in records:
        if record.backend is not None:
            types = short_types(record), number_types(record)
            found.setdefault(_without_params(record.id), set()).add(types)
    if all(len(several) < 2 for several in found.values()):
        return None
    equal = any(len({short for short, _ in several}) < len(several) for several in found.values())
    return Column(COLUMNS[TYPES].head, number_types if equal else short_types)


def parse_columns(text: str) -> tuple[str, ...]:
    """Parse ``--energy-columns``.

    Raises:
        ValueError: If a name is neither a column nor possibly a custom metric.
    """
    words = _words(text)
    _check_names([word for word in words if not is_custom_name(word)], COLUMNS)
    return tuple(words)


def parse_sort(text: str) -> str:
    """Parse ``--sort`` of ``llenergy report``.

    Raises:
        ValueError: If a name is neither a key nor possibly a custom metric.
    """
    word = text.strip()
    if not is_custom_name(word.removeprefix("-")):
        known = (*NAME_SORT_KEYS, *METRIC_NAMES)
        _check_names([word.removeprefix("-")], known, "; with - before it the largest comes first")
    return word


def _words(text: str) -> list[str]:
    words = dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ValueError("no name given")
    return list(words)


def _check_names(words: Sequence[str], known: Collection[str], more: str = "") -> tuple[str, ...]:
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}{more}")
    return tuple(words)


def _value(record: Record, name: str, missing: float) -> float:
    metric = record.metrics.get(name)
    return missing if metric is None or metric.value is None else metric.value


def _without_params(name: str) -> str:
    return name.partition("[")[0]


def _function_name(name: str) -> str:
    """Return the function and its parameters, which may contain colons."""
    test, bracket, params = name.partition("[")
    return f"{test.rpartition('::')[2]}{bracket}{params}"
