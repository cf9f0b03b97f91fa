# SPDX-License-Identifier: Apache-2.0
"""Metrics of a test, computed from its rounds, for one iteration of the work.

A metric is the median over the valid rounds (see ``round_statistics``). Tables, verdicts, the history and
JSON all show this value. A rate, such as tokens per second, is the inverse of the median time for one token.

A percentile of latencies is taken over all requests of all valid rounds; its uncertainty comes from the
scatter of the percentiles of single rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import msgspec

from pytest_llenergy.measure.carbon_and_cost import scale_metric
from pytest_llenergy.measure.round_statistics import RoundValue, percentile, summarize_rounds
from pytest_llenergy.model.record import Metric, Phase, Round, Terms, is_attributed
from pytest_llenergy.model.timeline import Flops

#: Percentiles of each latency of a served load.
PERCENTILES = (50, 90, 99)

#: Shortest time that a clock measures (seconds). In a file, a round may have any duration.
CLOCK_RESOLUTION_S = 1e-9

#: Why a served load may have no metric of its steady state.
NO_STEADY = "the load has no steady state (send more requests), or the number of tokens in a chunk is unknown"


def flops_metrics(energy: Metric, flops: Flops) -> dict[str, Metric]:
    """Return the floating-point operations of an iteration, and the joules of each.

    ``energy`` is the energy of an iteration (J).
    """
    count = Metric(
        value=flops.count,
        unit="FLOP",
        n=int(flops.count is not None),
        reason=flops.reason,
        source=flops.source,
    )
    return {"flops": count, "energy_per_flop_j": energy_per_flop(energy, count)}


def energy_per_flop(energy: Metric, flops: Metric) -> Metric:
    """Return the joules of one floating-point operation, with the relative uncertainties of the energy."""
    if not flops.value:
        reason = flops.reason or "no floating-point operations were counted"
        return Metric(value=None, unit="J", reason=reason, source=flops.source)
    return scale_metric(energy, 1 / flops.value, "J", flops.source)


@dataclass(frozen=True)
class RoundMetric:
    """How a metric is computed from rounds.

    Attributes:
        unit: Unit of the metric.
        value_of: Returns the value of one round; ``None`` if it is unavailable.
        missing: Why a workload may not have the metric.
        applies: Returns whether a round has what the metric needs, apart from joules.
        phase: Phase that the metric describes, if any.
        pooled: Returns the metric of all valid rounds together, if it is not the median over rounds.
        served: Whether only served loads have the metric.
        optional: Whether a test to which the metric does not apply leaves it out.
    """

    unit: str
    value_of: Callable[[Round], RoundValue | None]
    missing: str = "no valid round"
    applies: Callable[[Round], bool] = lambda _: True
    phase: str | None = None
    pooled: Callable[[Sequence[Round]], float] | None = None
    served: bool = False
    optional: bool = False

    @property
    def is_energy(self) -> bool:
        """Whether the metric is computed from joules."""
        return "J" in self.unit or self.unit == "W"

    @property
    def is_rate(self) -> bool:
        """Whether the metric is a count over a time."""
        return self.unit.endswith("/s")


def is_valid(round_: Round) -> bool:
    """Return whether a round counts in metrics."""
    return not any(flag.severity == "invalid" for flag in round_.flags)


def values_of_rounds(name: str, rounds: Sequence[Round]) -> tuple[list[tuple[int, RoundValue]], str | None]:
    """Return the values of a metric in valid rounds with the indices of these; without any, also the reason.

    Rounds are counted from 0.
    """
    figure = ROUND_METRICS[name]
    valid = [(index, each) for index, each in enumerate(rounds) if not each.flags or is_valid(each)]
    missing = figure.missing
    unresolved = _unresolved([each for _, each in valid], figure.phase) if figure.phase is not None else []
    if unresolved:
        # The median over only the rounds whose phase was resolved would be too high.
        missing, values = f"{len(unresolved)} of {len(valid)} rounds: {unresolved[0]}", []
    else:
        values = [(index, value) for index, each in valid if (value := figure.value_of(each)) is not None]
    if values:
        return values, None
    no_energy = _explain_missing_energy(rounds) if figure.is_energy or not valid else None
    return [], no_energy or missing


def round_values(name: str, rounds: Sequence[Round]) -> tuple[list[RoundValue], str | None]:
    """Return the values of a metric in valid rounds, in order; without any, also the reason."""
    values, reason = values_of_rounds(name, rounds)
    return [value for _, value in values], reason


def applies_to_rounds(name: str, rounds: Iterable[Round]) -> bool:
    """Return whether a workload has what a metric needs, such as tokens, apart from the meters."""
    return any(ROUND_METRICS[name].applies(round_) for round_ in rounds)


def compute_metrics(
    rounds: Sequence[Round],
    peak_memory_bytes: int | None,
    coverage: float = 1.0,
    planned: int | None = None,
) -> dict[str, Metric]:
    """Return every metric of a test by name. An unavailable metric has a reason instead of a value.

    Args:
        rounds: All rounds.
        peak_memory_bytes: Highest memory use, if known.
        coverage: Share of the time in which the sensors sample.
        planned: Number of rounds from which on more are added to meet a target; None if none are.
    """
    metrics: dict[str, Metric] = {}
    added_to = _added_to(rounds, planned)
    for name, figure in ROUND_METRICS.items():
        if figure.served and not any(round_.served for round_ in rounds):
            continue
        if figure.optional and not applies_to_rounds(name, rounds):
            continue
        values, reason = round_values(name, rounds)
        if values:
            # Net energy may be zero or less, gross energy may not.
            gross = "J" in figure.unit and name != "net_energy_j"
            metrics[name] = summarize_rounds(
                values, figure.unit, coverage, gross=gross, is_rate=figure.is_rate, added_to=added_to
            )
            if figure.pooled is not None:
                pooled = figure.pooled([round_ for round_ in rounds if is_valid(round_)])
                metrics[name] = msgspec.structs.replace(metrics[name], value=pooled)
        else:
            metrics[name] = Metric(value=None, unit=figure.unit, reason=reason)
    reason = None if peak_memory_bytes is not None else "this system does not report the peak"
    metrics["peak_memory_bytes"] = Metric(
        value=peak_memory_bytes, unit="B", n=int(peak_memory_bytes is not None), reason=reason
    )
    return metrics


def _explain_missing_energy(rounds: Sequence[Round]) -> str | None:
    """Return why no valid round has joules, or ``None`` if one has."""
    if any(is_valid(round_) and round_.energy_j is not None for round_ in rounds):
        return None
    reasons = [round_.reason for round_ in rounds if round_.reason]
    reasons += [flag.detail for round_ in rounds for flag in round_.flags if flag.severity == "invalid"]
    return reasons[0] if reasons else "no valid round"


def _added_to(rounds: Sequence[Round], planned: int | None) -> int | None:
    """Return how many valid rounds others were added to; ``None`` if none were added."""
    if planned is None or len(rounds) <= planned:
        return None
    return sum(map(is_valid, rounds[:planned]))


def relative_uncertainty(
    rounds: Sequence[Round], coverage: float = 1.0, planned: int | None = None
) -> float | None:
    """Return the relative uncertainty of the energy of an iteration, with arguments of ``compute_metrics``.

    ``None`` with fewer than two valid rounds, or without energy.
    """
    values = [value for round_ in rounds if is_valid(round_) and (value := _energy(round_)) is not None]
    if len(values) < 2:
        return None
    metric = summarize_rounds(values, "J", coverage, gross=True, added_to=_added_to(rounds, planned))
    if metric.value is None or metric.uncertainty is None or metric.value <= 0:
        return None
    return metric.uncertainty / metric.value


def _energy(round_: Round) -> RoundValue | None:
    return _joules(round_, round_.iterations)


def _whole(round_: Round) -> RoundValue | None:
    return _joules(round_, 1)


def _per_token(round_: Round) -> RoundValue | None:
    return _joules(round_, round_.tokens.output) if round_.tokens is not None else None


def _per_request(round_: Round) -> RoundValue | None:
    return _joules(round_, round_.requests) if round_.requests is not None else None


def _mean_power(round_: Round) -> RoundValue | None:
    return _joules(round_, round_.duration_s) if round_.duration_s >= CLOCK_RESOLUTION_S else None


def _joules(round_: Round, over: float) -> RoundValue | None:
    """Divide a round's energy by ``over``. Returns ``None`` if either is missing."""
    energy_j, u_j, u_absolute_j = round_.energy_j, round_.energy_u_j, round_.energy_u_absolute_j
    if energy_j is None or u_j is None or u_absolute_j is None or not over:
        return None
    accuracy = math.sqrt(max(0.0, u_absolute_j**2 - u_j**2)) / over
    meter, unsampled, shape = _split_uncertainty(u_j, round_.terms)
    return RoundValue(energy_j / over, meter / over, unsampled / over, accuracy, round_.phase, shape / over)


