# SPDX-License-Identifier: Apache-2.0
"""Format comparisons for every output, and render them in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from pytest_llenergy.record.comparison import ESSENTIAL_NOTES, VERDICTS, ComparedReports, Comparison, Verdict
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.quantity import format_number, format_pair, shown_unit
from pytest_llenergy.record.text import one_line, shorten
from pytest_llenergy.report.names import list_names, name_some
from pytest_llenergy.report.text_tables import Column, Screen, Table

VERDICT_STYLES: dict[Verdict, str] = {
    "regressed": "bold red",
    "not comparable": "red",
    "invalid": "red",
    "worse": "yellow",
    "inconclusive": "yellow",
    "improved": "green",
}

#: Verdicts that need no attention.
GREEN_VERDICTS: frozenset[Verdict] = frozenset({"improved", "unchanged", "new", "no value"})

#: If there are more rows, unchanged tests are only counted.
MAX_UNFILTERED_ROWS = 40

#: Further lines about the same verdict are only counted, and longer ones cut.
MAX_LINES, MAX_LENGTH = 10, 500

LEGEND = (
    "head: base times the estimated change",
    "detectable: smallest change found 9 times in 10; noise: scatter within a side",
)

#: Relative changes above this say nothing but that they are large: an absolute threshold is far above the
#: values, or their uncertainty is.
LARGE = 10.0


def render_verdicts(comparisons: Sequence[Comparison], width: int, *, color: bool) -> str:
    """Render comparisons as a table, most urgent first, then reasons and notes as lines, then counts."""
    screen = Screen(width, color=color)
    compared = [each for each in sort_by_verdict(comparisons) if each.rule_applied]
    shown = compared
    if len(compared) > MAX_UNFILTERED_ROWS:
        shown = [each for each in compared if each.verdict != "unchanged"]
    if shown:
        names = list_names([each.id for each in shown])
        if names_metrics(comparisons):
            names = [one_line(f"{name}: {each.metric}") for name, each in zip(names, shown, strict=True)]
        columns = [Column[Comparison]("verdict", lambda each: each.verdict, is_number=False)]
        columns += [each for each in COLUMNS if each.head not in NOT_IN_TERMINAL]
        styles = [VERDICT_STYLES.get(each.verdict, "") for each in shown]
        screen.table(Table("test", names, columns, shown, styles=styles))
    for verdict in VERDICTS:
        lines = explain_verdicts([each for each in comparisons if each.verdict == verdict], texts_of)
        for parts in lines[:MAX_LINES]:
            screen.line(": ".join(parts), VERDICT_STYLES.get(verdict, ""))
        if len(lines) > MAX_LINES:
            screen.line(f"{verdict}: {len(lines) - MAX_LINES} more")
    screen.line(summarize_verdicts(comparisons))
    if any(each.ratio is not None for each in compared):
        for line in filter(None, [*LEGEND, describe_sessions(comparisons)]):
            screen.line(line)
    return screen.text


def list_problems(comparisons: Sequence[Comparison], origin: str) -> list[str]:
    """Return a line for each reason of verdicts that are not green, and a count, for quiet runs."""
    lines = list(map(": ".join, explain_problems(comparisons)))
    more = [f"{len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return [*lines[:MAX_LINES], *more, f"compared with {origin}: {count_verdicts(comparisons)}"]


def explain_problems(comparisons: Sequence[Comparison]) -> list[tuple[Verdict, str, str]]:
    """Return verdict, tests and reason of the verdicts that need attention."""
    bad = [each for each in comparisons if each.verdict not in GREEN_VERDICTS or each.base_status is not None]
    return explain_verdicts(sort_by_verdict(bad), lambda each: [each.reason or format_change(each.ratio)])


def explain_verdicts(
    comparisons: Sequence[Comparison], texts_of: Callable[[Comparison], Sequence[str]]
) -> list[tuple[Verdict, str, str]]:
    """Return verdict, tests and text of each text that comparisons have, with its metrics."""
    alike: dict[tuple[Verdict, str], list[Comparison]] = {}
    for each in comparisons:
        if texts := list(filter(None, texts_of(each))):
            alike.setdefault((each.verdict, "; ".join(texts)), []).append(each)
    with_metric = names_metrics(comparisons)
    lines = []
    for (verdict, text), found in alike.items():
        metrics = ", ".join(dict.fromkeys(each.metric for each in found))
        about = shorten(one_line(f"{metrics}: {text}" if with_metric else text), MAX_LENGTH)
        lines.append((verdict, name_some([each.id for each in found]), about))
    return lines


def texts_of(comparison: Comparison) -> list[str]:
    """Return what the figures of a comparison do not say: its reason and notes."""
    notes = comparison.notes
    if comparison.verdict == "unchanged":
        notes = [each for each in notes if each.startswith(ESSENTIAL_NOTES)]
    return [*([comparison.reason] if needs_reason(comparison) else []), *notes]


def needs_reason(comparison: Comparison) -> bool:
    """Return whether the figures of a comparison do not explain its verdict."""
    undecided = not comparison.rule_applied or comparison.verdict == "inconclusive"
    return undecided or (comparison.ratio is None and comparison.verdict != "unchanged")


def names_metrics(comparisons: Sequence[Comparison]) -> bool:
    """Whether lines name their metric: a test is compared in several, or in one that is not built in."""
    seen: dict[str, str] = {}
    return any(
        each.metric not in ROUND_METRICS or seen.setdefault(each.id, each.metric) != each.metric
        for each in comparisons
    )


def sort_by_verdict(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Sort by urgency, and within a verdict keep the order of the tests, metrics of one side by side."""
    places = {name: place for place, name in enumerate(dict.fromkeys(each.id for each in comparisons))}
    return sorted(comparisons, key=lambda each: (VERDICTS.index(each.verdict), places[each.id]))


