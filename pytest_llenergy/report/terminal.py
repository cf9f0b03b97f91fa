# SPDX-License-Identifier: Apache-2.0
"""The table that a person reads, 80 columns wide if need be."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from pytest_llenergy.model.record import Flag, Record, Window
from pytest_llenergy.model.text import cut, one_line, trimmed
from pytest_llenergy.report.columns import rounded
from pytest_llenergy.report.grid import Strip, grids
from pytest_llenergy.report.layout import PLAIN, Layout
from pytest_llenergy.report.names import MOST_NAME, functions, short
from pytest_llenergy.report.rounds import STYLES, details

#: Parameters that have a column of their own.
OWN_COLUMN = frozenset({"backend"})

#: A parameter with a longer text than this is shown as pytest names it.
LONG = 40


def render(
    records: Sequence[Record],
    width: int,
    *,
    color: bool,
    layout: Layout = PLAIN,
    verbosity: int = 0,
) -> str:
    """Measured tests as a table, the others as lines with their reasons.

    With a ``verbosity`` of 1 the rounds of each test follow, with 2 their flags and uncertainty terms too.
    """
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
    )
    named = functions(record.id for record in records)
    tabled = [record for record in records if has_figures(record)]
    groups, columns = layout.groups(tabled), layout.shown(tabled)
    for title, group in groups.items():
        if title:
            console.print(Text(cut(title, MOST_NAME), style="bold"))
        tests = Strip("test", [name_of(record, named) for record in group], is_number=False)
        strips = [Strip(each.head, list(map(each.cell, group)), each.is_number) for each in columns]
        for table in grids(tests, strips, width):
            console.print(table)
    for record in [record for group in groups.values() for record in group] if verbosity > 0 else ():
        for part in details(record, name_of(record, named), width, with_terms=verbosity > 1):
            console.print(part)
    for record in records:
        for window in record.windows:
            console.print(Text(f"{short(record.id)} · {one_line(window.name)}: {joules_of(window, record)}"))
    for line in [
        *_without_result(records),
        *_skipped(records),
        *_notes([record for record in records if record.meters], named),
    ]:
        console.print(line)
    return trimmed(stream.getvalue())


def has_figures(record: Record) -> bool:
    """Whether there is anything to show of it in a table."""
    return any(metric.value is not None for metric in record.metrics.values())


def name_of(record: Record, named: Mapping[str, str]) -> str:
    """Function, as ``named`` by id, and parameters, without what has a column of its own."""
    test, ids = named[record.id], record.id.partition("[")[2]
    if any(isinstance(value, str) and len(value) > LONG for value in record.params.values()):
        # Objects are known by the ids that the suite gives them.
        return cut(one_line(f"{test} {ids.removesuffix(']')}"), MOST_NAME)
    own = {name: value for name, value in record.params.items() if name not in OWN_COLUMN}
    params = [f"{name}={value}" for name, value in own.items()]
    if len(record.ranks) > 1:
        params.append(f"ranks={len(record.ranks)}")
    return cut(one_line(f"{test} {' '.join(params)}"), MOST_NAME)


def joules_of(window: Window, record: Record) -> str:
    """``12.50 ± 0.50 J in 1 s``, or why there are none."""
    if window.energy_j is None:
        return f"no joules: {window.reason}"
    label = " estimated" if record.kind == "estimated" else ""
    joules = rounded(window.energy_j, window.energy_u_absolute_j)
    return f"{joules} J{label} in {window.duration_s:.3g} s"


def _without_result(records: Sequence[Record]) -> list[Text]:
    """One line for each state and reason. Failures have been told by pytest already."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.status in ("invalid", "crashed"):
            alike.setdefault((record.status.upper(), one_line(record.reason or "")), []).append(record)
    lines = []
    for (status, reason), (first, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(Text(f"{status} {short(first.id)}{more}: {reason}", style="red"))
    return lines


def _skipped(records: Sequence[Record]) -> list[Text]:
    """One line a reason."""
    reasons = Counter(record.reason for record in records if record.status == "skipped")
    return [Text(one_line(f"skipped {count}: {reason}")) for reason, count in reasons.items()]


def _notes(records: Sequence[Record], named: Mapping[str, str]) -> list[Text]:
    flagged = [Text(told, style=STYLES.get(severity, "")) for severity, told in flags(records, named)]
    return [*map(Text, notes(records)), *flagged]


def notes(records: Sequence[Record]) -> list[str]:
    """What holds for all figures."""
    told: list[str] = []
    estimated = next((record for record in records if record.kind == "estimated"), None)
    if estimated is not None:
        meter = estimated.meters[0]
        told.append(f"estimated, not measured: {meter.source}; {meter.accuracy}. No memory, no GPU.")
    if records:
        told.append("u: standard uncertainty (k=1), accuracy of the source included")
    return told


def flags(records: Sequence[Record], named: Mapping[str, str]) -> list[tuple[str, str]]:
    """Severity and a line for each flag that a reader must heed: the first test that has it, and how many."""
    first: dict[str, tuple[Record, Flag]] = {}
    count: Counter[str] = Counter()
    for record in records:
        own = [*record.flags, *(flag for window in record.windows for flag in window.flags)]
        for flag in {flag.name: flag for flag in reversed(own) if _heeded(flag)}.values():
            first.setdefault(flag.name, (record, flag))
            count[flag.name] += 1
    lines: list[tuple[str, str]] = []
    for name, (record, flag) in first.items():
        more = f" and {count[name] - 1} more" if count[name] > 1 else ""
        told = one_line(f"{name}: {name_of(record, named)}{more}: {flag.detail}")
        lines.append((flag.severity, told))
    return lines


def _heeded(flag: Flag) -> bool:
    return flag.severity != "note" or flag.name == "unread-meter"