def _split_uncertainty(u_j: float, terms: Terms | None) -> tuple[float, float, float]:
    """Return an uncertainty (J) without, and from, what a sensor did not sample and the course of power."""
    if terms is None:
        return u_j, 0.0, 0.0
    independent = math.sqrt(max(0.0, u_j**2 - terms.coverage_j**2 - terms.shape_j**2))
    return independent, terms.coverage_j, terms.shape_j


def _net(round_: Round) -> RoundValue | None:
    energy = _energy(round_)
    if energy is None or round_.idle_power_w is None:
        return None
    duration_s = round_.duration_s / round_.iterations
    idle_u_j = (round_.idle_power_u_w or 0.0) * duration_s
    net_j = energy.value - round_.idle_power_w * duration_s
    accuracy = energy.accuracy
    if energy.value and not is_attributed(round_):
        # An error of the gain affects idle power as well. That of a split affects only the rest.
        accuracy *= abs(net_j / energy.value)
    meter = math.hypot(energy.meter, idle_u_j)
    return RoundValue(net_j, meter, energy.unsampled, accuracy, energy.phase, energy.shape)


def _throughput(round_: Round) -> RoundValue | None:
    if round_.tokens is None or not round_.tokens.output:
        return None
    return _rate(round_.tokens.output, round_.duration_s)


