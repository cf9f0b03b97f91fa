# SPDX-License-Identifier: Apache-2.0
"""Render a comparison as the comment of a pull request, in Markdown.

Names and reasons come from the tested code, so they are escaped and limited in length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_llenergy.compare.gate import PASSED, exit_code, list_void_gates, suggest_remedy
from pytest_llenergy.record.comparison import (
    VERDICTS,
    AppliedRule,
    ComparedReports,
    Comparison,
    ReportSource,
    Verdict,
)
from pytest_llenergy.record.text import count_tests, one_line, shorten, unique_short_ids
from pytest_llenergy.report.verdicts import (
    columns_of,
    count_verdicts,
    describe_detectable,
    describe_noise,
    failing_verdicts,
    format_change,
    format_ratio,
    names_metrics,
    needs_reason,
    overall_changes,
    sort_by_verdict,
    warning_verdicts,
    worsening,
)

#: First line of the comment, by which a later run finds and replaces it.
MARKER = "<!-- llenergy:compare -->"

State = Literal["pass", "warning", "fail"]

STATE_SIGNS: dict[State, str] = {"pass": "✅", "warning": "⚠️", "fail": "❌"}

#: Most metrics in the title.
MAX_TITLE_METRICS = 3

#: Addresses that become links. Others could end the link.
ADDRESS = re.compile(r"https?://[\w.:/%#?=&+~@-]+")

#: GitHub refuses comments of more than 65,536 characters. Bytes are a safe upper bound.
MAX_COMMENT_BYTES = 65_000

#: Most characters of a name and of a reason.
MAX_NAME_LENGTH, MAX_REASON_LENGTH = 160, 300

#: Most notes above the table; the others are only counted.
MAX_NOTES = 10

SIGNS: dict[Verdict, str] = {
    "regressed": "🔴",
    "not comparable": "⛔",
    "invalid": "⛔",
    "worse": "🟠",
    "inconclusive": "🟡",
    "improved": "🟢",
    "new": "🆕",
    "removed": "➖",
    "unchanged": "⚪",
    "no value": "➖",
}

#: Characters that mean nothing in Markdown, in HTML or to GitHub. Addresses and links are escaped separately.
SAFE_CHARACTER = re.compile(r"[^\W_]|[ ,;=:./…→%+'()\[\]-]|(?<=[^\W_])_(?=[^\W_])")

#: Text that GitHub turns into a link although it has no scheme.
WWW_ADDRESS = re.compile(r"(www)\.", re.IGNORECASE)

#: ``@`` and ``#``, which start a mention or a reference on GitHub even as character references.
MENTION_OR_REFERENCE = re.compile(r"(&#(?:64|35);)")

COLUMNS = columns_of("comment")

TABLE_HEADER = (
    f"| | benchmark | {' | '.join(each.head for each in COLUMNS)} |",
    f"|---|---|{'---:|' * len(COLUMNS)}",
)


@dataclass(frozen=True)
class CommentContext:
    """What a comment says besides the comparison.

    Attributes:
        pairs: Stages of a run that measured both sides alternately, such as ``6+6``.
        over_budget: Ids of tests that exceed their budget on the head only.
        run_url: Address of the CI run.
        report_url: Address of the HTML page and the JSON.
        job: Name of the job, of several that comment.
        marker: First line of the comment.
    """

    pairs: str | None = None
    over_budget: tuple[str, ...] = ()
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


def render_title(compared: ComparedReports, context: CommentContext = NO_CONTEXT) -> str:
    """Render the title: pass, warning or fail, as the exit code says, and the overall change."""
    found = compared.comparisons
    failing = failing_verdicts(compared)
    failed = [each for each in found if each.gated and each.verdict in failing]
    warned = [each for each in found if each.gated and each.verdict in warning_verdicts(compared) - failing]
    unmeasured = {each.id for each in found if each.base_status is not None}
    fails = exit_code(compared) != PASSED or bool(context.over_budget)
    state: State = "fail" if fails else "warning" if warned or unmeasured else "pass"
    reasons = list(
        filter(None, [_count_tests(failed if fails else warned, len({each.id for each in found}))])
    )
    unsure = [each for each in found if each.gated and each.verdict == "inconclusive"]
    if unsure and compared.inconclusive != "pass":
        more = "more rounds" if context.pairs is None else "more pairs"
        reasons.append(suggest_remedy(unsure, more, in_turn=context.pairs is not None))
    if context.over_budget:
        reasons.append(f"{len(context.over_budget)} over budget")
    if unmeasured:
        reasons.append(f"{count_tests(len(unmeasured))} failed or skipped in the baseline")
    with_metric = [each for each in found if each.verdict != "no value"]
    if with_metric and all(each.verdict == "new" and each.gated for each in with_metric):
        new = len({each.id for each in found})
        reasons.append(f"no baseline: {count_tests(new, 'new ')}")
    elif not any(each.rule_applied for each in found):
        reasons.append("nothing was compared")
    elif fails and not reasons:
        reasons.append("no gate could be checked")
    overall = _describe_overall(found)
    text = ", ".join([state, *reasons]) + (f"{'; ' if reasons else ', '}{overall}" if overall else "")
    subject = "Time" if found and all(each.unit == "s" for each in found) else "Energy"
    return f"### {STATE_SIGNS[state]} {subject}{_job(context)}: {text}"


def _count_tests(found: Sequence[Comparison], count: int) -> str:
    """Return text such as ``1 of 48 tests regressed (+4.6%), 2 invalid``."""
    texts: list[str] = []
    for verdict in VERDICTS:
        named = [each for each in found if each.verdict == verdict]
        if not named:
            continue
        number = str(len({each.id for each in named}))
        number += "" if texts else f" of {count} test{'' if count == 1 else 's'}"
        worst = max(named, key=worsening)
        # A second level hardly moves the estimate, which is that of all rounds.
        floor = worst.rule.floor if worst.rule is not None else 0.0
        known = verdict in ("regressed", "worse") and worsening(worst) > 1 + floor
        most = f" ({'up to ' if len(named) > 1 else ''}{format_change(worst)})" if known else ""
        texts.append(f"{number} {verdict}{most}")
    return ", ".join(texts)


def _describe_overall(comparisons: Sequence[Comparison]) -> str:
    overall = overall_changes(comparisons)
    texts = [
        f"{escape_markdown(metric) + ' ' if len(overall) > 1 else ''}{format_ratio(mean)} over {count} "
        f"test{'' if count == 1 else 's'}"
        for metric, (mean, count) in list(overall.items())[:MAX_TITLE_METRICS]
    ]
    return ", ".join(texts) + (", …" if len(overall) > MAX_TITLE_METRICS else "")


def _job(context: CommentContext) -> str:
    return f" ({escape_markdown(context.job)})" if context.job else ""


def _links(context: CommentContext) -> str:
    links = {"HTML report and JSON": context.report_url, "CI run": context.run_url}
    return " · ".join(f"[{text}]({url})" for text, url in links.items() if ADDRESS.fullmatch(url))


def render_comment(
    compared: ComparedReports, context: CommentContext = NO_CONTEXT, max_bytes: int = MAX_COMMENT_BYTES
) -> str:
    """Render the comment in at most ``max_bytes``; the least urgent rows that do not fit are only counted."""
    groups = {state: [each for each in compared.comparisons if each.verdict == state] for state in VERDICTS}
    head = _head(compared, context)
    foot = _foot(compared)
    # The head counts tests that have no such metric.
    urgent = [
        each
        for each in sort_by_verdict(compared.comparisons)
        if each.verdict not in ("unchanged", "no value")
    ]
    names = unique_short_ids(each.id for each in compared.comparisons)
    with_metric = names_metrics(compared.comparisons)
    rows = [(each.verdict, _row(each, names[each.id], with_metric=with_metric)) for each in urgent]
    unchanged = [
        (each.verdict, _row(each, names[each.id], with_metric=with_metric)) for each in groups["unchanged"]
    ]
    room = max_bytes - line_size(head) - line_size(foot) - 2000
    kept, room = _fitting(rows, room)
    kept_unchanged, _ = _fitting(unchanged, room)
    parts = [head]
    if kept:
        parts += ["", *TABLE_HEADER, *kept]
    if kept_unchanged:
        parts += [
            "",
            f"<details><summary>{len(unchanged)} unchanged</summary>",
            "",
            *TABLE_HEADER,
            *kept_unchanged,
            "",
            "</details>",
        ]
    omitted = Counter(state for state, _ in rows[len(kept) :])
    omitted += Counter(state for state, _ in unchanged[len(kept_unchanged) :])
    if omitted:
        counts = ", ".join(f"{omitted[state]} {state}" for state in VERDICTS if omitted[state])
        parts += ["", f"Cut to fit into a comment: {counts}. All of them are in the JSON."]
    return "\n".join([*parts, "", foot]) + "\n"


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


def _head(compared: ComparedReports, context: CommentContext) -> str:
    shown = [escape_markdown(line) for line in compared.devices[:3]]
    shown += [f"{len(compared.devices) - 3} more devices"] if len(compared.devices) > 3 else []
    about = [f"{_side(compared.head)} against {_side(compared.base)}", *shown]
    about += [_describe_pairs(context.pairs)] if context.pairs is not None else []
    about += filter(None, [describe_noise(compared.comparisons), describe_detectable(compared.comparisons)])
    lines = [context.marker, render_title(compared, context), f"{count_verdicts(compared.comparisons)}  "]
    lines += filter(None, [" · ".join(about), f"\n{_links(context)}" if _links(context) else ""])
    over = ", ".join(f"<code>{escape_markdown(each)}</code>" for each in context.over_budget[:MAX_NOTES])
    lines += [f"\n**over budget on the head:** {over}"] if over else []
    notes = [*list_void_gates(compared.comparisons), *compared.notes]
    lines += [f"\n**{escape_markdown(note, MAX_REASON_LENGTH)}**" for note in notes[:MAX_NOTES]]
    if len(notes) > MAX_NOTES:
        lines.append(f"\n**and {len(notes) - MAX_NOTES} more notes, in the JSON**")
    return "\n".join(lines)


def _describe_pairs(stages: str) -> str:
    counts = re.findall(r"\d{1,9}", stages)
    return f"{'up to ' if len(counts) > 1 else ''}{sum(map(int, counts))} pairs"


def _side(side: ReportSource) -> str:
    if side.commit is None:
        # Marked as code, since a dash or a number at the beginning of a line would start a list.
        return f"<code>{escape_markdown(side.origin)}</code>"
    return f"<code>{escape_markdown(side.commit[:10])}</code>{' (with changes)' if side.dirty else ''}"


def _row(comparison: Comparison, short_id: str, *, with_metric: bool) -> str:
    sign = f"{SIGNS[comparison.verdict]} {comparison.verdict}"
    reason = comparison.reason if needs_reason(comparison) else ""
    metric = f" {escape_markdown(comparison.metric)}" if with_metric else ""
    name = f"<code>{escape_markdown(short_id)}</code>{metric}"
    if comparison.verdict == "removed":
        return f"| {sign} | <del>{name}</del>{' | -' * len(COLUMNS)} |"
    for note in filter(None, [reason, *comparison.notes]):
        name += f"<br>{escape_markdown(note, MAX_REASON_LENGTH)}"
    cells = {each.head: escape_markdown(each.cell(comparison)) for each in COLUMNS}
    if comparison.verdict in ("regressed", "worse", "improved") and comparison.ratio is not None:
        cells["change"] = f"**{cells['change']}**"
    return f"| {' | '.join([sign, name, *cells.values()])} |"


def _foot(compared: ComparedReports) -> str:
    rules = dict.fromkeys(
        (each.metric, _rule(each.rule)) for each in compared.comparisons if each.rule is not None
    )
    text = "; ".join(f"{escape_markdown(metric)}: {rule}" for metric, rule in rules)
    if not text:
        return "No rule was applied."
    fails, warns = (
        ", ".join(each for each in VERDICTS if each in verdicts)
        for verdicts in (failing_verdicts(compared), warning_verdicts(compared))
    )
    return (
        f"Fails: {fails}; warns: {warns}. Regressed: {text}. In rows with a change, base is a median of "
        "rounds and head is base times the estimated change; the title has the geometric mean of the changes."
    )


def _rule(rule: AppliedRule) -> str:
    absolute = f" and {rule.threshold_absolute:g}" if rule.threshold_absolute else ""
    threshold, floor = f"{rule.threshold * 100:.3g}%", f"{rule.floor * 100:.3g}%"
    return f"the estimate is about {threshold}{absolute} worse or more and the lower limit is above {floor}"


def _fitting(rows: Sequence[tuple[Verdict, str]], room: int) -> tuple[list[str], int]:
    """Return the first rows that fit into ``room`` bytes, and the bytes that remain."""
    kept: list[str] = []
    for _, row in rows:
        room -= line_size(row)
        if room < 0:
            break
        kept.append(row)
    return kept, max(room, 0)


def line_size(text: str) -> int:
    """Return the bytes of a line with its end."""
    return len(text.encode()) + 1
