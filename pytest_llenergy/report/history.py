# SPDX-License-Identifier: Apache-2.0
"""Render a history as a table for the terminal."""

from __future__ import annotations

from pytest_llenergy.compare.history import HistoryView, Standing
from pytest_llenergy.report.names import list_names
from pytest_llenergy.report.text_tables import Column, Screen, Table, value_column
from pytest_llenergy.report.verdicts import format_value


def _usual(standing: Standing) -> str:
    band = f" ± {standing.band:.1%}" if standing.band is not None else ""
    return format_value(standing.usual) + band


def _changed(standing: Standing) -> str:
    sizes = ["-" if each.size is None else f"{each.size:+.1%}" for each in standing.changes]
    places = [(each.commit or "?")[:10] for each in standing.changes]
    return ", ".join(f"{size} near {place}" for size, place in zip(sizes, places, strict=True)) or "-"


COLUMNS: tuple[Column[Standing], ...] = (
    Column("last", lambda each: format_value(each.last.value, each.unit)),
    Column("usual", _usual),
    value_column("change", "from_usual", "+.1%"),
    value_column("since first", "from_first", "+.1%"),
    value_column("sessions", "sessions", "d"),
    Column("changed", _changed, is_number=False),
)

#: Below the tables.
EXPLANATION = (
    "usual: median of the sessions before the last, with the band in which sessions are expected. "
    "Changes are hints: verify one with llenergy ab."
)


def render_text(view: HistoryView, width: int, *, color: bool) -> str:
    """Render a table for each metric and device, with one row per test."""
    screen = Screen(width, color=color)
    tables: dict[str, list[Standing]] = {}
    for each in view.standings:
        tables.setdefault(f"{each.metric} on {each.device} ({each.device_key})", []).append(each)
    for title, standings in tables.items():
        screen.line(title)
        names = list_names([each.id for each in standings])
        screen.table(Table("test", names, COLUMNS, standings))
    screen.line(EXPLANATION)
    return f"{screen.text}\n" if screen.text else ""
