# SPDX-License-Identifier: Apache-2.0
"""Render a history as a table for the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from pytest_llenergy.compare.history.trend import HistoryView, Standing
from pytest_llenergy.record.text import strip_trailing_space
from pytest_llenergy.report.text_tables import TableColumn, plain_text, tables_with_whole_names
from pytest_llenergy.report.verdicts import format_value, name_column

#: Columns of numbers.
COLUMNS = ("last", "usual", "change", "since first", "sessions", "changed")


def render_text(view: HistoryView, width: int, *, color: bool) -> str:
    """Render a table for each metric and device, with one row per test.

    Args:
        view: What to render.
        width: Width of the terminal in characters.
        color: Whether to colour the text.
    """
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False)
    for title, standings in _tables(view).items():
        console.print(plain_text(title))
        cells = zip(*map(standing_cells, standings), strict=True)
        columns = [TableColumn(name, column) for name, column in zip(COLUMNS, cells, strict=True)]
        names = name_column([each.id for each in standings])
        for table in tables_with_whole_names(names, columns, width, names_first=True):
            console.print(table)
    for note in list_notes(view):
        console.print(plain_text(note))
    text = strip_trailing_space(stream.getvalue())
    return f"{text}\n" if text else ""


def _tables(view: HistoryView) -> dict[str, list[Standing]]:
    found: dict[str, list[Standing]] = {}
    for each in view.standings:
        found.setdefault(f"{each.metric} on {each.device} ({each.device_key})", []).append(each)
    return found


def standing_cells(standing: Standing) -> tuple[str, ...]:
    """Return the cells of ``COLUMNS``."""
    changes = [f"{_format_percent(each.size)} near {(each.commit or '?')[:10]}" for each in standing.changes]
    band = f" ± {standing.band:.1%}" if standing.band is not None else ""
    return (
        format_value(standing.last.value, standing.unit),
        format_value(standing.usual) + band,
        _format_percent(standing.from_usual),
        _format_percent(standing.from_first),
        str(standing.sessions),
        ", ".join(changes) or "-",
    )


def list_notes(view: HistoryView) -> list[str]:
    """Return the notes below the tables; the last explains the columns."""
    earlier = sum(each.earlier > 0 for each in view.standings)
    return [
        *[f"{earlier} tests had a different workload before; those sessions are left out"] * bool(earlier),
        "usual: median of the sessions before the last, with the band in which sessions are expected. "
        "Changes are hints: verify one with llenergy ab.",
    ]


def _format_percent(change: float | None) -> str:
    return "-" if change is None else f"{change:+.1%}"
