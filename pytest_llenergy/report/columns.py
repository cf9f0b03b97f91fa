# SPDX-License-Identifier: Apache-2.0
"""What can stand in a column of the summary: metrics, and facts about a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_llenergy.measure.metrics import FIGURES
from pytest_llenergy.model.record import Metric, Record
from pytest_llenergy.model.text import one_line

#: Metrics that are made of no rounds.
APART = ("peak_memory_bytes", "flops", "energy_per_flop_j")

#: What stands above a metric; another has its name there.
HEADS = {
    "energy_j": "J ± u",
    "energy_per_output_token_j": "J/token ± u",
    "energy_per_request_j": "J/request ± u",
    "net_energy_j": "net J ± u",
    "mean_power_w": "W ± u",
    "duration_s": "s",
    "output_tokens_per_s": "token/s",
    "requests_per_s": "request/s",
    "prefill_energy_j": "prefill J ± u",
    "decode_energy_j": "decode J ± u",
    "time_to_first_token_s": "first token s",
    "inter_token_latency_s": "inter token s",
    "end_to_end_latency_s": "end to end s",
    "peak_memory_bytes": "peak MiB",
    "energy_per_flop_j": "J/FLOP ± u",
    "flops": "FLOP",
}


@dataclass(frozen=True)
class Column:
    """``head`` stands above, ``cell`` is what a record has there."""

    head: str
    cell: Callable[[Record], str]
    is_number: bool = False


#: Places behind the point from which on a power of ten is written.
MOST_PLACES = 5


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


def backend_of(record: Record) -> str:
    """Its engine, ``-`` without one."""
    return one_line(record.backend.name) if record.backend else "-"


def model_of(record: Record) -> str:
    """Its model, ``-`` without one."""
    return one_line(record.backend.model) if record.backend else "-"


def device_of(record: Record) -> str:
    """What it ran on: ``NVIDIA H200 x 2``, ``cpu``."""
    kinds = [board.name for board in record.boards] or record.devices
    counts = {kind: kinds.count(kind) for kind in kinds}
    told = [kind if count == 1 else f"{kind} x {count}" for kind, count in counts.items()]
    return one_line(", ".join(told)) or "-"


def meter_of(record: Record) -> str:
    """What it was measured with, or ``estimated``."""
    if record.kind == "estimated":
        return "estimated"
    return one_line(",".join(dict.fromkeys(meter.name for meter in record.meters))) or "none"


def _metric(name: str, *, with_u: bool) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        metric = record.metrics.get(name)
        if metric is None or metric.value is None:
            return "-"
        if name == "peak_memory_bytes":
            return f"{metric.value / 2**20:.0f}"
        return _scientific(metric) if with_u else f"{metric.value:.3g}"

    return cell


def _scientific(metric: Metric) -> str:
    """Joules for one floating-point operation have more zeros than anybody would read."""
    value, u = metric.value or 0.0, metric.uncertainty_absolute
    if value == 0 or abs(value) >= 1e-4:
        return rounded(value, u)
    return f"{value:.3g}" if u is None else f"{value:.3g} ± {u:.1e}"


def _columns() -> dict[str, Column]:
    facts = {
        "backend": Column("backend", backend_of),
        "model": Column("model", model_of),
        "device": Column("device", device_of),
        "meter": Column("meter", meter_of),
        "rounds": Column("rounds", lambda record: str(len(record.rounds) or "-"), is_number=True),
    }
    energies = {name for name, figure in FIGURES.items() if figure.is_energy} | {"energy_per_flop_j"}
    metrics = {
        name: Column(HEADS.get(name, name), _metric(name, with_u=name in energies), is_number=True)
        for name in METRICS
    }
    return {**facts, **metrics}


#: Every metric that a record may have.
METRICS: tuple[str, ...] = (*FIGURES, *APART)

#: By the words of ``--energy-columns``.
COLUMNS: Mapping[str, Column] = _columns()

#: Those that are shown where nobody has chosen.
DEFAULT = ("backend", "energy_j", "energy_per_output_token_j", "output_tokens_per_s", "meter")
