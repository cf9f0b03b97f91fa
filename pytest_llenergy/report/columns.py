# SPDX-License-Identifier: Apache-2.0
"""Columns of the summary: their headings and cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_llenergy.record.metrics import BUILT_IN, is_prefill_only
from pytest_llenergy.record.quantity import format_number, format_quantity, format_with_uncertainty
from pytest_llenergy.record.record import BackendInfo, Metric, Precision, Record, WindowRecord, domain_kind
from pytest_llenergy.record.served import SATURATED
from pytest_llenergy.record.text import one_line

#: Headings of metrics.
HEADINGS = {name: figure.heading or name for name, figure in BUILT_IN.items()}

#: End of the heading of a column whose cells have the uncertainty.
WITH_U = "± u"

#: What ``main_columns`` shows.
MAIN = (
    *("energy_j", "energy_per_output_token_j", "energy_per_input_token_j"),
    *("output_tokens_per_s", "duration_s"),
)

#: Weights of integers or blocks of them, whose arithmetic is in another type.
QUANTISED = re.compile(r"[iuq]\w*\d", re.IGNORECASE)


@dataclass(frozen=True)
class Column:
    """A heading, and a function that returns the cell of a record."""

    head: str
    cell: Callable[[Record], str]
    is_number: bool = False


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


#: What a backend does not report.
UNKNOWN = "?"


def short_types(record: Record) -> str:
    """Return the number types that matter most: ``f32`` if all are, or ``q4_1, KV u8``.

    The arithmetic of quantised weights, rarer types and quantised inputs are in ``number_types``.
    """
    if record.backend is None:
        return "-"
    weights, compute, cache, _ = (each.partition("+")[0] for each in _all_types(record.backend))
    words = [weights]
    if compute != weights and not QUANTISED.match(weights):
        words.append(compute)
    if cache not in ("", weights, compute) or (cache == UNKNOWN and compute not in words):
        words.append(f"KV {cache}")
    return one_line(", ".join(words))


def number_types(record: Record) -> str:
    """Return all number types: ``f32`` if all are, or ``q4_1+q8_0 bf16 kv-u8 in-i8``.

    What is not reported is ``?``, also for inputs of products that may be quantised.
    """
    if record.backend is None:
        return "-"
    weights, compute, cache, inputs = _all_types(record.backend)
    words = [weights]
    if compute != weights:
        words.append(compute)
    if cache not in ("", compute):
        words.append(f"kv-{cache}")
    if inputs != "none" and (inputs != UNKNOWN or compute != weights):
        words.append(f"in-{inputs}")
    return one_line(" ".join(words))


def _all_types(backend: BackendInfo) -> tuple[str, str, str, str]:
    """Return the short types of weights, arithmetic, cache (empty without one) and inputs of products."""
    known = backend.precision or Precision()
    # Models that only embed have no cache.
    cache = "" if backend.task == "embed" else UNKNOWN
    return (
        _short_types(known.weights) or UNKNOWN,
        _short_types(known.compute) or UNKNOWN,
        _short_types(known.kv_cache) or cache,
        _short_types(known.activations) or UNKNOWN,
    )


def _short_types(types: str | None) -> str:
    """Shorten names of types: ``bf16`` for ``bfloat16``, ``i8`` for ``int8, groups of 32``."""
    names = re.sub(r"(bf|f|u|)(?:loat|int)(?=\d)", lambda found: found[1] or "i", types or "")
    return names.partition(", groups")[0].replace(", ", "+")


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


def _u(metric: Metric, *, absolute: bool) -> float | None:
    return metric.uncertainty_absolute if absolute else metric.uncertainty


def _metric(name: str, *, with_u: bool, absolute: bool) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        metric = record.metrics.get(name)
        if metric is None or metric.value is None:
            saturated = name.startswith("steady_") and any(flag.name == SATURATED for flag in record.flags)
            return SATURATED if saturated else "-"
        if name == "peak_memory_bytes":
            return f"{metric.value / 2**20:.0f}"
        if not with_u:
            return format_number(metric.value)
        if metric.unit.partition("/")[0] != "J":
            return format_with_uncertainty(metric.value, _u(metric, absolute=absolute))
        # The heading says per what.
        return format_quantity(metric.value, _u(metric, absolute=absolute), "J")

    return cell


#: Columns of facts by their names in ``--energy-columns``.
FACTS: Mapping[str, Column] = {
    "backend": Column("backend", backend_name),
    "model": Column("model", model_name),
    "device": Column("device", device_names),
    "meter": Column("meter", meter_names),
    "rounds": Column("rounds", lambda record: str(len(record.rounds) or "-"), is_number=True),
    "types": Column("types", short_types),
}


def column_of(name: str, *, absolute: bool = False) -> Column:
    """Return a column, built in or of a custom metric.

    Args:
        name: Its name in ``--energy-columns``.
        absolute: Whether uncertainties include what all tests on the same devices have in common.
    """
    if name in FACTS:
        return FACTS[name]
    if name not in HEADINGS:
        return Column(one_line(name), _custom_metric(name, absolute=absolute), is_number=True)
    heading = HEADINGS[name]
    return Column(heading, _metric(name, with_u=heading.endswith(WITH_U), absolute=absolute), is_number=True)


#: Built-in columns by their names in ``--energy-columns``.
COLUMNS: Mapping[str, Column] = {**FACTS, **{name: column_of(name) for name in HEADINGS}}


def main_columns(records: Sequence[Record], *, absolute: bool) -> list[Column]:
    """Return the columns that every table has: energy, energy per token, and tokens per second or seconds.

    Energy per output token of work that only reads its input would be that of its whole prompt: it has the
    energy per input token in its place. Units in the cells tell what the heading does not.
    """
    energy, output, read, rate, seconds = (column_of(name, absolute=absolute) for name in MAIN)
    writing = [record for record in records if not is_prefill_only(record.rounds)]
    per_output = any(output.cell(record) != "-" for record in writing)
    has_rate = any(rate.cell(record) != "-" for record in writing)

    def per_token(record: Record) -> str:
        if not is_prefill_only(record.rounds):
            return output.cell(record)
        cell = read.cell(record)
        return f"{cell}/in" if per_output and cell != "-" else cell

    def speed(record: Record) -> str:
        cell = "-" if is_prefill_only(record.rounds) else rate.cell(record)
        time = seconds.cell(record)
        return f"{time} s" if cell == "-" != time else cell

    return [
        energy,
        Column(output.head if per_output else read.head, per_token, is_number=True),
        Column(rate.head, speed, is_number=True) if has_rate else seconds,
    ]


def _custom_metric(name: str, *, absolute: bool) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        metric = record.metrics.get(name)
        if metric is None or metric.value is None:
            return "-"
        return format_quantity(metric.value, _u(metric, absolute=absolute), one_line(metric.unit))

    return cell


def format_window_energy(window: WindowRecord, *, absolute: bool) -> str:
    """Return text such as ``12.50 ± 0.50 J in 1 s``, or the reason for missing energy."""
    if window.energy_j is None:
        return f"no joules: {window.reason}"
    kinds = {part.kind for part in window.by_domain.values()}
    label = "".join(f", joules {kind}" for kind in ("attributed", "estimated") if kind in kinds)
    u_j = window.energy_u_absolute_j if absolute else window.energy_u_j
    joules = format_quantity(window.energy_j, u_j, "J")
    return f"{joules} in {window.duration_s:.3g} s{label}"
