# SPDX-License-Identifier: Apache-2.0
"""Tables of a terminal that lose no digit: what does not fit gets a table or line of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

#: What the first column is given at least, unless all of it is shorter (characters).
LEAST_FIRST = 12

#: Characters between two columns.
BETWEEN = 2

#: Characters before a row that is below its name.
INDENT = 2


@dataclass(frozen=True)
class Strip:
    """One column: what stands above it, what is in it, one cell a row."""

    head: str
    cells: Sequence[str]
    is_number: bool = True
    styles: Sequence[str] = ()

    @property
    def width(self) -> int:
        """Of its widest cell (characters)."""
        return max(map(cell_len, [self.head, *self.cells]))


def grids(first: Strip, strips: Sequence[Strip], width: int) -> Iterator[Table]:
    """Tables that are no wider than ``width`` characters, each with the first column and some of the others.

    The first column is folded where it must be, and so is another that would not fit by itself.
    """
    least = min(LEAST_FIRST, first.width)
    kept: list[Strip] = []
    for strip in strips:
        if kept and least + sum(each.width + BETWEEN for each in [*kept, strip]) > width:
            yield _table(first, kept)
            kept = []
        kept.append(strip)
    yield _table(first, kept)


def whole_names(names: Strip, strips: Sequence[Strip], width: int) -> Iterator[Table | Above]:
    """One table in which no name is folded: behind the first column, or above its row where it must be.

    Where not even the other columns fit beside each other they are as ``grids`` has them.
    """
    others = sum(each.width + BETWEEN for each in strips)
    first, *rest = strips
    if names.width + others <= width:
        yield _table(first, [names, *rest])
    elif INDENT + others - BETWEEN <= width:
        yield Above(names.cells, _table(first, rest))
    else:
        yield from grids(names, strips, width)


@dataclass(frozen=True)
class Above:
    """A table, of one line for each row, with a name above each."""

    names: Sequence[str]
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.table, options.update_width(options.max_width - INDENT), pad=False)
        head, rows = lines[: -len(self.names)], lines[-len(self.names) :]
        for line in head:
            yield from _indented(line)
        for name, line in zip(self.names, rows, strict=True):
            yield Text(name, overflow="fold")
            yield from _indented(line)


def _indented(line: Sequence[Segment]) -> Iterator[Segment]:
    yield from (Segment(" " * INDENT), *line, Segment.line())


def _table(first: Strip, strips: Sequence[Strip]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first.head, overflow="fold")
    for strip in strips:
        alone = len(strips) == 1
        justify = "right" if strip.is_number else "left"
        table.add_column(strip.head, justify=justify, no_wrap=not alone, overflow="fold")  # type: ignore[arg-type]
    for row in zip(*map(_texts, [first, *strips]), strict=True):
        table.add_row(*row)
    return table


def _texts(strip: Strip) -> Iterator[Text]:
    styles = strip.styles or [""] * len(strip.cells)
    return (Text(cell, style=style) for cell, style in zip(strip.cells, styles, strict=True))
