# SPDX-License-Identifier: Apache-2.0
"""Parts of a page: tables, figures, and the reasons of tests without a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Cell:
    """A cell. ``look`` names style classes, ``target`` is an anchor of the page to link to."""

    text: str
    look: str = ""
    target: str = ""


#: Cells of a row; a string stands for a cell without style.
Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """A table. Columns whose names begin with ``#`` hold numbers."""

    label: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def has_text(self) -> bool:
        """Whether a column holds sentences, and all columns have names."""
        return all(self.columns) and any("text" in cell.look for row in self.rows for cell in row)


def table(label: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """Build a table without empty columns."""
    cells = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    kept = [
        place
        for place in range(len(columns))
        if not cells or any(row[place].text not in ("", "-") for row in cells)
    ]
    return Table(label, [columns[place] for place in kept], [[row[place] for place in kept] for row in cells])


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend: the style class of its mark, and its meaning."""

    look: str
    text: str


@dataclass(frozen=True)
class Plot:
    """A figure with its title, caption and legend.

    Attributes:
        svg: The figure, as wide as a phone.
        wide: The same figure for wider screens, if it has one.
        numbers: What the figure shows, if no other table of the page lists it.
    """

    svg: Markup
    title: str
    caption: str
    legend: Sequence[LegendEntry] = ()
    wide: Markup | None = None
    numbers: Table | None = None


@dataclass(frozen=True)
class Reason:
    """Why some tests have no result, or their verdict. ``tests`` hold links to their sections."""

    state: str
    text: str
    tests: Sequence[Cell]
