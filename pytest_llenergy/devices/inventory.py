# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the host has. NVML only: asking CUDA would freeze visibility in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pytest_llenergy.devices.nvml import Session
from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.model.environment import Board

T = TypeVar("T")


@contextmanager
def nvml() -> Iterator[Session | None]:
    """An open session; ``None`` where there is no driver or no module.

    Raises ``DeviceError`` when there is a driver that refuses.
    """
    try:
        session = Session()
    except NoDriverError:
        yield None
        return
    try:
        yield session
    finally:
        session.close()


def boards() -> list[Board]:
    """Every board that the driver shows, in PCI order; empty without a driver.

    Raises ``DeviceError`` for a board that does not answer: without it the indices of others would shift.
    """
    with nvml() as session:
        if session is None:
            return []
        return [_board(session.module, index) for index in range(session.module.nvmlDeviceGetCount())]


def driver_version() -> str | None:
    """The driver's version; ``None`` without one."""
    with nvml() as session:
        return str(session.module.nvmlSystemGetDriverVersion()) if session is not None else None


def temperature_c(uuid: str) -> float | None:
    """The board's temperature in degrees Celsius; ``None`` where the driver does not tell."""
    try:
        with nvml() as session:
            if session is None:
                return None
            module = session.module

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
