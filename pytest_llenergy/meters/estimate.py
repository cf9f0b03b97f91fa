# SPDX-License-Identifier: Apache-2.0
"""A model for hosts without any counter: CPU time times published watts per virtual CPU.

    E = n · P_idle · t + (P_full − P_idle) · t_busy

with n logical CPUs of the host and t_busy their busy seconds summed. The coefficients are those of the
Cloud Carbon Footprint project (https://www.cloudcarbonfootprint.org/docs/methodology/, appendix I),
derived from SPECpower results. The point uses its averages over processor families (AWS: 0.74 W and
3.5 W); the limits are the lowest and highest family in its table, so the true value of a given host
may lie anywhere between them. It covers processor power only: no memory, no fans, no supply losses.
"""

from __future__ import annotations

import time

from pytest_llenergy.errors import MeterDoesNotApply
from pytest_llenergy.meters.cpu_time import cpu_time
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets

#: Watts per virtual CPU at 0 % and at 100 % load: average over families, lowest, highest.
AVERAGE_W = (0.74, 3.5)
LOWEST_W = (0.45, 1.69)
HIGHEST_W = (3.04, 8.58)

#: Linux counts CPU time in ticks of at most 10 ms, and tells it in such (USER_HZ = 100) where it must.
TICK_S = 0.01


def model_energy_j(watts: tuple[float, float], cpus: int, elapsed_s: float, busy_s: float) -> float:
    """Joules of ``cpus`` logical CPUs over ``elapsed_s`` of which they were busy ``busy_s`` in sum."""
    idle_w, full_w = watts
    return cpus * idle_w * elapsed_s + (full_w - idle_w) * busy_s


class EstimateMeter:
    """The whole host's processors as one domain, from its CPU time."""

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
        idle_j = model_energy_j(AVERAGE_W, self._cpus, duration_s, 0)
        busy_s = max(0.0, energy_j - idle_j) / (AVERAGE_W[1] - AVERAGE_W[0])
        low = model_energy_j(LOWEST_W, self._cpus, duration_s, busy_s)
        high = model_energy_j(HIGHEST_W, self._cpus, duration_s, busy_s)
        return low, high

    def read(self) -> list[float | str]:
        return [model_energy_j(AVERAGE_W, self._cpus, time.monotonic(), cpu_time().busy_s)]

    def close(self) -> None:
        """Nothing is held open."""


def open_estimate(targets: Targets) -> list[EstimateMeter]:
    """Raises ``MeterDoesNotApply`` for tests that use GPUs: there is no model of a GPU."""
    if not targets.cpu:
        raise MeterDoesNotApply("estimate: models the CPU only, and the test uses GPUs")
    return [EstimateMeter()]


SPEC = MeterSpec(name="estimate", kind="estimated", open=open_estimate)
