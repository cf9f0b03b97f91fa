# SPDX-License-Identifier: Apache-2.0
"""Columns of the summary: their headings and cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pytest_llenergy.measure.carbon_and_cost import CARBON, DERIVED
from pytest_llenergy.measure.metrics import BUILT_IN, is_prefill_only
from pytest_llenergy.model.quantity import format_quantity, format_with_uncertainty
from pytest_llenergy.model.record import BackendInfo, Precision, Record, Window
from pytest_llenergy.model.served import SATURATED
from pytest_llenergy.model.text import one_line, shorten

#: Headings of metrics.
HEADINGS = {name: figure.heading or name for name, figure in BUILT_IN.items()}

#: End of the heading of a column whose cells have the uncertainty.
WITH_U = "± u"

#: Longest currency that is shown (characters): a report may come from anywhere.
MAX_CURRENCY = 12

#: Metrics per output token, which mean little for work that only reads its input, and the one that does.
OF_OUTPUT, OF_INPUT = ("energy_per_output_token_j", "output_tokens_per_s"), "energy_per_input_token_j"

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


def _metric(name: str, *, with_u: bool) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        metric = record.metrics.get(name)
        if metric is None or metric.value is None:
            saturated = name.startswith("steady_") and any(flag.name == SATURATED for flag in record.flags)
            return SATURATED if saturated else "-"
        if name == "peak_memory_bytes":
            return f"{metric.value / 2**20:.0f}"
        if not with_u:
            # Three digits, and thousands without a power of ten.
            return f"{metric.value:.3g}" if abs(metric.value) < 999.5 else f"{metric.value:.0f}"
        if name not in DERIVED and metric.unit.partition("/")[0] != "J":
            return format_with_uncertainty(metric.value, metric.uncertainty_absolute)
        # The heading says per what.
        unit = "J"
        if name in DERIVED:
            unit = "g" if name in CARBON else shorten(one_line(metric.unit.partition("/")[0]), MAX_CURRENCY)
        return format_quantity(metric.value, metric.uncertainty_absolute, unit)

    return cell


def _columns() -> dict[str, Column]:
    facts = {
        "backend": Column("backend", backend_name),
        "model": Column("model", model_name),
        "device": Column("device", device_names),
        "meter": Column("meter", meter_names),
        "rounds": Column("rounds", lambda record: str(len(record.rounds) or "-"), is_number=True),
        "types": Column("types", short_types),
    }
    metrics = {
        name: Column(heading, _metric(name, with_u=heading.endswith(WITH_U)), is_number=True)
        for name, heading in HEADINGS.items()
    }
    return {**facts, **metrics}


#: Built-in columns by their names in ``--energy-columns``.
COLUMNS: Mapping[str, Column] = _columns()


def column_of(name: str) -> Column:
    """Return a built-in column, or that of a custom metric."""
    return COLUMNS[name] if name in COLUMNS else Column(one_line(name), _custom_metric(name), is_number=True)


def default_column(name: str) -> Column:
    """Return a column as it is shown if nobody asked for it.

    Joules per output token of work that only reads its input would be the joules of its whole prompt. Such
    work has joules per input token in their place, and other work has none of these.
    """
    column = column_of(name)
    if name not in (*OF_OUTPUT, OF_INPUT):
        return column
    of_prefill = name == OF_INPUT
    return replace(
        column,
        cell=lambda record: column.cell(record) if is_prefill_only(record.rounds) == of_prefill else "-",
    )


def _custom_metric(name: str) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        metric = record.metrics.get(name)
        if metric is None or metric.value is None:
            return "-"
        return format_quantity(metric.value, metric.uncertainty_absolute, one_line(metric.unit))

    return cell


def format_window_energy(window: Window) -> str:
    """Return text such as ``12.50 ± 0.50 J in 1 s``, or the reason for missing energy."""
    if window.energy_j is None:
        return f"no joules: {window.reason}"
    kinds = {part.kind for part in window.by_domain.values()}
    label = "".join(f", joules {kind}" for kind in ("attributed", "estimated") if kind in kinds)
    joules = format_quantity(window.energy_j, window.energy_u_absolute_j, "J")
    return f"{joules} in {window.duration_s:.3g} s{label}"
