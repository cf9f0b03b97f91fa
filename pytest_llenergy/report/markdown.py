# SPDX-License-Identifier: Apache-2.0
"""Markdown whose texts nobody can break out of, and the summary of a run in it, also for GitHub Actions."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.record import Record
from pytest_llenergy.record.text import one_line, shorten
from pytest_llenergy.report.layout import Layout
from pytest_llenergy.report.summary import Line, summarize
from pytest_llenergy.report.text_tables import Column, Row, Table
from pytest_llenergy.report.verdicts import list_problems

#: Most characters of a name and of a reason.
MAX_NAME_LENGTH, MAX_REASON_LENGTH = 160, 300

#: GitHub's limit for the summary of a step.
MAX_SUMMARY_BYTES = 1024 * 1024

#: Characters that mean nothing in Markdown, in HTML or to GitHub. Addresses and links are escaped separately.
SAFE_CHARACTER = re.compile(r"[^\W_]|[ ,;=:./…→%+'()\[\]-]|(?<=[^\W_])_(?=[^\W_])")

#: Text that GitHub turns into a link although it has no scheme.
WWW_ADDRESS = re.compile(r"(www)\.", re.IGNORECASE)

#: ``@`` and ``#``, which start a mention or a reference on GitHub even as character references.
MENTION_OR_REFERENCE = re.compile(r"(&#(?:64|35);)")


def escape_markdown(text: str, width: int = MAX_NAME_LENGTH) -> str:
    """Escape text so that Markdown, HTML and GitHub show it literally, on one line.

    Characters with a meaning become character references. Invisible ones, such as direction marks, become
    escapes.
    """
    line = shorten(one_line(text), width)
    referred = "".join(
        each if SAFE_CHARACTER.match(line, place) else f"&#{ord(each)};" for place, each in enumerate(line)
    )
    # Break addresses and links.
    unlinked = WWW_ADDRESS.sub(r"\1&#46;", referred.replace("://", "&#58;//").replace("](", "]&#40;"))
    return MENTION_OR_REFERENCE.sub(r"\1&#8203;", unlinked)


def table_head(columns: Sequence[Column[Row]], *names: str) -> list[str]:
    """Return the two lines above the rows of a table; ``names`` are the headings of their names."""
    heads = " | ".join([*names, *(escape_markdown(each.head) for each in columns)])
    aligned = "".join("---:|" if each.is_number else "---|" for each in columns)
    return [f"| {heads} |", f"|{'---|' * len(names)}{aligned}"]


def table_row(name: str, columns: Sequence[Column[Row]], row: Row) -> str:
    """Return a row of a table. ``name`` is Markdown."""
    return f"| {' | '.join([name, *(escape_markdown(each.cell(row)) for each in columns)])} |"


def select_fitting(lines: Sequence[str], max_bytes: int) -> list[str]:
    """Return the first lines that fit into so many bytes."""
    kept: list[str] = []
    for line in lines:
        max_bytes -= len(line.encode()) + 1
        if max_bytes < 0:
            break
        kept.append(line)
    return kept


def append_step_summary(records: Sequence[Record], layout: Layout, *, complete: bool) -> None:
    """Append the table of a run to the summary of the step; do nothing outside GitHub Actions.

    Raises:
        ReportError: It cannot be written.
    """
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            room = MAX_SUMMARY_BYTES - file.tell()
            file.write(render_run_markdown(records, layout, room, complete=complete))
    except OSError as error:
        raise ReportError(f"GITHUB_STEP_SUMMARY={name}: {error.strerror}") from None


def render_run_markdown(records: Sequence[Record], layout: Layout, max_bytes: int, *, complete: bool) -> str:
    """Render the tests of a run in at most ``max_bytes``; lines that do not fit are only counted."""
    counts = Counter(each.status for each in records)
    found = ", ".join(f"{count} {status}" for status, count in counts.items())
    # The text before it may not end with an empty line.
    lines = ["", f"### Energy: {found}{'' if complete else ', interrupted'}", ""]
    compared = [each for record in records for each in record.comparisons]
    for text in list_problems(compared, "the baseline") if compared else ():
        lines.append(f"- {escape_markdown(text, MAX_REASON_LENGTH)}")
    for part in summarize(records, layout, brief=False):
        lines += _render_table(part) if isinstance(part, Table) else [_render_line(part)]
    # A hundred bytes for the line that counts the others.
    kept = select_fitting(lines, max_bytes - 100)
    if 0 < len(kept) < len(lines):
        kept += ["", f"{len(lines) - len(kept)} more lines are in the report."]
    return "\n".join([*kept, ""]) if kept else ""


def _render_line(line: Line) -> str:
    name = f"<code>{escape_markdown(line.name)}</code>: " if line.name else ""
    return f"- {name}{escape_markdown(line.text, MAX_REASON_LENGTH)}"


def _render_table(table: Table[Any]) -> Iterator[str]:
    yield from ("", *table_head(table.columns, table.head))
    for group, name, row in zip_longest(table.groups, table.names, table.rows, fillvalue=""):
        if group:
            yield f"| **{escape_markdown(group)}** |{' |' * len(table.columns)}"
        yield table_row(f"<code>{escape_markdown(name.strip())}</code>", table.columns, row)
    yield ""
