# SPDX-License-Identifier: Apache-2.0
"""Notes on the table of a run: estimates, fallbacks, flags and the legend, the most important first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_llenergy.record.base import EnergyKind
from pytest_llenergy.record.record import Flag, MeterInfo, Record, domain_kind, flag_kind
from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.columns import scales_differ

#: Style of a line about a flag, by severity.
SEVERITY_STYLES = {"warning": "yellow", "invalid": "red"}

#: Flags in the order in which their notes are shown; others follow in the order of the tests.
FIRST_FLAGS = ("saturated", "uneven-rounds")


def list_notes(
    metered: Sequence[Record],
    flags: Sequence[tuple[str, str]],
    further: Sequence[str] = (),
    *,
    absolute: bool = False,
) -> list[tuple[str, str]]:
    """Return severity and text of all notes on a table, the most important first, each once.

    Args:
        metered: Records with meters.
        flags: Severity and text of flags, from ``summary_flags``.
        further: Notes on the run.
        absolute: Whether the uncertainties that are shown include the accuracy of the meters anyway.
    """
    invalid = [each for each in flags if each[0] == "invalid"]
    warnings = [each for each in flags if each[0] == "warning"]
    first = [each for each in warnings if each[1].startswith(tuple(f"{name}:" for name in FIRST_FLAGS))]
    found = [
        *invalid,
        *(("note", text) for text in meter_notes(metered, absolute=absolute)),
        *(("note", text) for text in _fallback_notes(metered)),
        *first,
        *(("warning", text) for text in further),
        *warnings,
        *(each for each in flags if each[0] == "note"),
    ]
    return list(dict.fromkeys(found))


def meter_notes(records: Sequence[Record], *, absolute: bool = False) -> list[str]:
    """Return a note for each meter: what it measures, and how far all of its values may be off together."""
    found: dict[tuple[str, EnergyKind], list[tuple[Record, MeterInfo]]] = {}
    for record in records:
        for meter in record.meters:
            found.setdefault((meter.name, meter.kind), []).append((record, meter))
    differ = not absolute and scales_differ(records)
    notes = ["u includes the accuracy of the meters, as rows had different devices or meters"] * differ
    for (name, kind), pairs in found.items():
        domains = " and ".join(dict.fromkeys(domain_kind(meter.domain) for _, meter in pairs))
        how = f"{domains} energy {kind} by {name}"
        if kind == "estimated":
            how = "energy estimated (see llenergy doctor)"
        metrics = [metric for record, _ in pairs if (metric := record.metrics.get("energy_j")) is not None]
        # Rows may show more than the error that they share.
        exceeds = any(
            (each.uncertainty_absolute or 0.0) > 1.5 * (each.uncertainty or 0.0) for each in metrics
        )
        if not absolute and not differ and (exceeds or not metrics):
            how += f"; all rows share one error of scale ({pairs[0][1].accuracy.partition(';')[0]})"
        notes.append(one_line(f"{how}: {pairs[0][1].source}" if kind == "estimated" else how))
    return notes


def _fallback_notes(records: Sequence[Record]) -> list[str]:
    """Return a note that counts the tests that ran on another device than they asked for."""
    counts = Counter(record.fallback for record in records if record.fallback is not None)
    return [
        f"fallback: {count} test{'s' * (count > 1)} ran on the {one_line(device).upper()} instead of GPUs"
        for device, count in counts.items()
    ]


def summary_flags(records: Sequence[Record], labels: Mapping[str, str]) -> list[tuple[str, str]]:
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
