# SPDX-License-Identifier: Apache-2.0
"""A window that has ended, as it is stored."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.meters.flags import trace_flags
from pytest_llenergy.meters.quantities import Energy
from pytest_llenergy.meters.totals import absolute_u_j, add, stored
from pytest_llenergy.meters.trace import Mark, Series
from pytest_llenergy.meters.windows import energy_between, resolvable
from pytest_llenergy.model.record import Flag, Window


def close(
    name: str,
    trace: Sequence[Series],
    start_ns: int,
    end_ns: int,
    reasons: Sequence[str],
    marks: Sequence[Mark] = (),
) -> Window:
    """Joules and flags of a window between two monotonic moments, from what the meters said around it.

    ``marks`` are other moments at which power may have changed.
    """
    energies = {series.domain.name: _domain(series, start_ns, end_ns, marks) for series in trace}
    by_domain = {
        series.domain.name: stored(energies[series.domain.name], series, (end_ns - start_ns) / 1e9)
        for series in trace
    }
    total = add(list(energies.values()), reasons)
    flags = [*_caveats(trace, reasons), *trace_flags(trace, start_ns, end_ns)]
    if total.energy_j is None:
        flags.insert(0, Flag(name="unmeasured", severity="warning", detail=total.reason or "no reading"))
    return Window(
        name=name,
        start_s=start_ns / 1e9,
        duration_s=(end_ns - start_ns) / 1e9,
        energy_j=total.energy_j,
        energy_u_j=total.u_j,
        energy_u_absolute_j=absolute_u_j(total, list(by_domain.values())),
        by_domain=by_domain,
        flags=flags,
        reason=total.reason,
    )


def _caveats(trace: Sequence[Series], reasons: Sequence[str]) -> list[Flag]:
    """What is true of every window of these meters."""
    flags = [Flag(name="unread-meter", severity="note", detail=reason) for reason in reasons if trace]
    for series in trace:
        domain = series.domain
        if domain.kind == "estimated":
            detail = f"{domain.source}; {domain.accuracy}"
            flags.append(Flag(name="estimated", severity="note", detail=detail))
        if domain.coverage < 1:
            detail = (
                f"the sensor of {domain.name} sees {domain.coverage:.0%} of each tick: one window cannot "
                "tell a load that repeats in step with it; rounds in shuffled phase can"
            )
            flags.append(Flag(name="part-time-sensor", severity="warning", detail=detail))
    return flags


def _domain(series: Series, start_ns: int, end_ns: int, marks: Sequence[Mark]) -> Energy:
    energy = energy_between(series, start_ns, end_ns, marks=marks)
    return resolvable(energy, series, (end_ns - start_ns) / 1e9)
