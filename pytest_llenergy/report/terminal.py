# SPDX-License-Identifier: Apache-2.0
"""Render the summary in the terminal: tables, reasons, notes and flags.

Digits are never cut: columns that do not fit next to each other continue in another table.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pytest_llenergy.model.load_curve import LoadCurve
from pytest_llenergy.model.quantity import format_energy, format_quantity, format_scaled, scale_of
from pytest_llenergy.model.record import Flag, Record, Round, Terms, Times, Window
from pytest_llenergy.model.text import (
    MAX_NAME_LENGTH,
    escape_invisible,
    one_line,
    short_test_name,
    shorten,
    strip_trailing_space,
    unique_function_names,
)
from pytest_llenergy.report.columns import COLUMNS, DEFAULT_LAYOUT, Column, Layout, number_types
from pytest_llenergy.report.load_curves import HEADS, curve_rows, describe_curve, less_important_heads

#: Smallest width of the first column, unless all of its cells are shorter (characters).
MIN_FIRST_WIDTH = 12

#: Characters between two columns.
COLUMN_GAP = 2

#: Characters by which rows are indented below their names.
INDENT = 2

#: Style of a line about a flag, by severity.
SEVERITY_STYLES = {"warning": "yellow", "invalid": "red"}

#: Parts of a round's uncertainty, by cause.
UNCERTAINTY_TERMS = ("edges_j", "outside_j", "resolution_j", "coverage_j")

#: Legend of the table.
UNCERTAINTY_NOTE = "u: standard uncertainty (k=1), accuracy of the source included"

#: Parameters that have a column.
PARAMS_WITH_COLUMN = frozenset({"backend"})

#: Most lines of notes below the table without ``-v``, one for each cause.
MAX_NOTES = 3

#: Flags in the order in which their notes are shown; others follow in the order of the tests.
FIRST_FLAGS = ("saturated", "outlying-rounds")

#: If a parameter is a longer text, pytest's id of the parameters is shown instead.
MAX_PARAM_LENGTH = 40


@dataclass(frozen=True)
class TableColumn:
    """One column: its heading, and one cell per row, in which invisible characters are escaped."""

    head: str
    cells: Sequence[str]
    is_number: bool = True
    styles: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", escape_invisible(self.head))
        object.__setattr__(self, "cells", [escape_invisible(cell) for cell in self.cells])

    @property
    def width(self) -> int:
        """Width of the widest cell (characters)."""
        return max(map(cell_len, [self.head, *self.cells]))


def plain_text(text: str, style: str = "", overflow: OverflowMethod | None = None) -> Text:
    """Return text for the console, in which invisible characters are escaped."""
    return Text(escape_invisible(text), style=style, overflow=overflow)


def split_into_tables(
    first: TableColumn, columns: Sequence[TableColumn], width: int, *, repeated: Sequence[TableColumn] = ()
) -> Iterator[Table]:
    """Yield tables of at most ``width`` characters, each with the first column and some of the others.

    The first column wraps if necessary, and so does a column that is too wide even alone.

    Args:
        first: The first column.
        columns: The other columns.
        width: Width of the terminal in characters.
        repeated: Those of ``columns`` that begin every table, to tell its rows apart.
    """
    least = min(MIN_FIRST_WIDTH, first.width)
    kept: list[TableColumn] = []
    for column in columns:
        if kept and least + sum(each.width + COLUMN_GAP for each in [*kept, column]) > width:
            yield _table(first, kept)
            begin = sum(each.width + COLUMN_GAP for each in [*repeated, column])
            kept = list(repeated) if least + begin <= width else []
        kept.append(column)
    yield _table(first, kept)


def tables_with_whole_names(
    names: TableColumn, columns: Sequence[TableColumn], width: int, *, names_first: bool = False
) -> Iterator[Table | NamesAboveRows]:
    """Yield one table whose names do not wrap: after the first column or, if too long, above their rows.

    If not even the other columns fit, fall back to ``split_into_tables``.

    Args:
        names: The names of the rows.
        columns: The other columns.
        width: Width of the terminal in characters.
        names_first: Whether the names precede the first column if they fit.
    """
    others = sum(each.width + COLUMN_GAP for each in columns)
    first, *rest = columns
    if names.width + others <= width:
        yield _table(names, columns) if names_first else _table(first, [names, *rest])
    elif INDENT + others - COLUMN_GAP <= width:
        yield NamesAboveRows(names.cells, _table(first, rest))
    else:
        yield from split_into_tables(names, columns, width)


@dataclass(frozen=True)
class NamesAboveRows:
    """A table with one line per row, and a name above each row."""

    names: Sequence[str]
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.table, options.update_width(options.max_width - INDENT), pad=False)
        head, rows = lines[: -len(self.names)], lines[-len(self.names) :]
        for line in head:
            yield from _indented(line)
        for name, line in zip(self.names, rows, strict=True):
            yield plain_text(name, overflow="fold")
            yield from _indented(line)


def _indented(line: Sequence[Segment]) -> Iterator[Segment]:
    yield from (Segment(" " * INDENT), *line, Segment.line())


def _table(first: TableColumn, columns: Sequence[TableColumn]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first.head, overflow="fold")
    for column in columns:
        alone = len(columns) == 1
        justify = "right" if column.is_number else "left"
        table.add_column(column.head, justify=justify, no_wrap=not alone, overflow="fold")  # type: ignore[arg-type]
    for row in zip(*map(_texts, [first, *columns]), strict=True):
        table.add_row(*row)
    return table


def _texts(column: TableColumn) -> Iterator[Text]:
    styles = column.styles or [""] * len(column.cells)
    return (plain_text(cell, style=style) for cell, style in zip(column.cells, styles, strict=True))


def round_details(
    record: Record, name: str, width: int, said: set[tuple[str, str]], *, with_terms: bool
) -> Iterator[Table | Text]:
    """Yield the rounds of a test for ``-v``; ``with_terms`` adds uncertainty and flags for ``-vv``.

    Args:
        record: The record of the test.
        name: Name of the test.
        width: Width of the terminal in characters.
        said: Names and details of the flags of tests so far, which are not repeated.
        with_terms: Whether to add uncertainty and flags.
    """
    if not record.rounds:
        return
    types = number_types(record)
    more = f"; number types {types}" if types != "-" else ""
    yield plain_text(f"{name}: {_procedure(record)}{more}", style="bold")
    numbers = TableColumn("round", [str(number) for number in range(1, len(record.rounds) + 1)])
    yield from split_into_tables(numbers, _round_columns(record.rounds), width)
    if with_terms:
        yield from split_into_tables(
            numbers, [_term_column(term, record.rounds) for term in UNCERTAINTY_TERMS], width
        )
        yield from _uncertainty(record)
        yield from _flags(record, said)


def _round_columns(rounds: Sequence[Round]) -> list[TableColumn]:
    """Return the columns for which at least one round has a value."""
    columns = [
        TableColumn("s", [f"{each.duration_s:.3g}" for each in rounds]),
        _energy_column(rounds),
        TableColumn("idle W", [_number(each.idle_power_w) for each in rounds]),
        TableColumn("token", [str(each.tokens.output) if each.tokens else "-" for each in rounds]),
        TableColumn("°C", [_number(each.temperature_start_c) for each in rounds]),
        TableColumn("other CPU s", [_number(each.other_cpu_s) for each in rounds]),
        TableColumn("flags", [",".join(flag.name for flag in each.flags) or "-" for each in rounds], False),
    ]
    return [column for column in columns if set(column.cells) != {"-"}]


def _energy_column(rounds: Sequence[Round]) -> TableColumn:
    """Return the joules of rounds, all in the step of the largest."""
    scale = scale_of("J", *(each.energy_j for each in rounds if each.energy_j is not None))
    cells = [
        "-" if each.energy_j is None else format_scaled(each.energy_j, each.energy_u_absolute_j, "J", scale)
        for each in rounds
    ]
    return TableColumn("energy ± u", cells)


def _term_column(name: str, rounds: Sequence[Round]) -> TableColumn:
    terms = [each.terms for each in rounds]
    return TableColumn(name.removesuffix("_j"), [_term(each, name) for each in terms])


def _term(terms: Terms | None, name: str) -> str:
    return "-" if terms is None else format_energy(getattr(terms, name))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _procedure(record: Record) -> str:
    """Return ``6 rounds of 2 iterations after a warm-up of 3 (settled)``."""
    rounds = _count(len(record.rounds), "round")
    procedure = record.procedure
    if procedure is None:
        return rounds
    settled = {True: " (settled)", False: " (not settled)", None: ""}[procedure.settled]
    each = _count(procedure.iterations, "iteration")
    return f"{rounds} of {each} after a warm-up of {procedure.warmup_iterations}{settled}"


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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _uncertainty(record: Record) -> Iterator[Text]:
    """Yield a line with the causes of the uncertainty of the energy."""
    metric = record.metrics.get("energy_j")
    if metric is None or metric.value is None or metric.uncertainty is None:
        return
    parts = [f"{format_energy(metric.uncertainty)} between runs on these devices"]
    if metric.spread is not None:
        parts.append(
            f"of which {format_energy(metric.spread)} from the scatter of {_count(metric.n, 'round')}"
        )
    if metric.uncertainty_absolute is not None:
        parts.append(f"{format_energy(metric.uncertainty_absolute)} with the accuracy of the source")
    if record.procedure is not None and record.procedure.reached is not None:
        parts.append(f"reached {record.procedure.reached:.1%}, target {record.procedure.target * 100:g}%")
    yield plain_text(f"u of an iteration: {', '.join(parts)}")


def _flags(record: Record, said: set[tuple[str, str]]) -> Iterator[Text]:
    rounds: dict[Flag, list[int]] = {}
    for number, round_ in enumerate(record.rounds, 1):
        for flag in round_.flags:
            rounds.setdefault(flag, []).append(number)
    # Flags of rounds are also summarised in the record, and estimates are a note below.
    shown = {"estimated", *(flag.name for flag in rounds)}
    for flag in record.flags:
        if flag.name not in shown and (flag.name, flag.detail) not in said:
            said.add((flag.name, flag.detail))
            yield _line(flag, flag.name)
    for flag, numbers in rounds.items():
        plural = "s" if len(numbers) > 1 else ""
        yield _line(flag, f"round{plural} {', '.join(map(str, numbers))}: {flag.name}")


def _line(flag: Flag, where: str) -> Text:
    return plain_text(
        one_line(f"{where} ({flag.severity}): {flag.detail}"), style=SEVERITY_STYLES.get(flag.severity, "")
    )


def render_summary(
    records: Sequence[Record],
    width: int,
    *,
    color: bool,
    layout: Layout = DEFAULT_LAYOUT,
    verbosity: int = 0,
    notes: Sequence[str] = (),
    with_times: bool = False,
) -> str:
    """Render measured tests as a table, and the others as lines with their reasons.

    Args:
        records: Records of the run.
        width: Width of the terminal (characters).
        color: Whether to colour the text.
        layout: Columns, order and groups of the table.
        verbosity: 1 adds the rounds of each test, where the time went and all notes, 2 also flags and
            uncertainty terms.
        notes: Further notes on the run.
        with_times: Whether to show where the time went in any case.
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
    short, named_by = row_labels(records, layout)
    tabled = [record for record in records if has_values(record)]
    groups, chosen = layout.groups(tabled), layout.columns_of(tabled)
    for title, group in groups.items():
        if title:
            console.print(plain_text(shorten(title, MAX_NAME_LENGTH), style="bold"))
        tests = TableColumn("test", [_row_title(record, short) for record in group], is_number=False)
        columns = [TableColumn(each.head, list(map(each.cell, group)), each.is_number) for each in chosen]
        repeated = [column for column, each in zip(columns, chosen, strict=True) if each is named_by]
        for table in split_into_tables(tests, columns, width, repeated=repeated):
            console.print(table)
    said: set[tuple[str, str]] = set()
    for record in [record for group in groups.values() for record in group] if verbosity > 0 else ():
        name = labels[record.id]
        for part in round_details(record, name, width, said, with_terms=verbosity > 1):
            console.print(part)
    for record in records:
        for window in record.windows:
            name = f"{short_test_name(record.id)} · {one_line(window.name)}"
            found = f"{name}: {format_window_energy(window)}"
            failed = record.status == "invalid" and window.energy_j is None
            console.print(plain_text(f"INVALID {found}", style="red") if failed else plain_text(found))
    for record in records:
        if record.load_curve is not None:
            console.print(plain_text(f"{labels[record.id]}: {describe_curve(record.load_curve)}"))
            for table in load_tables(record.load_curve, width):
                console.print(table)
    for table in time_table(records, labels, width) if verbosity > 0 or with_times else ():
        console.print(table)
    metered = [record for record in records if record.meters]
    for line in [*_without_result(records), *_skipped(records)]:
        console.print(line)
    for line in _notes(metered, notes, labels, width, verbosity):
        console.print(line)
    return strip_trailing_space(stream.getvalue())


