# SPDX-License-Identifier: Apache-2.0
"""Tables of a terminal that lose no digit: columns that do not fit beside others get a table of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

#: What the first column is given at least, unless all of it is shorter (characters).
LEAST_FIRST = 12

#: Characters between two columns.
BETWEEN = 2


@dataclass(frozen=True)
class Strip:
    """One column: what stands above it, what is in it, one cell a row."""

    head: str
    cells: Sequence[str]
    is_number: bool = True

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


def _table(first: Strip, strips: Sequence[Strip]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first.head, overflow="fold")
    for strip in strips:
        alone = len(strips) == 1
        justify = "right" if strip.is_number else "left"
        table.add_column(strip.head, justify=justify, no_wrap=not alone, overflow="fold")  # type: ignore[arg-type]
    for row in zip(first.cells, *(strip.cells for strip in strips), strict=True):
        table.add_row(*map(Text, row))
    return table
