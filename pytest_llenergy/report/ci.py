# SPDX-License-Identifier: Apache-2.0
"""Formats of CI systems: GitHub annotations and step summaries."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import VERDICTS, ComparedReports, Comparison
from pytest_llenergy.record.text import escape_invisible, one_line, short_test_name
from pytest_llenergy.report.pr_comment import MAX_COMMENT_BYTES, CommentContext, render_comment
from pytest_llenergy.report.verdicts import (
    failing_verdicts,
    format_change,
    format_sides,
    summarize_verdicts,
    warning_verdicts,
    worsening,
)

if TYPE_CHECKING:
    from pytest_llenergy.record.record import Record
    from pytest_llenergy.report.layout import Layout


#: Most annotations of one kind that GitHub shows per step (https://github.com/orgs/community/discussions/68471).
MAX_ANNOTATIONS = 10

#: GitHub's limit for the summary of a step.
MAX_SUMMARY_BYTES = 1024 * 1024


def render_workflow_commands(compared: ComparedReports) -> str:
    """Render workflow commands: an error per regression, a warning that counts the rest, and a summary."""
    regressed = [each for each in compared.comparisons if each.verdict == "regressed" and each.gated]
    regressed.sort(key=worsening, reverse=True)
    lines = [_error_command(each) for each in regressed[:MAX_ANNOTATIONS]]
    counts = Counter[str](each.verdict for each in compared.comparisons if each.gated)
    counted = (failing_verdicts(compared) | warning_verdicts(compared)) - {"regressed"}
    rest = [f"{counts[state]} {state}" for state in VERDICTS if state in counted and counts[state]]
    if len(regressed) > MAX_ANNOTATIONS:
        rest.insert(0, f"{len(regressed) - MAX_ANNOTATIONS} more regressed")
    if rest:
        lines.append(workflow_command("warning", {"title": "Energy"}, f"{', '.join(rest)}; see the summary"))
    # No test names here: one could start a line that GitHub takes for a command.
    return "\n".join([*lines, f"energy: {summarize_verdicts(compared.comparisons)}"]) + "\n"


def workflow_command(name: str, properties: dict[str, str], message: str) -> str:
    """Return ``::name key=value,key=value::message``.

    Form and escapes are those of ``packages/core/src/command.ts`` in ``actions/toolkit``.
    """
    escaped = {
        key: _escape_data(value).replace(":", "%3A").replace(",", "%2C") for key, value in properties.items()
    }
    text = ",".join(f"{key}={value}" for key, value in escaped.items() if value)
    return f"::{name} {text}::{_escape_data(message)}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _error_command(comparison: Comparison) -> str:
    change = f" {format_change(comparison.ratio)}" if comparison.ratio is not None else ""
    values = f", {' -> '.join(format_sides(comparison))}{comparison.kind_label}"
    shown = values if None not in (comparison.base, comparison.head) else ""
    message = one_line(f"{comparison.metric} regressed{shown}: {comparison.reason}")
    path = comparison.id.partition("::")[0]
    about = {"title": f"Energy: {short_test_name(comparison.id)}{change}"}
    if path.endswith(".py") and not path.startswith(("/", "..")):
        about["file"] = escape_invisible(path)
    return workflow_command("error", about, message)


def append_comparison_summary(compared: ComparedReports, context: CommentContext) -> None:
    """Append a comparison to the summary of the step; do nothing outside GitHub Actions."""

    def render(room: int) -> str:
        return render_comment(compared, context, max_bytes=room) if room >= MAX_COMMENT_BYTES else ""

    _append_to_summary(render)


def append_run_summary(records: Sequence[Record], layout: Layout, *, complete: bool) -> None:
    """Append the table of a run to the summary of the step; do nothing outside GitHub Actions."""
    from pytest_llenergy.report.markdown import render_run_markdown

    _append_to_summary(lambda room: render_run_markdown(records, layout, room, complete=complete))


def _append_to_summary(render: Callable[[int], str]) -> None:
    """Append the text that ``render`` returns for the number of bytes left in the summary."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(render(MAX_SUMMARY_BYTES - file.tell()))
    except OSError as error:
        raise ReportError(f"GITHUB_STEP_SUMMARY={name}: {error.strerror}") from None
