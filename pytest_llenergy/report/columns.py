# SPDX-License-Identifier: Apache-2.0
"""Columns of the summary: their headings and cells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_llenergy.record.metrics import BUILT_IN, is_prefill_only
from pytest_llenergy.record.quantity import format_number, format_quantity
from pytest_llenergy.record.record import Precision, Record, WindowRecord, domain_kind
from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.text_tables import Column

#: End of the heading of a column whose cells have the uncertainty.
WITH_U = "± u"

#: What ``main_columns`` shows.
MAIN = (
    *("energy_j", "energy_per_output_token_j", "energy_per_input_token_j"),
    *("output_tokens_per_s", "duration_s"),
)

#: What a backend does not report.
UNKNOWN = "?"


def backend_name(record: Record) -> str:
    """Return the name of the backend, or ``-``."""
    return one_line(record.backend.name) if record.backend else "-"


def model_name(record: Record) -> str:
    """Return the name of the model, or ``-``."""
    return one_line(record.backend.model) if record.backend else "-"


def device_names(record: Record) -> str:
    """Return the devices, such as ``NVIDIA H200 x 2``, ``cpu`` or ``cpu (fallback)``."""
    kinds = [board.name for board in record.boards] or record.devices
    counts = {kind: kinds.count(kind) for kind in kinds}
    names = [kind if count == 1 else f"{kind} x {count}" for kind, count in counts.items()]
    return one_line(", ".join(names)) + (" (fallback)" if record.fallback else "") or "-"


def number_types(record: Record) -> str:
    """Return all number types: ``f32`` if all are, or ``q4_1+q8_0 bf16 kv-u8``; ``?`` is not reported."""
    if record.backend is None:
        return "-"
    known = record.backend.precision or Precision()
    weights, compute, cache = (
        _shorten_types(each) or UNKNOWN for each in (known.weights, known.compute, known.kv_cache)
    )
    words = [weights]
    if compute != weights:
        words.append(compute)
    if cache != compute:
        words.append(f"kv-{cache}")
    return one_line(" ".join(words))


def _shorten_types(types: str | None) -> str:
    """Shorten names of types: ``bf16`` for ``bfloat16``."""
    names = re.sub(r"(bf|f|u|)(?:loat|int)(?=\d)", lambda found: found[1] or "i", types or "")
    return names.replace(", ", "+")


def meter_names(record: Record) -> str:
    """Return the names of the meters, ``estimated`` or ``none``; ``rapl (attributed)`` on a busy host."""
    if record.kind == "estimated":
        return "estimated"
    names = ",".join(dict.fromkeys(meter.name for meter in record.meters)) or "none"
    return one_line(f"{names} (attributed)" if record.kind == "attributed" else names)


def scales_differ(records: Sequence[Record]) -> bool:
    """Whether tests were measured on different devices or by different meters, whose errors differ."""
    scales = (
        (
            frozenset(board.name for board in record.boards),
            frozenset((meter.name, domain_kind(meter.domain)) for meter in record.meters),
            record.kind,
        )
        for record in records
        if record.meters and (record.windows or record.value_of("energy_j") is not None)
    )
    return len(set(scales)) > 1


#: Columns of facts by their names in ``--energy-columns``.
FACTS: Mapping[str, Column[Record]] = {
    "backend": Column("backend", backend_name, is_number=False),
    "model": Column("model", model_name, is_number=False),
    "device": Column("device", device_names, is_number=False),
    "meter": Column("meter", meter_names, is_number=False),
    "rounds": Column("rounds", lambda record: str(len(record.rounds) or "-")),
    "types": Column("types", number_types, is_number=False),
}


def column_of(name: str, *, absolute: bool = False) -> Column[Record]:
    """Return a column by its name in ``--energy-columns``, built in or of a custom metric.

    With ``absolute``, uncertainties include what all tests on the same devices have in common.
    """
    if name in FACTS:
        return FACTS[name]
    heading = (BUILT_IN[name].heading or name) if name in BUILT_IN else None

    def cell(record: Record) -> str:
        metric = record.metrics.get(name)
        if metric is None or metric.value is None:
            return "-"
        if name == "peak_memory_bytes":
            return f"{metric.value / 2**20:.0f}"
        if heading is not None and not heading.endswith(WITH_U):
            return format_number(metric.value)
        # The heading of a built-in metric says per what.
        unit = metric.unit if heading is None else "J" if metric.unit.startswith("J") else ""
        u = metric.uncertainty_absolute if absolute else metric.uncertainty
        return format_quantity(metric.value, u, one_line(unit))

    return Column(heading or one_line(name), cell)


#: Built-in columns by their names in ``--energy-columns``.
COLUMNS: Mapping[str, Column[Record]] = {**FACTS, **{name: column_of(name) for name in BUILT_IN}}


def main_columns(records: Sequence[Record], *, absolute: bool) -> list[Column[Record]]:
    """Return the columns that every table has: energy, energy per token, and tokens per second or seconds.

    Energy per output token of work that only reads its input would be that of its whole prompt: it has the
    energy per input token in its place. Units in the cells tell what the heading does not.
    """
    energy, output, read, rate, seconds = (column_of(name, absolute=absolute) for name in MAIN)

    def per_token(record: Record) -> str:
        if not is_prefill_only(record.rounds):
            return output.cell(record)
        cell = read.cell(record)
        return cell if cell == "-" else f"{cell}/in"

    def speed(record: Record) -> str:
        cell, time = "-" if is_prefill_only(record.rounds) else rate.cell(record), seconds.cell(record)
        return f"{time} s" if cell == "-" != time else cell

    has_rate = any(rate.cell(each) != "-" for each in records if not is_prefill_only(each.rounds))
    return [energy, Column(output.head, per_token), Column(rate.head, speed) if has_rate else seconds]


def format_window_energy(window: WindowRecord, *, absolute: bool) -> str:
    """Return text such as ``12.50 ± 0.50 J in 1 s``, or the reason for missing energy."""
    if window.energy_j is None:
        return f"no joules: {window.reason}"
    kinds = {part.kind for part in window.by_domain.values()}
    label = "".join(f", joules {kind}" for kind in ("attributed", "estimated") if kind in kinds)
    u_j = window.energy_u_absolute_j if absolute else window.energy_u_j
    joules = format_quantity(window.energy_j, u_j, "J")
    return f"{joules} in {window.duration_s:.3g} s{label}"
