# SPDX-License-Identifier: Apache-2.0
"""Flags that the trace alone can raise: what a reader must know about the joules of any window."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llenergy.meters.trace import Series
from pytest_llenergy.model.record import Flag

#: A window with fewer ticks of its counter rests on its edges alone.
FEW_TICKS = 2

#: A reader that was due and did not run for this long may have missed ticks near an edge (seconds).
READER_GAP_S = 0.1

#: What power did meanwhile no later reading tells (seconds).
POWER_GAP_S = 0.05


def trace_flags(trace: Sequence[Series], start_ns: int, end_ns: int) -> list[Flag]:
    """Every flag of a window between two monotonic moments."""
    flags: list[Flag] = []
    for series in trace:
        domain, duration_ms = series.domain, (end_ns - start_ns) / 1e6
        flags += domain.flags
        seen = len(series.between(start_ns, end_ns))
        always_fresh = domain.max_age_s is not None and duration_ms / 1e3 >= FEW_TICKS * domain.max_age_s
        if seen < FEW_TICKS and not always_fresh:
            detail = f"{domain.name} ticked {seen} times in {duration_ms:.4g} ms"
            flags.append(Flag(name="few-ticks", severity="warning", detail=detail))
        around_ns = round((series.period_s or 0.0) * 1e9)
        pause_s = series.latest_pause_s(start_ns - around_ns, end_ns + around_ns)
        if pause_s > (POWER_GAP_S if domain.integrated else READER_GAP_S):
            detail = f"{domain.name} was not read for {pause_s * 1e3:.0f} ms although it was due"
            flags.append(Flag(name="reader-gap", severity="warning", detail=detail))
    return flags
