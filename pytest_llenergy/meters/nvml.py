# SPDX-License-Identifier: Apache-2.0
"""NVIDIA boards: the energy counter that the driver keeps since it was loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_llenergy.errors import MeterError
from pytest_llenergy.meters.protocol import Domain, MeterSpec, Targets, within

#: NVML documents no accuracy for the counter; ±5 % is what NVIDIA states for board power (nvml.h,
#: nvmlDeviceGetPowerUsage) and what independent work found (Yang et al., "Part-time Power
#: Measurements: nvidia-smi's Lack of Attention", SC 2024).
GAIN_LIMIT = 0.05


def counter_energy_j(pynvml: Any, handle: Any) -> float:
    """Joules since the driver was loaded, from the counter in millijoules. Raises ``NVMLError``."""
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000


class NvmlMeter:
    """One domain for each board, opened by UUID: indices differ between CUDA and NVML."""

    name = "nvml"
    poll_period_s = 0.01

    def __init__(self, uuids: Sequence[str]) -> None:
        try:
            import pynvml
        except ImportError:
            raise MeterError("nvml: the module pynvml is missing; pip install nvidia-ml-py") from None
        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise MeterError(f"nvml: {error}") from None
        try:
            self._handles = [self._open(uuid) for uuid in uuids]
        except MeterError:
            pynvml.nvmlShutdown()
            raise
        self.domains = tuple(
            Domain(
                name=f"gpu:{uuid}",
                kind="measured",
                source="nvmlDeviceGetTotalEnergyConsumption",
                scope="board",
                update_period_s=None,
                resolution_j=0.001,
                accuracy=f"within {GAIN_LIMIT:.0%} of the reading",
                limits=within(GAIN_LIMIT),
            )
            for uuid in uuids
        )

    def _open(self, uuid: str) -> Any:
        try:
            handle = self._pynvml.nvmlDeviceGetHandleByUUID(uuid)
            # Architecture numbers do not tell whether there is a counter; one call does.
            counter_energy_j(self._pynvml, handle)
        except self._pynvml.NVMLError as error:
            raise MeterError(f"nvml: no energy counter on {uuid} ({error})") from None
        return handle

    def read(self) -> list[float | str]:
        values: list[float | str] = []
        for handle in self._handles:
            try:
                values.append(counter_energy_j(self._pynvml, handle))
            except self._pynvml.NVMLError as error:
                values.append(f"nvml: {error}")
        return values

    def close(self) -> None:
        self._pynvml.nvmlShutdown()


def open_nvml(targets: Targets) -> NvmlMeter:
    """Raises ``MeterError`` where there is no driver, or a board of the targets has no counter."""
    if not targets.gpus:
        raise MeterError("nvml: the test uses no GPU")
    return NvmlMeter(targets.gpus)


SPEC = MeterSpec(name="nvml", kind="measured", open=open_nvml)
