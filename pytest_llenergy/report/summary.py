# SPDX-License-Identifier: Apache-2.0
"""The summary of a run as lines and tables, the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.record.record import Record, Times
from pytest_llenergy.record.text import one_line, short_test_name
from pytest_llenergy.report.columns import UNKNOWN, format_window_energy, number_types, scales_differ
from pytest_llenergy.report.layout import Layout
from pytest_llenergy.report.loads import describe_curve, describe_failure, load_columns
from pytest_llenergy.report.names import record_labels
from pytest_llenergy.report.notes import list_missing, list_notes
from pytest_llenergy.report.rounds import round_columns
from pytest_llenergy.report.text_tables import Table, value_column

#: Style of a line about a flag, by severity.
SEVERITY_STYLES = {"warning": "yellow", "invalid": "red"}

#: Most notes, reasons for skipping tests, and windows of a test in a brief summary.
MAX_NOTES, MAX_REASONS, MAX_WINDOWS = 6, 3, 10


@dataclass(frozen=True)
class Line:
    """A line of a summary. That of a test or several begins with their ``name``."""

    text: str
    style: str = ""
    name: str = ""


Part = Line | Table[Any]


def summarize(
    records: Sequence[Record],
    layout: Layout,
    *,
    brief: bool,
    with_rounds: bool = False,
    notes: Sequence[str] = (),
    with_failures: bool = True,
) -> Iterator[Part]:
    """Yield the table of measured tests, then windows, loads, tests without a result, and notes.

    If ``brief``, what exceeds a few lines is only counted. ``with_rounds`` adds the rounds of each test, and
    where the time went. ``notes`` are about the run.
    """
    labels, absolute = record_labels(records), scales_differ(records)
    if rows := layout.rows(records):
        groups, names, shown = zip(*rows, strict=True)
        full_names = [_with_status(name, record) for name, record in zip(names, shown, strict=True)]
        yield Table("test", full_names, layout.columns_of(records), shown, groups)
        for record in shown if with_rounds else ():
            yield from _summarize_rounds(record, labels[record.id])
    for record in records:
        yield from _summarize_windows(
            record, MAX_WINDOWS if brief else len(record.windows), absolute=absolute
        )
    for record in records:
        if (curve := record.load_curve) is not None:
            yield Line(describe_curve(curve), name=labels[record.id])
            if points := curve.by_rate():
                rates = [f"{point.request_rate:.3g}" for point in points]
                yield Table("sent/s", rates, load_columns(curve), points)
            if (failure := describe_failure(curve)) is not None:
                yield Line(failure)
    if with_rounds:
        yield from _summarize_times([each for each in records if each.times is not None])
    missing = list_missing(records)
    for status, tests, reason in missing:
        if status != "skipped" and (with_failures or status != "failed"):
            yield Line(reason, "red", f"{status.upper()} {tests}")
    skipped = [(tests, reason) for status, tests, reason in missing if status == "skipped"]
    for tests, reason in skipped[: MAX_REASONS if brief else None]:
        yield Line(reason, name=f"skipped {tests}")
    if brief and len(skipped) > MAX_REASONS:
        yield Line(f"skipped for {len(skipped) - MAX_REASONS} more reasons (-v)")
    found = list_notes(records, notes)
    for severity, text in found[: MAX_NOTES if brief else None]:
        yield Line(text, SEVERITY_STYLES.get(severity, ""))
    if brief and len(found) > MAX_NOTES:
        yield Line(f"more notes: {len(found) - MAX_NOTES} (-v)")


def _with_status(label: str, record: Record) -> str:
    """Return the label of a test, with the status of one whose joules are no result."""
    return label if record.counts else f"{label} ({record.status})"


def _summarize_rounds(record: Record, name: str) -> Iterator[Part]:
    rounds = record.rounds
    if not rounds:
        return
    types = number_types(record)
    more = f"; number types {types}" if types not in ("-", UNKNOWN) else ""
    yield Line(f"{_describe_procedure(record)}{more}", "bold", name)
    numbers = [str(number) for number in range(1, len(rounds) + 1)]
    yield Table("round", numbers, round_columns(record), rounds)


def _describe_procedure(record: Record) -> str:
    """Return ``6 rounds of 2 iterations after a warm-up of 3 (settled)``."""
    rounds, procedure = _count(len(record.rounds), "round"), record.procedure
    if procedure is None:
        return rounds
    settled = {True: " (settled)", False: " (not settled)", None: ""}[procedure.settled]
    each = _count(procedure.iterations, "iteration")
    return f"{rounds} of {each} after a warm-up of {procedure.warmup_iterations}{settled}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _summarize_windows(record: Record, most: int, *, absolute: bool) -> Iterator[Line]:
    """Yield a line for each of the first ``most`` windows, and one that counts the rest."""
    test = short_test_name(record.id)
    for window in record.windows[:most]:
        is_lost = window.energy_j is None and record.status == "invalid"
        name = f"INVALID {test}" if is_lost else _with_status(test, record)
        energy = format_window_energy(window, absolute=absolute)
        yield Line(energy, "red" if is_lost else "", f"{name} · {one_line(window.name)}")
    if hidden := record.windows[most:]:
        lost = sum(window.energy_j is None for window in hidden)
        without = f", {lost} without joules" if lost else ""
        yield Line(f"{len(hidden)} more windows{without} (-v)", "red" if lost else "", test)


def _summarize_times(records: Sequence[Record]) -> Iterator[Part]:
    """Yield the seconds that loading, warm-up, rounds and gaps of each test and of all took."""
    times = [each.times for each in records if each.times is not None]
    if not times:
        return
    names, fields = list(record_labels(records).values()), Times.__struct_fields__
    if len(times) > 1:
        names.append(f"all {len(times)}")
        times.append(Times(**{name: sum(getattr(each, name) for each in times) for name in fields}))
    columns = [
        value_column({"warmup_s": "warm-up s"}.get(name, name.replace("_", " ")), name, ".2f")
        for name in fields
        if any(getattr(each, name) for each in times)
    ]
    yield Table("time", names, columns, times)
