# SPDX-License-Identifier: Apache-2.0
"""The table that a person reads, 80 columns wide if need be."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_llenergy.model.record import Flag, Metric, Record, Window
from pytest_llenergy.model.text import cut, one_line
from pytest_llenergy.report.verdicts import MOST_NAME, short

#: Parameters that have a column of their own.
OWN_COLUMN = frozenset({"backend"})

#: A parameter with a longer text than this is shown as pytest names it.
LONG = 40

#: Places behind the point from which on a power of ten is written.
MOST_PLACES = 5


def render(records: Sequence[Record], width: int, *, color: bool) -> str:
    """Measured tests as a table, the others as lines with their reasons."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color, highlight=False)
    shown = [
        record for record in records if any(metric.value is not None for metric in record.metrics.values())
    ]
    if shown:
        console.print(_table(shown))
    for record in records:
        for window in record.windows:
            console.print(f"{short(record.id)} · {window.name}: {_window(window, record)}", markup=False)
        # Failures have been told by pytest already.
        if record.status in ("invalid", "crashed"):
            console.print(f"{record.status.upper()} {short(record.id)}: {record.reason}", markup=False)
    for line in [*_skipped(records), *_notes([record for record in records if record.meters])]:
        console.print(line, markup=False)
    return stream.getvalue().rstrip("\n")


def _table(records: Sequence[Record]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("test", overflow="fold", ratio=1)
    table.add_column("backend", no_wrap=True)
    for name in ("J ± u", "J/token ± u", "token/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("meter", no_wrap=True)
    for record in records:
        table.add_row(
            Text(_name(record)),
            Text(one_line(record.backend.name) if record.backend else "-"),
            _with_uncertainty(record.metrics.get("energy_j")),
            _with_uncertainty(record.metrics.get("energy_per_output_token_j")),
            _value(record.metrics.get("output_tokens_per_s")),
            Text(one_line(_meter(record))),
        )
    return table


def _name(record: Record) -> str:
    path, _, ids = record.id.partition("[")
    test = path.rpartition("::")[2]
    if any(isinstance(value, str) and len(value) > LONG for value in record.params.values()):
        # Objects are known by the ids that the suite gives them.
        return cut(one_line(f"{test} {ids.removesuffix(']')}"), MOST_NAME)
    own = {name: value for name, value in record.params.items() if name not in OWN_COLUMN}
    params = [f"{name}={value}" for name, value in own.items()]
    if len(record.ranks) > 1:
        params.append(f"ranks={len(record.ranks)}")
    return cut(one_line(f"{test} {' '.join(params)}"), MOST_NAME)


def _window(window: Window, record: Record) -> str:
    if window.energy_j is None:
        return f"no joules: {window.reason}"
    label = " estimated" if record.kind == "estimated" else ""
    joules = rounded(window.energy_j, window.energy_u_absolute_j)
    return f"{joules} J{label} in {window.duration_s:.3g} s"


def _value(metric: Metric | None) -> str:
    return f"{metric.value:.3g}" if metric is not None and metric.value is not None else "-"


def _with_uncertainty(metric: Metric | None) -> str:
    if metric is None or metric.value is None:
        return "-"
    return rounded(metric.value, metric.uncertainty_absolute)


def rounded(value: float, u: float | None) -> str:
    """Value and standard uncertainty, to the place of the latter's second digit."""
    if not u or not math.isfinite(u):
        return f"{value:.3g}"
    places = max(0, 1 - math.floor(math.log10(u)))
    if places > MOST_PLACES:
        # Microjoules are not told by a row of zeros.
        power = math.floor(math.log10(max(abs(value), u)))
        places = max(0, places + power)
        return f"({value / 10**power:.{places}f} ± {u / 10**power:.{places}f})e{power}"
    return f"{value:.{places}f} ± {u:.{places}f}"


def _meter(record: Record) -> str:
    names = ",".join(dict.fromkeys(meter.name for meter in record.meters)) or "none"
    if record.kind == "estimated":
        return "estimated"
    return names


def _skipped(records: Sequence[Record]) -> list[str]:
    """One line a reason."""
    reasons = Counter(record.reason for record in records if record.status == "skipped")
    return [f"skipped {count}: {reason}" for reason, count in reasons.items()]


def _notes(records: Sequence[Record]) -> list[str]:
    notes: list[str] = []
    estimated = next((record for record in records if record.kind == "estimated"), None)
    if estimated is not None:
        meter = estimated.meters[0]
        notes.append(f"estimated, not measured: {meter.source}; {meter.accuracy}. No memory, no GPU.")
    if records:
        notes.append("u: standard uncertainty (k=1), accuracy of the source included")
    return notes + _flags(records)


def _flags(records: Sequence[Record]) -> list[str]:
    """One line for each flag that a reader must heed: the first test that has it, and how many more do."""
    first: dict[str, tuple[Record, Flag]] = {}
    count: Counter[str] = Counter()
    for record in records:
        flags = [*record.flags, *(flag for window in record.windows for flag in window.flags)]
        for flag in {flag.name: flag for flag in reversed(flags) if _heeded(flag)}.values():
            first.setdefault(flag.name, (record, flag))
            count[flag.name] += 1
    return [
        f"{name}: {_name(record)}{f' and {count[name] - 1} more' if count[name] > 1 else ''}: {flag.detail}"
        for name, (record, flag) in first.items()
    ]


def _heeded(flag: Flag) -> bool:
    return flag.severity != "note" or flag.name == "unread-meter"
