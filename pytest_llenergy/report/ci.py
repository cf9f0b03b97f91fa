# SPDX-License-Identifier: Apache-2.0
"""Formats of CI systems: GitHub annotations, GitLab metrics, JUnit XML."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pytest_llenergy.errors import ReportError
from pytest_llenergy.record.comparison import VERDICTS, ComparedReports, Comparison, Verdict
from pytest_llenergy.record.text import escape_invisible, escape_lines, one_line, short_test_name
from pytest_llenergy.report.pr_comment import MAX_COMMENT_BYTES, CommentContext, render_comment, render_title
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

#: Decimal places of a relative change: a tenth of a percent.
CHANGE_DECIMAL_PLACES = 3

#: Result of the test case by verdict; other verdicts pass.
JUNIT_OUTCOMES: dict[Verdict, str] = {
    "regressed": "failure",
    "not comparable": "error",
    "invalid": "error",
    "worse": "skipped",
    "inconclusive": "skipped",
    "new": "skipped",
    "removed": "skipped",
    "no value": "skipped",
}


@dataclass(frozen=True)
class Sample:
    """One formatted value and its labels. Empty labels are left out."""

    labels: Mapping[str, str]
    value: str


@dataclass(frozen=True)
class Family:
    """A gauge and its samples. If it has a ``unit``, ``name`` ends with it."""

    name: str
    help: str
    samples: Sequence[Sample]
    unit: str = ""


def render_openmetrics_text(families: Iterable[Family]) -> str:
    """Render families with samples as OpenMetrics 1.0.

    See https://prometheus.io/docs/specs/om/open_metrics_spec/.
    """
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# TYPE {family.name} gauge")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {escape_openmetrics(family.help)}")
        lines += [f"{family.name}{_format_labels(each.labels)} {each.value}" for each in family.samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def escape_openmetrics(text: str) -> str:
    """Escape the value of a label, or a help text."""
    return escape_lines(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _format_labels(labels: Mapping[str, str]) -> str:
    text = ",".join(f'{name}="{escape_openmetrics(value)}"' for name, value in labels.items() if value)
    return f"{{{text}}}" if text else ""


def render_workflow_commands(compared: ComparedReports) -> str:
    """Render workflow commands: an error per regression, a warning that counts the rest, and a summary."""
    regressed = [each for each in compared.comparisons if each.verdict == "regressed"]
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

    Args:
        name: Name of the command.
        properties: Its properties.
        message: Its text.
    """
    text = ",".join(f"{key}={_escape_property(value)}" for key, value in properties.items() if value)
    return f"::{name}{' ' if text else ''}{text}::{_escape_data(message)}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def append_comparison_summary(compared: ComparedReports, context: CommentContext) -> None:
    """Append a comparison to the summary of the step; do nothing outside GitHub Actions.

    Raises:
        ReportError: If the file cannot be written.
    """
    _append_to_summary(lambda room: _render_fitting(compared, context, room))


def append_run_summary(records: Sequence[Record], layout: Layout, *, complete: bool) -> None:
    """Append the table of a run to the summary of the step; do nothing outside GitHub Actions.

    Args:
        records: Records of the run.
        layout: Layout of the table.
        complete: Whether the run finished.

    Raises:
        ReportError: If the file cannot be written.
    """
    from pytest_llenergy.report.markdown import render_run_markdown

    _append_to_summary(lambda room: render_run_markdown(records, layout, room, complete=complete))


def _append_to_summary(render: Callable[[int], str]) -> None:
    """Append the text that ``render`` returns for the number of bytes left in the summary."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    path = Path(name)
    try:
        size = path.stat().st_size if path.exists() else 0
        text = render(MAX_SUMMARY_BYTES - size)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ReportError(f"GITHUB_STEP_SUMMARY={name}: {error.strerror}") from None


def _render_fitting(compared: ComparedReports, context: CommentContext, room: int) -> str:
    """Return the comment, or only its title, or nothing, depending on ``room`` (bytes).

    A summary may be longer than a comment.
    """
    if room >= MAX_COMMENT_BYTES:
        return render_comment(compared, context, max_bytes=room)
    title = f"\n{render_title(compared, context)}\n"
    return title if len(title.encode()) <= room else ""


def _error_command(comparison: Comparison) -> str:
    file, line = _locate(comparison.id)
    values = " -> ".join(format_sides(comparison))
    change = f" {format_change(comparison)}" if comparison.ratio is not None else ""
    title = f"Energy: {short_test_name(comparison.id)}{change}"
    shown = f", {values}{comparison.kind_label}" if None not in (comparison.base, comparison.head) else ""
    message = one_line(f"{comparison.metric} regressed{shown}: {comparison.reason}")
    return workflow_command("error", {"title": title, "file": escape_invisible(file), "line": line}, message)


def _locate(name: str) -> tuple[str, str]:
    """Return the file of a test, relative to the repository's root, and its line; each empty if unknown."""
    plain = name.partition("[")[0]
    file, *inner = plain.split("::")
    path = Path(file)
    if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
        return "", ""
    line = _find_line(path, inner)
    workspace = os.environ.get("GITHUB_WORKSPACE")
    if line and workspace:
        root = Path(workspace).resolve()
        if path.resolve().is_relative_to(root):
            path = path.resolve().relative_to(root)
    return path.as_posix(), line


