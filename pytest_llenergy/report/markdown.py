# SPDX-License-Identifier: Apache-2.0
"""A run as Markdown: the table of the terminal, that no test id breaks out of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_llenergy.model.comparison import Comparison
from pytest_llenergy.model.record import Record
from pytest_llenergy.model.text import short_test_name, unique_function_names
from pytest_llenergy.report.columns import Column, Layout
from pytest_llenergy.report.pr_comment import MAX_REASON_LENGTH, escape_markdown
from pytest_llenergy.report.terminal import (
    format_window_energy,
    has_values,
    record_label,
    summary_flags,
    summary_notes,
)
from pytest_llenergy.report.verdicts import count_verdicts, format_change, sort_by_verdict

#: Lines below the table, before the rest is only counted.
MAX_LINES = 20


def render_run_markdown(records: Sequence[Record], layout: Layout, most_bytes: int, *, complete: bool) -> str:
    """The tests of a run in ``most_bytes`` at most; rows that do not fit are counted."""
    head = _head(records, complete=complete)
    named = unique_function_names(record.id for record in records)
    foot = "\n".join(["", *_without_figures(records), *_verdicts(records), *_notes(records, named), ""])
    # For the line that counts what was cut.
    room = most_bytes - _size(head) - _size(foot) - 100
    if room < 0:
        return f"{head}\n" if _size(head) <= most_bytes else ""
    lines, cut = [head], 0
    tabled = [record for record in records if has_values(record)]
    columns = layout.shown(tabled)
    for title, group in layout.groups(tabled).items():
        begin = ["", *([f"**{escape_markdown(title)}**", ""] if title else []), *_above(columns)]
        rows = [_row(record, columns, named) for record in group]
        room -= sum(map(_size, begin))
        kept: list[str] = []
        while len(kept) < len(rows) and (room := room - _size(rows[len(kept)])) >= 0:
            kept.append(rows[len(kept)])
        lines += [*begin, *kept] if kept else []
        cut += len(rows) - len(kept)
    if cut:
        lines += ["", f"{cut} more tests are in the report."]
    return "\n".join([*lines, foot])


def _head(records: Sequence[Record], *, complete: bool) -> str:
    """How many there are. An empty line comes first: what is there already may not end with one."""
    counts = Counter(record.status for record in records)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    stopped = "" if complete else ", stopped before its end"
    lines = ["", f"### Energy: {told}{stopped}"]
    compared = [each for record in records for each in record.comparisons]
    lines += (
        ["", escape_markdown(f"Compared with the baseline: {count_verdicts(compared)}", MAX_REASON_LENGTH)]
        if compared
        else []
    )
    return "\n".join(lines)


def _above(columns: Sequence[Column]) -> list[str]:
    heads = " | ".join(escape_markdown(column.head) for column in columns)
    aligned = "|".join("---:" if column.is_number else "---" for column in columns)
    return [f"| test | {heads} |", f"|---|{aligned}|"]


def _row(record: Record, columns: Sequence[Column], named: Mapping[str, str]) -> str:
    cells = " | ".join(escape_markdown(column.cell(record)) for column in columns)
    failed = "" if record.counts else f" ({record.status})"
    return f"| <code>{escape_markdown(record_label(record, named))}</code>{failed} | {cells} |"


def _without_figures(records: Sequence[Record]) -> list[str]:
    """A line for each window, and for each test that came to nothing."""
    lines = [
        (f"{short_test_name(record.id)} · {window.name}", format_window_energy(window, record))
        for record in records
        for window in record.windows
    ]
    lines += [
        (short_test_name(record.id), f"{record.status}: {record.reason}")
        for record in records
        if not (record.windows or has_values(record) or record.status == "skipped")
    ]
    return _items(lines)


def _verdicts(records: Sequence[Record]) -> list[str]:
    """A line for each comparison that a reader must heed, the worst first."""
    compared = sort_by_verdict([each for record in records for each in record.comparisons])
    return _items(
        [
            (short_test_name(each.id), f"{each.metric} {each.verdict}{_moved(each)}: {each.reason}")
            for each in compared
            if each.verdict not in ("unchanged", "improved", "new")
        ]
    )


def _moved(comparison: Comparison) -> str:
    return "" if comparison.ratio is None else f", {format_change(comparison)}"


def _items(lines: Sequence[tuple[str, str]]) -> list[str]:
    shown = [
        f"- <code>{escape_markdown(what)}</code>: {escape_markdown(told, MAX_REASON_LENGTH)}"
        for what, told in lines[:MAX_LINES]
    ]
    return shown + ([f"- {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else [])


def _notes(records: Sequence[Record], named: Mapping[str, str]) -> list[str]:
    """What holds for all figures, and the flags."""
    metered = [record for record in records if record.meters]
    told = [*summary_notes(metered), *(line for _, line in summary_flags(metered, named))]
    return ["", *(escape_markdown(each, MAX_REASON_LENGTH) + "  " for each in told)] if told else []


def _size(text: str) -> int:
    return len(text.encode()) + 1