def _rate(count: int, duration_s: float) -> RoundValue | None:
    return RoundValue(count / duration_s) if duration_s >= CLOCK_RESOLUTION_S else None


def _exact(value: float | None) -> RoundValue | None:
    return RoundValue(value) if value is not None else None


def _duration(round_: Round) -> RoundValue:
    return RoundValue(round_.duration_s / round_.iterations)


def _unresolved(valid: Sequence[Round], name: str) -> list[str]:
    phases = [_phase(round_, name) for round_ in valid]
    return [each.reason for each in phases if each is not None and each.reason]


def _phase(round_: Round, name: str) -> Phase | None:
    return next((phase for phase in round_.phases if phase.name == name), None)


def _phase_energy(name: str, round_: Round) -> RoundValue | None:
    phase, whole = _phase(round_, name), _whole(round_)
    if phase is None or phase.energy_j is None or phase.energy_u_j is None or whole is None:
        return None
    meter, unsampled, shape = _split_uncertainty(phase.energy_u_j, phase.terms)
    accuracy = whole.accuracy * phase.energy_j / whole.value if whole.value else 0.0
    value = RoundValue(phase.energy_j, meter, unsampled, accuracy, round_.phase, shape)
    return value.scale(1 / round_.iterations)


def _phase_metric(name: str) -> RoundMetric:
    return RoundMetric(
        "J",
        partial(_phase_energy, name),
        "the workload has no phases",
        applies=lambda round_: _phase(round_, name) is not None,
        phase=name,
    )


def _steady_tokens(name: str, round_: Round) -> int | None:
    phase = _phase(round_, name)
    return phase.output_tokens if phase is not None else None


def _steady_per_token(round_: Round) -> RoundValue | None:
    tokens, energy = _steady_tokens("steady", round_), _phase_energy("steady", round_)
    if energy is None or not tokens:
        return None
    # The energy is per iteration; the tokens are of all iterations.
    return energy.scale(round_.iterations / tokens)


def _steady_throughput(round_: Round) -> RoundValue | None:
    phase, tokens = _phase(round_, "steady"), _steady_tokens("steady", round_)
    return _rate(tokens, phase.duration_s) if phase is not None and tokens is not None else None


