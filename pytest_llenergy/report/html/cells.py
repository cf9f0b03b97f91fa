# SPDX-License-Identifier: Apache-2.0
"""Tables of text, and how numbers stand in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_llenergy.model.record import Metric
from pytest_llenergy.report.columns import rounded
from pytest_llenergy.report.verdicts import value


@dataclass(frozen=True)
class Cell:
    """``look`` is a class of the style sheet, ``target`` an anchor of this page."""

    text: str
    look: str = ""
    target: str = ""


@dataclass(frozen=True)
class Table:
    """``columns`` whose name begins with ``#`` hold numbers."""

    label: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


#: What becomes a row: texts are plain cells.
Row = Sequence["str | Cell"]


def table(label: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """A table of plain text and cells, without columns that are empty all over."""
    cells = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    kept = [
        place
        for place in range(len(columns))
        if not cells or any(row[place].text not in ("", "-") for row in cells)
    ]
    return Table(label, [columns[place] for place in kept], [[row[place] for place in kept] for row in cells])


def state_cell(state: str) -> Cell:
    """A verdict or a status, with its colour."""
    return Cell(state, f"state {state.replace(' ', '-')}")


def with_uncertainty(metric: Metric | None) -> str:
    """Value and standard uncertainty, to the second digit of the latter."""
    if metric is None or metric.value is None:
        return "-"
    return rounded(metric.value, metric.uncertainty_absolute)


def plain(metric: Metric | None) -> str:
    """Four digits of it."""
    return value(metric.value if metric is not None else None)


def scatter(metric: Metric | None) -> str:
    """Relative standard deviation of single rounds, from that of their mean."""
    if metric is None or not metric.value or metric.spread is None or metric.n < 2:
        return "-"
    return f"{metric.spread * metric.n**0.5 / metric.value:.1%}"


def share(number: float | None) -> str:
    return "-" if number is None else f"{number:.1%}"
