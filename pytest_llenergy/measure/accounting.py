# SPDX-License-Identifier: Apache-2.0
"""Assign joules and latencies to rounds and phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from pytest_llenergy.measure.phases import (
    phase_energies,
    phase_spans,
    solve_round,
    solved_together,
    span_tokens,
)
from pytest_llenergy.measure.quality import round_flags
from pytest_llenergy.measure.rounds import MeasuredRound, tick_phase
from pytest_llenergy.meters.attribution import Split, attribution_flags, choose_split
from pytest_llenergy.meters.quiet_gaps import MIN_GAP_TICKS, doubt_quiet_edges, quiet_power
from pytest_llenergy.meters.trace import Series, Trace
from pytest_llenergy.meters.uncertainty import (
    Attributed,
    Energy,
    Power,
    absolute_uncertainty_j,
    domain_energy,
    sum_energies,
)
from pytest_llenergy.meters.window_arithmetic import (
    RESOLVABLE,
    energy_between,
    energy_between_readings,
)
from pytest_llenergy.model.record import Flag, Phase, Round, Tokens
from pytest_llenergy.model.served import ServedRequests, TokenGaps
from pytest_llenergy.model.timeline import RequestTimeline, Timeline

#: Relative standard uncertainty of the energy of a phase for which rounds are made long enough: half of what
#: is resolvable, so that it is known too if less is used than in the round that told how long.
RESOLVED_WELL = RESOLVABLE / 2


def time_to_first_token_s(timeline: Timeline) -> float | None:
    """Return the mean time from the arrival of a request at the backend to its first token (seconds)."""
    waits: list[float] = []
    for iteration in (each for rank in timeline.ranks if not rank.repeats_others for each in rank.iterations):
        for request in iteration.requests:
            if request.first_token_ns is None:
                return None
            start_ns = iteration.start_ns if request.start_ns is None else request.start_ns
            waits.append((request.first_token_ns - start_ns) / 1e9)
    return fmean(waits) if waits else None


def inter_token_latency_s(timeline: Timeline) -> float | None:
    """Return the mean over requests of their mean time between output tokens (seconds).

    That of a request is the time from its first token to its last, over the number of tokens after the first.
    Requests with one output token are left out; ``None`` if no request remains.
    """
    gaps: list[float] = []
    for request in timeline.requests:
        if request.first_token_ns is None or request.last_token_ns is None:
            return None
        if request.output_tokens > 1:
            span_s = (request.last_token_ns - request.first_token_ns) / 1e9
            gaps.append(span_s / (request.output_tokens - 1))
    return fmean(gaps) if gaps else None


def served_requests(timeline: Timeline) -> ServedRequests | None:
    """Return the latencies of each request of a served load, to the microsecond; ``None`` for other work."""
    if not timeline.served:
        return None
    requests = sorted(timeline.requests, key=lambda each: each.start_ns or 0)
    times = [
        (each.start_ns, each.first_token_ns, each.last_token_ns)
        for each in requests
        if each.start_ns is not None and each.first_token_ns is not None and each.last_token_ns is not None
    ]
    if len(times) < len(requests):
        return None
    waits_ns = (each.start_ns - each.due_ns if each.start_ns and each.due_ns else 0 for each in requests)
    cached = [each.cached_tokens for each in requests if each.cached_tokens is not None]
    return ServedRequests(
        sent_s=[_seconds(sent_ns - timeline.start_ns) for sent_ns, _, _ in times],
        time_to_first_token_s=[_seconds(first_ns - sent_ns) for sent_ns, first_ns, _ in times],
        end_to_end_latency_s=[_seconds(last_ns - sent_ns) for sent_ns, _, last_ns in times],
        output_tokens=[each.output_tokens for each in requests],
        time_per_output_token_s=[
            _time_per_output_token_s(each, last_ns - first_ns)
            for each, (_, first_ns, last_ns) in zip(requests, times, strict=True)
        ],
        token_gaps=token_gaps(requests),
        input_tokens=[each.input_tokens for each in requests],
        waited_s=[_seconds(wait_ns) for wait_ns in waits_ns],
        cached_tokens=cached if len(cached) == len(requests) else [],
        failures=list(timeline.failures),
    )


def token_gaps(requests: Sequence[RequestTimeline]) -> TokenGaps | None:
    """Return the times between consecutive tokens of all requests; ``None`` if a token has no time.

    Tokens of one chunk arrive together. The gap is that between chunks, as in ``vllm bench serve``
    (vllm/benchmarks/serve.py: ``itl``): nobody waits within a chunk, and gaps of zero would make the median
    depend on how a server cuts its stream. Chunks that a busy client reads at once have a gap of zero.
    """
    if any(len(request.token_ns) != request.output_tokens for request in requests):
        return None
    counts: Counter[int] = Counter()
    for request in requests:
        arrivals_ns = request.chunk_ns or request.token_ns
        counts.update(_three_digits(round((b - a) / 1e3)) for a, b in pairwise(arrivals_ns))
    ordered = sorted(counts)
    return TokenGaps(gap_s=[each / 1e6 for each in ordered], count=[counts[each] for each in ordered])


def _three_digits(number: int) -> int:
    return round(float(f"{number:.3g}"))


def _time_per_output_token_s(request: RequestTimeline, span_ns: int) -> float | None:
    return _seconds(span_ns / (request.output_tokens - 1)) if request.output_tokens > 1 else None


def _seconds(nanoseconds: float) -> float:
    return round(nanoseconds / 1e9, 6)


@dataclass(frozen=True)
class DomainRound:
    """Energy of one domain in one round: in total, by phase, and the idle power around it.

    If others used the host, ``attributed`` has the energy of the whole domain, and ``split`` tells how it was
    split. ``doubt`` is what speaks against a quiet gap that reaches up to the work.
    """

    series: Series
    whole: Energy
    phases: dict[str, Energy]
    idle: Power | None
    attributed: Attributed | None = None
    split: Split | None = None
    doubt: str | None = None


def account_round(
    measured: MeasuredRound,
    trace: Trace,
    reasons: Sequence[str] = (),
    rest: dict[str, Power] | None = None,
) -> Round:
    """Return the record of a round. Joules are the sum over all domains, or missing if any domain has none.

    Args:
        measured: The round.
        trace: One series for each domain.
        reasons: Why meters could not be opened, for a round without meters.
        rest: Power of each domain in the last gap in which others were quiet. It is updated.
    """
    timeline, rest = measured.timeline, {} if rest is None else rest
    domains = [_domain_round(measured, series, rest) for series in trace]
    by_domain = {
        each.series.domain.name: domain_energy(each.whole, each.series, timeline.duration_s, each.attributed)
        for each in domains
    }
    total = sum_energies([each.whole for each in domains], reasons)
    idle = _idle(domains)
    return Round(
        start_s=timeline.start_ns / 1e9,
        duration_s=timeline.duration_s,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=absolute_uncertainty_j(total, list(by_domain.values())),
        iterations=timeline.iterations,
        phase=tick_phase(trace, timeline.start_ns),
        terms=total.variances.terms() if total.energy_j is not None else None,
        idle_power_w=idle.watts if idle else None,
        idle_power_u_w=idle.u_watts if idle else None,
        by_domain=by_domain,
        phases=_phases(timeline, domains),
        tokens=_tokens(measured),
        requests=len(timeline.requests) or None,
        served=served_requests(timeline),
        time_to_first_token_s=time_to_first_token_s(timeline),
        inter_token_latency_s=inter_token_latency_s(timeline),
        temperature_start_c=measured.temperature_start_c,
        own_cpu_s=measured.own_cpu_s,
        other_cpu_s=measured.other_cpu_s,
        stolen_cpu_s=measured.stolen_cpu_s,
        flags=[
            *round_flags(measured, trace, total),
            *attribution_flags([each.split for each in domains if each.split is not None]),
            *_doubts(domains),
        ],
        reason=total.reason,
    )


def required_lengths(
    measured: MeasuredRound, trace: Trace, names: Collection[str], rounds: int
) -> dict[str, float]:
    """Return how much longer rounds must be for the energy of each phase to be known well, by name.

    1 or less is long enough, and infinite is a phase that no length resolves. Phases that the round does not
    have are left out. Decode without a second token of any sequence is no phase of the work.

    Args:
        measured: A round.
        trace: One series for each domain.
        names: Names of phases.
        rounds: Number of rounds that will be measured.
    """
    timeline = measured.timeline
    spans = phase_spans(timeline)
    wanted = [
        name
        for name in names
        if name in spans and (name != "decode" or any(each.output_tokens > 1 for each in timeline.requests))
    ]
    domains = [_domain_round(measured, series, {}) for series in trace] if wanted else []
    return {
        name: _required_length(sum_energies([each.phases[name] for each in domains]), rounds)
        for name in wanted
    }


def _required_length(energy: Energy, rounds: int) -> float:
    if energy.energy_j is None or energy.energy_j <= 0:
        return math.inf
    # These grow with the energy; the others with the root of the number of iterations.
    shared = math.hypot(*(math.sqrt(each) for each in (energy.variances.shape, energy.variances.coverage)))
    fixed = shared / energy.energy_j
    if fixed >= RESOLVABLE:
        return math.inf
    goal = max(RESOLVED_WELL, (fixed + RESOLVABLE) / 2)
    others = energy.variances.total / energy.energy_j**2 - fixed**2
    return others / rounds / (goal**2 - fixed**2)


def _doubts(domains: Sequence[DomainRound]) -> list[Flag]:
    details = [f"{each.series.domain.name}: {each.doubt}" for each in domains if each.doubt is not None]
    return [Flag(name="edge-not-quiet", severity="warning", detail=detail) for detail in details]


def _domain_round(measured: MeasuredRound, series: Series, rest: dict[str, Power]) -> DomainRound:
    timeline = measured.timeline
    spans = phase_spans(timeline)
    if series.domain.rests:
        return _resting_domain_round(measured, series, spans)
    before = quiet_power(series, measured.gap_start_ns, timeline.start_ns)
    after = quiet_power(series, timeline.end_ns, measured.gap_end_ns)
    gaps = ((measured.gap_start_ns, timeline.start_ns), (timeline.end_ns, measured.gap_end_ns))
    reason = next(filter(None, (series.reason_between(*gap) for gap in gaps)), None)
    # A counter that was wrong in a quiet gap shows a wrong idle power there. Power that was not read for a
    # while is not wrong.
    if before is None or after is None or (reason is not None and not series.domain.integrated):
        reason = reason or (
            f"{series.meter}: {series.domain.name} ticked fewer than {MIN_GAP_TICKS} times in a quiet gap; "
            "it stands still, or --energy-gap is too short"
        )
        nothing = Energy(None, reason=reason)
        return DomainRound(series, nothing, dict.fromkeys(spans, nothing), None)
    whole = energy_between(series, timeline.start_ns, timeline.end_ns, before, after)
    spread = abs(after.watts - before.watts) / math.sqrt(12)
    watts = (before.watts + after.watts) / 2
    idle = Power(watts, math.hypot(before.u_watts / 2, after.u_watts / 2, spread))
    doubt = None
    # A part-time sensor shows an edge elsewhere within its tick.
    if solved_together(series, timeline) and whole.energy_j is not None and series.domain.coverage >= 1:
        edges = (timeline.start_ns, timeline.end_ns)
        doubt = doubt_quiet_edges(series, *edges, before, after, whole.variances)
        if doubt is not None:
            whole = solve_round(series, *edges, before, after)
    phases = phase_energies(series, spans, timeline, whole, before, after)
    found = DomainRound(series, whole, phases, idle, doubt=doubt)
    if measured.gap_cpu is None or whole.energy_j is None:
        return found
    loaded = list(zip((before, after), measured.gap_cpu, strict=True))
    use = measured.cpu
    split = choose_split(series.domain, use, whole.energy_j / use.duration_s, loaded, rest)
    if split is not None:
        return _split_round(found, split, timeline)
    if series.domain.cpu_ratio is not None and measured.has_busy_gap:
        return replace(found, idle=rest.get(series.domain.name))
    return found


def _split_round(found: DomainRound, split: Split, timeline: Timeline) -> DomainRound:
    """Return the test's part of the energy of a domain."""
    phases: dict[str, Energy] = {}
    for name, parts in phase_spans(timeline).items():
        part = split.part(found.phases[name], sum(end_ns - start_ns for start_ns, end_ns in parts) / 1e9)
        phases[name] = part.energy if part is not None else found.phases[name]
    attributed = split.part(found.whole, timeline.duration_s)
    whole = attributed.energy if attributed is not None else found.whole
    return DomainRound(found.series, whole, phases, split.idle, attributed, split, found.doubt)


