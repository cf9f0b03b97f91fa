# SPDX-License-Identifier: Apache-2.0
"""Bencher Metric Format, https://bencher.dev/docs/reference/bencher-metric-format/."""

from __future__ import annotations

import json

from pytest_llenergy.export.sides import Side, figures

#: What Bencher calls a metric, and what turns it into its unit. Its own ``latency`` is nanoseconds; the
#: others are made with the units of the record.
MEASURES = {
    "energy_j": ("energy", 1.0),
    "energy_per_output_token_j": ("energy-per-output-token", 1.0),
    "energy_per_request_j": ("energy-per-request", 1.0),
    "net_energy_j": ("net-energy", 1.0),
    "prefill_energy_j": ("prefill-energy", 1.0),
    "decode_energy_j": ("decode-energy", 1.0),
    "mean_power_w": ("mean-power", 1.0),
    "duration_s": ("latency", 1e9),
    "output_tokens_per_s": ("output-tokens-per-second", 1.0),
    "time_to_first_token_s": ("time-to-first-token", 1.0),
    "inter_token_latency_s": ("inter-token-latency", 1.0),
    "peak_memory_bytes": ("peak-memory", 1.0),
    "flops": ("flops", 1.0),
    "energy_per_flop_j": ("energy-per-flop", 1.0),
    "steady_energy_per_output_token_j": ("steady-energy-per-output-token", 1.0),
    "steady_output_tokens_per_s": ("steady-output-tokens-per-second", 1.0),
    "requests_per_s": ("requests-per-second", 1.0),
    "end_to_end_latency_s": ("end-to-end-latency", 1.0),
    "time_to_first_token_p50_s": ("time-to-first-token-fiftieth-percentile", 1.0),
    "time_to_first_token_p90_s": ("time-to-first-token-ninetieth-percentile", 1.0),
    "time_to_first_token_p99_s": ("time-to-first-token-ninety-ninth-percentile", 1.0),
    "inter_token_latency_p50_s": ("inter-token-latency-fiftieth-percentile", 1.0),
    "inter_token_latency_p90_s": ("inter-token-latency-ninetieth-percentile", 1.0),
    "inter_token_latency_p99_s": ("inter-token-latency-ninety-ninth-percentile", 1.0),
    "end_to_end_latency_p50_s": ("end-to-end-latency-fiftieth-percentile", 1.0),
    "end_to_end_latency_p90_s": ("end-to-end-latency-ninetieth-percentile", 1.0),
    "end_to_end_latency_p99_s": ("end-to-end-latency-ninety-ninth-percentile", 1.0),
}


def bencher(side: Side) -> str:
    """Every metric, from one standard uncertainty below to one above."""
    written: dict[str, dict[str, dict[str, float]]] = {}
    for record in side.measured():
        for name, metric, value in figures(record):
            measure, factor = MEASURES[name]
            entry = {"value": value * factor}
            if metric.uncertainty is not None:
                entry["lower_value"] = (value - metric.uncertainty) * factor
                entry["upper_value"] = (value + metric.uncertainty) * factor
            written.setdefault(record.id, {})[measure] = entry
    return json.dumps(written, indent=2) + "\n"
