# SPDX-License-Identifier: Apache-2.0
"""A comparison as the comment of a pull request, in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pytest_llenergy.model.comparison import STATES, AppliedRule, ComparedReports, Comparison, Side, State
from pytest_llenergy.model.text import cut, one_line, told_apart
from pytest_llenergy.report.verdicts import change, in_order, interval, noise_line, value

#: By this a later run finds the comment that it replaces.
MARKER = "<!-- llenergy:compare -->"

#: GitHub refuses comments of more than 65,536 characters; counted in bytes there is room left.
MOST_BYTES = 65_000

#: What is kept of a name, and of a reason.
MOST_NAME, MOST_REASON = 160, 300

#: Notes above the table.
MOST_NOTES = 10

SIGNS: dict[State, str] = {
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
PLAIN = re.compile(r"[^\W_]|[ ,;=:./…%+'()\[\]-]|(?<=[^\W_])_(?=[^\W_])")

#: What GitHub makes a link of without a scheme.
WWW = re.compile(r"(www)\.", re.IGNORECASE)

#: What GitHub makes a mention or a reference of, even where it is written as a character reference.
CALLING = re.compile(r"(&#(?:64|35);)")


def render_comment(compared: ComparedReports, most_bytes: int = MOST_BYTES) -> str:
    """The comment. What is cut to make it fit is named in its last lines, the least important first."""
    groups = {state: [each for each in compared.comparisons if each.verdict == state] for state in STATES}
    head = _head(compared)
    foot = _foot(compared)
    loud = [each for each in in_order(compared.comparisons) if each.verdict != "unchanged"]
    names = told_apart(each.id for each in compared.comparisons)
    rows = [(each.verdict, _row(each, names[each.id])) for each in loud]
    quiet = [(each.verdict, _row(each, names[each.id])) for each in groups["unchanged"]]
    room = most_bytes - _size(head) - _size(foot) - 2000
    kept, room = _fitting(rows, room)
    kept_quiet, _ = _fitting(quiet, room)
    parts = [head]
    if kept:
        parts += ["", *TABLE, *kept]
    if kept_quiet:
        parts += [
            "",
            f"<details><summary>{len(quiet)} unchanged</summary>",
            "",
            *TABLE,
            *kept_quiet,
            "",
            "</details>",
        ]
    cut = Counter(state for state, _ in rows[len(kept) :])
    cut += Counter(state for state, _ in quiet[len(kept_quiet) :])
    if cut:
        named = ", ".join(f"{cut[state]} {state}" for state in STATES if cut[state])
        parts += ["", f"Cut to fit into a comment: {named}. All of them are in the JSON."]
    return "\n".join([*parts, "", foot]) + "\n"


TABLE = (
    "| | benchmark | base | head | change | limits | tokens/s | rounds |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


def plain(text: str, most: int = MOST_NAME) -> str:
    """Text that shows as it is, wherever it stands in Markdown: on one line, nothing in it means anything.

    What Markdown, HTML or GitHub could read is written as a character reference, and what cannot be seen,
    such as marks that turn the direction of writing, as its escape.
    """
    line = cut(one_line(text), most)
    referred = "".join(
        each if PLAIN.match(line, place) else f"&#{ord(each)};" for place, each in enumerate(line)
    )
    # Neither an address nor a link.
    unlinked = WWW.sub(r"\1&#46;", referred.replace("://", "&#58;//").replace("](", "]&#40;"))
    return CALLING.sub(r"\1&#8203;", unlinked)


def _head(compared: ComparedReports) -> str:
    counts = Counter(each.verdict for each in compared.comparisons)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "nothing to compare"
    shown = [plain(line) for line in compared.devices[:3]]
    shown += [f"{len(compared.devices) - 3} more devices"] if len(compared.devices) > 3 else []
    about = [f"{_side(compared.head)} against {_side(compared.base)}", *shown]
    noise = noise_line(compared.comparisons)
    about += [noise] if noise else []
    lines = [MARKER, f"### Energy: {told}", " · ".join(about)]
    lines += [f"\n**{plain(note, MOST_REASON)}**" for note in compared.notes[:MOST_NOTES]]
    if len(compared.notes) > MOST_NOTES:
        lines.append(f"\n**and {len(compared.notes) - MOST_NOTES} more notes, in the JSON**")
    return "\n".join(lines)


def _side(side: Side) -> str:
    if side.commit is None:
        # At the beginning of a line, where a dash or a number would mean something.
        return f"<code>{plain(side.origin)}</code>"
    return f"<code>{plain(side.commit[:10])}</code>{' (with changes)' if side.dirty else ''}"


def _row(comparison: Comparison, shown: str) -> str:
    sign = f"{SIGNS[comparison.verdict]} {comparison.verdict}"
    told = comparison.reason if not comparison.judged or comparison.verdict == "inconclusive" else ""
    name = f"<code>{plain(shown)}</code>"
    for note in filter(None, [told, *comparison.notes]):
        name += f"<br>{plain(note, MOST_REASON)}"
    unit = plain(comparison.unit)
    moved = change(comparison)
    if comparison.verdict in ("regressed", "improved"):
        moved = f"**{moved}**"
    estimated = " (estimated)" if comparison.kind == "estimated" else ""
    cells = (
        sign,
        name,
        value(comparison.base, unit),
        value(comparison.head, unit) + estimated,
        moved,
        interval(comparison),
        _throughput(comparison),
        f"{comparison.n_base} + {comparison.n_head}" if comparison.judged else "-",
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
    told = "; ".join(f"{plain(metric)}: {rule}" for metric, rule in rules)
    return f"Regressed: {told}. Values are medians of rounds." if told else "No rule was applied."


def _rule(rule: AppliedRule) -> str:
    absolute = f" and by {rule.threshold_absolute:g}" if rule.threshold_absolute else ""
    threshold, floor = f"{rule.threshold * 100:.3g}%", f"{rule.floor * 100:.3g}%"
    return f"worse by {threshold}{absolute} or more, and surely by more than {floor}"


def _fitting(rows: Sequence[tuple[State, str]], room: int) -> tuple[list[str], int]:
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
