# SPDX-License-Identifier: Apache-2.0
"""``llenergy list``: the reports that are saved under a name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pytest_llenergy.cli.console import add_format, print_json, print_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.report.saved import SavedReport

#: Characters of a commit that the table shows.
SHORT_COMMIT = 9


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "list",
        help="list the reports that are saved under a name",
        description="List the reports of --energy-save and llenergy ab, newest first, from the directory "
        ".llenergy here or in the nearest parent. Other commands take their names in place of files.",
    )
    add_format(parser, ("text", "json"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns 0."""
    from pytest_llenergy.report.saved import list_saved, saved_directory

    directory = saved_directory()
    saved = list_saved(directory)
    rows = [_row(each) for each in saved]
    if args.format == "json":
        print_json(rows)
    elif rows:
        _print_table(rows)
    else:
        print_message("list", f"nothing is saved in {directory}; pytest --energy-save=NAME does")
    return 0


def _row(saved: SavedReport) -> dict[str, Any]:
    from pytest_llenergy.record.report import PairedReport

    report, content = saved.report, saved.content
    if report is None or content is None:
        return {"name": saved.name, "reason": saved.reason}
    kinds = sorted({record.kind for record in report.records if record.kind is not None})
    commits = [report.source.commit]
    if isinstance(content, PairedReport):
        commits.insert(0, content.base.source.commit)
    return {
        "name": saved.name,
        "started_at": report.run.started_at,
        "commits": commits,
        "dirty": report.source.dirty,
        "tests": len({record.id for record in report.records}),
        "measured": len({record.id for record in report.records if record.counts}),
        "kinds": kinds,
        "complete": content.complete if isinstance(content, PairedReport) else report.run.complete,
    }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    import io
    import shutil

    from rich.console import Console

    from pytest_llenergy.cli.console import print_encodable, print_line
    from pytest_llenergy.record.text import strip_trailing_space
    from pytest_llenergy.report.text_tables import TableColumn, split_into_tables

    columns = {
        "date (UTC)": [row.get("started_at", "-")[:16].replace("T", " ") for row in rows],
        "commit": [_commit(row) for row in rows],
        "tests": [_tests(row) for row in rows],
        "kind": [", ".join(row.get("kinds", ())) or "-" for row in rows],
    }
    names = TableColumn("name", [row["name"] for row in rows], is_number=False)
    stream = io.StringIO()
    console = Console(file=stream, width=shutil.get_terminal_size().columns, no_color=True, highlight=False)
    shown = [TableColumn(head, cells, is_number=head == "tests") for head, cells in columns.items()]
    for table in split_into_tables(names, shown, console.width):
        console.print(table)
    print_encodable(strip_trailing_space(stream.getvalue()))
    for row in rows:
        if "reason" in row:
            print_line(f"{row['name']}: {row['reason']}")


def _commit(row: dict[str, Any]) -> str:
    if "reason" in row:
        return "-"
    commits = "..".join((each or "-")[:SHORT_COMMIT] for each in row["commits"])
    return f"{commits} with changes" if row["dirty"] else commits


def _tests(row: dict[str, Any]) -> str:
    if "reason" in row:
        return "-"
    number = str(row["tests"]) if row["measured"] == row["tests"] else f"{row['measured']} of {row['tests']}"
    return number if row["complete"] else f"{number}, interrupted"
