# SPDX-License-Identifier: Apache-2.0
"""Render the summary of a run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.record.record import Record
from pytest_llenergy.report.layout import DEFAULT_LAYOUT, Layout
from pytest_llenergy.report.summary import summarize
from pytest_llenergy.report.text_tables import Screen, Table

#: Share of the width that names may have before columns are left out.
NAME_SHARE = 0.3


def render_summary(
    records: Sequence[Record],
    width: int,
    *,
    color: bool,
    layout: Layout = DEFAULT_LAYOUT,
    verbose: bool = False,
    notes: Sequence[str] = (),
    with_failures: bool = False,
) -> str:
    """Render measured tests as a table, and the others as lines with their reasons; see ``summarize``.

    With ``verbose``, also all notes, the rounds, and where the time went. ``with_failures`` lists failed
    tests, which pytest itself reports at the end of a run.
    """
    screen = Screen(width, color=color)
    for part in summarize(
        records, layout, brief=not verbose, with_rounds=verbose, notes=notes, with_failures=with_failures
    ):
        if isinstance(part, Table):
            screen.table(part, NAME_SHARE, with_all=bool(layout.columns) or verbose)
            continue
        screen.line(f"{part.name}: {part.text}" if part.name else part.text, part.style)
    return screen.text
