# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the host has. NVML only: asking CUDA would freeze visibility in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board

T = TypeVar("T")


@contextmanager
def nvml() -> Iterator[Any]:
    """The module ``pynvml``, initialised; ``None`` where there is no driver or no module.

    Raises ``DeviceError`` when there is a driver that refuses.
    """
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        # A driver that is there and does not answer is not the same as no GPU.
        raise DeviceError(f"NVML: {error}; see nvidia-smi") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def boards() -> list[Board]:
    """Every board that the driver shows, in PCI order; empty without a driver.

    Raises ``DeviceError`` for a board that does not answer: without it the indices of others would shift.
    """
    with nvml() as module:
        if module is None:
            return []
        return [_board(module, index) for index in range(module.nvmlDeviceGetCount())]


def driver_version() -> str | None:
    """The driver's version; ``None`` without one."""
    with nvml() as module:
        return str(module.nvmlSystemGetDriverVersion()) if module is not None else None


def temperature_c(uuid: str) -> float | None:
    """The board's temperature in degrees Celsius; ``None`` where the driver does not tell."""
    try:
        with nvml() as module:
            if module is None:
                return None

            def read() -> float:
                return float(module.nvmlDeviceGetTemperature(module.nvmlDeviceGetHandleByUUID(uuid), 0))

            return _optional(module, read)
    except DeviceError:
        # Joules that were measured are not given up for want of a temperature.
        return None


def _board(module: Any, index: int) -> Board:
    try:
        handle = module.nvmlDeviceGetHandleByIndex(index)
        uuid, name = str(module.nvmlDeviceGetUUID(handle)), str(module.nvmlDeviceGetName(handle))
        pci_bus_id = str(module.nvmlDeviceGetPciInfo(handle).busId)
    except module.NVMLError as error:
        raise DeviceError(f"NVML: GPU {index} does not answer ({error}); see nvidia-smi") from None
    return Board(
        uuid=uuid,
        name=name,
        pci_bus_id=pci_bus_id,
        memory_bytes=_optional(module, lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)),
        power_limit_w=_optional(module, lambda: float(module.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000),
    )


def _optional(module: Any, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except module.NVMLError:
        return None
