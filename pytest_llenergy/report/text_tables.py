# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal that fit its width.

Digits are never cut: columns that do not fit next to each other continue in another table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pytest_llenergy.model.text import escape_invisible

#: Smallest width of the first column, unless all of its cells are shorter (characters).
MIN_FIRST_WIDTH = 12

#: Characters between two columns.
COLUMN_GAP = 2

#: Characters by which rows are indented below their names.
INDENT = 2


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
