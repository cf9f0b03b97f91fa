# SPDX-License-Identifier: Apache-2.0
"""A comparison as the comment of a pull request, in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pytest_llenergy.model.comparison import VERDICTS, AppliedRule, ComparedReports, Comparison, Side, Verdict
from pytest_llenergy.model.text import one_line, shorten, unique_short_ids
from pytest_llenergy.report.verdicts import (
    describe_noise,
    format_change,
    format_interval,
    format_value,
    sort_by_verdict,
)

#: By this a later run finds the comment that it replaces.
MARKER = "<!-- llenergy:compare -->"

#: GitHub refuses comments of more than 65,536 characters; counted in bytes there is room left.
MAX_COMMENT_BYTES = 65_000

#: What is kept of a name, and of a reason.
MAX_NAME_LENGTH, MAX_REASON_LENGTH = 160, 300

#: Notes above the table.
MAX_NOTES = 10

SIGNS: dict[Verdict, str] = {
    "regressed": "🔴",
    "not comparable": "⛔",
    "invalid": "⛔",
    "inconclusive": "🟡",
    "improved": "🟢",
    "new": "🆕",
    "removed": "➖",
    "unchanged": "⚪",
}

#: What means nothing in Markdown, HTML, or to GitHub; addresses and links are looked at apart.
SAFE_CHARACTER = re.compile(r"[^\W_]|[ ,;=:./…%+'()\[\]-]|(?<=[^\W_])_(?=[^\W_])")

#: What GitHub makes a link of without a scheme.
WWW_ADDRESS = re.compile(r"(www)\.", re.IGNORECASE)

#: What GitHub makes a mention or a reference of, even where it is written as a character reference.
MENTION_OR_REFERENCE = re.compile(r"(&#(?:64|35);)")


def render_comment(compared: ComparedReports, most_bytes: int = MAX_COMMENT_BYTES) -> str:
    """The comment. What is cut to make it fit is named in its last lines, the least important first."""
    groups = {state: [each for each in compared.comparisons if each.verdict == state] for state in VERDICTS}
    head = _head(compared)
    foot = _foot(compared)
    loud = [each for each in sort_by_verdict(compared.comparisons) if each.verdict != "unchanged"]
    names = unique_short_ids(each.id for each in compared.comparisons)
    rows = [(each.verdict, _row(each, names[each.id])) for each in loud]
    quiet = [(each.verdict, _row(each, names[each.id])) for each in groups["unchanged"]]
    room = most_bytes - _size(head) - _size(foot) - 2000
    kept, room = _fitting(rows, room)
    kept_quiet, _ = _fitting(quiet, room)
    parts = [head]
    if kept:
        parts += ["", *TABLE_HEADER, *kept]
    if kept_quiet:
        parts += [
            "",
            f"<details><summary>{len(quiet)} unchanged</summary>",
            "",
            *TABLE_HEADER,
            *kept_quiet,
            "",
            "</details>",
        ]
    cut = Counter(state for state, _ in rows[len(kept) :])
    cut += Counter(state for state, _ in quiet[len(kept_quiet) :])
    if cut:
        named = ", ".join(f"{cut[state]} {state}" for state in VERDICTS if cut[state])
        parts += ["", f"Cut to fit into a comment: {named}. All of them are in the JSON."]
    return "\n".join([*parts, "", foot]) + "\n"


TABLE_HEADER = (
    "| | benchmark | base | head | change | limits | tokens/s | rounds |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


def escape_markdown(text: str, most: int = MAX_NAME_LENGTH) -> str:
    """Text that shows as it is, wherever it stands in Markdown: on one line, nothing in it means anything.

    What Markdown, HTML or GitHub could read is written as a character reference, and what cannot be seen,
    such as marks that turn the direction of writing, as its escape.
    """
    line = shorten(one_line(text), most)
    referred = "".join(
        each if SAFE_CHARACTER.match(line, place) else f"&#{ord(each)};" for place, each in enumerate(line)
    )
    # Neither an address nor a link.
    unlinked = WWW_ADDRESS.sub(r"\1&#46;", referred.replace("://", "&#58;//").replace("](", "]&#40;"))
    return MENTION_OR_REFERENCE.sub(r"\1&#8203;", unlinked)


def _head(compared: ComparedReports) -> str:
    counts = Counter(each.verdict for each in compared.comparisons)
    told = (
        ", ".join(f"{counts[state]} {state}" for state in VERDICTS if counts[state]) or "nothing to compare"
    )
    shown = [escape_markdown(line) for line in compared.devices[:3]]
    shown += [f"{len(compared.devices) - 3} more devices"] if len(compared.devices) > 3 else []
    about = [f"{_side(compared.head)} against {_side(compared.base)}", *shown]
    noise = describe_noise(compared.comparisons)
    about += [noise] if noise else []
    lines = [MARKER, f"### Energy: {told}", " · ".join(about)]
    lines += [f"\n**{escape_markdown(note, MAX_REASON_LENGTH)}**" for note in compared.notes[:MAX_NOTES]]
    if len(compared.notes) > MAX_NOTES:
        lines.append(f"\n**and {len(compared.notes) - MAX_NOTES} more notes, in the JSON**")
    return "\n".join(lines)


def _side(side: Side) -> str:
    if side.commit is None:
        # At the beginning of a line, where a dash or a number would mean something.
        return f"<code>{escape_markdown(side.origin)}</code>"
    return f"<code>{escape_markdown(side.commit[:10])}</code>{' (with changes)' if side.dirty else ''}"


def _row(comparison: Comparison, shown: str) -> str:
    sign = f"{SIGNS[comparison.verdict]} {comparison.verdict}"
    told = comparison.reason if not comparison.rule_applied or comparison.verdict == "inconclusive" else ""
    name = f"<code>{escape_markdown(shown)}</code>"
    for note in filter(None, [told, *comparison.notes]):
        name += f"<br>{escape_markdown(note, MAX_REASON_LENGTH)}"
    unit = escape_markdown(comparison.unit)
    moved = format_change(comparison)
    if comparison.verdict in ("regressed", "improved"):
        moved = f"**{moved}**"
    estimated = " (estimated)" if comparison.kind == "estimated" else ""
    cells = (
        sign,
        name,
        format_value(comparison.base, unit),
        format_value(comparison.head, unit) + estimated,
        moved,
        format_interval(comparison),
        _throughput(comparison),
        f"{comparison.n_base} + {comparison.n_head}" if comparison.rule_applied else "-",
    )
    return f"| {' | '.join(cells)} |"


def _throughput(comparison: Comparison) -> str:
    base, head = comparison.base_tokens_per_s, comparison.head_tokens_per_s
    if base is None or head is None:
        return "-"
    moved = f" ({head / base - 1:+.1%})" if base > 0 else ""
    return f"{base:.4g} → {head:.4g}{moved}"


def _foot(compared: ComparedReports) -> str:
    rules = dict.fromkeys(
        (each.metric, _rule(each.rule)) for each in compared.comparisons if each.rule is not None
    )
    told = "; ".join(f"{escape_markdown(metric)}: {rule}" for metric, rule in rules)
    return f"Regressed: {told}. Values are medians of rounds." if told else "No rule was applied."


def _rule(rule: AppliedRule) -> str:
    absolute = f" and by {rule.threshold_absolute:g}" if rule.threshold_absolute else ""
    threshold, floor = f"{rule.threshold * 100:.3g}%", f"{rule.floor * 100:.3g}%"
    return f"worse by {threshold}{absolute} or more, and surely by more than {floor}"


def _fitting(rows: Sequence[tuple[Verdict, str]], room: int) -> tuple[list[str], int]:
    """As many of the first rows as there is room for, and what is left of it."""
    kept: list[str] = []
    for _, row in rows:
        room -= _size(row)
        if room < 0:
            break
        kept.append(row)
    return kept, max(room, 0)


def _size(text: str) -> int:
    return len(text.encode()) + 1
