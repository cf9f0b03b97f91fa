# SPDX-License-Identifier: Apache-2.0
"""Metrics of a test, computed from its rounds, for one iteration of the work.

A metric is the median over the valid rounds (see ``round_statistics``). Tables, verdicts, the history and
JSON all show this value. A rate, such as tokens per second, is the inverse of the median time for one token.

Metrics of served loads are in ``served_metrics``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

import msgspec

from pytest_llenergy.record.goodput import GOODPUT_METRICS
from pytest_llenergy.record.quantity import RESOLVABLE
from pytest_llenergy.record.record import Metric, Round, is_attributed
from pytest_llenergy.record.round_metric import (
    CLOCK_RESOLUTION_S,
    RoundMetric,
    SingleMetric,
    find_phase,
    is_energy_unit,
    is_valid,
    joules,
    phase_energy,
    rate,
)
from pytest_llenergy.record.round_statistics import RoundValue, summarize_rounds
from pytest_llenergy.record.served_metrics import SERVED_METRICS
from pytest_llenergy.record.timeline import Flops

#: Iterations of all rounds together that show a short phase, because they begin at different moments of a
#: tick (benchmarks/plugin/coverage/worlds_run.py), and most iterations of a round that are worth a try.
PHASE_ITERATIONS, MOST_ITERATIONS = 20, 10_000

#: Why work may have no energy per token or of a phase.
NO_OUTPUT = "no output tokens (count yours: energy(fn, output_tokens=...))"
NO_INPUT, NO_PHASES = "the workload has no input tokens", "the workload has no phases"


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


def scale_metric(metric: Metric, factor: float, unit: str, source: str | None) -> Metric:
    """Return a metric times an exact factor, with the same relative uncertainties."""
    numbers = {
        name: None if value is None else value * factor
        for name in ("value", "uncertainty", "spread", "uncertainty_absolute")
        for value in (getattr(metric, name),)
    }
    return msgspec.structs.replace(metric, unit=unit, source=source, **numbers)


def values_of_rounds(name: str, rounds: Sequence[Round]) -> tuple[list[tuple[int, RoundValue]], str | None]:
    """Return the values of a metric in valid rounds with the indices of these; without any, also the reason.

    Rounds are counted from 0.
    """
    figure = ROUND_METRICS[name]
    valid = [(index, each) for index, each in enumerate(rounds) if not each.flags or is_valid(each)]
    missing = figure.missing
    lacks = figure.lacks
    lacking = [why for _, each in valid if (why := lacks(each)) is not None] if lacks is not None else []
    if lacking:
        if any(figure.applies(each) for _, each in valid):
            missing = f"{len(lacking)} of {len(valid)} rounds: {lacking[0]}"
        elif figure.phase is not None and all(find_phase(each, figure.phase) is None for _, each in valid):
            missing = NO_PHASES
        values = []
    else:
        values = [(index, value) for index, each in valid if (value := figure.value_of(each)) is not None]
    if values and figure.phase is not None:
        u = _relative_uncertainty_of_mean([value for _, value in values])
        if u > RESOLVABLE:
            mean_s = fmean(_phase_duration_s(each, figure.phase) for _, each in valid)
            iterations = min(each.iterations for _, each in valid)
            return [], (
                f"not resolvable: {mean_s * 1e3:.3g} ms phase in {len(values)} rounds of {iterations} "
                f"iteration{'s' if iterations > 1 else ''}; {_longer_rounds(u, iterations, len(values))}"
            )
    if values:
        return values, None
    if valid and figure.needs and not any(figure.applies(each) for _, each in valid):
        return [], figure.needs
    no_energy = _explain_missing_energy(rounds) if is_energy_unit(figure.unit) or not valid else None
    return [], no_energy or missing


def _relative_uncertainty_of_mean(values: Sequence[RoundValue]) -> float:
    """Return how well rounds together know the energy of a phase, although single ones may not.

    Leaving out single rounds would leave out those that are too low by chance.
    """
    mean = fmean(each.value for each in values)
    return math.hypot(*_uncertainties(values)) / mean if mean > 0 else math.inf


def _longer_rounds(u: float, iterations: int, rounds: int) -> str:
    """Return what resolves a phase with a relative uncertainty: it falls with the root of the iterations."""
    needed = max(iterations * (u / RESOLVABLE) ** 2, PHASE_ITERATIONS / rounds)
    if needed > MOST_ITERATIONS:
        return "no number of iterations makes up for it; make the phase longer"
    digits = 10 ** max(0, math.ceil(math.log10(needed)) - 2)
    return f"the mark energy_options(iterations={math.ceil(needed / digits) * digits}) would do"


def _uncertainties(values: Sequence[RoundValue]) -> tuple[float, float]:
    """Return the standard uncertainties of the mean: what differs between rounds, and what they share."""
    single = math.sqrt(fmean(each.meter**2 for each in values) / len(values))
    return single, math.hypot(fmean(each.shape for each in values), fmean(each.unsampled for each in values))


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
        if figure.optional and not applies_to_rounds(name, rounds):
            continue
        values, reason = round_values(name, rounds)
        if values:
            # Net energy may be zero or less. Gross energy is more than zero.
            gross = "J" in figure.unit and name != "net_energy_j"
            metrics[name] = summarize_rounds(
                values, figure.unit, coverage, gross=gross, is_rate=figure.is_rate, added_to=added_to
            )
            if figure.source is not None:
                metrics[name] = msgspec.structs.replace(metrics[name], source=figure.source)
            if figure.pooled is not None:
                pooled, n = figure.pooled([round_ for round_ in rounds if is_valid(round_)])
                metrics[name] = msgspec.structs.replace(
                    metrics[name], value=pooled, n=n, rounds=metrics[name].n
                )
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
    # The most frequent one: another host or board may be disturbed in a few rounds.
    return Counter(reasons).most_common(1)[0][0] if reasons else "no valid round"


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
    return joules(round_, round_.iterations)


def _per_token(round_: Round) -> RoundValue | None:
    return joules(round_, round_.tokens.output) if round_.tokens is not None else None


def _per_input_token(round_: Round) -> RoundValue | None:
    return joules(round_, round_.tokens.input) if round_.tokens is not None else None


def _per_any_token(round_: Round) -> RoundValue | None:
    if round_.tokens is None or not round_.tokens.input:
        return None
    return joules(round_, round_.tokens.input + round_.tokens.output)


def decode_tokens(round_: Round) -> int:
    """Return the output tokens of a round without the first of each sequence, which prefill produces."""
    return round_.tokens.output - (round_.requests or 0) if round_.tokens is not None else 0


def is_prefill_only(rounds: Sequence[Round]) -> bool:
    """Return whether work reads tokens and produces at most one for each request, as embedding does too."""
    return bool(rounds) and all(_has_input(each) and decode_tokens(each) <= 0 for each in rounds)


def _phase_per_token(name: str, count: Callable[[Round], int], round_: Round) -> RoundValue | None:
    energy, tokens = phase_energy(name, round_), count(round_)
    # The energy is per iteration; the tokens are of all iterations.
    return energy.scale(round_.iterations / tokens) if energy is not None and tokens > 0 else None


def _per_request(round_: Round) -> RoundValue | None:
    return joules(round_, round_.requests) if round_.requests is not None else None


def _mean_power(round_: Round) -> RoundValue | None:
    return joules(round_, round_.duration_s) if round_.duration_s >= CLOCK_RESOLUTION_S else None


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
    return rate(round_.tokens.output, round_.duration_s)


def _exact(value: float | None) -> RoundValue | None:
    return RoundValue(value) if value is not None else None


def _duration(round_: Round) -> RoundValue:
    return RoundValue(round_.duration_s / round_.iterations)


def _phase_duration_s(round_: Round, name: str) -> float:
    """Return the mean length of a phase of a round (seconds)."""
    phase = find_phase(round_, name)
    return phase.duration_s / round_.iterations if phase is not None else 0.0


def _phase_metric(name: str) -> RoundMetric:
    return RoundMetric(
        "J",
        partial(phase_energy, name),
        NO_PHASES,
        f"{name} ± u",
        applies=lambda round_: find_phase(round_, name) is not None,
        phase=name,
        lacks=partial(_lacks_phase, name),
    )


def _phase_token_metric(name: str, count: Callable[[Round], int], missing: str, heading: str) -> RoundMetric:
    return RoundMetric(
        "J/token",
        partial(_phase_per_token, name, count),
        missing,
        heading,
        applies=lambda round_: find_phase(round_, name) is not None and count(round_) > 0,
        phase=name,
        lacks=partial(_lacks_phase, name),
    )


def _lacks_phase(name: str, round_: Round) -> str | None:
    phase = find_phase(round_, name)
    return phase.reason if phase is not None else f"no phase {name}"


def _is_drafted(round_: Round) -> bool:
    return round_.tokens is not None and round_.tokens.drafted is not None


def _draft_acceptance(round_: Round) -> RoundValue | None:
    tokens = round_.tokens
    if tokens is None or not tokens.drafted or tokens.accepted is None:
        return None
    return RoundValue(tokens.accepted / tokens.drafted)


def _has_tokens(round_: Round) -> bool:
    return round_.tokens is not None and round_.tokens.output > 0


def _input_tokens(round_: Round) -> int:
    return round_.tokens.input if round_.tokens is not None else 0


def _has_input(round_: Round) -> bool:
    return _input_tokens(round_) > 0


#: Every metric that is computed from rounds, in the order of the report.
ROUND_METRICS: dict[str, RoundMetric] = {
    "energy_j": RoundMetric("J", _energy, heading="energy ± u"),
    "energy_per_output_token_j": RoundMetric(
        "J/token",
        _per_token,
        NO_OUTPUT,
        "per token ± u",
        applies=_has_tokens,
    ),
    "energy_per_input_token_j": RoundMetric(
        "J/token", _per_input_token, NO_INPUT, "per input token ± u", applies=_has_input
    ),
    "energy_per_token_j": RoundMetric(
        "J/token", _per_any_token, NO_INPUT, "per in+out token ± u", applies=_has_input
    ),
    "energy_per_request_j": RoundMetric(
        "J/request",
        _per_request,
        "the workload has no requests",
        "per request ± u",
        applies=lambda round_: round_.requests is not None,
    ),
    "net_energy_j": RoundMetric("J", _net, "the idle power is unknown", "net energy ± u"),
    "mean_power_w": RoundMetric("W", _mean_power, heading="W ± u"),
    "duration_s": RoundMetric("s", _duration, heading="s"),
    "output_tokens_per_s": RoundMetric(
        "token/s",
        _throughput,
        NO_OUTPUT,
        "token/s",
        "more",
        applies=_has_tokens,
    ),
    "time_to_first_token_s": RoundMetric(
        "s",
        lambda round_: _exact(round_.time_to_first_token_s),
        "no token timestamps",
        "first token s",
        applies=lambda round_: round_.time_to_first_token_s is not None,
    ),
    "inter_token_latency_s": RoundMetric(
        "s",
        lambda round_: _exact(round_.inter_token_latency_s),
        "no token timestamps, or fewer than two tokens",
        "inter token s",
        applies=lambda round_: round_.inter_token_latency_s is not None,
    ),
    "prefill_energy_j": _phase_metric("prefill"),
    "decode_energy_j": _phase_metric("decode"),
    "prefill_energy_per_input_token_j": _phase_token_metric(
        "prefill", _input_tokens, NO_INPUT, "prefill per input token ± u"
    ),
    "decode_energy_per_output_token_j": _phase_token_metric(
        "decode", decode_tokens, "no sequence has a second output token", "decode per token ± u"
    ),
    **SERVED_METRICS,
    **GOODPUT_METRICS,
    "draft_acceptance_rate": RoundMetric(
        "accepted/drafted",
        _draft_acceptance,
        "no token was drafted",
        "accepted/drafted",
        "more",
        applies=_is_drafted,
        optional=True,
    ),
}

#: Every metric that has one value for all rounds; ``measure.roles`` computes those of roles.
METRICS_WITHOUT_ROUNDS: dict[str, SingleMetric] = {
    "peak_memory_bytes": SingleMetric("B", "peak MiB"),
    "flops": SingleMetric("FLOP", "FLOP"),
    "energy_per_flop_j": SingleMetric("J", "per FLOP ± u"),
    "prefill_workers_energy_j": SingleMetric("J", "prefill workers ± u"),
    "prefill_workers_energy_per_input_token_j": SingleMetric(
        "J/token", "prefill workers per input token ± u"
    ),
    "decode_workers_energy_j": SingleMetric("J", "decode workers ± u"),
    "decode_workers_energy_per_output_token_j": SingleMetric("J/token", "decode workers per token ± u"),
}

#: All built-in metrics, in the order of columns.
BUILT_IN: dict[str, RoundMetric | SingleMetric] = {**ROUND_METRICS, **METRICS_WITHOUT_ROUNDS}
METRIC_NAMES = tuple(BUILT_IN)
