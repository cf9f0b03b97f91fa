# SPDX-License-Identifier: Apache-2.0
"""Assign joules and latencies to rounds and phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from pytest_llenergy.energy.uncertainty import (
    Power,
    WindowEnergy,
    absolute_uncertainty_j,
    sum_energies,
)
from pytest_llenergy.measure.host_meters import DomainRound, HostRound
from pytest_llenergy.measure.phases import phase_spans, span_tokens
from pytest_llenergy.measure.quality import energy_flags
from pytest_llenergy.measure.request_energy import RequestShares, request_energies, sum_shares
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.record.defaults import Sharing
from pytest_llenergy.record.record import Phase, Round, Tokens
from pytest_llenergy.record.served import RequestEnergies, ServedRequests, TokenGaps
from pytest_llenergy.record.timeline import RequestTimeline, Timeline


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
    """Return the latencies of each request of a served load, to the microsecond.

    ``None`` for other work, and for a load that ended early.
    """
    if not timeline.served or not timeline.requests:
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


def account_round(
    measured: MeasuredRound, hosts: Sequence[HostRound], sharing: Sharing | None = None
) -> Round:
    """Return the record of a round. Joules are the sum over all domains, or missing if any domain has none.

    Args:
        measured: The round.
        hosts: What each host found in it.
        sharing: How its requests share its energy, if the record is to name each of them.
    """
    timeline = measured.timeline
    domains = [domain for host in hosts for domain in host.domains]
    by_domain = {domain.name: domain.record for domain in domains}
    total = _sum_over_hosts(hosts, lambda domain: domain.whole)
    idle = _idle(hosts)
    temperatures_c = [each.temperature_start_c for each in hosts if each.temperature_start_c is not None]
    return Round(
        start_s=timeline.start_ns / 1e9,
        duration_s=timeline.duration_s,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=absolute_uncertainty_j(total, list(by_domain.values())),
        iterations=timeline.iterations,
        phase=max(hosts, key=lambda host: host.tick_s).phase if hosts else None,
        terms=total.variances.terms() if total.energy_j is not None else None,
        idle_power_w=idle.watts if idle else None,
        idle_power_u_w=idle.u_watts if idle else None,
        by_domain=by_domain,
        phases=_phases(timeline, hosts),
        tokens=_tokens(timeline),
        requests=len(timeline.requests) or None,
        served=served_requests(timeline),
        request_energies=_request_energies(measured, domains, total, sharing),
        time_to_first_token_s=time_to_first_token_s(timeline),
        inter_token_latency_s=inter_token_latency_s(timeline),
        temperature_start_c=max(temperatures_c, default=None),
        own_cpu_s=sum(host.cpu.own_s for host in hosts),
        other_cpu_s=sum(host.cpu.other_s for host in hosts),
        stolen_cpu_s=sum(host.cpu.stolen_s for host in hosts),
        flags=[*energy_flags(total), *(flag for host in hosts for flag in host.flags), *timeline.flags],
        reason=total.reason,
    )


def _sum_over_hosts(
    hosts: Sequence[HostRound], energy_of: Callable[[DomainRound], WindowEnergy]
) -> WindowEnergy:
    """Return the sum over all hosts. A host without a meter, or without energy, leaves only its reason."""
    totals = [sum_energies([energy_of(each) for each in host.domains], host.reasons) for host in hosts]
    return sum_energies(totals, one_clock=False)


def _phases(timeline: Timeline, hosts: Sequence[HostRound]) -> list[Phase]:
    phases: list[Phase] = []
    for name, parts in phase_spans(timeline).items():
        energy = _phase_energy(hosts, name)
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


def _phase_energy(hosts: Sequence[HostRound], name: str) -> WindowEnergy:
    return _sum_over_hosts(hosts, lambda domain: domain.phases[name])


def _request_energies(
    measured: MeasuredRound, domains: Sequence[DomainRound], total: WindowEnergy, sharing: Sharing | None
) -> RequestEnergies | None:
    if not measured.requests:
        return None
    shares = RequestShares(reason=total.reason)
    if total.energy_j is not None:
        shares = sum_shares([each.requests for each in domains if each.requests is not None])
    return request_energies(shares, sharing or "equal", each=sharing is not None)


def _idle(hosts: Sequence[HostRound]) -> Power | None:
    """Return the idle power of all hosts; ``None`` if that of a domain is unknown."""
    powers = [domain.idle for host in hosts for domain in host.domains]
    known = [power for power in powers if power is not None]
    if not hosts or len(known) < len(powers) or not all(host.domains for host in hosts):
        return None
    return Power(sum(power.watts for power in known), math.hypot(*(power.u_watts for power in known)))


def _tokens(timeline: Timeline) -> Tokens | None:
    requests = timeline.requests
    if not requests:
        counting = [rank for rank in timeline.ranks if not rank.repeats_others]
        told = [each.tokens for rank in counting for each in rank.iterations if each.tokens is not None]
        return (
            Tokens(input=sum(each.input for each in told), output=sum(each.output for each in told))
            if told
            else None
        )
    return Tokens(
        input=sum(request.input_tokens for request in requests),
        output=sum(request.output_tokens for request in requests),
        drafted=_sum_known(request.drafted_tokens for request in requests),
        accepted=_sum_known(request.accepted_tokens for request in requests),
        cached=_sum_known(request.cached_tokens for request in requests),
    )


def _sum_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum, or None if a count is unknown."""
    known = list(counts)
    return None if None in known else sum(count or 0 for count in known)
