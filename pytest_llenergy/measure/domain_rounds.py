# SPDX-License-Identifier: Apache-2.0
"""Energies of one host's domains in one round, from the trace of its counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pytest_llenergy.energy.attribution import Split, attribution_flags, choose_split
from pytest_llenergy.energy.edges import mean_powers
from pytest_llenergy.energy.host_window import trace_flags
from pytest_llenergy.energy.quiet_gaps import MIN_GAP_TICKS, doubt_quiet_end, idle_power, quiet_power
from pytest_llenergy.energy.trace import Series, Trace
from pytest_llenergy.energy.uncertainty import Attributed, Power, Variances, WindowEnergy, domain_energy
from pytest_llenergy.energy.window_arithmetic import energy_between, energy_between_readings
from pytest_llenergy.measure.host_meters import DomainRound, HostRound
from pytest_llenergy.measure.phases import phase_energies, phase_spans, solved_together
from pytest_llenergy.measure.quality import use_flags
from pytest_llenergy.measure.request_energy import share_among_requests
from pytest_llenergy.measure.rounds import MeasuredRound, slowest_series, tick_phase
from pytest_llenergy.record.record import Flag
from pytest_llenergy.record.timeline import Timeline


class _Found(NamedTuple):
    """Energy of one domain in one round.

    If others used the host, ``attributed`` has the energy of the whole domain, and ``split`` tells how it was
    split. ``doubt`` is what speaks against a quiet gap that reaches up to the work.
    """

    whole: WindowEnergy
    phases: dict[str, WindowEnergy]
    idle: Power | None
    attributed: Attributed | None = None
    split: Split | None = None
    doubt: str | None = None


def account_domains(
    measured: MeasuredRound,
    trace: Trace,
    reasons: Sequence[str] = (),
    rest: dict[str, Power] | None = None,
) -> HostRound:
    """Return what this host found in a round.

    Args:
        measured: The round.
        trace: One series for each domain.
        reasons: Why meters could not be opened.
        rest: Power of each domain in the last gap in which others were quiet. It is updated.
    """
    start_ns, end_ns = measured.timeline.start_ns, measured.timeline.end_ns
    rest = {} if rest is None else rest
    found = {series.domain.name: _domain_round(measured, series, rest) for series in trace}
    domains: list[DomainRound] = []
    for series, each in zip(trace, found.values(), strict=True):
        record = domain_energy(each.whole, series, measured.timeline.duration_s, each.attributed)
        shares = None
        if measured.requests:
            u_ns = math.hypot(measured.clock_u_ns, measured.marking_u_ns)
            shares = share_among_requests(series, measured.requests, start_ns, end_ns, each.whole, u_ns)
        name = series.domain.name
        domains.append(DomainRound(name, each.whole, each.phases, each.idle, record, shares))
    doubts = [f"{name}: {each.doubt}" for name, each in found.items() if each.doubt is not None]
    leader = slowest_series(trace)
    return HostRound(
        domains=domains,
        reasons=list(reasons),
        flags=[
            *trace_flags(trace, start_ns, end_ns),
            *use_flags(measured),
            *attribution_flags([each.split for each in found.values() if each.split is not None]),
            *(Flag(name="doubtful", severity="warning", detail=doubt) for doubt in doubts),
        ],
        cpu=measured.cpu,
        temperature_start_c=measured.temperature_start_c,
        tick_s=(leader.period_s or 0.0) if leader is not None else 0.0,
        phase=tick_phase(trace, start_ns),
    )


def _domain_round(measured: MeasuredRound, series: Series, rest: dict[str, Power]) -> _Found:
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
            "it stands still"
        )
        nothing = WindowEnergy(None, reason=reason)
        return _Found(nothing, dict.fromkeys(spans, nothing), None)
    whole = energy_between(series, timeline.start_ns, timeline.end_ns, before, after)
    idle, doubt = idle_power(before, after), None
    # A part-time sensor shows an edge elsewhere within its tick.
    shows_end = series.domain.max_age_s is None and series.domain.coverage >= 1
    if shows_end and solved_together(series, timeline) and whole.energy_j is not None:
        edges = (timeline.start_ns, timeline.end_ns)
        found_doubt = doubt_quiet_end(series, *edges, before, after, whole.variances)
        if found_doubt is not None:
            at_stake_j, doubt = found_doubt
            whole = whole.widen(Variances(shape=at_stake_j**2))
    phases = phase_energies(series, spans, timeline, whole, before, after)
    found = _Found(whole, phases, idle, doubt=doubt)
    found = _widen_by_clock(found, series, measured, before.watts, after.watts)
    if measured.gap_cpu is None or whole.energy_j is None:
        return found
    loaded = list(zip((before, after), measured.gap_cpu, strict=True))
    use = measured.cpu
    split = choose_split(series.domain, use, loaded, rest)
    if split is not None:
        return _split_round(found, split, timeline)
    if series.domain.cpu_ratio is not None and measured.has_busy_gap:
        return found._replace(idle=rest.get(series.domain.name))
    return found


def _split_round(found: _Found, split: Split, timeline: Timeline) -> _Found:
    """Return the test's part of the energy of a domain."""
    phases: dict[str, WindowEnergy] = {}
    for name, parts in phase_spans(timeline).items():
        part = split.part(found.phases[name], sum(end_ns - start_ns for start_ns, end_ns in parts) / 1e9)
        phases[name] = part.energy if part is not None else found.phases[name]
    attributed = split.part(found.whole, timeline.duration_s)
    whole = attributed.energy if attributed is not None else found.whole
    return _Found(whole, phases, split.idle, attributed, split, found.doubt)


