# SPDX-License-Identifier: Apache-2.0
"""Render a comparison as the comment of a pull request, in Markdown.

Names and reasons come from the tested code, so they are escaped and limited in length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pytest_llenergy.model.comparison import (
    VERDICTS,
    AppliedRule,
    ComparedReports,
    Comparison,
    ReportSource,
    Verdict,
)
from pytest_llenergy.model.text import one_line, shorten, unique_short_ids
from pytest_llenergy.report.verdicts import (
    count_verdicts,
    describe_noise,
    format_change,
    format_interval,
    format_value,
    sort_by_verdict,
)

#: First line of the comment, by which a later run finds and replaces it.
MARKER = "<!-- llenergy:compare -->"

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
}

#: Characters that mean nothing in Markdown, in HTML or to GitHub. Addresses and links are escaped separately.
SAFE_CHARACTER = re.compile(r"[^\W_]|[ ,;=:./…%+'()\[\]-]|(?<=[^\W_])_(?=[^\W_])")

#: Text that GitHub turns into a link although it has no scheme.
WWW_ADDRESS = re.compile(r"(www)\.", re.IGNORECASE)

#: ``@`` and ``#``, which start a mention or a reference on GitHub even as character references.
MENTION_OR_REFERENCE = re.compile(r"(&#(?:64|35);)")

TABLE_HEADER = (
    "| | benchmark | base | head | change | limits | tokens/s | rounds |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


def render_comment(compared: ComparedReports, max_bytes: int = MAX_COMMENT_BYTES) -> str:
    """Render the comment in at most ``max_bytes``; the least urgent rows that do not fit are only counted."""
    groups = {state: [each for each in compared.comparisons if each.verdict == state] for state in VERDICTS}
    head = _head(compared)
    foot = _foot(compared)
    urgent = [each for each in sort_by_verdict(compared.comparisons) if each.verdict != "unchanged"]
    names = unique_short_ids(each.id for each in compared.comparisons)
    rows = [(each.verdict, _row(each, names[each.id])) for each in urgent]
    unchanged = [(each.verdict, _row(each, names[each.id])) for each in groups["unchanged"]]
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


def _head(compared: ComparedReports) -> str:
    shown = [escape_markdown(line) for line in compared.devices[:3]]
    shown += [f"{len(compared.devices) - 3} more devices"] if len(compared.devices) > 3 else []
    about = [f"{_side(compared.head)} against {_side(compared.base)}", *shown]
    noise = describe_noise(compared.comparisons)
    about += [noise] if noise else []
    lines = [MARKER, f"### Energy: {count_verdicts(compared.comparisons)}", " · ".join(about)]
    lines += [f"\n**{escape_markdown(note, MAX_REASON_LENGTH)}**" for note in compared.notes[:MAX_NOTES]]
    if len(compared.notes) > MAX_NOTES:
        lines.append(f"\n**and {len(compared.notes) - MAX_NOTES} more notes, in the JSON**")
    return "\n".join(lines)


def _side(side: ReportSource) -> str:
    if side.commit is None:
        # Marked as code, since a dash or a number at the beginning of a line would start a list.
        return f"<code>{escape_markdown(side.origin)}</code>"
    return f"<code>{escape_markdown(side.commit[:10])}</code>{' (with changes)' if side.dirty else ''}"


def _row(comparison: Comparison, short_id: str) -> str:
    sign = f"{SIGNS[comparison.verdict]} {comparison.verdict}"
    reason = comparison.reason if not comparison.rule_applied or comparison.verdict == "inconclusive" else ""
    name = f"<code>{escape_markdown(short_id)}</code>"
    for note in filter(None, [reason, *comparison.notes]):
        name += f"<br>{escape_markdown(note, MAX_REASON_LENGTH)}"
    unit = escape_markdown(comparison.unit)
    change = format_change(comparison)
    if comparison.verdict in ("regressed", "improved"):
        change = f"**{change}**"
    cells = (
        sign,
        name,
        format_value(comparison.base, unit),
        format_value(comparison.head, unit) + comparison.kind_label,
        change,
        format_interval(comparison),
        _throughput(comparison),
        f"{comparison.n_base} + {comparison.n_head}" if comparison.rule_applied else "-",
    )
    return f"| {' | '.join(cells)} |"


def _throughput(comparison: Comparison) -> str:
    base, head = comparison.base_tokens_per_s, comparison.head_tokens_per_s
    if base is None or head is None:
        return "-"
    change = f" ({head / base - 1:+.1%})" if base > 0 else ""
    return f"{base:.4g} → {head:.4g}{change}"


def _foot(compared: ComparedReports) -> str:
    rules = dict.fromkeys(
        (each.metric, _rule(each.rule)) for each in compared.comparisons if each.rule is not None
    )
    text = "; ".join(f"{escape_markdown(metric)}: {rule}" for metric, rule in rules)
    return f"Regressed: {text}. Values are medians of rounds." if text else "No rule was applied."


def _rule(rule: AppliedRule) -> str:
    absolute = f" and {rule.threshold_absolute:g}" if rule.threshold_absolute else ""
    threshold, floor = f"{rule.threshold * 100:.3g}%", f"{rule.floor * 100:.3g}%"
    return f"the estimate is at least {threshold}{absolute} worse and the lower limit is above {floor}"


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
