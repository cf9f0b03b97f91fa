# SPDX-License-Identifier: Apache-2.0
"""Notes on the table of a run: estimates, fallbacks, flags and the legend, the most important first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_llenergy.record.base import EnergyKind, Status
from pytest_llenergy.record.record import Flag, MeterInfo, Metric, Record, domain_kind, flag_kind
from pytest_llenergy.record.text import one_line, shorten
from pytest_llenergy.report.columns import scales_differ
from pytest_llenergy.report.names import name_some, record_labels

#: Most characters of a reason.
MAX_LENGTH = 300

#: Flags whose notes come first.
FIRST_FLAGS = ("saturated:", "uneven-rounds:")


def list_notes(records: Sequence[Record], further: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return severity and text of all notes on a table, the most important first, each once.

    Args:
        records: The records of the table.
        further: Notes on the run.
    """
    metered = [record for record in records if record.meters]
    flags = _flag_notes(metered)
    warnings = [each for each in flags if each[0] == "warning"]
    found = [
        *(each for each in flags if each[0] == "invalid"),
        *(("note", text) for text in _meter_notes(metered)),
        *(("note", text) for text in _fallback_notes(metered)),
        *(each for each in warnings if each[1].startswith(FIRST_FLAGS)),
        *(("warning", text) for text in further),
        *warnings,
    ]
    return list(dict.fromkeys(found))


def list_missing(records: Sequence[Record]) -> list[tuple[Status, str, str]]:
    """Return status, tests and reason of tests without a result, except for windows without energy."""
    alike: dict[tuple[Status, str], list[str]] = {}
    for record in records:
        if record.status != "measured" and record.reason not in [window.reason for window in record.windows]:
            alike.setdefault((record.status, one_line(record.reason or "")), []).append(record.id)
    return [(status, name_some(ids), shorten(reason, MAX_LENGTH)) for (status, reason), ids in alike.items()]


def _meter_notes(records: Sequence[Record]) -> list[str]:
    """Return a note for each meter: what it measures, and how far all of its values may be off together."""
    found: dict[tuple[str, EnergyKind], list[tuple[Metric | None, MeterInfo]]] = {}
    for record in records:
        for meter in record.meters:
            found.setdefault((meter.name, meter.kind), []).append((record.metrics.get("energy_j"), meter))
    differ = scales_differ(records)
    notes = ["u includes the accuracy of the meters, as rows had different devices or meters"] * differ
    for (name, kind), pairs in found.items():
        first = pairs[0][1]
        domains = " and ".join(dict.fromkeys(domain_kind(meter.domain) for _, meter in pairs))
        how = "energy estimated (see llenergy doctor)"
        how = how if kind == "estimated" else f"{domains} energy {kind} by {name}"
        # Rows may show more than the error that they share.
        metrics = [metric for metric, _ in pairs if metric is not None]
        if not differ and (not metrics or any(map(_shares_error, metrics))):
            how += f"; all rows share one error of scale ({first.accuracy.partition(';')[0]})"
        notes.append(one_line(f"{how}: {first.source}" if kind == "estimated" else how))
    return notes


def _shares_error(metric: Metric) -> bool:
    return (metric.uncertainty_absolute or 0.0) > 1.5 * (metric.uncertainty or 0.0)


def _fallback_notes(records: Sequence[Record]) -> list[str]:
    """Return a note that counts the tests that ran on another device than they asked for."""
    counts = Counter(record.fallback for record in records if record.fallback is not None)
    return [
        f"fallback: {count} test{'s' * (count > 1)} ran on the {one_line(device).upper()} instead of GPUs"
        for device, count in counts.items()
    ]


def _flag_notes(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return severity and text of each important flag. The text names one test and counts the others."""
    flagged: dict[tuple[str, str, str], list[tuple[Record, Flag]]] = {}
    for record in records:
        of_windows = [flag for window in record.windows for flag in window.flags]
        # The line of a window without joules says why.
        flags = [*record.flags, *(flag for flag in of_windows if flag.name != "unmeasured")]
        found: dict[tuple[str, str, str], Flag] = {}
        for flag in flags:
            if flag.severity != "note":
                found.setdefault(flag_kind(flag), flag)
        for kind, flag in found.items():
            flagged.setdefault(kind, []).append((record, flag))
    labels = record_labels(records)
    lines: list[tuple[str, str]] = []
    for (name, *_), pairs in flagged.items():
        (record, flag), *others = pairs
        tests = labels[record.id]
        if any(other.detail != flag.detail for _, other in others):
            tests = f"{len(pairs)} tests, such as {tests}"
        elif others:
            tests += f" and {len(others)} more"
        lines.append((flag.severity, one_line(f"{name}: {tests}: {flag.detail}")))
    return lines
