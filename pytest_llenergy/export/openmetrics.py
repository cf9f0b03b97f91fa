# SPDX-License-Identifier: Apache-2.0
"""Figures as gauges in the text format of OpenMetrics."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.export.sides import Side, figures
from pytest_llenergy.report.openmetrics import Family, Sample, render

#: The gauge of a metric, without its unit, and the unit.
GAUGES = {
    "energy_j": ("energy", "joules"),
    "energy_per_output_token_j": ("energy_per_output_token", "joules"),
    "energy_per_request_j": ("energy_per_request", "joules"),
    "net_energy_j": ("net_energy", "joules"),
    "prefill_energy_j": ("prefill_energy", "joules"),
    "decode_energy_j": ("decode_energy", "joules"),
    "mean_power_w": ("mean_power", "watts"),
    "duration_s": ("duration", "seconds"),
    "output_tokens_per_s": ("output_rate", "tokens_per_second"),
    "time_to_first_token_s": ("time_to_first_token", "seconds"),
    "inter_token_latency_s": ("inter_token_latency", "seconds"),
    "peak_memory_bytes": ("peak_memory", "bytes"),
    "flops": ("work", "flops"),
    "energy_per_flop_j": ("energy_per_flop", "joules"),
    "steady_energy_per_output_token_j": ("steady_energy_per_output_token", "joules"),
    "steady_output_tokens_per_s": ("steady_output_rate", "tokens_per_second"),
    "requests_per_s": ("request_rate", "requests_per_second"),
    "end_to_end_latency_s": ("end_to_end_latency", "seconds"),
    "time_to_first_token_p50_s": ("time_to_first_token_p50", "seconds"),
    "time_to_first_token_p90_s": ("time_to_first_token_p90", "seconds"),
    "time_to_first_token_p99_s": ("time_to_first_token_p99", "seconds"),
    "inter_token_latency_p50_s": ("inter_token_latency_p50", "seconds"),
    "inter_token_latency_p90_s": ("inter_token_latency_p90", "seconds"),
    "inter_token_latency_p99_s": ("inter_token_latency_p99", "seconds"),
    "end_to_end_latency_p50_s": ("end_to_end_latency_p50", "seconds"),
    "end_to_end_latency_p90_s": ("end_to_end_latency_p90", "seconds"),
    "end_to_end_latency_p99_s": ("end_to_end_latency_p99", "seconds"),
}


def openmetrics(sides: Sequence[Side]) -> str:
    """A gauge for each metric and one for its standard uncertainty, labelled by test, side and device."""
    values: dict[str, list[Sample]] = {name: [] for name in GAUGES}
    uncertainties: dict[str, list[Sample]] = {name: [] for name in GAUGES}
    for side in sides:
        for record in side.measured():
            labels = {
                "test": record.id,
                "side": side.name,
                "device": side.device_key(record),
                "kind": record.kind or "",
                "commit": side.report.source.commit or "",
            }
            for name, metric, value in figures(record):
                values[name].append(Sample(labels, repr(float(value))))
                if metric.uncertainty is not None:
                    uncertainties[name].append(Sample(labels, repr(metric.uncertainty)))
    families = []
    for name, (gauge, unit) in GAUGES.items():
        about = f"{name} of a test, mean over its valid rounds."
        families.append(Family(f"llenergy_{gauge}_{unit}", about, values[name], unit))
        about = f"Standard uncertainty (k=1) of {name}."
        families.append(Family(f"llenergy_{gauge}_uncertainty_{unit}", about, uncertainties[name], unit))
    return render(families)