def _notes(
    metered: Sequence[Record], further: Sequence[str], labels: Mapping[str, str], width: int, verbosity: int
) -> list[Text]:
    """Return the notes on the table: without ``-v`` a few lines, the most important first."""
    # With -vv, the flags of tests with rounds are above.
    flagged = [record for record in metered if verbosity < 2 or not record.rounds]
    texts = list_notes(metered, summary_flags(flagged, labels), further)
    notes = [plain_text(text, style=SEVERITY_STYLES.get(severity, "")) for severity, text in texts]
    shown = notes[:MAX_NOTES]
    if not notes or verbosity > 0 or (shown == notes and all(note.cell_len <= width for note in notes)):
        return notes
    hidden = len(notes) - len(shown)
    more = f" (+{hidden}: -v)" if hidden else " (-v)"
    for note in shown:
        note.truncate(width - (len(more) if note is shown[-1] else 0), overflow="ellipsis")
    shown[-1].append(more, style="default")
    return shown


def list_notes(
    metered: Sequence[Record], flags: Sequence[tuple[str, str]], further: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Return severity and text of all notes on a table, the most important first, each once.

    Args:
        metered: Records with meters.
        flags: Severity and text of flags, from ``summary_flags``.
        further: Notes on the run.
    """
    invalid = [each for each in flags if each[0] == "invalid"]
    warnings = [each for each in flags if each[0] == "warning"]
    first = [each for each in warnings if each[1].startswith(tuple(f"{name}:" for name in FIRST_FLAGS))]
    found = [
        *invalid,
        *(("note", text) for text in estimate_notes(metered)),
        *(("note", text) for text in _fallback_notes(metered)),
        *first,
        *(("warning", text) for text in further),
        *warnings,
        *(each for each in flags if each[0] == "note"),
        *(("note", text) for text in [UNCERTAINTY_NOTE] if metered),
    ]
    return list(dict.fromkeys(found))


def has_values(record: Record) -> bool:
    """Whether the record has a row in the table."""
    return any(metric.value is not None for metric in record.metrics.values())


def _row_title(record: Record, labels: Mapping[str, str]) -> str:
    """Return the label of a row, which says if the test failed after it was measured."""
    label = labels[record.id]
    return f"{label} (failed)" if record.status == "failed" else label


def record_labels(records: Sequence[Record]) -> dict[str, str]:
    """Return the label of each test by its id: function and parameters, the backend only if labels repeat."""
    short = _labels_without_backend(records)
    counts = Counter(short.values())
    names = unique_function_names(record.id for record in records)
    repeated = [record for record in records if counts[short[record.id]] > 1]
    return short | {record.id: _label(record, names[record.id], hidden=()) for record in repeated}


def row_labels(records: Sequence[Record], layout: Layout) -> tuple[dict[str, str], Column | None]:
    """Return the labels of rows by id, and the column with the backends if only that tells rows apart."""
    labels, short = record_labels(records), _labels_without_backend(records)
    backends = COLUMNS["backend"]
    if labels == short or backends not in layout.columns_of(records):
        return labels, None
    return short, backends


def _labels_without_backend(records: Sequence[Record]) -> dict[str, str]:
    names = unique_function_names(record.id for record in records)
    return {record.id: _label(record, names[record.id], hidden=PARAMS_WITH_COLUMN) for record in records}


def _label(record: Record, test: str, hidden: Collection[str]) -> str:
    ids = record.id.partition("[")[2]
    if any(isinstance(value, str) and len(value) > MAX_PARAM_LENGTH for value in record.params.values()):
        return shorten(one_line(f"{test} {ids.removesuffix(']')}"), MAX_NAME_LENGTH)
    params = [f"{name}={value}" for name, value in record.params.items() if name not in hidden]
    if len(record.ranks) > 1:
        params.append(f"ranks={len(record.ranks)}")
    return shorten(one_line(f"{test} {' '.join(params)}"), MAX_NAME_LENGTH)


def format_window_energy(window: Window) -> str:
    """Return text such as ``12.50 ± 0.50 J in 1 s``, or the reason for missing energy."""
    if window.energy_j is None:
        return f"no joules: {window.reason}"
    kinds = {part.kind for part in window.by_domain.values()}
    label = "".join(f", joules {kind}" for kind in ("attributed", "estimated") if kind in kinds)
    joules = format_quantity(window.energy_j, window.energy_u_absolute_j, "J")
    return f"{joules} in {window.duration_s:.3g} s{label}"


def _without_result(records: Sequence[Record]) -> list[Text]:
    """Return one line for each status and reason.

    Failures are reported by pytest itself, and windows without joules have lines of their own.
    """
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.status == "crashed" or (
            record.status == "invalid" and record.reason not in [window.reason for window in record.windows]
        ):
            alike.setdefault((record.status.upper(), one_line(record.reason or "")), []).append(record)
    lines = []
    for (status, reason), (first, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(plain_text(f"{status} {short_test_name(first.id)}{more}: {reason}", style="red"))
    return lines


def _skipped(records: Sequence[Record]) -> list[Text]:
    reasons = Counter(record.reason for record in records if record.status == "skipped")
    return [plain_text(one_line(f"skipped {count}: {reason}")) for reason, count in reasons.items()]


def estimate_notes(records: Sequence[Record]) -> list[str]:
    """Return one note for each source of estimated joules."""
    meters = [meter for record in records for meter in record.meters if meter.kind == "estimated"]
    notes = (
        f"joules estimated, not measured: {meter.source}; {meter.accuracy}. No memory, no GPU."
        for meter in meters
    )
    return list(dict.fromkeys(notes))


def _fallback_notes(records: Sequence[Record]) -> list[str]:
    """Return a note that counts the tests that ran on another device than they asked for."""
    counts = Counter(record.fallback for record in records if record.fallback is not None)
    return [
        f"fallback: {count} test{'s' * (count > 1)} ran on the {one_line(device).upper()} instead of GPUs"
        for device, count in counts.items()
    ]


def summary_flags(records: Sequence[Record], labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return severity and text of each important flag. The text names one test and counts the others."""
    first: dict[str, tuple[Record, Flag]] = {}
    count: Counter[str] = Counter()
    for record in records:
        of_windows = [flag for window in record.windows for flag in window.flags]
        # The line of a window without joules says why.
        flags = [*record.flags, *(flag for flag in of_windows if flag.name != "unmeasured")]
        named: dict[str, Flag] = {}
        for flag in filter(_is_important, flags):
            named.setdefault(flag.name, flag)
        for flag in named.values():
            first.setdefault(flag.name, (record, flag))
            count[flag.name] += 1
    lines: list[tuple[str, str]] = []
    for name, (record, flag) in first.items():
        more = f" and {count[name] - 1} more" if count[name] > 1 else ""
        text = one_line(f"{name}: {labels[record.id]}{more}: {flag.detail}")
        lines.append((flag.severity, text))
    return lines


def _is_important(flag: Flag) -> bool:
    return flag.severity != "note" or flag.name == "unread-meter"