def _request_throughput(round_: Round) -> RoundValue | None:
    served = round_.served is not None and round_.requests is not None
    return _rate(round_.requests, round_.duration_s) if served and round_.requests else None


def _latencies(column: str, rounds: Sequence[Round]) -> list[float]:
    """Return a latency of every request that has it."""
    served = [getattr(round_.served, column) for round_ in rounds if round_.served is not None]
    return [value for values in served for value in values if value is not None]


def _latency_percentile(column: str, percent: int, rounds: Sequence[Round]) -> float:
    return percentile(_latencies(column, rounds), percent)


def _latency_of_round(column: str, percent: int, round_: Round) -> RoundValue | None:
    latencies = _latencies(column, [round_])
    return RoundValue(percentile(latencies, percent)) if latencies else None


def _mean_latency(column: str, round_: Round) -> RoundValue | None:
    latencies = _latencies(column, [round_])
    return RoundValue(fmean(latencies)) if latencies else None


def _percentiles(column: str) -> dict[str, RoundMetric]:
    """Return the percentiles of one latency by name: ``time_to_first_token_p50_s`` and so on."""
    return {
        f"{column.removesuffix('_s')}_p{percent}_s": RoundMetric(
            "s",
            partial(_latency_of_round, column, percent),
            "no request has this latency",
            applies=_is_served,
            pooled=partial(_latency_percentile, column, percent),
            served=True,
        )
        for percent in PERCENTILES
    }


def _is_served(round_: Round) -> bool:
    return round_.served is not None


def _is_drafted(round_: Round) -> bool:
    return round_.tokens is not None and round_.tokens.drafted is not None


def _draft_acceptance(round_: Round) -> RoundValue | None:
    tokens = round_.tokens
    if tokens is None or not tokens.drafted or tokens.accepted is None:
        return None
    return RoundValue(tokens.accepted / tokens.drafted)


def _has_tokens(round_: Round) -> bool:
    return round_.tokens is not None and round_.tokens.output > 0


#: Every metric that is computed from rounds, in the order of the report.
ROUND_METRICS: dict[str, RoundMetric] = {
    "energy_j": RoundMetric("J", _energy),
    "energy_per_output_token_j": RoundMetric(
        "J/token", _per_token, "the workload makes no output tokens", applies=_has_tokens
    ),
    "energy_per_request_j": RoundMetric(
        "J/request",
        _per_request,
        "the workload has no requests",
        applies=lambda round_: round_.requests is not None,
    ),
    "net_energy_j": RoundMetric("J", _net, "the idle power is unknown"),
    "mean_power_w": RoundMetric("W", _mean_power),
    "duration_s": RoundMetric("s", _duration),
    "output_tokens_per_s": RoundMetric(
        "token/s", _throughput, "the workload makes no output tokens", applies=_has_tokens
    ),
    "time_to_first_token_s": RoundMetric(
        "s",
        lambda round_: _exact(round_.time_to_first_token_s),
        "no token timestamps",
        applies=lambda round_: round_.time_to_first_token_s is not None,
    ),
    "inter_token_latency_s": RoundMetric(
        "s",
        lambda round_: _exact(round_.inter_token_latency_s),
        "fewer than two tokens",
        applies=lambda round_: round_.inter_token_latency_s is not None,
    ),
    "prefill_energy_j": _phase_metric("prefill"),
    "decode_energy_j": _phase_metric("decode"),
    "steady_energy_per_output_token_j": RoundMetric(
        "J/token", _steady_per_token, NO_STEADY, applies=_is_served, phase="steady", served=True
    ),
    "steady_output_tokens_per_s": RoundMetric(
        "token/s", _steady_throughput, NO_STEADY, applies=_is_served, served=True
    ),
    "requests_per_s": RoundMetric("request/s", _request_throughput, applies=_is_served, served=True),
    "end_to_end_latency_s": RoundMetric(
        "s", partial(_mean_latency, "end_to_end_latency_s"), applies=_is_served, served=True
    ),
    "draft_acceptance_rate": RoundMetric(
        "accepted/drafted", _draft_acceptance, "no token was drafted", applies=_is_drafted, optional=True
    ),
    **_percentiles("time_to_first_token_s"),
    **_percentiles("inter_token_latency_s"),
    **_percentiles("end_to_end_latency_s"),
}
