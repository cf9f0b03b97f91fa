# SPDX-License-Identifier: Apache-2.0
"""Layout of the summary: which columns it has, and the order and labels of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llenergy.record.custom_metrics import custom_metrics_of, is_custom_name
from pytest_llenergy.record.record import Record
from pytest_llenergy.report.columns import (
    COLUMNS,
    column_of,
    device_names,
    main_columns,
    meter_names,
    number_types,
    scales_differ,
)
from pytest_llenergy.report.names import params_labels, unique_function_names
from pytest_llenergy.report.text_tables import Column, with_values

#: Columns of runs that record the energy of each request.
REQUESTS = ("energy_per_request_p50_j", "energy_per_request_p90_j")


@dataclass(frozen=True)
class Layout:
    """Layout of the summary: the names of its columns.

    Empty: the main ones; meter, device and number types where they differ; custom metrics that have a value.
    """

    columns: tuple[str, ...] = ()

    def columns_of(self, records: Sequence[Record]) -> list[Column[Record]]:
        """Return the columns for the records of a run, the most important first."""
        absolute = scales_differ(records)
        records = list(filter(has_values, records))
        if self.columns:
            return [column_of(name, absolute=absolute) for name in self.columns]
        names = ["meter"] * (len({meter_names(each) for each in records if each.meters}) > 1)
        # The number of ranks is shown elsewhere.
        devices = {device_names(each) if each.boards else "cpu" for each in records if each.devices}
        names += ["device"] * (len(devices) > 1)
        names += custom_metrics_of(records)
        names += ["types"] * _types_differ(records)
        if any(
            each.request_energies and each.request_energies.energy_j for r in records for each in r.rounds
        ):
            names += REQUESTS
        columns = main_columns(records, absolute=absolute)
        return with_values([*columns, *(column_of(name, absolute=absolute) for name in names)], records)

    def rows(self, records: Sequence[Record]) -> list[tuple[str, str, Record]]:
        """Return heading and label of each row: several tests of a function are together, under its name."""
        records = [each for each in records if has_values(each)]
        names = unique_function_names(record.id for record in records)
        functions: dict[str, list[Record]] = {}
        for record in records:
            functions.setdefault(names[record.id], []).append(record)
        params = params_labels(records, names)
        rows = []
        for first, *others in functions.values():
            name = names[first.id]
            if not others:
                rows.append(("", f"{name} {params[first.id]}".rstrip(), first))
            for number, record in enumerate([first, *others] if others else []):
                rows.append((name * (not number), f"  {params[record.id] or name}", record))
        return rows


DEFAULT_LAYOUT = Layout()


def has_values(record: Record) -> bool:
    """Whether the record has a row in the table."""
    return any(metric.value is not None for metric in record.metrics.values())


def _types_differ(records: Sequence[Record]) -> bool:
    """Whether the number types of a function's tests differ, so that their joules are unlike."""
    functions: dict[str, set[str]] = {}
    for record in records:
        if record.backend is not None:
            functions.setdefault(record.id.partition("[")[0], set()).add(number_types(record))
    return any(len(types) > 1 for types in functions.values())


def parse_columns(text: str) -> tuple[str, ...]:
    """Parse ``--energy-columns``, or raise ``ValueError`` for a name that no column can have."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ValueError("no name given")
    unknown = [word for word in words if word not in COLUMNS and not is_custom_name(word)]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(COLUMNS)}")
    return words
