# SPDX-License-Identifier: Apache-2.0
"""The metrics that can be gated: their units, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Whether less is better (J, s, W, bytes) or more (tokens/s).
Direction = Literal["less", "more"]

#: Factors of unit prefixes. Metrics are stored in base units.
UNIT_PREFIXES = {"": 1.0, "p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class MetricKind:
    """Base unit, as users write it after a number, and the direction that is better."""

    unit: str
    better: Direction = "less"


#: Every metric of a record that a gate can use.
METRICS = {
    "energy_j": MetricKind("J"),
    "net_energy_j": MetricKind("J"),
    "prefill_energy_j": MetricKind("J"),
    "decode_energy_j": MetricKind("J"),
    "energy_per_output_token_j": MetricKind("J"),
    "energy_per_request_j": MetricKind("J"),
    "mean_power_w": MetricKind("W"),
    "duration_s": MetricKind("s"),
    "output_tokens_per_s": MetricKind("token/s", "more"),
    "time_to_first_token_s": MetricKind("s"),
    "inter_token_latency_s": MetricKind("s"),
    "peak_memory_bytes": MetricKind("B"),
    "flops": MetricKind("FLOP"),
    "energy_per_flop_j": MetricKind("J"),
    "prefill_workers_energy_j": MetricKind("J"),
    "prefill_workers_energy_per_input_token_j": MetricKind("J"),
    "decode_workers_energy_j": MetricKind("J"),
    "decode_workers_energy_per_output_token_j": MetricKind("J"),
    "steady_energy_per_output_token_j": MetricKind("J"),
    "steady_output_tokens_per_s": MetricKind("token/s", "more"),
    "requests_per_s": MetricKind("request/s", "more"),
    "end_to_end_latency_s": MetricKind("s"),
    "time_to_first_token_p50_s": MetricKind("s"),
    "time_to_first_token_p90_s": MetricKind("s"),
    "time_to_first_token_p99_s": MetricKind("s"),
    "inter_token_latency_p50_s": MetricKind("s"),
    "inter_token_latency_p90_s": MetricKind("s"),
    "inter_token_latency_p99_s": MetricKind("s"),
    "end_to_end_latency_p50_s": MetricKind("s"),
    "end_to_end_latency_p90_s": MetricKind("s"),
    "end_to_end_latency_p99_s": MetricKind("s"),
}
