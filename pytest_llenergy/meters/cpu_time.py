# SPDX-License-Identifier: Apache-2.0
"""How much CPU time the host has used, as its kernel counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: nice, irq, softirq and steal exist on some systems only.
BUSY_STATES = ("user", "nice", "system", "irq", "softirq")

#: Where the root group of control groups (version 2) may be mounted.
GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds since the host started: ``busy`` with its processes, ``stolen`` by its hypervisor."""

    busy_s: float
    stolen_s: float


def cpu_time(groups: Sequence[Path] = GROUPS) -> CpuTime:
    """Summed over all logical CPUs."""
    import psutil

    times = psutil.cpu_times()
    busy_s = root_group_busy_s(groups)
    if busy_s is None:
        busy_s = sum(getattr(times, state, 0.0) for state in BUSY_STATES)
    return CpuTime(busy_s, getattr(times, "steal", 0.0))


def root_group_busy_s(groups: Sequence[Path]) -> float | None:
    """The same sum of states as in /proc/stat, in microseconds and not in ticks of 10 ms.

    The root group's cpu.stat is made of the kernel's CPU states, not of its processes (kernel:
    kernel/cgroup/rstat.c, ``root_cgroup_cputime``). ``None`` where the root group is not in sight, as in
    most containers.
    """
    for group in groups:
        # Every group but the root has this file; such a group holds only a part of the host.
        if not (group / "cgroup.events").exists() and (group / "cpu.stat").exists():
            fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            if "user_usec" in fields:
                return (int(fields["user_usec"]) + int(fields["system_usec"])) / 1e6
    return None
