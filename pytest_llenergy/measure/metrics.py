# SPDX-License-Identifier: Apache-2.0
"""Rounds → the figures of a test.

Each figure is the mean over the valid rounds. Its standard uncertainty joins the scatter of the rounds,
s/√n, with the mean of what the meter could not know in each round. ``uncertainty_absolute`` adds the
source's own accuracy, which does not shrink with n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from pytest_llenergy.model.record import Metric, Phase, Round

Value = tuple[float, float, float]
"""A value, its standard uncertainty, and its absolute standard uncertainty."""


def is_valid(round_: Round) -> bool:
    """Whether a round may enter a figure."""
    return not any(flag.severity == "invalid" for flag in round_.flags)


def summarise(rounds: Sequence[Round], peak_memory_bytes: int | None) -> dict[str, Metric]:
    """Every metric of a test, by name. A metric that cannot be had is there with its reason."""
    valid = [round_ for round_ in rounds if is_valid(round_)]
    why = _why_no_energy(rounds)
    metrics: dict[str, Metric] = {}

    def add(name: str, unit: str, of: Callable[[Round], Value | None], missing: str) -> None:
        values = [value for round_ in valid if (value := of(round_)) is not None]
        reason = (why or missing) if "J" in unit or unit == "W" or not valid else missing
        metrics[name] = _mean(values, unit) if values else Metric(value=None, unit=unit, reason=reason)

    def add_phase(name: str) -> None:
        found = [_phase(round_, name) for round_ in valid]
        reasons = [each.reason for each in found if each is not None and each.reason]
        missing = (
            f"{len(reasons)} of {len(valid)} rounds: {reasons[0]}"
            if reasons
            else "the workload has no phases"
        )
        # Rounds whose phase was long enough to be resolved would give too high a mean.
        add(f"{name}_energy_j", "J", lambda r: None if reasons else _phase_energy(r, name), missing)

    add("energy_j", "J", _energy, "no valid round")
    add("energy_per_output_token_j", "J/token", _per_token, "the workload counts no tokens")
    add("energy_per_request_j", "J/request", _per_request, "the workload has no requests")
    add("net_energy_j", "J", _net, "the idle power is not known")
    add("mean_power_w", "W", lambda r: _scaled(r, 1 / r.duration_s), "no valid round")
    add("duration_s", "s", lambda r: (r.duration_s, 0, 0), "no valid round")
    add("output_tokens_per_s", "token/s", _throughput, "the workload counts no tokens")
    add("time_to_first_token_s", "s", lambda r: _exact(r.time_to_first_token_s), "no token timestamps")
    add("inter_token_latency_s", "s", lambda r: _exact(r.inter_token_latency_s), "fewer than two tokens")
    add_phase("prefill")
    add_phase("decode")
    reason = None if peak_memory_bytes is not None else "this system does not tell the peak"
    metrics["peak_memory_bytes"] = Metric(
        value=peak_memory_bytes, unit="B", n=int(peak_memory_bytes is not None), reason=reason
    )
    return metrics


def _why_no_energy(rounds: Sequence[Round]) -> str | None:
    """Why no round has joules, or none that may count; ``None`` when one has."""
    if any(is_valid(round_) and round_.energy_j is not None for round_ in rounds):
        return None
    reasons = [round_.reason for round_ in rounds if round_.reason]
    reasons += [flag.detail for round_ in rounds for flag in round_.flags if flag.severity == "invalid"]
    return reasons[0] if reasons else "no valid round"


def _mean(values: Sequence[Value], unit: str) -> Metric:
    n = len(values)
    if n == 1:
        return Metric(
            value=values[0][0], unit=unit, n=1, reason="one round shows no scatter: uncertainty unknown"
        )
    scatter = stdev(value for value, _, _ in values) / math.sqrt(n)
    # What is unknown at the edges differs from round to round only in part, so it is not divided by √n.
    meter = fmean(u for _, u, _ in values)
    own = fmean(math.sqrt(max(0.0, absolute**2 - u**2)) for _, u, absolute in values)
    return Metric(
        value=fmean(value for value, _, _ in values),
        unit=unit,
        uncertainty=math.hypot(scatter, meter),
        uncertainty_absolute=math.hypot(scatter, meter, own),
        n=n,
    )


def _energy(round_: Round) -> Value | None:
    return _scaled(round_, 1.0)


def _scaled(round_: Round, factor: float) -> Value | None:
    if round_.energy_j is None or round_.energy_u_j is None or round_.energy_u_absolute_j is None:
        return None
    return round_.energy_j * factor, round_.energy_u_j * factor, round_.energy_u_absolute_j * factor


def _per_token(round_: Round) -> Value | None:
    if round_.tokens is None or round_.tokens.output == 0:
        return None
    return _scaled(round_, 1 / round_.tokens.output)


def _per_request(round_: Round) -> Value | None:
    return _scaled(round_, 1 / round_.requests) if round_.requests else None


def _net(round_: Round) -> Value | None:
    energy = _energy(round_)
    if energy is None or round_.idle_power_w is None:
        return None
    idle_u_j = (round_.idle_power_u_w or 0.0) * round_.duration_s
    net_j = energy[0] - round_.idle_power_w * round_.duration_s
    return net_j, math.hypot(energy[1], idle_u_j), math.hypot(energy[2], idle_u_j)


def _throughput(round_: Round) -> Value | None:
    return (round_.tokens.output / round_.duration_s, 0, 0) if round_.tokens else None


def _exact(value: float | None) -> Value | None:
    return (value, 0, 0) if value is not None else None


def _phase(round_: Round, name: str) -> Phase | None:
    return next((phase for phase in round_.phases if phase.name == name), None)


def _phase_energy(round_: Round, name: str) -> Value | None:
    phase = _phase(round_, name)
    if phase is None or phase.energy_j is None or phase.energy_u_j is None:
        return None
    if not round_.energy_j or round_.energy_u_absolute_j is None or round_.energy_u_j is None:
        return None
    own = math.sqrt(max(0.0, round_.energy_u_absolute_j**2 - round_.energy_u_j**2))
    absolute = math.hypot(phase.energy_u_j, own * phase.energy_j / round_.energy_j)
    return phase.energy_j, phase.energy_u_j, absolute
