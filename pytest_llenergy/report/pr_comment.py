# SPDX-License-Identifier: Apache-2.0
"""Render a comparison as the comment of a pull request, in Markdown.

Names and reasons come from the tested code, so they are escaped and limited in length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from pytest_llenergy.compare.gate import list_void_gates
from pytest_llenergy.record.comparison import (
    VERDICTS,
    AppliedRule,
    ComparedReports,
    Comparison,
    ReportSource,
    Verdict,
)
from pytest_llenergy.record.text import count_tests
from pytest_llenergy.report.markdown import (
    MAX_REASON_LENGTH,
    escape_markdown,
    select_fitting,
    table_head,
    table_row,
)
from pytest_llenergy.report.names import list_names
from pytest_llenergy.report.outcome import describe_outcome
from pytest_llenergy.report.text_tables import Column, with_values
from pytest_llenergy.report.verdicts import (
    COLUMNS,
    NOT_IN_COMMENT,
    count_verdicts,
    describe_noise,
    failing_verdicts,
    format_change,
    names_metrics,
    needs_reason,
    sort_by_verdict,
    warning_verdicts,
)

#: First line of the comment, by which a later run finds and replaces it.
MARKER = "<!-- llenergy:compare -->"

STATE_SIGNS = {"pass": "✅", "warning": "⚠️", "fail": "❌", "no gate": "⚖️"}

#: Addresses that become links. Others could end the link.
ADDRESS = re.compile(r"https?://[\w.:/%#?=&+~@-]+")

#: GitHub refuses comments of more than 65,536 characters. Bytes are a safe upper bound.
MAX_COMMENT_BYTES = 65_000

#: Bytes for the lines around the rows.
AROUND_ROWS = 2_000

#: Most notes above the table; the others are only counted.
MAX_NOTES = 10

SIGNS: dict[Verdict, str] = dict(zip(VERDICTS, "🔴⛔⛔🟠🟡🟢🆕➖⚪➖", strict=True))


@dataclass(frozen=True)
class CommentContext:
    """What a comment says besides the comparison.

    ``pairs`` are the stages of a run that measured both sides alternately, such as ``6+6``; ``job`` names one
    of several jobs.
    """

    pairs: str | None = None
    run_url: str = ""
    report_url: str = ""
    job: str = ""
    marker: str = MARKER


NO_CONTEXT = CommentContext()


def marker_of(workflow: str, job: str = "") -> str:
    """Return the marker of a job's comment, or without ``job`` how those of the workflow start."""
    parts = [re.sub(r"[^\w.,()=+ ]+", "-", part)[:100] for part in (workflow, job)]
    start = f"{MARKER.removesuffix(' -->')} {parts[0]}/"
    return f"{start}{parts[1]} -->" if job else start


def render_missing(context: CommentContext, commit: str) -> str:
    """Render the comment of a run that compared nothing; it replaces that of an older commit."""
    name = f"<code>{escape_markdown(commit[:10])}</code>" if commit else "the last commit"
    lines = [
        context.marker,
        f"### ❔ Energy{_job(context)}: no comparison for {name}",
        "The job failed or was skipped before it compared anything.",
    ]
    return "\n".join(filter(None, [*lines, _links(context)])) + "\n"


def render_title(compared: ComparedReports, context: CommentContext) -> str:
    """Render the title: the outcome, as the exit code says, and the overall change."""
    found = compared.comparisons
    state, reasons = describe_outcome(compared, paired=context.pairs is not None)
    overall = _describe_overall(found)
    text = ", ".join([state, *reasons]) + (f"{'; ' if reasons else ', '}{overall}" if overall else "")
    subject = "Time" if found and all(each.unit == "s" for each in found) else "Energy"
    return f"### {STATE_SIGNS[state]} {subject}{_job(context)}: {text}"


def _describe_overall(comparisons: Sequence[Comparison]) -> str:
    """Return the geometric mean of the ratios, if all are of one metric."""
    ratios = [each.ratio for each in comparisons if each.rule_applied and each.ratio]
    if not ratios or len({each.metric for each in comparisons}) > 1:
        return ""
    return f"{format_change(geometric_mean(ratios))} over {count_tests(len(ratios))}"


def _job(context: CommentContext) -> str:
    return f" ({escape_markdown(context.job)})" if context.job else ""


def _links(context: CommentContext) -> str:
    links = {"HTML report and JSON": context.report_url, "CI run": context.run_url}
    return " · ".join(f"[{text}]({url})" for text, url in links.items() if ADDRESS.fullmatch(url))


