# SPDX-License-Identifier: Apache-2.0
"""What the meters of a host found in a window: energies of its domains, with flags, and their record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_llenergy.energy.attribution import CpuUse, Split, attribution_flags, choose_split
from pytest_llenergy.energy.edges import mean_powers
from pytest_llenergy.energy.trace import Mark, Series
from pytest_llenergy.energy.uncertainty import (
    Variances,
    WindowEnergy,
    absolute_uncertainty_j,
    domain_energy,
    sum_energies,
)
from pytest_llenergy.energy.window_arithmetic import energy_between, require_resolvable
from pytest_llenergy.record.record import DomainEnergy, Flag, WindowRecord

#: The energy of a window with fewer ticks depends on its edges alone.
FEW_TICKS = 2

#: A reader that was due and did not run for this long may have missed ticks near an edge (seconds).
READER_GAP_S = 0.1

#: The same for integrated power, where a later reading cannot make up for a missing one (seconds).
POWER_GAP_S = 0.05


def trace_flags(trace: Sequence[Series], start_ns: int, end_ns: int) -> list[Flag]:
    """Return the flags that the trace alone raises for a window between two monotonic moments."""
    flags: list[Flag] = []
    for series in trace:
        domain, duration_ms = series.domain, (end_ns - start_ns) / 1e6
        flags += domain.flags
        ticks = len(series.ticks_between(start_ns, end_ns))
        always_fresh = domain.max_age_s is not None and duration_ms / 1e3 >= FEW_TICKS * domain.max_age_s
        if ticks < FEW_TICKS and not always_fresh:
            detail = f"{domain.name} ticked {ticks} times in {duration_ms:.4g} ms"
            flags.append(Flag(name="imprecise", severity="warning", detail=detail))
        around_ns = round((series.period_s or 0.0) * 1e9)
        pause_s = series.latest_pause_s(start_ns - around_ns, end_ns + around_ns)
        # One that rests is also read by the thread that works, at the edges.
        if pause_s > (POWER_GAP_S if domain.integrated else READER_GAP_S) and not domain.rests:
            detail = f"{domain.name} was not read for {pause_s * 1e3:.0f} ms although it was due"
            flags.append(Flag(name="doubtful", severity="warning", detail=detail))
        stall_s = series.latest_stall_s(start_ns - around_ns, end_ns + around_ns)
        if stall_s:
            detail = f"the counter of {domain.name} stood still for {stall_s * 1e3:.0f} ms while it was read"
            flags.append(Flag(name="doubtful", severity="warning", detail=detail))
    return flags


@dataclass(frozen=True)
class HostWindow:
    """What one host found in a window.

    Attributes:
        energies: WindowEnergy of each domain, by name: the test's part.
        by_domain: The same for the record, with the limits of its source.
        reasons: Why meters could not be opened.
        flags: What a reader must know of this host in this window.
        own_cpu_s: CPU time of the test's processes, if known.
        other_cpu_s: CPU time of other processes, if known.
    """

    energies: dict[str, WindowEnergy]
    by_domain: dict[str, DomainEnergy]
    reasons: list[str]
    flags: list[Flag] = field(default_factory=list)
    own_cpu_s: float | None = None
    other_cpu_s: float | None = None


def account_window(
    trace: Sequence[Series],
    start_ns: int,
    end_ns: int,
    reasons: Sequence[str],
    marks: Sequence[Mark] = (),
    use: CpuUse | None = None,
    clock_u_ns: float = 0.0,
) -> HostWindow:
    """Return what the host of a trace found in a window that has ended.

    Power may have changed at other ``marks``. ``clock_u_ns`` is the standard uncertainty of both moments.
    """
    duration_s = (end_ns - start_ns) / 1e9
    energies: dict[str, WindowEnergy] = {}
    by_domain: dict[str, DomainEnergy] = {}
    splits: list[Split] = []
    for series in trace:
        energy, part = _domain(series, start_ns, end_ns, marks, clock_u_ns / 1e9), None
        if use is not None and energy.energy_j is not None:
            # Windows may follow each other without a gap, so that idle power is unknown.
            split = choose_split(series.domain, use)
            part = split.part(energy, duration_s) if split is not None else None
            splits += [split] if split is not None else []
        energies[series.domain.name] = energy if part is None else part.energy
        by_domain[series.domain.name] = domain_energy(energies[series.domain.name], series, duration_s, part)
    return HostWindow(
        energies,
        by_domain,
        list(reasons),
        [*_caveats(trace, reasons), *trace_flags(trace, start_ns, end_ns), *attribution_flags(splits)],
        use.own_s if use is not None else None,
        use.other_s if use is not None else None,
    )


def window_record(name: str, start_ns: int, end_ns: int, hosts: Sequence[HostWindow]) -> WindowRecord:
    """Return the record of a window that has ended."""
    totals = [sum_energies(list(host.energies.values()), host.reasons) for host in hosts]
    total = sum_energies(totals, one_clock=False)
    by_domain = {name: each for host in hosts for name, each in host.by_domain.items()}
    flags = [flag for host in hosts for flag in host.flags]
    if total.energy_j is None:
        flags.insert(0, Flag(name="unmeasured", severity="warning", detail=total.reason or "no reading"))
    own = [host.own_cpu_s for host in hosts if host.own_cpu_s is not None]
    other = [host.other_cpu_s for host in hosts if host.other_cpu_s is not None]
    return WindowRecord(
        name=name,
        start_s=start_ns / 1e9,
        duration_s=(end_ns - start_ns) / 1e9,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=absolute_uncertainty_j(total, list(by_domain.values())),
        by_domain=by_domain,
        own_cpu_s=sum(own) if own else None,
        other_cpu_s=sum(other) if other else None,
        flags=flags,
        reason=total.reason,
    )


def _caveats(trace: Sequence[Series], reasons: Sequence[str]) -> list[Flag]:
    """Return the flags that every window of these meters has."""
    flags = [Flag(name="meter", severity="note", detail=reason) for reason in reasons if trace]
    for series in trace:
        domain = series.domain
        if domain.kind == "estimated":
            detail = f"{domain.source}; {domain.accuracy}"
            flags.append(Flag(name="estimated", severity="note", detail=detail))
        if domain.coverage < 1 and domain.coverage_known:
            detail = (
                f"the sensor of {domain.name} sees {domain.coverage:.0%} of each tick: one window cannot "
                "detect a load that repeats in step with it; rounds in shuffled phase can"
            )
            flags.append(Flag(name="meter", severity="warning", detail=detail))
    return flags


def _domain(
    series: Series, start_ns: int, end_ns: int, marks: Sequence[Mark], clock_u_s: float
) -> WindowEnergy:
    energy = energy_between(series, start_ns, end_ns, marks=marks)
    if clock_u_s and energy.energy_j is not None:
        clock = _clock_variance(series, start_ns, end_ns, energy.energy_j, clock_u_s)
        energy = energy.widen(Variances(clock=clock))
    return require_resolvable(energy, series, start_ns, end_ns)


def _clock_variance(series: Series, start_ns: int, end_ns: int, energy_j: float, u_s: float) -> float:
    """Return the variance (J²) from moments that another clock gave.

    A window may begin and end under load, and the errors of its edges are independent if the offset moved
    between them. Thus each edge counts with the largest power near it, not with a step of power as in
    ``domain_rounds``, whose rounds lie between quiet gaps.
    """
    wide_ns = round((3 * (series.period_s or 0.0) + 2 * u_s) * 1e9)
    mean_w = energy_j * 1e9 / (end_ns - start_ns)
    return sum(
        (u_s * max([mean_w, *mean_powers(series, edge_ns - wide_ns, edge_ns + wide_ns)])) ** 2
        for edge_ns in (start_ns, end_ns)
    )