def _resting_domain_round(
    measured: MeasuredRound, series: Series, spans: Mapping[str, list[tuple[int, int]]]
) -> _Found:
    """Return the energy of a domain that counts only the work, so that its idle power is zero."""
    timeline = measured.timeline
    between = energy_between_readings if measured.in_reader else energy_between
    whole = between(series, timeline.start_ns, timeline.end_ns)
    phases = phase_energies(series, spans, timeline, whole)
    return _widen_by_clock(_Found(whole, phases, Power(0.0, 0.0)), series, measured, 0.0, 0.0)


def _widen_by_clock(
    found: _Found, series: Series, measured: MeasuredRound, before_w: float, after_w: float
) -> _Found:
    """Return energies whose uncertainty includes that of the clock on which the moments were taken.

    An edge that is moved by u exchanges the power on its one side for that on the other, for as long. The two
    edges of a round add up in quadrature, and the edges of a phase in all iterations linearly.

    Args:
        found: Energies of a domain in one round.
        series: Trace of the domain.
        measured: The round.
        before_w: Power before the round (W).
        after_w: Power after the round (W).
    """
    timeline, u_ns = measured.timeline, (measured.clock_u_ns, measured.marking_u_ns)
    if not any(u_ns) or found.whole.energy_j is None:
        return found
    mean_w = found.whole.energy_j / timeline.duration_s
    inside_w = mean_powers(series, timeline.start_ns, timeline.end_ns) or [mean_w]
    whole = _add_clock(found.whole, u_ns, [inside_w[0] - before_w], [inside_w[-1] - after_w])
    spans = phase_spans(timeline)
    powers_w: dict[str, float] = {}
    for name, parts in spans.items():
        energy_j, length_ns = found.phases[name].energy_j, sum(end - start for start, end in parts)
        powers_w[name] = mean_w if energy_j is None or not length_ns else energy_j * 1e9 / length_ns
    order = [name for _, name in sorted((start, name) for name, parts in spans.items() for start, _ in parts)]
    steps_w = [b - a for a, b in pairwise([before_w, *(powers_w[name] for name in order), after_w])]
    phases = {
        name: _add_clock(
            energy,
            u_ns,
            [step_w for step_w, follows in zip(steps_w, order, strict=False) if follows == name],
            [step_w for step_w, precedes in zip(steps_w[1:], order, strict=True) if precedes == name],
        )
        for name, energy in found.phases.items()
    }
    return found._replace(whole=whole, phases=phases)


def _add_clock(
    energy: WindowEnergy, u_ns: tuple[float, float], starts_w: Sequence[float], ends_w: Sequence[float]
) -> WindowEnergy:
    """Return an energy with the steps of power (W) at the starts and ends of its parts, moved by ``u_ns``.

    The first of the two is that of this host's clock, the other that of the host that marked the edges.
    """
    squares = sum(sum(map(abs, steps_w)) ** 2 for steps_w in (starts_w, ends_w))
    clock, marking = ((each / 1e9) ** 2 * squares for each in u_ns)
    return energy.widen(Variances(clock=clock, marking=marking))
