# SPDX-License-Identifier: Apache-2.0
"""Render a run as Markdown: the table of the terminal, with every name escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_llenergy.record.comparison import Comparison
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import short_test_name, unique_function_names
from pytest_llenergy.report.columns import Column, format_window_energy, scales_differ
from pytest_llenergy.report.layout import Layout, has_values, record_labels
from pytest_llenergy.report.load_curves import HEADS, curve_rows, describe_curve, describe_failure
from pytest_llenergy.report.notes import list_notes, summary_flags
from pytest_llenergy.report.pr_comment import MAX_REASON_LENGTH, escape_markdown, line_size
from pytest_llenergy.report.verdicts import (
    GREEN_VERDICTS,
    format_change,
    sort_by_verdict,
    summarize_verdicts,
)

#: Most lines of each list below the table; the others are only counted.
MAX_LINES = 20


def render_run_markdown(records: Sequence[Record], layout: Layout, max_bytes: int, *, complete: bool) -> str:
    """Render the tests of a run in at most ``max_bytes``; rows that do not fit are only counted.

    Args:
        records: Records of the run.
        layout: Layout of the table.
        max_bytes: Limit of the text in bytes.
        complete: Whether the run finished.
    """
    head = _head(records, complete=complete)
    labels = record_labels(records)
    curves = [line for record in records for line in _loads(record, labels)]
    foot = "\n".join(
        ["", *_windows_and_failures(records), *_verdicts(records), *curves, *_notes(records, labels), ""]
    )
    # 100 bytes for the line that counts the omitted rows.
    room = max_bytes - line_size(head) - line_size(foot) - 100
    if room < 0:
        return f"{head}\n" if line_size(head) <= max_bytes else ""
    tabled = layout.sort_records(list(filter(has_values, records)))
    columns = layout.columns_of(records)
    names = unique_function_names(record.id for record in records)
    begin = ["", *_table_header(columns)]
    rows = [_row(each, columns) for each in layout.rows(tabled, names)]
    room -= sum(map(line_size, begin))
    kept: list[str] = []
    while len(kept) < len(rows) and (room := room - line_size(rows[len(kept)])) >= 0:
        kept.append(rows[len(kept)])
    lines = [head, *begin, *kept] if kept else [head]
    if len(kept) < len(rows):
        lines += ["", f"{len(rows) - len(kept)} more tests are in the report."]
    return "\n".join([*lines, foot])


def _head(records: Sequence[Record], *, complete: bool) -> str:
    """Return the title, after an empty line since the text before it may not end with one."""
    counts = Counter(record.status for record in records)
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    stopped = "" if complete else ", interrupted"
    lines = ["", f"### Energy: {text}{stopped}"]
    compared = [each for record in records for each in record.comparisons]
    lines += (
        [
            "",
            escape_markdown(f"Compared with the baseline: {summarize_verdicts(compared)}", MAX_REASON_LENGTH),
        ]
        if compared
        else []
    )
    return "\n".join(lines)


def _table_header(columns: Sequence[Column]) -> list[str]:
    heads = " | ".join(escape_markdown(column.head) for column in columns)
    aligned = "|".join("---:" if column.is_number else "---" for column in columns)
    return [f"| test | {heads} |", f"|---|{aligned}|"]


def _row(row: tuple[str, str, Record], columns: Sequence[Column]) -> str:
    """Return the row of a test, below one with its heading if it has one."""
    heading, label, record = row
    above = f"| **{escape_markdown(heading)}** |{' |' * len(columns)}\n" if heading else ""
    cells = " | ".join(escape_markdown(column.cell(record)) for column in columns)
    return f"{above}| <code>{escape_markdown(label.strip())}</code>{_failure(record)} | {cells} |"


def _failure(record: Record) -> str:
    """Return the status of a test whose joules are no result, to put after its name."""
    return "" if record.counts else f" ({record.status})"


def _windows_and_failures(records: Sequence[Record]) -> list[str]:
    """Return a line for each window and for each test without a result."""
    absolute = scales_differ(records)
    lines = [
        (
            f"{short_test_name(record.id)}{_failure(record)} · {window.name}",
            format_window_energy(window, absolute=absolute),
        )
        for record in records
        for window in record.windows
    ]
    lines += [
        (short_test_name(record.id), f"{record.status}: {record.reason}")
        for record in records
        if not (record.windows or has_values(record) or record.status == "skipped")
    ]
    return _bullets(lines)


def _loads(record: Record, labels: Mapping[str, str]) -> list[str]:
    """Return a table of the loads of a test."""
    curve = record.load_curve
    if curve is None:
        return []
    name, title = (
        escape_markdown(labels[record.id]),
        escape_markdown(describe_curve(curve), MAX_REASON_LENGTH),
    )
    rows = [" | ".join(row) for row in curve_rows(curve)[:MAX_LINES]]
    aligned = "|".join(["---:"] * (len(HEADS) - 1))
    failure = describe_failure(curve)
    return [
        *("", f"<code>{name}</code>: {title}", "", f"| {' | '.join(HEADS)} |", f"|{aligned}|---|"),
        *(f"| {row} |" for row in rows),
        *(("", escape_markdown(failure, MAX_REASON_LENGTH)) if failure is not None else ()),
    ]


def _verdicts(records: Sequence[Record]) -> list[str]:
    """Return a line for each comparison with an important verdict, most urgent first."""
    compared = sort_by_verdict([each for record in records for each in record.comparisons])
    return _bullets(
        [
            (short_test_name(each.id), f"{each.metric} {each.verdict}{_format_change(each)}: {each.reason}")
            for each in compared
            if each.verdict not in GREEN_VERDICTS or each.base_status is not None
        ]
    )


def _format_change(comparison: Comparison) -> str:
    return "" if comparison.ratio is None else f", {format_change(comparison)}"


def _bullets(lines: Sequence[tuple[str, str]]) -> list[str]:
    shown = [
        f"- <code>{escape_markdown(name)}</code>: {escape_markdown(text, MAX_REASON_LENGTH)}"
        for name, text in lines[:MAX_LINES]
    ]
    return shown + ([f"- {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else [])


def _notes(records: Sequence[Record], labels: Mapping[str, str]) -> list[str]:
    """Return the notes on all values, and the flags."""
    metered = [record for record in records if record.meters]
    text = [line for _, line in list_notes(metered, summary_flags(metered, labels))]
    return ["", *(escape_markdown(each, MAX_REASON_LENGTH) + "  " for each in text)] if text else []
