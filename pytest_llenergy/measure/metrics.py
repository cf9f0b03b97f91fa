# SPDX-License-Identifier: Apache-2.0
"""Rounds → the figures of a test, each per iteration of the work.

Each figure is the mean over the valid rounds. What a meter cannot know at the edges of a round differs
from round to round, because rounds start in shuffled phase to its ticks. It therefore shows in the scatter
of the rounds, s/√n, and that is the standard uncertainty; unless the rounds happen to agree better than
the meter can know, which is no knowledge: then it is the meter's, over √n. What a part-time sensor did not
see counts in full where the rounds did not start all over a tick. ``uncertainty_absolute`` adds the
source's own accuracy, which does not shrink with n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_llenergy.measure import spread
from pytest_llenergy.model.record import Metric, Phase, Round, Terms


@dataclass(frozen=True)
class Value:
    """What one round says, in the unit of the figure.

    ``meter`` is the standard uncertainty of its edges, ``unseen`` that of a part-time sensor, ``own`` that
    of the source's accuracy; ``phase`` is where in a tick the round started.
    """

    value: float
    meter: float = 0.0
    unseen: float = 0.0
    own: float = 0.0
    phase: float | None = None

    def times(self, factor: float) -> Value:
        """In another unit."""
        return Value(
            self.value * factor, self.meter * factor, self.unseen * factor, self.own * factor, self.phase
        )


def is_valid(round_: Round) -> bool:
    """Whether a round may enter a figure."""
    return not any(flag.severity == "invalid" for flag in round_.flags)


def summarise(
    rounds: Sequence[Round], peak_memory_bytes: int | None, coverage: float = 1.0
) -> dict[str, Metric]:
    """Every metric of a test, by name. A metric that cannot be had is there with its reason.

    ``coverage`` is the share of the time in which the sensors look.
    """
    valid = [round_ for round_ in rounds if is_valid(round_)]
    why = _why_no_energy(rounds)
    metrics: dict[str, Metric] = {}

    def add(name: str, unit: str, of: Callable[[Round], Value | None], missing: str) -> None:
        values = [value for round_ in valid if (value := of(round_)) is not None]
        reason = (why or missing) if "J" in unit or unit == "W" or not valid else missing
        if values:
            # Net of idle there may be nothing left; gross there cannot.
            gross = "J" in unit and name != "net_energy_j"
            metrics[name] = _mean(values, unit, coverage, gross=gross)
        else:
            metrics[name] = Metric(value=None, unit=unit, reason=reason)

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
    add("mean_power_w", "W", _mean_power, "no valid round")
    add("duration_s", "s", lambda r: Value(r.duration_s / r.iterations), "no valid round")
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


def relative_uncertainty(rounds: Sequence[Round], coverage: float = 1.0) -> float | None:
    """Of the energy of an iteration, over the valid rounds; ``None`` below two, or without energy."""
    values = [value for round_ in rounds if is_valid(round_) and (value := _energy(round_)) is not None]
    if len(values) < 2:
        return None
    metric = _mean(values, "J", coverage, gross=True)
    if metric.value is None or metric.uncertainty is None or metric.value <= 0:
        return None
    return metric.uncertainty / metric.value


def _mean(values: Sequence[Value], unit: str, coverage: float, *, gross: bool) -> Metric:
    n, mean = len(values), fmean(each.value for each in values)
    if gross and mean <= 0:
        return Metric(
            value=None, unit=unit, n=n, reason=f"not resolvable: {n} rounds give {mean:.2g} J on average"
        )
    if n == 1:
        reason = "one round shows no scatter: uncertainty unknown"
        return Metric(value=mean, unit=unit, n=1, reason=reason)
    phases = [each.phase for each in values]
    unseen = fmean(each.unseen for each in values)
    dithered = unseen > 0 and spread.covers_tick(phases, coverage)
    numbers = [each.value for each in values]
    if dithered:
        scatter = spread.of_dithered_mean(numbers, [phase or 0.0 for phase in phases])
        unseen = 0.0
    else:
        scatter = spread.of_mean(numbers)
    meter = math.sqrt(fmean(each.meter**2 for each in values) / n)
    uncertainty = math.hypot(max(scatter, meter), unseen)
    return Metric(
        value=mean,
        unit=unit,
        uncertainty=uncertainty,
        spread=scatter,
        uncertainty_absolute=math.hypot(uncertainty, fmean(each.own for each in values)),
        n=n,
    )


def _energy(round_: Round) -> Value | None:
    if round_.energy_j is None or round_.energy_u_j is None or round_.energy_u_absolute_j is None:
        return None
    unseen = _coverage_j(round_.terms)
    own = math.sqrt(max(0.0, round_.energy_u_absolute_j**2 - round_.energy_u_j**2))
    meter = math.sqrt(max(0.0, round_.energy_u_j**2 - unseen**2))
    return Value(round_.energy_j, meter, unseen, own, round_.phase).times(1 / round_.iterations)


def _whole(round_: Round) -> Value | None:
    energy = _energy(round_)
    return energy.times(round_.iterations) if energy is not None else None


def _per_token(round_: Round) -> Value | None:
    energy = _whole(round_)
    if energy is None or round_.tokens is None or round_.tokens.output == 0:
        return None
    return energy.times(1 / round_.tokens.output)


def _per_request(round_: Round) -> Value | None:
    energy = _whole(round_)
    return energy.times(1 / round_.requests) if energy is not None and round_.requests else None


def _mean_power(round_: Round) -> Value | None:
    energy = _whole(round_)
    return energy.times(1 / round_.duration_s) if energy is not None else None


def _net(round_: Round) -> Value | None:
    energy = _energy(round_)
    if energy is None or round_.idle_power_w is None:
        return None
    duration_s = round_.duration_s / round_.iterations
    idle_u_j = (round_.idle_power_u_w or 0.0) * duration_s
    net_j = energy.value - round_.idle_power_w * duration_s
    # A gain that is off is off for idle as well.
    own = energy.own * abs(net_j / energy.value) if energy.value else 0.0
    return Value(net_j, math.hypot(energy.meter, idle_u_j), energy.unseen, own, energy.phase)


def _throughput(round_: Round) -> Value | None:
    return Value(round_.tokens.output / round_.duration_s) if round_.tokens else None


def _exact(value: float | None) -> Value | None:
    return Value(value) if value is not None else None


def _phase(round_: Round, name: str) -> Phase | None:
    return next((phase for phase in round_.phases if phase.name == name), None)


def _phase_energy(round_: Round, name: str) -> Value | None:
    phase, whole = _phase(round_, name), _whole(round_)
    if phase is None or phase.energy_j is None or phase.energy_u_j is None or whole is None:
        return None
    unseen = _coverage_j(phase.terms)
    meter = math.sqrt(max(0.0, phase.energy_u_j**2 - unseen**2))
    own = whole.own * phase.energy_j / whole.value if whole.value else 0.0
    return Value(phase.energy_j, meter, unseen, own, round_.phase).times(1 / round_.iterations)


def _coverage_j(terms: Terms | None) -> float:
    return terms.coverage_j if terms is not None else 0.0
