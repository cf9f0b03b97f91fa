# SPDX-License-Identifier: Apache-2.0
"""Flags: what a reader must know about a round. An ``invalid`` round is never part of a figure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.measure.rounds import MeasuredRound
from pytest_llenergy.measure.windows import Energy
from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.record import Flag

#: Cores that others may use during a round before it is called contended, or stolen by a hypervisor.
CONTENDED_CORES = 0.25

#: Below a few ticks of 10 ms the system's count of CPU time says nothing.
LEAST_CPU_S = 0.05

#: Relative standard uncertainty of a round above which it is called imprecise.
IMPRECISE = 0.10

#: A window below this many ticks of its counter rests on its edges alone.
FEW_TICKS = 2


def round_flags(
    measured: MeasuredRound, trace: Sequence[Series], total: Energy, duration_s: float
) -> list[Flag]:
    """Every flag of one round."""
    flags: list[Flag] = []
    if total.energy_j is None:
        # Its times and counts are as good as any other's.
        flags.append(Flag(name="unmeasured", severity="warning", detail=total.reason or "no reading"))
    elif total.energy_j <= 0:
        detail = f"the counters give {total.energy_j:.3g} J, which no work can use"
        flags.append(Flag(name="impossible", severity="invalid", detail=detail))
    elif total.u_j is not None and total.u_j > IMPRECISE * total.energy_j:
        detail = f"standard uncertainty {total.u_j / total.energy_j:.0%} of the energy; measure longer rounds"
        flags.append(Flag(name="imprecise", severity="warning", detail=detail))
    for series in trace:
        seen = len(series.between(measured.timeline.start_ns, measured.timeline.end_ns))
        if seen < FEW_TICKS:
            detail = f"{series.domain.name} ticked {seen} times in {duration_s * 1e3:.0f} ms"
            flags.append(Flag(name="few-ticks", severity="warning", detail=detail))
    for name, cpu_s, who in (
        ("contended", measured.other_cpu_s, "other processes used"),
        ("stolen", measured.stolen_cpu_s, "the hypervisor gave other guests"),
    ):
        if cpu_s > max(CONTENDED_CORES * duration_s, LEAST_CPU_S):
            detail = f"{who} {cpu_s / duration_s:.2f} cores"
            flags.append(Flag(name=name, severity="warning", detail=detail))
    return flags