def render_comment(compared: ComparedReports, context: CommentContext = NO_CONTEXT) -> str:
    """Render the comment; the least urgent rows that do not fit are only counted."""
    found = compared.comparisons
    columns = with_values([each for each in COLUMNS if each.head not in NOT_IN_COMMENT], found)
    with_metric = names_metrics(found)
    # The head counts tests that have no such metric.
    shown = [each for each in sort_by_verdict(found) if each.verdict != "no value"]
    rows = [
        _row(each, name, columns, with_metric=with_metric)
        for name, each in zip(list_names([each.id for each in shown]), shown, strict=True)
    ]
    head, foot = _head(compared, context), _foot(compared)
    kept = select_fitting(rows, MAX_COMMENT_BYTES - len(f"{head}{foot}".encode()) - AROUND_ROWS)
    urgent = sum(each.verdict != "unchanged" for each in shown)
    table = ["", *table_head(columns, "", "benchmark")]
    parts = [head, *(table + kept[:urgent] if kept[:urgent] else [])]
    if unchanged := kept[urgent:]:
        folded = f"<details><summary>{len(rows) - urgent} unchanged</summary>"
        parts += ["", folded, *table, *unchanged, "", "</details>"]
    if omitted := shown[len(kept) :]:
        parts += ["", f"Cut to fit into a comment: {count_verdicts(omitted)}. All of them are in the JSON."]
    return "\n".join([*parts, "", foot]) + "\n"


def _head(compared: ComparedReports, context: CommentContext) -> str:
    about = [f"{_side(compared.head)} against {_side(compared.base)}"]
    about += [escape_markdown(line) for line in compared.devices[:3]]
    about += [f"{len(compared.devices) - 3} more devices"] if len(compared.devices) > 3 else []
    about += [_describe_pairs(context.pairs)] if context.pairs is not None else []
    about += filter(None, [describe_noise(compared.comparisons)])
    lines = [context.marker, render_title(compared, context), f"{count_verdicts(compared.comparisons)}  "]
    lines += filter(None, [" · ".join(about), f"\n{_links(context)}" if _links(context) else ""])
    notes = [*list_void_gates(compared.comparisons), *compared.notes]
    lines += [f"\n**{escape_markdown(note, MAX_REASON_LENGTH)}**" for note in notes[:MAX_NOTES]]
    if len(notes) > MAX_NOTES:
        lines.append(f"\n**and {len(notes) - MAX_NOTES} more notes, in the JSON**")
    return "\n".join(lines)


def _describe_pairs(stages: str) -> str:
    counts = re.findall(r"\d{1,9}", stages)
    return f"{'up to ' if len(counts) > 1 else ''}{sum(map(int, counts))} pairs"


def _side(side: ReportSource) -> str:
    # Marked as code, since a dash or a number at the beginning of a line would start a list.
    name = f"<code>{escape_markdown(side.origin if side.commit is None else side.commit[:10])}</code>"
    return f"{name} (with changes)" if side.commit is not None and side.dirty else name


def _row(
    comparison: Comparison, name: str, columns: Sequence[Column[Comparison]], *, with_metric: bool
) -> str:
    name = f"<code>{escape_markdown(name)}</code>"
    if with_metric:
        name += f" {escape_markdown(comparison.metric)}"
    reasons = [comparison.reason] if needs_reason(comparison) else []
    for note in filter(None, [*reasons, *comparison.notes]):
        name += f"<br>{escape_markdown(note, MAX_REASON_LENGTH)}"
    return table_row(f"{SIGNS[comparison.verdict]} {comparison.verdict} | {name}", columns, comparison)


def _foot(compared: ComparedReports) -> str:
    rules = dict.fromkeys(
        _rule(each.metric, each.rule) for each in compared.comparisons if each.rule is not None
    )
    if not rules:
        return "No rule was applied."
    fails, warns = (
        ", ".join(each for each in VERDICTS if each in verdicts)
        for verdicts in (failing_verdicts(compared), warning_verdicts(compared))
    )
    gate = (
        f"Fails: {fails}; warns: {warns}." if any(each.gated for each in compared.comparisons) else "No gate."
    )
    return (
        f"{gate} Regressed: {'; '.join(rules)}. In rows with a change, base is a "
        "median of rounds and head is base times the estimated change; the title has the geometric mean of "
        "the changes."
    )


def _rule(metric: str, rule: AppliedRule) -> str:
    absolute = f" and {rule.threshold_absolute:g}" if rule.threshold_absolute else ""
    threshold, floor = f"{rule.threshold * 100:.3g}%{absolute}", f"{rule.floor * 100:.3g}%"
    return f"{escape_markdown(metric)} about {threshold} worse or more, and the lower limit above {floor}"