def _find_line(path: Path, names: Sequence[str]) -> str:
    """Return the line of a function, or of a method in its class; empty if unknown."""
    try:
        node: ast.AST = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for name in names:
        # If several workers ran a test, "@" and the worker follow its name.
        name = name.partition("@")[0]
        body = getattr(node, "body", ())
        inner = [each for each in body if getattr(each, "name", None) == name]
        if not inner:
            return ""
        node = inner[-1]
    return str(getattr(node, "lineno", ""))


def render_gitlab_metrics(compared: ComparedReports) -> str:
    """Render a metrics report of GitLab (``artifacts:reports:metrics``): counts and changes.

    GitLab compares the text of each value with that of the target branch and lists those that differ. Joules
    always differ, so the report holds the relative change: exactly 0 for unchanged tests, and NaN for
    inconclusive ones.
    """
    counts = Counter(each.verdict for each in compared.comparisons)
    tests = Family(
        "llenergy_comparisons",
        "Comparisons by verdict.",
        [Sample({"verdict": state}, str(counts[state])) for state in VERDICTS],
    )
    changes = Family(
        "llenergy_change_ratio",
        "Relative change from the base; 0 if unchanged, NaN if inconclusive.",
        [
            Sample(
                {"test": _escape_hashes(each.id), "metric": _escape_hashes(each.metric)}, _format_change(each)
            )
            for each in compared.comparisons
            if each.rule_applied
        ],
        unit="ratio",
    )
    return render_openmetrics_text([tests, changes])


def _format_change(comparison: Comparison) -> str:
    if comparison.verdict == "inconclusive" or comparison.ratio is None:
        return "NaN"
    return "0" if comparison.verdict == "unchanged" else f"{comparison.ratio - 1:+.{CHANGE_DECIMAL_PLACES}f}"


def _escape_hashes(name: str) -> str:
    """Escape hashes, after which GitLab ignores the rest of a line (``parsers/metrics/generic.rb``)."""
    return name.replace("#", "%23")


def render_junit(compared: ComparedReports) -> str:
    """Render one JUnit test case per comparison. Errors of tests that are not gated count as skipped."""
    failing = failing_verdicts(compared)
    outcomes = [_outcome(each, failing) for each in compared.comparisons]
    counts = Counter(outcomes)
    numbers = {
        "tests": str(len(outcomes)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
    }
    root = ElementTree.Element("testsuites", {"name": "llenergy", **numbers})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "llenergy", **numbers})
    for comparison, outcome in zip(compared.comparisons, outcomes, strict=True):
        _add_case(suite, comparison, outcome)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _outcome(comparison: Comparison, failing: set[Verdict]) -> str:
    outcome = JUNIT_OUTCOMES.get(comparison.verdict, "passed")
    if comparison.verdict in failing and outcome == "skipped":
        outcome = "error"
    return "skipped" if outcome == "error" and not comparison.gated else outcome


def _add_case(suite: ElementTree.Element, comparison: Comparison, outcome: str) -> None:
    path, bracket, params = comparison.id.partition("[")
    file, *classes, function = path.split("::") if "::" in path else ("", path)
    classname = ".".join([file.removesuffix(".py").replace("/", "."), *classes])
    name = f"{function}{bracket}{params} {comparison.metric}"
    case = ElementTree.SubElement(
        suite, "testcase", {"classname": escape_lines(classname), "name": escape_lines(name)}
    )
    properties = ElementTree.SubElement(case, "properties")
    for key, text in _facts(comparison).items():
        ElementTree.SubElement(
            properties, "property", {"name": f"llenergy.{key}", "value": escape_lines(text)}
        )
    if outcome != "passed":
        about = {"message": escape_lines(f"{comparison.metric} {comparison.verdict}: {comparison.reason}")}
        if outcome != "skipped":
            about["type"] = f"llenergy.{comparison.verdict.replace(' ', '_')}"
        ElementTree.SubElement(case, outcome, about).text = escape_lines("\n".join(comparison.notes)) or None


def _facts(comparison: Comparison) -> dict[str, str]:
    """Return the facts that are known, as unrounded text."""
    facts = {
        "metric": comparison.metric,
        "verdict": comparison.verdict,
        "unit": comparison.unit,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "base": comparison.base,
        "head": comparison.head,
        "noise": comparison.noise,
        "kind": comparison.kind,
    }
    return {name: str(fact) for name, fact in facts.items() if fact is not None}
