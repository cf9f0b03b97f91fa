# SPDX-License-Identifier: Apache-2.0
"""Comparisons as a person reads them in a terminal, 80 columns wide if need be."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from rich.console import Console
from rich.text import Text

from pytest_llenergy.model.comparison import STATES, Comparison, State
from pytest_llenergy.model.text import MOST_NAME, cut, functions, one_line, short, trimmed
from pytest_llenergy.report.terminal import Strip, whole_names

STYLES: dict[State, str] = {
    "regressed": "bold red",
    "not comparable": "red",
    "invalid": "red",
    "inconclusive": "yellow",
    "improved": "green",
}

#: From so many rows on those that are unchanged are only counted.
MANY_ROWS = 40

#: Below the table.
LEGEND = "finds: least change found 9 times in 10; noise: scatter of a side's rounds"

#: Lines for tests of one state, before the rest is only counted.
MANY_LINES = 10


def render_verdicts(comparisons: Sequence[Comparison], width: int, *, color: bool) -> str:
    """Tests that were judged as a table, worst first; a line for each of the others; then how many."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False)
    judged = [each for each in in_order(comparisons) if each.judged]
    shown = judged
    if len(judged) > MANY_ROWS:
        shown = [each for each in judged if each.verdict != "unchanged"]
    if shown:
        for table in whole_names(_tests(shown), _strips(shown), width):
            console.print(table)
    for state in STATES:
        found = [each for each in comparisons if each.verdict == state and state != "unchanged"]
        if state in ("regressed", "improved"):
            found = [each for each in found if each.notes]
        for each in found[:MANY_LINES]:
            console.print(Text(f"{state}: {short(each.id)}: {_told(each)}", style=STYLES.get(state, "")))
        if len(found) > MANY_LINES:
            console.print(f"{state}: {len(found) - MANY_LINES} more", markup=False)
    console.print(summary(comparisons), markup=False)
    if judged:
        console.print(LEGEND, markup=False)
    return trimmed(stream.getvalue())


def in_order(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The worst first; within a state in the order given."""
    return sorted(comparisons, key=lambda each: STATES.index(each.verdict))


def summary(comparisons: Sequence[Comparison]) -> str:
    """``1 regressed, 46 unchanged; noise 0.6% median, 3.4% at most``."""
    counts = Counter(each.verdict for each in comparisons)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "nothing to compare"
    return "; ".join(filter(None, (told, noise_line(comparisons))))


def noise_line(comparisons: Sequence[Comparison]) -> str:
    """How much the rounds of a side scatter; empty where nothing was judged."""
    noises = [each.noise for each in comparisons if each.noise is not None]
    if not noises:
        return ""
    return f"noise {median(noises):.1%} median, {max(noises):.1%} at most"


def change(comparison: Comparison) -> str:
    """``+4.6%``."""
    return "-" if comparison.ratio is None else f"{comparison.ratio - 1:+.1%}"


def interval(comparison: Comparison) -> str:
    """``+3.1% … +6.0%``: where the change lies."""
    if comparison.low is None or comparison.high is None:
        return "-"
    return f"{comparison.low - 1:+.1%} … {comparison.high - 1:+.1%}"


def value(number: float | None, unit: str = "") -> str:
    """Four digits of it, with its unit."""
    return "-" if number is None else f"{number:.4g}{f' {unit}' if unit else ''}"


def _tests(comparisons: Sequence[Comparison]) -> Strip:
    named = functions(each.id for each in comparisons)
    return Strip("test", [_test(each.id, named[each.id]) for each in comparisons], is_number=False)


def _strips(comparisons: Sequence[Comparison]) -> list[Strip]:
    verdicts, styles = (
        [each.verdict for each in comparisons],
        [STYLES.get(each.verdict, "") for each in comparisons],
    )
    cells: dict[str, Callable[[Comparison], str]] = {
        "base": lambda each: value(each.base),
        "head": lambda each: value(each.head, one_line(each.unit)),
        "change": change,
        "limits": interval,
        "finds": lambda each: "-" if each.detectable is None else f"{each.detectable:.1%}",
    }
    figures = [Strip(head, list(map(cell, comparisons))) for head, cell in cells.items()]
    return [Strip("verdict", verdicts, is_number=False, styles=styles), *figures]


def _test(name: str, function: str) -> str:
    _, bracket, params = name.partition("[")
    return cut(one_line(f"{function}{bracket}{params}"), MOST_NAME)


def _told(comparison: Comparison) -> str:
    told = [] if comparison.verdict in ("regressed", "improved") else [comparison.reason]
    return one_line("; ".join([*told, *comparison.notes]))
