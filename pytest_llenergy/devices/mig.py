# SPDX-License-Identifier: Apache-2.0
"""MIG instances: parts of a divided board, each of which is a device to CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.devices.nvml import Session, read_or_none
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import Board

MIG_PREFIX = "MIG-"

#: Why a board in MIG mode that has no instances cannot be used, and what to do.
NO_INSTANCES = (
    "in MIG mode without instances and cannot be used (nvidia-smi mig -cgi PROFILE -C makes instances, "
    "nvidia-smi -mig 0 ends the mode)"
)

#: From this driver version on, a process sees one compute instance of each GPU instance; before, only one in
#: total (NVIDIA MIG user guide, "CUDA Device Enumeration").
SEVERAL_FROM_DRIVER = 570

#: Profile names round memory to eighths of the board's (NVIDIA go-nvlib, ``getMigMemorySizeGB``).
MEMORY_PARTS = 8


@dataclass(frozen=True)
class Instance:
    """A MIG instance.

    Attributes:
        uuid: UUID of the instance.
        board: UUID of its board.
        gpu_instance: Id of its GPU instance.
        compute_instance: Id of its compute instance.
        profile: Profile such as ``1g.10gb``; None if the driver does not report it.
        memory_bytes: Total memory; None if the driver does not report it.
    """

    uuid: str
    board: str
    gpu_instance: int
    compute_instance: int
    profile: str | None = None
    memory_bytes: int | None = None

    @property
    def legacy_name(self) -> str:
        """Name of the instance with drivers before 470, which CUDA still accepts."""
        return f"{MIG_PREFIX}{self.board}/{self.gpu_instance}/{self.compute_instance}"

    @property
    def label(self) -> str:
        """UUID, with the profile if known."""
        return f"{self.uuid} ({self.profile})" if self.profile else self.uuid


def shown_to_one_process(instances: Sequence[Instance], driver: str | None) -> tuple[Instance, ...]:
    """Return the instances that CUDA shows to one process, in the given order."""
    major = (driver or "").partition(".")[0]
    if not major.isdecimal() or int(major) < SEVERAL_FROM_DRIVER:
        return tuple(instances[:1])
    first: dict[tuple[str, int], Instance] = {}
    for instance in instances:
        first.setdefault((instance.board, instance.gpu_instance), instance)
    return tuple(first.values())


def is_mig_enabled(session: Session, uuid: str) -> bool | None:
    """Return whether a board is in MIG mode; None if it has no such mode."""
    module = session.module
    return read_or_none(
        module, lambda: bool(module.nvmlDeviceGetMigMode(module.nvmlDeviceGetHandleByUUID(uuid))[0])
    )


def list_instances(session: Session, board: Board) -> list[Instance]:
    """Return the instances of a board in the driver's order; empty for an undivided board.

    Raises:
        DeviceError: An instance exists and does not answer.
    """
    module = session.module
    try:
        handle = module.nvmlDeviceGetHandleByUUID(board.uuid)
        count = int(module.nvmlDeviceGetMaxMigDeviceCount(handle))
    except module.NVMLError:
        # The driver or the board does not support MIG.
        return []
    instances = []
    for index in range(count):
        try:
            instance_handle = module.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (module.NVMLError_NotFound, module.NVMLError_InvalidArgument, module.NVMLError_NotSupported):
            # The slot is empty.
            continue
        except module.NVMLError as error:
            raise _no_answer(index, board, error) from None
        try:
            instances.append(_instance(module, instance_handle, board))
        except module.NVMLError as error:
            raise _no_answer(index, board, error) from None
    return instances


def _no_answer(index: int, board: Board, error: Exception) -> DeviceError:
    return DeviceError(
        f"NVML: MIG instance {index} of {board.uuid} does not answer ({error}); see nvidia-smi -L"
    )


def _instance(module: Any, handle: Any, board: Board) -> Instance:
    return Instance(
        uuid=str(module.nvmlDeviceGetUUID(handle)),
        board=board.uuid,
        gpu_instance=int(module.nvmlDeviceGetGpuInstanceId(handle)),
        compute_instance=int(module.nvmlDeviceGetComputeInstanceId(handle)),
        profile=_profile(module, handle, board.memory_bytes),
        memory_bytes=read_or_none(module, lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)),
    )


def _profile(module: Any, handle: Any, board_memory_bytes: int | None) -> str | None:
    attributes = read_or_none(module, lambda: module.nvmlDeviceGetAttributes(handle))
    if attributes is None or not board_memory_bytes:
        return None
    parts = math.ceil(attributes.memorySizeMB * 2**20 / board_memory_bytes * MEMORY_PARTS)
    memory_gb = round(parts / MEMORY_PARTS * math.ceil(board_memory_bytes / 2**30))
    gpu, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    return f"{gpu}g.{memory_gb}gb" if gpu == compute else f"{compute}c.{gpu}g.{memory_gb}gb"
