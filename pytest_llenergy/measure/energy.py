# SPDX-License-Identifier: Apache-2.0
"""Marks × trace: the joules of each round and phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llenergy.measure import windows
from pytest_llenergy.measure.latency import inter_token_latency_s, time_to_first_token_s
from pytest_llenergy.measure.quality import round_flags
from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.measure.windows import Energy, Power, Reading
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.record import DomainEnergy, Phase, Round, Tokens
from pytest_llenergy.model.timeline import RoundTimeline


@dataclass(frozen=True)
class DomainRound:
    """One domain in one round: the whole window, its phases by name, and the idle power around it."""

    series: Series
    whole: Energy
    phases: dict[str, Energy]
    idle: Power | None

    def stored(self, duration_s: float) -> DomainEnergy:
        """As it goes into the record."""
        domain, energy = self.series.domain, self.whole
        low_j = high_j = None
        if energy.energy_j is not None:
            low_j, high_j = domain.limits(energy.energy_j, duration_s)
        return DomainEnergy(
            energy_j=energy.energy_j,
            energy_u_j=energy.u_j,
            kind=domain.kind,
            reason=energy.reason,
            low_j=low_j,
            high_j=high_j,
        )


def account(measured: MeasuredRound, trace: Sequence[Series], reasons: Sequence[str] = ()) -> Round:
    """Join one round with what the meters said. Joules of all domains are summed, or none are.

    ``reasons`` say why meters could not be opened, for the case that none was.
    """
    timeline = measured.timeline
    duration_s = (timeline.end_ns - timeline.start_ns) / 1e9
    domains = [_domain_round(measured, series) for series in trace]
    stored = {each.series.domain.name: each.stored(duration_s) for each in domains}
    total = _sum([each.whole for each in domains])
    if not domains:
        total = Energy(None, None, "; ".join(reasons) or "no meter was open")
    idle = _idle(domains)
    flags = round_flags(measured, trace, total, duration_s)
    return Round(
        start_s=timeline.start_ns / 1e9,
        duration_s=duration_s,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=_absolute(total, list(stored.values())),
        idle_power_w=idle.watts if idle else None,
        idle_power_u_w=idle.u_watts if idle else None,
        by_domain=stored,
        phases=_phases(timeline, domains),
        tokens=_tokens(measured),
        requests=len(timeline.requests) or None,
        time_to_first_token_s=time_to_first_token_s(timeline),
        inter_token_latency_s=inter_token_latency_s(timeline),
        temperature_start_c=measured.temperature_start_c,
        other_cpu_s=measured.other_cpu_s,
        stolen_cpu_s=measured.stolen_cpu_s,
        flags=flags,
        reason=total.reason,
    )


def _domain_round(measured: MeasuredRound, series: Series) -> DomainRound:
    timeline = measured.timeline
    before = windows.quiet_power(series, measured.gap_start_ns, timeline.start_ns)
    after = windows.quiet_power(series, timeline.end_ns, measured.gap_end_ns)
    if before is None or after is None:
        reason = series.reason or (
            f"{series.meter}: {series.domain.name} ticked fewer than {windows.MIN_GAP_TICKS} times in a "
            "quiet gap; lengthen --energy-gap"
        )
        nothing = Energy(None, None, reason)
        return DomainRound(series, nothing, dict.fromkeys(_phase_edges(timeline), nothing), None)
    start = windows.at_start(series, timeline.start_ns, before)
    end = windows.at_end(series, timeline.end_ns, after)
    spread = abs(after.watts - before.watts) / math.sqrt(12)
    watts = (before.watts + after.watts) / 2
    idle = Power(watts, math.hypot(before.u_watts / 2, after.u_watts / 2, spread))
    phases = _domain_phases(timeline, series, start, end, idle)
    return DomainRound(series, windows.between(start, end, series), phases, idle)


def _phase_edges(timeline: RoundTimeline) -> dict[str, tuple[int, int]]:
    """Prefill runs to the first token (of the last rank to have one), decode from there to the end."""
    border_ns = timeline.first_token_ns
    if border_ns is None:
        return {}
    return {"prefill": (timeline.start_ns, border_ns), "decode": (border_ns, timeline.end_ns)}


def _domain_phases(
    timeline: RoundTimeline, series: Series, start: Reading | None, end: Reading | None, idle: Power
) -> dict[str, Energy]:
    tick_s = series.tick_period_s or math.inf
    highest_w, _ = windows.powers(series, timeline.start_ns, timeline.end_ns)
    phases: dict[str, Energy] = {}
    for name, (start_ns, end_ns) in _phase_edges(timeline).items():
        duration_s = (end_ns - start_ns) / 1e9
        if duration_s < tick_s:
            reason = f"not resolvable: {duration_s * 1e3:.3g} ms phase, {tick_s * 1e3:.3g} ms tick"
            phases[name] = Energy(None, None, reason)
            continue
        first = start if name == "prefill" else windows.inside(series, start_ns, highest_w, idle.watts)
        last = end if name == "decode" else windows.inside(series, end_ns, highest_w, idle.watts)
        phases[name] = windows.between(first, last, series)
    return phases


def _phases(timeline: RoundTimeline, domains: Sequence[DomainRound]) -> list[Phase]:
    phases: list[Phase] = []
    for name, (start_ns, end_ns) in _phase_edges(timeline).items():
        energy = _sum([domain.phases[name] for domain in domains])
        phases.append(
            Phase(
                name=name,
                duration_s=(end_ns - start_ns) / 1e9,
                energy_j=energy.energy_j,
                energy_u_j=energy.u_j,
                reason=energy.reason,
            )
        )
    return phases


def _sum(energies: Sequence[Energy]) -> Energy:
    if not energies:
        return Energy(None, None, "no meter was open")
    total_j = variance = 0.0
    for energy in energies:
        if energy.energy_j is None or energy.u_j is None:
            return Energy(None, None, energy.reason)
        total_j += energy.energy_j
        variance += energy.u_j**2
    return Energy(total_j, math.sqrt(variance))


def _absolute(total: Energy, domains: Sequence[DomainEnergy]) -> float | None:
    if total.u_j is None:
        return None
    variance = total.u_j**2
    for domain in domains:
        if domain.low_j is not None and domain.high_j is not None:
            variance += (domain.high_j - domain.low_j) ** 2 / 12
    return math.sqrt(variance)


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
    )
