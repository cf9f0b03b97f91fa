# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal that fit its width.

Digits are never cut: columns that do not fit next to each other continue in another table, or are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pytest_llenergy.record.text import escape_invisible, shorten

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


def split_into_tables(first: TableColumn, columns: Sequence[TableColumn], width: int) -> Iterator[Table]:
    """Yield tables of at most ``width`` characters, each with the first column and some of the others.

    The first column wraps if necessary, and so does a column that is too wide even alone.
    """
    for kept in split_columns(columns, width - min(MIN_FIRST_WIDTH, first.width)):
        yield _table(first, kept)


def split_columns(columns: Sequence[TableColumn], width: int) -> list[list[TableColumn]]:
    """Return the columns in as few lists as fit ``width`` characters beside the first column."""
    lists: list[list[TableColumn]] = [[]]
    for column in columns:
        if lists[-1] and sum(each.width + COLUMN_GAP for each in [*lists[-1], column]) > width:
            lists.append([])
        lists[-1].append(column)
    return lists


def table_of_groups(
    names: TableColumn, headings: Sequence[str], columns: Sequence[TableColumn], width: int
) -> Table | NamesAboveRows:
    """Return a table with names that wrap between words, some of them below a heading.

    Args:
        names: The names of the rows.
        headings: A heading above each row, or an empty string.
        columns: The other columns.
        width: Width of the terminal in characters.
    """
    room = width - sum(each.width + COLUMN_GAP for each in columns)
    if room < min(MIN_FIRST_WIDTH, names.width):
        return _table(names, columns)
    lines, above = [], []
    cells: list[list[str]] = [[] for _ in columns]
    for row, (heading, name) in enumerate(zip(headings, names.cells, strict=True)):
        for number, line in enumerate(wrap_name(name, room)):
            lines.append(line)
            above.append("" if number else heading)
            for column, added in zip(columns, cells, strict=True):
                added.append("" if number else column.cells[row])
    wrapped = [replace(column, cells=added) for column, added in zip(columns, cells, strict=True)]
    return NamesAboveRows(above, _table(replace(names, cells=lines), wrapped), indent=0)


def wrap_name(name: str, width: int) -> list[str]:
    """Wrap a name between words, long ones after ``=`` or else ``_-/.``, and shorten what is longer still."""
    indent = " " * (len(name) - len(name.lstrip()) + INDENT)
    pieces = [name]
    for pattern in (r" *[^ ]+", r"[^=]*=+|[^=]+", r".[^_/.-]*[_/.-]*"):
        pieces = [
            part
            for piece in pieces
            for part in ([piece] if cell_len(piece) <= width - len(indent) else re.findall(pattern, piece))
        ]
    lines: list[str] = []
    for piece in pieces:
        if lines and cell_len(lines[-1] + piece) <= width:
            lines[-1] += piece
        else:
            line = indent + piece.lstrip() if lines else piece
            lines.append(set_cell_size(shorten(line, width), min(width, cell_len(line))))
    return lines


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
    """A table with one line per row, and a name above each row that has one."""

    names: Sequence[str]
    table: Table
    indent: int = INDENT

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.update_width(options.max_width - self.indent)
        lines = console.render_lines(self.table, room, pad=False)
        head, rows = lines[: -len(self.names)], lines[-len(self.names) :]
        for name, line in zip([*[""] * len(head), *self.names], [*head, *rows], strict=True):
            for part in wrap_name(name, options.max_width) if name else ():
                yield plain_text(part)
            yield from (Segment(" " * self.indent), *line, Segment.line())


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
