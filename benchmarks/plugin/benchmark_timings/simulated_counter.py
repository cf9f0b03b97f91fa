# SPDX-License-Identifier: Apache-2.0
"""pytest plugin with a simulated counter of 10 W that ticks every 100 ms, as many GPUs do."""

from __future__ import annotations

import time

from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Targets, within

PERIOD_S, WATTS = 0.1, 10.0


class SimulatedCounter:
    """Joules since the machine started, at the latest tick."""

    name = "simulated"
    poll_period_s = 0.005
    domains = (
        Domain(
            name="cpu:simulated",
            kind="measured",
            source="simulation",
            scope="host",
            resolution_j=1e-6,
            accuracy="exact",
            limits=within(0.0),
            update_period_s=PERIOD_S,
        ),
    )

    def read(self) -> list[float | str]:
        return [WATTS * PERIOD_S * (time.monotonic() // PERIOD_S)]

    def close(self) -> None:
        """Nothing is open."""


def open_counter(_targets: Targets) -> list[SimulatedCounter]:
    """Return the counter."""
    return [SimulatedCounter()]


def pytest_llenergy_meters() -> list[MeterSpec]:
    """Provide the meter."""
    return [MeterSpec(name="simulated", kind="measured", open=open_counter)]
