# SPDX-License-Identifier: Apache-2.0
"""Estimate of CPU energy on hosts without any counter: CPU time times published watts per virtual CPU.

    E = n · P_idle · t + (P_full − P_idle) · t_busy

with n logical CPUs of the host and t_busy the sum of their busy seconds. The coefficients are those of the
Cloud Carbon Footprint project (https://www.cloudcarbonfootprint.org/docs/methodology/, appendix I), derived
from SPECpower results. The estimate uses its averages over processor families (AWS: 0.74 W and 3.5 W); the
limits are the lowest and the highest family in its table, so the true value of a given host may lie
anywhere between them. It covers processor power only: no memory, no fans, no supply losses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import MeterDoesNotApply
from pytest_llenergy.meters.base import Domain, MeterSpec, Targets

#: Busy states of psutil; nice, irq and softirq exist on some systems only.
BUSY_STATES = ("user", "nice", "system", "irq", "softirq")

#: Possible mount points of the root control group (version 2).
GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of the host since it started: busy with its processes, and stolen by its hypervisor."""

    busy_s: float
    stolen_s: float


def read_cpu_time(groups: Sequence[Path] = GROUPS) -> CpuTime:
    """Return the CPU time of the host, summed over all logical CPUs."""
    import psutil

    times = psutil.cpu_times()
    busy_s = read_root_cgroup_busy_s(groups)
    if busy_s is None:
        busy_s = sum(getattr(times, state, 0.0) for state in BUSY_STATES)
    return CpuTime(busy_s, getattr(times, "steal", 0.0))


def read_root_cgroup_busy_s(groups: Sequence[Path]) -> float | None:
    """Return the busy CPU seconds of /proc/stat, but to the microsecond instead of ticks of 10 ms.

    The root group's cpu.stat is the sum of the kernel's CPU states, not of its processes (kernel:
    kernel/cgroup/rstat.c, ``root_cgroup_cputime``). ``None`` if the root group is not visible, as in most
    containers.
    """
    for group in groups:
        # Every group but the root has cgroup.events; any other group is only a part of the host.
        if not (group / "cgroup.events").exists() and (group / "cpu.stat").exists():
            fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            if "user_usec" in fields:
                return (int(fields["user_usec"]) + int(fields["system_usec"])) / 1e6
    return None


#: Watts per virtual CPU at 0 % and at 100 % load: average over families, lowest, highest.
AVERAGE_W = (0.74, 3.5)
LOWEST_W = (0.45, 1.69)
HIGHEST_W = (3.04, 8.58)

#: Coarsest step in which Linux reports CPU time (USER_HZ = 100).
TICK_S = 0.01


def modelled_energy_j(watts: tuple[float, float], cpus: int, elapsed_s: float, busy_s: float) -> float:
    """Return the joules of ``cpus`` logical CPUs over ``elapsed_s`` with ``busy_s`` busy in total."""
    idle_w, full_w = watts
    return cpus * idle_w * elapsed_s + (full_w - idle_w) * busy_s


class EstimateMeter:
    """All processors of the host as one domain."""

    name = "estimate"
    poll_period_s: float = 0.05

    def __init__(self) -> None:
        import psutil

        self._cpus = psutil.cpu_count(logical=True) or 1
        self.domains: tuple[Domain] = (
            Domain(
                name="cpu:host",
                kind="estimated",
                source="CPU time x Cloud Carbon Footprint coefficients",
                scope="host processors",
                resolution_j=(AVERAGE_W[1] - AVERAGE_W[0]) * TICK_S,
                accuracy=(
                    f"{LOWEST_W[0]}-{HIGHEST_W[0]} W idle and {LOWEST_W[1]}-{HIGHEST_W[1]} W busy "
                    f"per logical CPU ({self._cpus})"
                ),
                limits=self._limits,
                covers_others=True,
                update_period_s=TICK_S,
                max_age_s=TICK_S,
            ),
        )

    def _limits(self, energy_j: float, duration_s: float) -> tuple[float, float]:
        idle_j = modelled_energy_j(AVERAGE_W, self._cpus, duration_s, 0)
        busy_s = max(0.0, energy_j - idle_j) / (AVERAGE_W[1] - AVERAGE_W[0])
        low = modelled_energy_j(LOWEST_W, self._cpus, duration_s, busy_s)
        high = modelled_energy_j(HIGHEST_W, self._cpus, duration_s, busy_s)
        return low, high

    def read(self) -> list[float | str]:
        return [modelled_energy_j(AVERAGE_W, self._cpus, time.monotonic(), read_cpu_time().busy_s)]

    def close(self) -> None:
        """Nothing is held open."""


def open_estimate(targets: Targets) -> list[EstimateMeter]:
    """Open the estimate. Raises ``MeterDoesNotApply`` for tests that use GPUs, which it does not model."""
    if not targets.cpu:
        raise MeterDoesNotApply("estimate: models the CPU only, and the test uses GPUs")
    return [EstimateMeter()]


SPEC = MeterSpec(name="estimate", kind="estimated", open=open_estimate)
