# SPDX-License-Identifier: Apache-2.0
"""Render the summary of a run in the terminal: tables, reasons, and a few notes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_llenergy.record.load_curve import LoadCurve
from pytest_llenergy.record.record import Record, Times
from pytest_llenergy.record.served import SATURATED
from pytest_llenergy.record.text import (
    cut_words,
    one_line,
    short_test_name,
    shorten,
    strip_trailing_space,
    unique_function_names,
)
from pytest_llenergy.report.columns import format_window_energy, scales_differ
from pytest_llenergy.report.layout import DEFAULT_LAYOUT, Layout, has_values, record_labels
from pytest_llenergy.report.load_curves import (
    HEADS,
    curve_rows,
    describe_curve,
    describe_failure,
    less_important_heads,
)
from pytest_llenergy.report.notes import SEVERITY_STYLES, list_notes, summary_flags
from pytest_llenergy.report.round_details import round_details
from pytest_llenergy.report.text_tables import (
    TableColumn,
    plain_text,
    split_columns,
    split_into_tables,
    table_of_groups,
)

#: Most notes below the table without ``-v``, one for each cause, and most windows of a test.
MAX_NOTES, MAX_WINDOWS = 6, 10

#: Characters of two lines that may be lost by wrapping.
WRAP_ROOM = 8

#: Most reasons for skipping tests that are listed without ``-v``, and most characters of one for failing.
MAX_REASONS, MAX_REASON_LENGTH = 3, 300

#: Share of the width that names may have before columns are left out.
NAME_SHARE = 0.3


def render_summary(
    records: Sequence[Record],
    width: int,
    *,
    color: bool,
    layout: Layout = DEFAULT_LAYOUT,
    verbosity: int = 0,
    notes: Sequence[str] = (),
    with_times: bool = False,
    with_failures: bool = False,
) -> str:
    """Render measured tests as a table, and the others as lines with their reasons.

    Args:
        records: Records of the run.
        width: Width of the terminal (characters).
        color: Whether to colour the text.
        layout: Columns and order of the table.
        verbosity: 1 adds the rounds of each test, where the time went and all notes, 2 also flags and
            uncertainty terms.
        notes: Further notes on the run.
        with_times: Whether to show where the time went in any case.
        with_failures: Whether to list failed tests, which pytest itself reports at the end of a run.
    """
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
    )
    labels = record_labels(records)
    names = unique_function_names(record.id for record in records)
    tabled, chosen = layout.sort_records(list(filter(has_values, records))), layout.columns_of(records)
    left_out: dict[str, None] = {}
    if tabled:
        headings, tests, rows = zip(*layout.rows(tabled, names), strict=True)
        first = TableColumn("test", list(map(_with_status, tests, rows)), is_number=False)
        columns = [TableColumn(each.head, list(map(each.cell, rows)), each.is_number) for each in chosen]
        kept, *others = split_columns(columns, width - min(first.width, int(width * NAME_SHARE)))
        if not layout.columns and verbosity <= 0:
            left_out = dict.fromkeys(column.head for each in others for column in each)
            others = []
        for each in [kept, *others]:
            console.print(table_of_groups(first, headings, each, width))
    if left_out:
        console.print(plain_text(f"no room for {', '.join(left_out)} (-v)"))
    absolute = scales_differ(records)
    said: set[tuple[str, str]] = set()
    for record in tabled if verbosity > 0 else ():
        name = labels[record.id]
        for part in round_details(record, name, width, said, with_terms=verbosity > 1):
            console.print(part)
    for record in records:
        for line in _window_lines(record, None if verbosity > 0 else MAX_WINDOWS, absolute=absolute):
            console.print(line)
    for record in records:
        if record.load_curve is not None:
            console.print(plain_text(f"{labels[record.id]}: {describe_curve(record.load_curve)}"))
            for table in load_tables(record.load_curve, width):
                console.print(table)
            if (failure := describe_failure(record.load_curve)) is not None:
                console.print(plain_text(failure))
    for table in time_table(records, labels, width) if verbosity > 0 or with_times else ():
        console.print(table)
    metered = [record for record in records if record.meters]
    for line in [*_without_result(records, with_failures=with_failures), *_skipped(records, verbosity)]:
        console.print(line)
    for line in _notes(metered, notes, labels, width, verbosity):
        console.print(line)
    return strip_trailing_space(stream.getvalue())


def _window_lines(record: Record, most: int | None, *, absolute: bool) -> Iterator[Text]:
    """Yield a line for each of the first ``most`` windows (None: all), and one that counts the rest."""
    test = short_test_name(record.id)
    for window in record.windows[:most]:
        rest = f" · {one_line(window.name)}: {format_window_energy(window, absolute=absolute)}"
        if record.status == "invalid" and window.energy_j is None:
            yield plain_text(f"INVALID {test}{rest}", style="red")
        else:
            yield plain_text(_with_status(test, record) + rest)
    hidden = record.windows[most:] if most is not None else []
    if hidden:
        lost = sum(window.energy_j is None for window in hidden)
        without = f", {lost} without joules" if lost else ""
        yield plain_text(f"{test} · {len(hidden)} more windows{without} (-v)", style="red" if lost else "")


def _notes(
    metered: Sequence[Record], further: Sequence[str], labels: Mapping[str, str], width: int, verbosity: int
) -> list[Text]:
    """Return the notes on the table: without ``-v`` a few of about two lines, the most important first."""
    # With -vv, the flags of tests with rounds are above.
    flagged = [record for record in metered if verbosity < 2 or not record.rounds]
    notes = list_notes(metered, summary_flags(flagged, labels), further)
    if verbosity <= 0:
        more = [("note", f"more notes: {len(notes) - MAX_NOTES} (-v)")] if len(notes) > MAX_NOTES else []
        # What a load without a steady state achieved is its result.
        notes = [
            (severity, text if text.startswith(f"{SATURATED}:") else cut_words(text, 2 * width - WRAP_ROOM))
            for severity, text in notes[:MAX_NOTES]
        ] + more
    return [plain_text(text, style=SEVERITY_STYLES.get(severity, "")) for severity, text in notes]


def load_tables(curve: LoadCurve, width: int) -> Iterator[Table]:
    """Yield a table of the loads of one test, by rate. With an SLO, less important columns are left out."""
    rows, hidden = curve_rows(curve), less_important_heads(curve)
    first, *columns = (
        TableColumn(head, [row[place] for row in rows], is_number=head != HEADS[-1])
        for place, head in enumerate(HEADS)
        if head not in hidden
    )
    kept = [column for column in columns if any(cell != "-" for cell in column.cells)]
    yield from split_into_tables(first, kept, width)


def time_table(records: Sequence[Record], labels: Mapping[str, str], width: int) -> Iterator[Table]:
    """Yield the seconds that loading, warm-up, rounds and gaps of each test and of all took."""
    timed = [(labels[record.id], record.times) for record in records if record.times is not None]
    tests = [*(name for name, _ in timed), *([f"all {len(timed)}"] if len(timed) > 1 else [])]
    columns = []
    for name in Times.__struct_fields__:
        values = [getattr(times, name) for _, times in timed]
        if name == "other_loads_s" and not any(values):
            continue
        head = {"warmup_s": "warm-up s"}.get(name, name.replace("_", " "))
        columns.append(TableColumn(head, [f"{value:.2f}" for value in [*values, sum(values)][: len(tests)]]))
    if timed:
        yield from split_into_tables(TableColumn("time", tests, is_number=False), columns, width)


def _with_status(label: str, record: Record) -> str:
    """Return the label of a test, with the status of one whose joules are no result."""
    return label if record.status == "measured" else f"{label} ({record.status})"


def _without_result(records: Sequence[Record], *, with_failures: bool) -> list[Text]:
    """Return one line for each status and reason. Windows without energy have lines of their own."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.status in (("crashed", "failed") if with_failures else ("crashed",)) or (
            record.status == "invalid" and record.reason not in [window.reason for window in record.windows]
        ):
            alike.setdefault((record.status.upper(), one_line(record.reason or "")), []).append(record)
    lines = []
    for (status, reason), (first, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        text = f"{status} {short_test_name(first.id)}{more}: {shorten(reason, MAX_REASON_LENGTH)}"
        lines.append(plain_text(text, style="red"))
    return lines


def _skipped(records: Sequence[Record], verbosity: int) -> list[Text]:
    """Return a line for each reason; without ``-v`` only a count if there are many."""
    reasons = Counter(record.reason for record in records if record.status == "skipped")
    if len(reasons) > MAX_REASONS and verbosity <= 0:
        return [plain_text(f"skipped {reasons.total()} for {len(reasons)} reasons (-v)")]
    return [plain_text(one_line(f"skipped {count}: {reason}")) for reason, count in reasons.items()]
