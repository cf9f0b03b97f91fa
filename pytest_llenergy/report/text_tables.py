# SPDX-License-Identifier: Apache-2.0
"""Columns, which every output shares, and their tables in a terminal.

Digits are never cut: columns that do not fit next to each other continue in another table.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console
from rich.text import Text

from pytest_llenergy.record.text import escape_invisible, shorten

Row = TypeVar("Row")

#: Columns with their heading and cells as text.
Texts = list[tuple["Column[Row]", list[str]]]

#: Characters between two columns, which also indent a row below its name.
GAP = 2

#: Names get at least this room in their rows, unless all are shorter; otherwise they are above the rows.
MIN_NAME_WIDTH = 12


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A heading, and a function that returns the cell of a row, ``-`` for a missing value."""

    head: str
    cell: Callable[[Row], str]
    is_number: bool = True


def value_column(head: str, name: str, form: str = ".3g") -> Column[Any]:
    """Return a column of an attribute of the rows that is a number or None."""
    return Column(head, lambda row: "-" if (value := getattr(row, name)) is None else format(value, form))


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows with a name each, below the heading of their group if that is new, and the style of each."""

    head: str
    names: Sequence[str]
    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    groups: Sequence[str] = ()
    styles: Sequence[str] = ()


def with_values(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns in which at least one row has a value."""
    return [column for column in columns if any(column.cell(row) not in ("-", "") for row in rows)]


class Screen:
    """Collects lines and tables for a terminal of ``width`` characters."""

    def __init__(self, width: int, *, color: bool) -> None:
        self._stream = io.StringIO()
        self._width = width
        self._console = Console(
            file=self._stream,
            width=width,
            force_terminal=color,
            color_system="standard" if color else None,
            no_color=not color,
            highlight=False,
        )

    def line(self, text: str, style: str = "") -> None:
        """Add a text, wrapped between words, in which invisible characters are escaped."""
        self._console.print(Text(escape_invisible(text), style=style))

    def table(self, table: Table[Row], name_share: float = 0.0, *, with_all: bool = True) -> None:
        """Add a table. Columns that do not fit continue in another one or, without ``with_all``, are named.

        ``name_share`` is the share of the width that names may have before columns no longer fit.
        """
        names = [table.head, *map(escape_invisible, table.names)]
        texts = [
            (each, [each.head, *(escape_invisible(each.cell(row)) for row in table.rows)])
            for each in table.columns
        ]
        reserved = min(max(map(cell_len, names)), int(name_share * self._width))
        first, *others = _split(texts, self._width - reserved)
        for part in [first, *others] if with_all else [first]:
            self._add_table(names, part, ["", *map(escape_invisible, table.groups)], ["bold", *table.styles])
        if others and not with_all:
            self.line(f"no room for {', '.join(each.head for part in others for each, _ in part)} (-v)")

    def _add_table(
        self, names: Sequence[str], columns: Texts[Row], groups: Sequence[str], styles: Sequence[str]
    ) -> None:
        """Add a table of columns that fit; a name that is too long is above its row."""
        widths = [max(map(cell_len, cells)) for _, cells in columns]
        longest = max(map(cell_len, names))
        room = min(longest, self._width - sum(widths) - GAP * len(widths))
        if room < min(longest, MIN_NAME_WIDTH):
            room = 0
        for place, (name, group, style) in enumerate(zip_longest(names, groups, styles, fillvalue="")):
            self._add_pieces(group)
            if cell_len(name) > room:
                self._add_pieces(name if place else "")
                name = ""
            cells = [
                _align(cells[place], width, to_right=column.is_number)
                for (column, cells), width in zip(columns, widths, strict=True)
            ]
            self._add_pieces((" " * GAP).join([set_cell_size(name, room), *cells]).rstrip(), style)
            if not place:
                self._add_pieces("─" * (room + sum(widths) + GAP * len(widths)))

    def _add_pieces(self, text: str, style: str = "") -> None:
        """Add a text, broken where it exceeds the width."""
        for piece in chop_cells(text, self._width) if text else ():
            self._console.print(Text(piece, style=style), no_wrap=True)

    @property
    def text(self) -> str:
        """The text so far, without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._stream.getvalue().split("\n")).rstrip("\n")


def _split(columns: Texts[Row], width: int) -> Iterator[Texts[Row]]:
    """Yield the columns in as few parts as fit ``width`` characters; one that never fits is shortened."""
    part: Texts[Row] = []
    left = width
    for column, cells in columns:
        cells = [shorten(cell, width - GAP) for cell in cells]
        needed = max(map(cell_len, cells)) + GAP
        if part and needed > left:
            yield part
            part, left = [], width
        part.append((column, cells))
        left -= needed
    yield part


def _align(text: str, width: int, *, to_right: bool) -> str:
    space = " " * (width - cell_len(text))
    return f"{space}{text}" if to_right else f"{text}{space}"
