# SPDX-License-Identifier: Apache-2.0
"""Comparisons as GitHub Actions shows them: annotations at the tests, and the summary of the step.

The form of a command and its escapes are those of the toolkit, ``packages/core/src/command.ts`` of
``actions/toolkit``.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llenergy.errors import ReportError
from pytest_llenergy.model.comparison import STATES, ComparedReports, Comparison
from pytest_llenergy.model.text import one_line, visible
from pytest_llenergy.report.comment import MOST_BYTES, render_comment
from pytest_llenergy.report.names import short
from pytest_llenergy.report.verdicts import change, summary, value

if TYPE_CHECKING:
    from pytest_llenergy.model.record import Record
    from pytest_llenergy.report.layout import Layout

#: GitHub shows no more of a kind in a step, https://github.com/orgs/community/discussions/68471.
MOST_ANNOTATIONS = 10

#: GitHub takes no summary of a step that is larger.
MOST_SUMMARY_BYTES = 1024 * 1024

#: What is told in one warning, for the gates that were asked for.
UNTOLD = ("not comparable", "invalid", "inconclusive")


def commands(compared: ComparedReports) -> str:
    """Workflow commands: an error for each regression, a warning that counts the rest; then how many."""
    regressed = [each for each in compared.comparisons if each.verdict == "regressed"]
    regressed.sort(key=_size, reverse=True)
    lines = [_error(each) for each in regressed[:MOST_ANNOTATIONS]]
    counts = Counter[str](each.verdict for each in compared.comparisons if each.gated)
    rest = [f"{counts[state]} {state}" for state in UNTOLD if counts[state]]
    if len(regressed) > MOST_ANNOTATIONS:
        rest.insert(0, f"{len(regressed) - MOST_ANNOTATIONS} more regressed")
    if rest:
        lines.append(command("warning", {"title": "Energy"}, f"{', '.join(rest)}; see the summary"))
    # No name of a test: a line of its own could be taken for a command.
    return "\n".join([*lines, f"energy: {summary(compared.comparisons)}"]) + "\n"


def command(name: str, properties: dict[str, str], message: str) -> str:
    """``::name key=value,key=value::message``."""
    told = ",".join(f"{key}={_property(text)}" for key, text in properties.items() if text)
    return f"::{name}{' ' if told else ''}{told}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def append_summary(compared: ComparedReports) -> None:
    """Add the Markdown to the summary of the step; nothing outside GitHub Actions.

    Raises ``ReportError`` where the file cannot be written.
    """
    _append(lambda room: _fitting(compared, room))


def append_run(records: Sequence[Record], layout: Layout, *, complete: bool) -> None:
    """Add a table of a run to the summary of the step; nothing outside GitHub Actions.

    Raises ``ReportError`` where the file cannot be written.
    """
    from pytest_llenergy.report.markdown import render_run

    _append(lambda room: render_run(records, layout, room, complete=complete))


def _append(fitting: Callable[[int], str]) -> None:
    """Add the text that fits into so many bytes."""
    named = os.environ.get("GITHUB_STEP_SUMMARY")
    if not named:
        return
    path = Path(named)
    try:
        there = path.stat().st_size if path.exists() else 0
        text = fitting(MOST_SUMMARY_BYTES - there)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ReportError(f"GITHUB_STEP_SUMMARY={named}: {error.strerror}") from None


def _fitting(compared: ComparedReports, room: int) -> str:
    """The comment, longer than one may be elsewhere; its first line where there is no room for more."""
    if room >= MOST_BYTES:
        return render_comment(compared, most_bytes=room)
    counts = Counter(each.verdict for each in compared.comparisons)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    line = f"\n### Energy: {told}\n"
    return line if len(line) <= room else ""


def _size(comparison: Comparison) -> float:
    ratio = comparison.ratio or 1.0
    return ratio if comparison.better == "less" else 1 / ratio


def _error(comparison: Comparison) -> str:
    file, line = _place(comparison.id)
    moved = f"{value(comparison.base)} -> {value(comparison.head, comparison.unit)}"
    estimated = " (estimated)" if comparison.kind == "estimated" else ""
    title = f"Energy: {short(comparison.id)} {change(comparison)}"
    message = one_line(f"{comparison.metric} regressed, {moved}{estimated}: {comparison.reason}")
    return command("error", {"title": title, "file": visible(file), "line": line}, message)


def _place(name: str) -> tuple[str, str]:
    """File and line of a test, as far as they are known here; from the root of the repository.

    A record has its node id, which begins with a file; the line is that of the function, if the file is here.
    """
    plain = name.partition("[")[0]
    file, *inner = plain.split("::")
    path = Path(file)
    if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
        return "", ""
    line = _line(path, inner)
    workspace = os.environ.get("GITHUB_WORKSPACE")
    if line and workspace:
        root = Path(workspace).resolve()
        if path.resolve().is_relative_to(root):
            path = path.resolve().relative_to(root)
    return path.as_posix(), line


def _line(path: Path, names: Sequence[str]) -> str:
    """Where a function, or a method of a class, begins; empty where that cannot be told."""
    try:
        found: ast.AST = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for name in names:
        # Of several workers that ran a test each has a name of its own.
        name = name.partition("@")[0]
        body = getattr(found, "body", ())
        inner = [each for each in body if getattr(each, "name", None) == name]
        if not inner:
            return ""
        found = inner[-1]
    return str(getattr(found, "lineno", ""))
