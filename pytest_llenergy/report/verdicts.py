# SPDX-License-Identifier: Apache-2.0
"""Render comparisons in the terminal, and format their values for every output."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from rich.console import Console
from rich.text import Text

from pytest_llenergy.record.comparison import ESSENTIAL_NOTES, VERDICTS, ComparedReports, Comparison, Verdict
from pytest_llenergy.record.metrics import ROUND_METRICS
from pytest_llenergy.record.quantity import format_number, format_pair, shown_unit
from pytest_llenergy.record.text import (
    MAX_NAME_LENGTH,
    one_line,
    short_test_name,
    shorten,
    strip_trailing_space,
    unique_function_names,
)
from pytest_llenergy.report.text_tables import INDENT, TableColumn, plain_text, tables_with_whole_names

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

LEGEND = (
    "head: base times the estimated change",
    "detectable: smallest change found 9 times in 10; noise: scatter within a side",
)

#: Relative changes above this say nothing but that they are large: an absolute threshold is far above the
#: values, or their uncertainty is.
LARGE = 10.0

#: Further tests with the same verdict are only counted.
MAX_BLOCKS = 10


def render_verdicts(comparisons: Sequence[Comparison], width: int, *, color: bool) -> str:
    """Render comparisons as a table, most urgent first, then reasons and notes as lines, then counts.

    Args:
        comparisons: The comparisons.
        width: Width of the terminal in characters.
        color: Whether to colour the text.
    """
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False)
    with_metric = names_metrics(comparisons)
    compared = [each for each in sort_by_verdict(comparisons) if each.rule_applied]
    shown = compared
    if len(compared) > MAX_UNFILTERED_ROWS:
        shown = [each for each in compared if each.verdict != "unchanged"]
    if shown:
        for table in tables_with_whole_names(
            _first_column(shown, with_metric=with_metric), _columns(shown), width
        ):
            console.print(table)
    for state in VERDICTS:
        explained = [each for each in comparisons if each.verdict == state]
        if state == "unchanged":
            explained = [each for each in explained if any(map(_is_essential, each.notes))]
        if state in ("regressed", "worse", "improved"):
            explained = [each for each in explained if each.notes or needs_reason(each)]
        blocks = _explain_tests(explained, with_metric=with_metric, brief=False)
        for block in blocks[:MAX_BLOCKS]:
            console.print(_wrap_block(block, VERDICT_STYLES.get(state, ""), console))
        if len(blocks) > MAX_BLOCKS:
            console.print(f"{state}: {len(blocks) - MAX_BLOCKS} more", markup=False)
    console.print(summarize_verdicts(comparisons), markup=False)
    if any(each.ratio is not None for each in compared):
        console.print("\n".join(filter(None, [*LEGEND, describe_sessions(comparisons)])), markup=False)
    return strip_trailing_space(stream.getvalue())


def list_problems(comparisons: Sequence[Comparison], origin: str) -> list[str]:
    """Return a block of lines for each test whose verdict is not green, and a count, for quiet runs."""
    bad = [
        each
        for each in sort_by_verdict(comparisons)
        if each.verdict not in GREEN_VERDICTS or each.base_status is not None
    ]
    with_metric = names_metrics(comparisons)
    blocks = _explain_tests(bad, with_metric=with_metric, brief=True)
    lines = [
        " " * INDENT * (place > 0) + line for each in blocks[:MAX_BLOCKS] for place, line in enumerate(each)
    ]
    if len(blocks) > MAX_BLOCKS:
        lines.append(f"{len(blocks) - MAX_BLOCKS} more")
    return [*lines, f"compared with {origin}: {count_verdicts(comparisons)}"]


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
    if not noises:
        return ""
    return f"noise {median(noises):.1%} median, {max(noises):.1%} at most"


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


def describe_detectable(comparisons: Sequence[Comparison]) -> str:
    """Describe which changes could have been found; return an empty string if nothing was compared."""
    found = [each.detectable for each in comparisons if each.detectable is not None]
    if not found:
        return ""
    return f"finds changes from {format_size(median(found))} (median test), {format_size(max(found))} (worst)"


def needs_reason(comparison: Comparison) -> bool:
    """Return whether the figures of a comparison do not explain its verdict."""
    undecided = not comparison.rule_applied or comparison.verdict == "inconclusive"
    return undecided or (comparison.ratio is None and comparison.verdict != "unchanged")


def format_size(change: float) -> str:
    """Format a relative change without sign, such as ``4.6%``; large ones as ``>1000%``."""
    return f"{change:.1%}" if change <= LARGE else f">{LARGE:.0%}"


def overall_changes(comparisons: Sequence[Comparison]) -> dict[str, tuple[float, int]]:
    """Return the geometric mean of the ratios and their number, by metric."""
    logs: dict[str, list[float]] = {}
    for each in comparisons:
        if each.rule_applied and each.ratio is not None and each.ratio > 0:
            logs.setdefault(each.metric, []).append(math.log(each.ratio))
    return {metric: (math.exp(fmean(found)), len(found)) for metric, found in logs.items()}


def describe_sessions(comparisons: Sequence[Comparison]) -> str:
    """Say what the limits allow for if the baseline is stored; return an empty string if it is not."""
    spreads = [each.session_spread for each in comparisons if each.session_spread is not None]
    if not spreads:
        return ""
    low, high = f"{min(spreads):.1%}", f"{max(spreads):.1%}"
    size = low if low == high else f"{low} to {high}"
    return f"limits allow for {size} between sessions; llenergy ab finds smaller changes"


def format_change(comparison: Comparison) -> str:
    """Format the relative change, such as ``+4.6%``, or ``-``."""
    return format_ratio(comparison.ratio)


def format_ratio(ratio: float | None) -> str:
    """Format head over base as a relative change, or ``-``."""
    return "-" if ratio is None else f"{ratio - 1:+.1%}"


def format_interval(comparison: Comparison) -> str:
    """Format the limits of the change, such as ``+3.1% … +6.0%``, or ``-``."""
    if comparison.low is None or comparison.high is None:
        return "-"
    return f"{comparison.low - 1:+.1%} … {comparison.high - 1:+.1%}"


def format_change_and_limits(comparison: Comparison) -> str:
    """Format the relative change with its limits if it has any: ``+4.6% (+3.1% … +6.0%)``."""
    limits = format_interval(comparison)
    return format_change(comparison) + (f" ({limits})" if limits != "-" else "")


def format_rounds(comparison: Comparison) -> str:
    """Format the numbers of rounds whose values were compared, such as ``6 + 6``, or ``-``."""
    counts = comparison.n_base, comparison.n_head
    return f"{counts[0]} + {counts[1]}" if comparison.rule_applied and any(counts) else "-"


def format_value(number: float | None, unit: str = "") -> str:
    """Format a number with four significant digits and its unit, or return ``-``."""
    return "-" if number is None else f"{format_number(number, 4)} {shown_unit(unit)}".rstrip()


def format_sides(comparison: Comparison) -> tuple[str, str]:
    """Format base and head in one step; the head is the base times the estimated change."""
    return format_pair(comparison.base, comparison.estimated_head, one_line(comparison.unit))


def _format_speeds(comparison: Comparison) -> str:
    """Format tokens per second, such as ``60 → 30 (-50.0%)``, or ``-``."""
    base, head = comparison.base_tokens_per_s, comparison.head_tokens_per_s
    if base is None or head is None:
        return "-"
    return f"{base:.4g} → {head:.4g}" + (f" ({head / base - 1:+.1%})" if base > 0 else "")


Output = Literal["terminal", "comment", "page"]


@dataclass(frozen=True)
class VerdictColumn:
    """A column of figures in the tables of comparisons, and the outputs that have it."""

    head: str
    cell: Callable[[Comparison], str]
    outputs: tuple[Output, ...] = ("terminal", "comment", "page")


#: In the order of every table, after the verdict and the test.
COLUMNS = (
    VerdictColumn("base", lambda each: format_sides(each)[0]),
    VerdictColumn("head", lambda each: format_sides(each)[1], ("terminal",)),
    VerdictColumn("head", lambda each: format_sides(each)[1] + each.kind_label, ("comment", "page")),
    VerdictColumn("change", format_change),
    VerdictColumn("limits", format_interval),
    VerdictColumn("noise", lambda each: "-" if each.noise is None else f"{each.noise:.1%}", ("page",)),
    VerdictColumn(
        "detectable",
        lambda each: "-" if each.detectable is None else format_size(each.detectable),
        ("terminal", "page"),
    ),
    VerdictColumn("tokens/s", _format_speeds, ("comment", "page")),
    VerdictColumn("rounds", format_rounds, ("comment", "page")),
)


def columns_of(output: Output) -> list[VerdictColumn]:
    """Return the columns of figures of an output."""
    return [each for each in COLUMNS if output in each.outputs]


def name_column(ids: Sequence[str]) -> TableColumn:
    """Return the first column of a table: the short name of each test, with its parameters."""
    named = unique_function_names(ids)
    return TableColumn("test", [_test(each, named[each]) for each in ids], is_number=False)


def _first_column(comparisons: Sequence[Comparison], *, with_metric: bool) -> TableColumn:
    names = name_column([each.id for each in comparisons])
    if not with_metric:
        return names
    cells = [f"{cell}: {each.metric}" for cell, each in zip(names.cells, comparisons, strict=True)]
    return TableColumn("test: metric", list(map(one_line, cells)), is_number=False)


def _columns(comparisons: Sequence[Comparison]) -> list[TableColumn]:
    verdicts = [each.verdict for each in comparisons]
    styles = [VERDICT_STYLES.get(verdict, "") for verdict in verdicts]
    figures = [TableColumn(each.head, list(map(each.cell, comparisons))) for each in columns_of("terminal")]
    return [TableColumn("verdict", verdicts, is_number=False, styles=styles), *figures]


def _test(name: str, function: str) -> str:
    _, bracket, params = name.partition("[")
    return shorten(one_line(f"{function}{bracket}{params}"), MAX_NAME_LENGTH)


def _is_essential(note: str) -> bool:
    return note.startswith(ESSENTIAL_NOTES)


def _explain_tests(comparisons: Sequence[Comparison], *, with_metric: bool, brief: bool) -> list[list[str]]:
    """Return a block of lines for each verdict of a test: each reason and note once, with its metrics.

    Tests that have no value of a metric share a block.

    Args:
        comparisons: The comparisons.
        with_metric: Whether to name the metrics.
        brief: Whether to leave out notes but give the reason of every verdict.
    """
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        subject = each.metric if each.verdict == "no value" else each.id
        groups.setdefault((each.verdict, subject), []).append(each)
    blocks = []
    for (verdict, _), found in groups.items():
        others = len({each.id for each in found}) - 1
        head = f"{verdict}: {short_test_name(found[0].id)}" + (f" and {others} more" if others else "")
        metrics = _names(found)
        texts = _by_metrics(found, brief=brief or verdict == "no value")
        if len(texts) < 2:
            block = [": ".join([head, *([metrics] if with_metric else []), *texts.values()])]
        else:
            block = [
                head,
                *(text if names == metrics else f"{names}: {text}" for names, text in texts.items()),
            ]
        blocks.append(list(map(one_line, block)))
    return blocks


def _by_metrics(comparisons: Sequence[Comparison], *, brief: bool) -> dict[str, str]:
    """Return reasons, and notes unless ``brief``, by the names of the metrics that have them."""
    said: dict[str, list[Comparison]] = {}
    for each in comparisons:
        if brief or needs_reason(each):
            said.setdefault(each.reason, []).append(each)
    for each in [] if brief else comparisons:
        for note in each.notes:
            said.setdefault(note, []).append(each)
    texts: dict[str, list[str]] = {}
    for text, found in said.items():
        if text:
            texts.setdefault(_names(found), []).append(text)
    return {names: "; ".join(each) for names, each in texts.items()}


def _names(comparisons: Sequence[Comparison]) -> str:
    return ", ".join(dict.fromkeys(each.metric for each in comparisons))


def _wrap_block(block: Sequence[str], style: str, console: Console) -> Text:
    """Wrap the lines of a block at the width of the console, with all but the first indented."""
    width = max(console.width - 2 * INDENT, INDENT)
    lines: list[Text] = []
    for place, line in enumerate(block):
        depth = min(place, 1)
        first, *rest = plain_text(line, style=style).wrap(console, width)
        lines += [Text(" " * INDENT * depth) + first]
        lines += [Text(" " * INDENT * (depth + 1)) + each for each in rest]
    return Text("\n").join(lines)
