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
    NO_TIME,
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

#: Iterations of all rounds together that show a short phase, because they begin at different moments of a
#: tick (benchmarks/plugin/coverage/worlds_run.py), and most iterations of a round that are worth a try.
PHASE_ITERATIONS, MOST_ITERATIONS = 20, 10_000

#: Why work may have no energy per token or of a phase.
NO_OUTPUT = "no output tokens (count yours: energy(fn, output_tokens=...))"
NO_INPUT, NO_PHASES = "the workload has no input tokens", "the workload has no phases"
NO_DRAFTS, NO_TIMES = "the work drafts no tokens", "no token timestamps"
NO_GAPS = "no token timestamps, or fewer than two tokens"


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

    Rounds are counted from 0. Those without energy say nothing about a metric of energy.
    """
    figure, of_energy = ROUND_METRICS[name], is_energy_unit(ROUND_METRICS[name].unit)
    valid = [(index, each) for index, each in enumerate(rounds) if not each.flags or is_valid(each)]
    counted = [each for each in valid if each[1].energy_j is not None] if of_energy else valid
    values: list[tuple[int, RoundValue]] = []
    lacking: list[str] = []
    for index, each in counted:
        value = figure.of(each)
        if isinstance(value, str):
            lacking.append(value)
        else:
            values.append((index, value))
    if lacking and figure.every:
        values = []
    if values and figure.phase is not None:
        why = _explain_unresolvable(
            [value for _, value in values], figure.phase, [each for _, each in counted]
        )
        return ([], why) if why is not None else (values, None)
    if values:
        return values, None
    if valid and figure.optional and not figure.applies(each for _, each in valid):
        return [], figure.needs
    if not counted:
        return [], _explain_missing_energy(rounds)
    if figure.every and len(counted) > 1 and lacking != [figure.needs] * len(counted):
        return [], f"{len(lacking)} of {len(counted)} rounds: {lacking[0]}"
    return [], lacking[0]


def _explain_unresolvable(values: Sequence[RoundValue], name: str, rounds: Sequence[Round]) -> str | None:
    """Return why the energy of a phase is not known, and the rounds that would do; None if it is known.

    All rounds together may know it although single ones do not. Leaving out single rounds would leave out
    those that are too low by chance.
    """
    mean = fmean(each.value for each in values)
    single = math.sqrt(fmean(each.meter**2 for each in values) / len(values))
    shared = fmean(each.shape for each in values), fmean(each.unsampled for each in values)
    u = math.hypot(single, *shared) / mean if mean > 0 else math.inf
    if u <= RESOLVABLE:
        return None
    phases = ((find_phase(each, name), each.iterations) for each in rounds)
    mean_s = fmean(phase.duration_s / count for phase, count in phases if phase is not None)
    iterations = min(each.iterations for each in rounds)
    # It falls with the root of the iterations, and is itself known from these few; so some more.
    needed = 2 * max(iterations * (u / RESOLVABLE) ** 2, PHASE_ITERATIONS / len(values))
    advice = "no number of iterations makes up for it; make the phase longer"
    if needed <= MOST_ITERATIONS:
        digits = 10 ** max(0, math.ceil(math.log10(needed)) - 2)
        advice = f"the mark energy_options(iterations={math.ceil(needed / digits) * digits}) would do"
    return (
        f"not resolvable: {mean_s * 1e3:.3g} ms phase in {len(values)} rounds of {iterations} "
        f"iteration{'s' if iterations > 1 else ''}; {advice}"
    )


def round_values(name: str, rounds: Sequence[Round]) -> tuple[list[RoundValue], str | None]:
    """Return the values of a metric in valid rounds, in order; without any, also the reason."""
    values, reason = values_of_rounds(name, rounds)
    return [value for _, value in values], reason


def applies_to_rounds(name: str, rounds: Iterable[Round]) -> bool:
    """Return whether a workload has what a metric needs, such as tokens, apart from the meters."""
    return ROUND_METRICS[name].applies(rounds)


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
                values,
                figure.unit,
                coverage,
                gross=gross,
                is_rate=figure.unit.endswith("/s"),
                added_to=added_to,
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


def _explain_missing_energy(rounds: Sequence[Round]) -> str:
    """Return why no valid round has energy."""
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
    values, _ = round_values("energy_j", rounds)
    if len(values) < 2:
        return None
    metric = summarize_rounds(values, "J", coverage, gross=True, added_to=_added_to(rounds, planned))
    if metric.value is None or metric.uncertainty is None or metric.value <= 0:
        return None
    return metric.uncertainty / metric.value


def decode_tokens(round_: Round) -> int:
    """Return the output tokens of a round without the first of each sequence, which prefill produces."""
    return output_tokens(round_) - (round_.requests or 0) if round_.tokens is not None else 0


def is_prefill_only(rounds: Sequence[Round]) -> bool:
    """Return whether work reads tokens and produces at most one for each request."""
    return bool(rounds) and all(_input_tokens(each) > 0 and decode_tokens(each) <= 0 for each in rounds)


def output_tokens(round_: Round) -> int:
    """Return the output tokens of a round, 0 without any."""
    return round_.tokens.output if round_.tokens is not None else 0


def _input_tokens(round_: Round) -> int:
    return round_.tokens.input if round_.tokens is not None else 0


def _all_tokens(round_: Round) -> int:
    return _input_tokens(round_) and _input_tokens(round_) + output_tokens(round_)


def _per(count: Callable[[Round], int], needs: str, round_: Round) -> RoundValue | str:
    """Return the energy of a round over a count of it."""
    return joules(round_, over) if (over := count(round_)) > 0 else needs


def _per_count(unit: str, count: Callable[[Round], int], needs: str, heading: str) -> RoundMetric:
    return RoundMetric(unit, partial(_per, count, needs), needs, heading)


def _energy(round_: Round) -> RoundValue | str:
    return joules(round_, round_.iterations)


def _mean_power(round_: Round) -> RoundValue | str:
    return joules(round_, round_.duration_s) if round_.duration_s >= CLOCK_RESOLUTION_S else NO_TIME


def _net(round_: Round) -> RoundValue | str:
    energy = _energy(round_)
    if isinstance(energy, str) or round_.idle_power_w is None:
        return energy if isinstance(energy, str) else "the idle power is unknown"
    duration_s = round_.duration_s / round_.iterations
    idle_u_j = (round_.idle_power_u_w or 0.0) * duration_s
    net_j = energy.value - round_.idle_power_w * duration_s
    accuracy = energy.accuracy
    if energy.value and not is_attributed(round_):
        # An error of the gain affects idle power as well. That of a split affects only the rest.
        accuracy *= abs(net_j / energy.value)
    meter = math.hypot(energy.meter, idle_u_j)
    return RoundValue(net_j, meter, energy.unsampled, accuracy, energy.phase, energy.shape)


def _throughput(round_: Round) -> RoundValue | str:
    tokens = output_tokens(round_)
    return rate(tokens, round_.duration_s) if tokens > 0 else NO_OUTPUT


def _known(field: str, needs: str, round_: Round) -> RoundValue | str:
    value = getattr(round_, field)
    return needs if value is None else RoundValue(value)


def _draft_acceptance(round_: Round) -> RoundValue | str:
    tokens = round_.tokens
    if tokens is None or tokens.drafted is None:
        return NO_DRAFTS
    if not tokens.drafted or tokens.accepted is None:
        return "no token was drafted"
    return RoundValue(tokens.accepted / tokens.drafted)


def _phase(name: str, round_: Round) -> RoundValue | str:
    phase = find_phase(round_, name)
    return NO_PHASES if phase is None else phase_energy(round_, phase)


def _phase_per_token(
    name: str, count: Callable[[Round], int], missing: str, round_: Round
) -> RoundValue | str:
    energy, tokens = _phase(name, round_), count(round_)
    if isinstance(energy, str) or tokens <= 0:
        return energy if isinstance(energy, str) else missing
    # The energy is per iteration; the tokens are of all iterations.
    return energy.scale(round_.iterations / tokens)


def _phase_metrics(
    name: str, tokens: str, count: Callable[[Round], int], missing: str
) -> dict[str, RoundMetric]:
    """Return the energy of a phase, and that over the tokens that it reads or writes."""
    whole, each = partial(_phase, name), partial(_phase_per_token, name, count, missing)
    shown = tokens.removeprefix("output ")
    return {
        f"{name}_energy_j": RoundMetric("J", whole, NO_PHASES, f"{name} ± u", phase=name, every=True),
        f"{name}_energy_per_{tokens.replace(' ', '_')}_j": RoundMetric(
            "J/token", each, NO_PHASES, f"{name} per {shown} ± u", phase=name, every=True
        ),
    }


#: Every metric that is computed from rounds, in the order of the report.
ROUND_METRICS: dict[str, RoundMetric] = {
    "energy_j": RoundMetric("J", _energy, heading="energy ± u"),
    "energy_per_output_token_j": _per_count("J/token", output_tokens, NO_OUTPUT, "per token ± u"),
    "energy_per_input_token_j": _per_count("J/token", _input_tokens, NO_INPUT, "per input token ± u"),
    "energy_per_token_j": _per_count("J/token", _all_tokens, NO_INPUT, "per in+out token ± u"),
    "energy_per_request_j": _per_count(
        "J/request", lambda each: each.requests or 0, "the workload has no requests", "per request ± u"
    ),
    "net_energy_j": RoundMetric("J", _net, heading="net energy ± u"),
    "mean_power_w": RoundMetric("W", _mean_power, heading="W ± u"),
    "duration_s": RoundMetric("s", lambda each: RoundValue(each.duration_s / each.iterations), heading="s"),
    "output_tokens_per_s": RoundMetric("token/s", _throughput, NO_OUTPUT, "token/s", "more"),
    "time_to_first_token_s": RoundMetric(
        "s", partial(_known, "time_to_first_token_s", NO_TIMES), NO_TIMES, "first token s"
    ),
    "inter_token_latency_s": RoundMetric(
        "s", partial(_known, "inter_token_latency_s", NO_GAPS), NO_GAPS, "inter token s"
    ),
    **_phase_metrics("prefill", "input token", _input_tokens, NO_INPUT),
    **_phase_metrics("decode", "output token", decode_tokens, "no sequence has a second output token"),
    **SERVED_METRICS,
    **GOODPUT_METRICS,
    "draft_acceptance_rate": RoundMetric(
        "accepted/drafted", _draft_acceptance, NO_DRAFTS, "accepted/drafted", "more", optional=True
    ),
}

#: Every metric that has one value for all rounds.
METRICS_WITHOUT_ROUNDS: dict[str, SingleMetric] = {
    "peak_memory_bytes": SingleMetric("B", "peak MiB"),
}

#: All built-in metrics, in the order of columns.
BUILT_IN: dict[str, RoundMetric | SingleMetric] = {**ROUND_METRICS, **METRICS_WITHOUT_ROUNDS}
METRIC_NAMES = tuple(BUILT_IN)