def _resting_domain_round(
    measured: MeasuredRound, series: Series, spans: Mapping[str, list[tuple[int, int]]]
) -> DomainRound:
    """Return the energy of a domain that counts only the work, so that its idle power is zero."""
    timeline = measured.timeline
    between = energy_between_readings if measured.in_reader else energy_between
    whole = between(series, timeline.start_ns, timeline.end_ns)
    phases = phase_energies(series, spans, timeline, whole)
    return DomainRound(series, whole, phases, Power(0.0, 0.0))


def _phases(timeline: Timeline, domains: Sequence[DomainRound]) -> list[Phase]:
    phases: list[Phase] = []
    for name, parts in phase_spans(timeline).items():
        energy = sum_energies([domain.phases[name] for domain in domains])
        phases.append(
            Phase(
                name=name,
                duration_s=sum(end_ns - start_ns for start_ns, end_ns in parts) / 1e9,
                energy_j=energy.energy_j,
                energy_u_j=energy.u_j,
                terms=energy.variances.terms() if energy.energy_j is not None else None,
                reason=energy.reason,
                output_tokens=span_tokens(timeline, name),
            )
        )
    return phases


def _idle(domains: Sequence[DomainRound]) -> Power | None:
    powers = [domain.idle for domain in domains if domain.idle is not None]
    if not powers or len(powers) < len(domains):
        return None
    return Power(sum(power.watts for power in powers), math.hypot(*(power.u_watts for power in powers)))


def _tokens(measured: MeasuredRound) -> Tokens | None:
    requests = measured.timeline.requests
    if not requests:
        return None
    return Tokens(
        input=sum(request.input_tokens for request in requests),
        output=sum(request.output_tokens for request in requests),
        drafted=_sum_known(request.drafted_tokens for request in requests),
        accepted=_sum_known(request.accepted_tokens for request in requests),
        computed=_sum_known(request.computed_tokens for request in requests),
        cached=_sum_known(request.cached_tokens for request in requests),
    )


def _sum_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum, or None if a count is unknown."""
    known = list(counts)
    return None if None in known else sum(count or 0 for count in known)
