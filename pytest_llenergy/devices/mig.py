# SPDX-License-Identifier: Apache-2.0
"""MIG: the instances that a board is divided into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llenergy.devices.nvml import Session, read_or_none
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board

MIG_PREFIX = "MIG-"

#: What is wrong with a board that is divided into nothing, and what to do.
NO_INSTANCES = (
    "in MIG mode without instances and cannot be used (nvidia-smi mig -cgi PROFILE -C makes instances, "
    "nvidia-smi -mig 0 ends the mode)"
)

#: From this driver on a process sees one compute instance of each GPU instance; before it only one in all
#: (NVIDIA MIG user guide, "CUDA Device Enumeration").
SEVERAL_FROM_DRIVER = 570

#: Memory is divided by eighths: how profiles round it (NVIDIA go-nvlib, ``getMigMemorySizeGB``).
MEMORY_PARTS = 8


@dataclass(frozen=True)
class Instance:
    """One MIG instance, which is a device to CUDA. ``board`` is the UUID of the board that it is a part of.

    ``profile`` is as in ``1g.10gb``. Memory is bytes. Both are ``None`` where the driver does not tell.
    """

    uuid: str
    board: str
    gpu_instance: int
    compute_instance: int
    profile: str | None = None
    memory_bytes: int | None = None

    @property
    def legacy_name(self) -> str:
        """The name that drivers before 470 gave it, and that CUDA still takes."""
        return f"{MIG_PREFIX}{self.board}/{self.gpu_instance}/{self.compute_instance}"

    @property
    def label(self) -> str:
        """The UUID, and the profile where it is known."""
        return f"{self.uuid} ({self.profile})" if self.profile else self.uuid


def shown_to_one_process(instances: Sequence[Instance], driver: str | None) -> tuple[Instance, ...]:
    """Those among these instances that CUDA shows to one process, in the same order."""
    major = (driver or "").partition(".")[0]
    if not major.isdecimal() or int(major) < SEVERAL_FROM_DRIVER:
        return tuple(instances[:1])
    first: dict[tuple[str, int], Instance] = {}
    for instance in instances:
        first.setdefault((instance.board, instance.gpu_instance), instance)
    return tuple(first.values())


def is_mig_enabled(session: Session, uuid: str) -> bool | None:
    """Whether the board with this UUID is in MIG mode; ``None`` where it has no such mode or tells none."""
    module = session.module
    return read_or_none(
        module, lambda: bool(module.nvmlDeviceGetMigMode(module.nvmlDeviceGetHandleByUUID(uuid))[0])
    )


def list_instances(session: Session, board: Board) -> list[Instance]:
    """The instances of a board, in the driver's order; none where it is not divided.

    Raises ``DeviceError`` for an instance that is there and does not answer.
    """
    module = session.module
    try:
        handle = module.nvmlDeviceGetHandleByUUID(board.uuid)
        count = int(module.nvmlDeviceGetMaxMigDeviceCount(handle))
    except module.NVMLError:
        # Drivers and boards that know nothing of MIG.
        return []
    found = []
    for index in range(count):
        try:
            instance = module.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (module.NVMLError_NotFound, module.NVMLError_InvalidArgument, module.NVMLError_NotSupported):
            # Not every place is taken.
            continue
        except module.NVMLError as error:
            raise _no_answer(index, board, error) from None
        try:
            found.append(_instance(module, instance, board))
        except module.NVMLError as error:
            raise _no_answer(index, board, error) from None
    return found


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
