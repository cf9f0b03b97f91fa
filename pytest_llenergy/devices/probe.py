# SPDX-License-Identifier: Apache-2.0
"""Read the GPUs of this host and print them as JSON: the program that ``inventory`` runs.

In a process of its own a driver call that never returns costs that process, and not pytest.
"""

from __future__ import annotations

import math
import os
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import msgspec

from pytest_llenergy.devices.amd_smi import MIB, read_amd_boards
from pytest_llenergy.devices.inventory import Instance, Inventory
from pytest_llenergy.devices.nvml import Session, read_or_none, read_text
from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.lifetime import die_with_parent
from pytest_llenergy.record.environment import Board

#: Profile names round memory to eighths of the board's (NVIDIA go-nvlib, ``getMigMemorySizeGB``).
MEMORY_PARTS = 8


def probe() -> Inventory:
    """Return the NVIDIA boards, or on a host without any the AMD boards."""
    try:
        found = _read_nvidia()
    except NoDriverError as error:
        found = Inventory(driver_missing=str(error))
    except DeviceError as error:
        return Inventory(error=str(error))
    if found.boards or found.lost or find_spec("amdsmi") is None:
        return found
    try:
        boards, lost = read_amd_boards()
        return replace(found, boards=boards, lost=lost)
    except NoDriverError as error:
        missing = found.driver_missing or "NVML shows none"
        return replace(found, driver_missing=f"{missing}; AMD SMI: {error}")
    except DeviceError as error:
        return Inventory(error=str(error))


def _read_nvidia() -> Inventory:
    """Return all boards and MIG instances.

    Raises:
        DeviceError: As for ``Session``.
    """
    with closing(Session()) as session:
        nvml = session.module
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise DeviceError(f"NVML: the driver does not count its GPUs ({error}); see nvidia-smi") from None
        boards: list[Board] = []
        instances: list[Instance] = []
        lost: dict[int, str] = {}
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                board = _read_board(nvml, handle)
                instances += _read_instances(nvml, handle, board)
            except nvml.NVMLError as error:
                # NVML still counts the board, so the others keep their positions.
                lost[index] = f"NVML: GPU {index} does not answer ({error}); see nvidia-smi"
                continue
            boards.append(board)
        driver = read_or_none(nvml, lambda: read_text(nvml.nvmlSystemGetDriverVersion))
    return Inventory(tuple(boards), tuple(instances), driver, lost=lost)


def _read_board(nvml: Any, handle: Any) -> Board:
    return Board(
        uuid=read_text(nvml.nvmlDeviceGetUUID, handle),
        name=read_text(nvml.nvmlDeviceGetName, handle),
        pci_bus_id=str(nvml.nvmlDeviceGetPciInfo(handle).busId),
        memory_bytes=read_or_none(nvml, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        power_limit_w=read_or_none(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    )


def _read_instances(nvml: Any, handle: Any, board: Board) -> list[Instance]:
    """Return the instances of a board in the driver's order; empty for an undivided board."""
    # None if the driver or the board does not support MIG.
    count = read_or_none(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) or 0
    instances = []
    for index in range(count):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            # The slot is empty.
            continue
        memory = read_or_none(nvml, lambda each=instance: int(nvml.nvmlDeviceGetMemoryInfo(each).total))  # type: ignore[misc]
        instances.append(
            Instance(
                uuid=read_text(nvml.nvmlDeviceGetUUID, instance),
                board=board.uuid,
                profile=_read_profile(nvml, instance, board.memory_bytes),
                memory_bytes=memory,
            )
        )
    return instances


def _read_profile(nvml: Any, instance: Any, board_memory_bytes: int | None) -> str | None:
    attributes = read_or_none(nvml, lambda: nvml.nvmlDeviceGetAttributes(instance))
    if attributes is None or not board_memory_bytes:
        return None
    parts = math.ceil(attributes.memorySizeMB * MIB / board_memory_bytes * MEMORY_PARTS)
    memory_gb = round(parts / MEMORY_PARTS * math.ceil(board_memory_bytes / 2**30))
    gpu, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    return f"{gpu}g.{memory_gb}gb" if gpu == compute else f"{compute}c.{gpu}g.{memory_gb}gb"


def _main() -> None:
    die_with_parent(os.getppid())
    # What libraries print must not come into the answer.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        answer.write(msgspec.json.encode(probe()))


if __name__ == "__main__":
    _main()
