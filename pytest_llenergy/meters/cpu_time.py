# SPDX-License-Identifier: Apache-2.0
"""How much CPU time the host has used, as its kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass

#: nice, irq, softirq and steal exist on some systems only.
BUSY_STATES = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds since the host started: ``busy`` with its processes, ``stolen`` by its hypervisor."""

    busy_s: float
    stolen_s: float


def cpu_time() -> CpuTime:
    """Summed over all logical CPUs."""
    import psutil

    times = psutil.cpu_times()
    busy = sum(getattr(times, state, 0.0) for state in BUSY_STATES)
    return CpuTime(busy, getattr(times, "steal", 0.0))
