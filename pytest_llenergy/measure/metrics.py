# SPDX-License-Identifier: Apache-2.0
"""Metrics of a test, computed from its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, linear_regression, quantiles, stdev

import msgspec

from pytest_llenergy.meters.uncertainty import student_factor
from pytest_llenergy.model.record import Metric, Phase, Round, Terms
from pytest_llenergy.model.timeline import Flops

# Percentiles of latencies.

#: Those that are told of every latency of a served load.
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: int) -> float:
    """By ``statistics.quantiles(method="inclusive")``; needs one value.

    That is linear interpolation between order statistics (definition 7 of Hyndman and Fan, 1996), the default
    of ``numpy.percentile``, which the benchmarks of vLLM and ML.ENERGY use.
    """
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


# Figures for one operation, made of joules that were measured and operations that were counted apart.


def flops_metrics(energy: Metric, flops: Flops) -> dict[str, Metric]:
    """``flops`` of an iteration, and joules for each. ``energy`` is that of an iteration (J)."""
    count = Metric(
        value=flops.count,
        unit="FLOP",
        n=int(flops.count is not None),
        reason=flops.reason,
        source=flops.source,
    )
    return {"flops": count, "energy_per_flop_j": energy_per_flop(energy, count)}


def energy_per_flop(energy: Metric, flops: Metric) -> Metric:
    """Joules for one floating-point operation; relative uncertainties are those of the energy."""
    if not flops.value:
        reason = flops.reason or "no floating-point operations were counted"
        return Metric(value=None, unit="J", reason=reason, source=flops.source)
    scaled = {
        name: None if value is None else value / flops.value
        for name in ("value", "uncertainty", "spread", "uncertainty_absolute")
        for value in (getattr(energy, name),)
    }
    return msgspec.structs.replace(energy, unit="J", source=flops.source, **scaled)


# What the scatter of the rounds says about their mean.


def uncertainty_of_mean(values: Sequence[float]) -> float:
    """s/√n, widened for few values (GUM 4.2.3, G.3.2). Needs two values."""
    n = len(values)
    return stdev(values) / math.sqrt(n) * student_factor(n - 1)


def uncertainty_of_dithered_mean(values: Sequence[float], phases: Sequence[float]) -> float:
    """The same for values of which each was taken in a stratum of its own.

    Only neighbouring strata differ by chance; what changes slowly over the phase is averaged out. Uses
    the successive differences in the order of phase, a closed ring (Wolter, Introduction to Variance
    Estimation, 2nd ed., chapter 8); these count for two thirds of as many independent values.
    """
    n = len(values)
    ordered = [value for _, value in sorted(zip(phases, values, strict=True))]
    squares = sum((b - a) ** 2 for a, b in zip(ordered, [*ordered[1:], ordered[0]], strict=True))
    return math.sqrt(squares / 2) / n * student_factor(max(1, (n - 1) * 2 / 3))


def phases_cover_tick(phases: Sequence[float | None], seen: float) -> bool:
    """Whether rounds started all over a tick, so that their mean is that of every phase.

    A sensor that sees the share ``seen`` of each tick sees something of any load, however short, unless
    all rounds miss a stretch of the tick as long as that.
    """
    known = sorted(phase for phase in phases if phase is not None)
    if not known or len(known) < len(phases):
        return False
    holes = [b - a for a, b in zip(known, [*known[1:], known[0] + 1], strict=True)]
    return max(holes) <= seen


def linear_drift(values: Sequence[float]) -> tuple[float, float] | None:
    """Change from the first to the last value by a straight line, relative to their mean, and its t value.

    ``None`` below four values.
    """
    n = len(values)
    if n < 4:
        return None
    mean, order = fmean(values), range(n)
    slope, start = linear_regression(order, values)
    rest = sum((value - start - slope * index) ** 2 for index, value in enumerate(values))
    error = math.sqrt(rest / (n - 2) / sum((index - (n - 1) / 2) ** 2 for index in order))
    change = slope * (n - 1) / mean if mean else 0.0
    return change, slope / error if error else math.copysign(math.inf, slope) if slope else 0.0


# Rounds → the figures of a test, each per iteration of the work.
#
# Each figure is the mean over the valid rounds. What a meter cannot know at the edges of a round differs
# from round to round, because rounds start in shuffled phase to its ticks. It therefore shows in the scatter
# of the rounds, s/√n, and that is the standard uncertainty; unless the rounds happen to agree better than
# the meter can know, which is no knowledge: then it is the meter's, over √n. What a part-time sensor did not
# see counts in full where the rounds did not start all over a tick. ``uncertainty_absolute`` adds the
# source's own accuracy, which does not shrink with n.
#
# A percentile of latencies is that of all requests of all valid rounds together, and how the percentiles of
# single rounds scatter about each other tells its uncertainty (batch means).

#: Why a served load may have no figure of its steady state.
NO_STEADY = "the load has no steady state (send more requests), or how many tokens a chunk holds is not told"


class Value(msgspec.Struct, frozen=True, gc=False):
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


@dataclass(frozen=True)
class Figure:
    """How rounds give a figure: ``of`` one round, ``None`` where it has none.

    ``missing`` says why a workload may not have it. ``applies`` is whether a round has what the figure is
    made of, joules aside. ``phase`` is the phase that it is of. ``pooled`` gives the figure of all valid
    rounds at once, where that is not the mean of theirs. One that is ``served`` is told of served loads only.
    """

    unit: str
    of: Callable[[Round], Value | None]
    missing: str = "no valid round"
    applies: Callable[[Round], bool] = lambda _: True
    phase: str | None = None
    pooled: Callable[[Sequence[Round]], float] | None = None
    served: bool = False

    @property
    def is_energy(self) -> bool:
        """Whether it is made of joules."""
        return "J" in self.unit or self.unit == "W"


def is_valid(round_: Round) -> bool:
    """Whether a round may enter a figure."""
    return not any(flag.severity == "invalid" for flag in round_.flags)


def round_values(name: str, rounds: Sequence[Round]) -> tuple[list[Value], str | None]:
    """What each valid round says of a figure, in the order of the rounds; why none does where that is so."""
    figure = FIGURES[name]
    valid = [round_ for round_ in rounds if not round_.flags or is_valid(round_)]
    missing = figure.missing
    unresolved = _unresolved(valid, figure.phase) if figure.phase is not None else []
    if unresolved:
        # Rounds whose phase was long enough to be resolved would give too high a mean.
        missing, values = f"{len(unresolved)} of {len(valid)} rounds: {unresolved[0]}", []
    else:
        values = [value for round_ in valid if (value := figure.of(round_)) is not None]
    if values:
        return values, None
    why = _why_no_energy(rounds) if figure.is_energy or not valid else None
    return [], why or missing


def applies_to_rounds(name: str, rounds: Iterable[Round]) -> bool:
    """Whether a workload has what a figure is made of, such as tokens, whatever the meters could tell."""
    return any(FIGURES[name].applies(round_) for round_ in rounds)


def compute_metrics(
    rounds: Sequence[Round], peak_memory_bytes: int | None, coverage: float = 1.0
) -> dict[str, Metric]:
    """Every metric of a test, by name. A metric that cannot be had is there with its reason.

    ``coverage`` is the share of the time in which the sensors look.
    """
    metrics: dict[str, Metric] = {}
    for name, figure in FIGURES.items():
        if figure.served and not any(round_.served for round_ in rounds):
            continue
        values, reason = round_values(name, rounds)
        if values:
            # Net of idle there may be nothing left; gross there cannot.
            gross = "J" in figure.unit and name != "net_energy_j"
            metrics[name] = _mean(values, figure.unit, coverage, gross=gross)
            if figure.pooled is not None:
                pooled = figure.pooled([round_ for round_ in rounds if is_valid(round_)])
                metrics[name] = msgspec.structs.replace(metrics[name], value=pooled)
        else:
            metrics[name] = Metric(value=None, unit=figure.unit, reason=reason)
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
    dithered = unseen > 0 and phases_cover_tick(phases, coverage)
    numbers = [each.value for each in values]
    if dithered:
        scatter = uncertainty_of_dithered_mean(numbers, [phase or 0.0 for phase in phases])
        unseen = 0.0
    else:
        scatter = uncertainty_of_mean(numbers)
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
    return _joules(round_, round_.iterations)


def _whole(round_: Round) -> Value | None:
    return _joules(round_, 1)


def _per_token(round_: Round) -> Value | None:
    return _joules(round_, round_.tokens.output) if round_.tokens is not None else None


def _per_request(round_: Round) -> Value | None:
    return _joules(round_, round_.requests) if round_.requests is not None else None


def _mean_power(round_: Round) -> Value | None:
    return _joules(round_, round_.duration_s)


def _joules(round_: Round, over: float) -> Value | None:
    """The energy of a round by so many of what it is of; ``None`` without energy, and of none."""
    energy_j, u_j, u_absolute_j = round_.energy_j, round_.energy_u_j, round_.energy_u_absolute_j
    if energy_j is None or u_j is None or u_absolute_j is None or not over:
        return None
    own = math.sqrt(max(0.0, u_absolute_j**2 - u_j**2)) / over
    unseen, meter = 0.0, u_j
    if round_.terms is not None:
        unseen = round_.terms.coverage_j
        meter = math.sqrt(max(0.0, u_j**2 - unseen**2))
    return Value(energy_j / over, meter / over, unseen / over, own, round_.phase)


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
    if round_.tokens is None or not round_.tokens.output:
        return None
    return Value(round_.tokens.output / round_.duration_s)


def _exact(value: float | None) -> Value | None:
    return Value(value) if value is not None else None


def _duration(round_: Round) -> Value:
    return Value(round_.duration_s / round_.iterations)


def _unresolved(valid: Sequence[Round], name: str) -> list[str]:
    found = [_phase(round_, name) for round_ in valid]
    return [each.reason for each in found if each is not None and each.reason]


def _phase(round_: Round, name: str) -> Phase | None:
    return next((phase for phase in round_.phases if phase.name == name), None)


def _phase_energy(name: str, round_: Round) -> Value | None:
    phase, whole = _phase(round_, name), _whole(round_)
    if phase is None or phase.energy_j is None or phase.energy_u_j is None or whole is None:
        return None
    unseen = _coverage_j(phase.terms)
    meter = math.sqrt(max(0.0, phase.energy_u_j**2 - unseen**2))
    own = whole.own * phase.energy_j / whole.value if whole.value else 0.0
    return Value(phase.energy_j, meter, unseen, own, round_.phase).times(1 / round_.iterations)


def _coverage_j(terms: Terms | None) -> float:
    return terms.coverage_j if terms is not None else 0.0


def _of_phase(name: str) -> Figure:
    return Figure(
        "J",
        partial(_phase_energy, name),
        "the workload has no phases",
        applies=lambda round_: _phase(round_, name) is not None,
        phase=name,
    )


def _steady_tokens(name: str, round_: Round) -> int | None:
    phase = _phase(round_, name)
    return phase.output_tokens if phase is not None else None


def _steady_per_token(round_: Round) -> Value | None:
    tokens, energy = _steady_tokens("steady", round_), _phase_energy("steady", round_)
    if energy is None or not tokens:
        return None
    # The energy is that of an iteration, the tokens are those of all.
    return energy.times(round_.iterations / tokens)


def _steady_throughput(round_: Round) -> Value | None:
    phase, tokens = _phase(round_, "steady"), _steady_tokens("steady", round_)
    return Value(tokens / phase.duration_s) if phase is not None and tokens is not None else None


def _request_throughput(round_: Round) -> Value | None:
    served = round_.served is not None and round_.requests is not None
    return Value(round_.requests / round_.duration_s) if served and round_.requests else None


def _latencies(column: str, rounds: Sequence[Round]) -> list[float]:
    """That latency of every request that has one."""
    served = [getattr(round_.served, column) for round_ in rounds if round_.served is not None]
    return [value for values in served for value in values if value is not None]


def _latency_percentile(column: str, percent: int, rounds: Sequence[Round]) -> float:
    return percentile(_latencies(column, rounds), percent)


def _latency_of_round(column: str, percent: int, round_: Round) -> Value | None:
    found = _latencies(column, [round_])
    return Value(percentile(found, percent)) if found else None


def _mean_latency(column: str, round_: Round) -> Value | None:
    found = _latencies(column, [round_])
    return Value(fmean(found)) if found else None


def _percentiles(column: str) -> dict[str, Figure]:
    """The percentiles of one latency, by name: ``time_to_first_token_p50_s`` and so on."""
    return {
        f"{column.removesuffix('_s')}_p{percent}_s": Figure(
            "s",
            partial(_latency_of_round, column, percent),
            "no request has one",
            applies=_is_served,
            pooled=partial(_latency_percentile, column, percent),
            served=True,
        )
        for percent in PERCENTILES
    }


def _is_served(round_: Round) -> bool:
    return round_.served is not None


def _has_tokens(round_: Round) -> bool:
    return round_.tokens is not None and round_.tokens.output > 0


#: Every figure that is made of rounds, in the order of the report.
FIGURES: dict[str, Figure] = {
    "energy_j": Figure("J", _energy),
    "energy_per_output_token_j": Figure(
        "J/token", _per_token, "the workload makes no output tokens", applies=_has_tokens
    ),
    "energy_per_request_j": Figure(
        "J/request",
        _per_request,
        "the workload has no requests",
        applies=lambda round_: round_.requests is not None,
    ),
    "net_energy_j": Figure("J", _net, "the idle power is not known"),
    "mean_power_w": Figure("W", _mean_power),
    "duration_s": Figure("s", _duration),
    "output_tokens_per_s": Figure(
        "token/s", _throughput, "the workload makes no output tokens", applies=_has_tokens
    ),
    "time_to_first_token_s": Figure(
        "s",
        lambda round_: _exact(round_.time_to_first_token_s),
        "no token timestamps",
        applies=lambda round_: round_.time_to_first_token_s is not None,
    ),
    "inter_token_latency_s": Figure(
        "s",
        lambda round_: _exact(round_.inter_token_latency_s),
        "fewer than two tokens",
        applies=lambda round_: round_.inter_token_latency_s is not None,
    ),
    "prefill_energy_j": _of_phase("prefill"),
    "decode_energy_j": _of_phase("decode"),
    "steady_energy_per_output_token_j": Figure(
        "J/token", _steady_per_token, NO_STEADY, applies=_is_served, phase="steady", served=True
    ),
    "steady_output_tokens_per_s": Figure(
        "token/s", _steady_throughput, NO_STEADY, applies=_is_served, served=True
    ),
    "requests_per_s": Figure("request/s", _request_throughput, applies=_is_served, served=True),
    "end_to_end_latency_s": Figure(
        "s", partial(_mean_latency, "end_to_end_latency_s"), applies=_is_served, served=True
    ),
    **_percentiles("time_to_first_token_s"),
    **_percentiles("inter_token_latency_s"),
    **_percentiles("end_to_end_latency_s"),
}