def count_verdicts(comparisons: Sequence[Comparison]) -> str:
    """Return text such as ``1 regressed, 46 unchanged``."""
    counts = Counter(each.verdict for each in comparisons)
    return ", ".join(f"{counts[each]} {each}" for each in VERDICTS if counts[each]) or "nothing to compare"


def summarize_verdicts(comparisons: Sequence[Comparison]) -> str:
    """Return text such as ``1 regressed, 46 unchanged; noise 0.6% median, 3.4% at most``."""
    return "; ".join(filter(None, (count_verdicts(comparisons), describe_noise(comparisons))))


def describe_noise(comparisons: Sequence[Comparison]) -> str:
    """Describe how much rounds of one side scatter; return an empty string if nothing was compared."""
    noises = [each.noise for each in comparisons if each.noise is not None]
    return f"noise {median(noises):.1%} median, {max(noises):.1%} at most" if noises else ""


def describe_sessions(comparisons: Sequence[Comparison]) -> str:
    """Say what the limits allow for if the baseline is stored; return an empty string if it is not."""
    spreads = [each.session_spread for each in comparisons if each.session_spread is not None]
    if not spreads:
        return ""
    low, high = f"{min(spreads):.1%}", f"{max(spreads):.1%}"
    size = low if low == high else f"{low} to {high}"
    return f"limits allow for {size} between sessions; llenergy ab finds smaller changes"


def failing_verdicts(compared: ComparedReports) -> set[Verdict]:
    """Return the verdicts of gated tests that fail a comparison."""
    verdicts: set[Verdict] = {"regressed", "not comparable", "invalid"}
    if compared.inconclusive == "fail":
        return verdicts | {"inconclusive", "removed"}
    # Without any comparison, a test that is missing is no detail.
    return verdicts if any(each.rule_applied for each in compared.comparisons) else verdicts | {"removed"}


def warning_verdicts(compared: ComparedReports) -> set[Verdict]:
    """Return the verdicts of gated tests that are a warning."""
    verdicts: set[Verdict] = {"worse"}
    return verdicts | ({"inconclusive", "removed"} if compared.inconclusive == "warn" else set())


def worsening(comparison: Comparison) -> float:
    """Return the ratio in the direction that is worse: above 1 if the head is worse."""
    ratio = comparison.ratio or 1.0
    return ratio if comparison.better == "less" else 1 / ratio


def format_change(ratio: float | None) -> str:
    """Format head over base as a relative change, such as ``+4.6%``, or ``-``."""
    return "-" if ratio is None else f"{ratio - 1:+.1%}"


def format_limits(comparison: Comparison) -> str:
    """Format the limits of the change, such as ``+3.1% … +6.0%``, or ``-``."""
    if comparison.low is None or comparison.high is None:
        return "-"
    return f"{comparison.low - 1:+.1%} … {comparison.high - 1:+.1%}"


def format_value(number: float | None, unit: str = "") -> str:
    """Format a number with four significant digits and its unit, or return ``-``."""
    return "-" if number is None else f"{format_number(number, 4)} {shown_unit(unit)}".rstrip()


def format_sides(comparison: Comparison) -> tuple[str, str]:
    """Format base and head in one step; the head is the base times the estimated change."""
    return format_pair(comparison.base, comparison.estimated_head, one_line(comparison.unit))


def _format_size(change: float | None) -> str:
    """Format a relative change without sign, such as ``4.6%``; large ones as ``>1000%``."""
    if change is None:
        return "-"
    return f"{change:.1%}" if change <= LARGE else f">{LARGE:.0%}"


def _format_rounds(comparison: Comparison) -> str:
    """Format the numbers of rounds whose values were compared, such as ``6 + 6``, or ``-``."""
    counts = comparison.n_base, comparison.n_head
    return f"{counts[0]} + {counts[1]}" if comparison.rule_applied and any(counts) else "-"


def _format_speeds(comparison: Comparison) -> str:
    """Format tokens per second, such as ``60 → 30 (-50.0%)``, or ``-``."""
    base, head = comparison.base_tokens_per_s, comparison.head_tokens_per_s
    if base is None or head is None:
        return "-"
    return f"{base:.4g} → {head:.4g}" + (f" ({format_change(head / base)})" if base > 0 else "")


def _format_kind(comparison: Comparison) -> str:
    return comparison.kind if comparison.kind is not None and comparison.kind_label else "-"


#: Figures of a comparison, in the order of every table.
COLUMNS: tuple[Column[Comparison], ...] = (
    Column("base", lambda each: format_sides(each)[0]),
    Column("head", lambda each: format_sides(each)[1]),
    Column("change", lambda each: format_change(each.ratio)),
    Column("limits", format_limits),
    Column("noise", lambda each: _format_size(each.noise)),
    Column("detectable", lambda each: _format_size(each.detectable)),
    Column("tokens/s", _format_speeds),
    Column("rounds", _format_rounds),
    Column("kind", _format_kind, is_number=False),
)

#: Columns that a terminal and a comment have no room for.
NOT_IN_TERMINAL, NOT_IN_COMMENT = ("noise", "tokens/s", "rounds", "kind"), ("noise", "detectable")
