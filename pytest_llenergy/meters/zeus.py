# SPDX-License-Identifier: Apache-2.0
"""Apple silicon and Jetson through Zeus's device layer (extra ``zeus``).

On Apple silicon the values come from IOReport. Apple does not document their origin, so they count as
estimates. On Jetson, Zeus integrates the power that the board's INA3221 sensors measure, at least every 0.1
s, in a process that lives until this one ends.

Zeus's GPU layer is not used: NVIDIA and AMD boards are read directly, and Zeus reports no UUID that would
identify an AMD board.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty
from typing import Any

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.base import Domain, MeterSpec, Targets, unknown_accuracy
from pytest_llenergy.model.base import EnergyKind

MILLI = 1e-3
JETSON_PERIOD_S = 0.1


@dataclass(frozen=True)
class Part:
    """A field of Zeus's measurement. The fields that are added up do not overlap."""

    field: str
    name: str
    scope: str


#: Clusters and cores are part of cpu_total.
APPLE = (
    Part("cpu_total_mj", "soc:cpu", "processor cores"),
    Part("gpu_mj", "soc:gpu", "graphics"),
    Part("gpu_sram_mj", "soc:gpu-sram", "graphics memory on the chip"),
    Part("dram_mj", "soc:dram", "memory"),
    Part("ane_mj", "soc:ane", "neural engine"),
)
JETSON_TOTAL = (Part("total_energy_mj", "soc:total", "whole module"),)
JETSON_RAILS = (
    Part("cpu_energy_mj", "soc:cpu", "processor rail"),
    Part("gpu_energy_mj", "soc:gpu", "graphics rail"),
)


def select_parts(measurement: Any) -> tuple[Part, ...]:
    """Select the parts of this chip to add up.

    Raises:
        MeterError: If it has no known part.
    """
    for parts in (APPLE, JETSON_TOTAL, JETSON_RAILS):
        present = tuple(part for part in parts if getattr(measurement, part.field, None) is not None)
        if present:
            return present
    raise MeterError(f"zeus: {type(measurement).__name__} has no known energy field")


class ZeusSocMeter:
    """All parts of the chip, each as a domain."""

    name = "zeus"
    poll_period_s: float = 0.05

    def __init__(self, soc: Any) -> None:
        """Open the chip.

        Raises:
            MeterError: If it reports no energy.
        """
        self._soc = soc
        measurement = soc.get_total_energy_consumption()
        self._parts = select_parts(measurement)
        jetson = self._parts[0] not in APPLE
        accuracy = unknown_accuracy("the chip")
        kind: EnergyKind = "measured" if jetson else "estimated"
        self.domains: tuple[Domain, ...] = tuple(
            Domain(
                name=part.name,
                kind=kind,
                source=f"zeus {type(measurement).__name__}.{part.field}",
                scope=part.scope,
                resolution_j=MILLI,
                accuracy=accuracy.words,
                limits=accuracy.limits,
                covers_others=True,
                update_period_s=JETSON_PERIOD_S if jetson else None,
                max_age_s=JETSON_PERIOD_S if jetson else None,
                flags=accuracy.flags if index == 0 else (),
            )
            for index, part in enumerate(self._parts)
        )

    def read(self) -> list[float | str]:
        try:
            measurement = self._soc.get_total_energy_consumption()
        except Empty:
            return ["zeus: its polling process does not answer"] * len(self._parts)
        values = [getattr(measurement, part.field) for part in self._parts]
        return [
            f"zeus: {part.field} is missing" if value is None else float(value) * MILLI
            for part, value in zip(self._parts, values, strict=True)
        ]

    def close(self) -> None:
        """Zeus keeps the chip open until the process ends."""


def open_zeus(_targets: Targets) -> list[ZeusSocMeter]:
    """Open the chip, with its CPU and GPU.

    Raises:
        MeterError: If Zeus is missing or lacks the chip.
    """
    try:
        from zeus.device.soc import ZeusSoCInitError, get_soc
    except ImportError:
        raise MeterError("zeus: zeus is missing; pip install 'pytest-llenergy[zeus]'") from None
    try:
        soc = get_soc()
    except ZeusSoCInitError as error:
        raise MeterError(f"zeus: {error} It reads Apple silicon and Jetson.") from None
    return [ZeusSocMeter(soc)]


#: "estimated", as on Apple silicon, so that it is never selected where measured energy is required.
SPEC = MeterSpec(name="zeus", kind="estimated", open=open_zeus, by_default=False)
