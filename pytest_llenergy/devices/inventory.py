# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs of the host, read through NVML.

CUDA is never used, since it would fix ``CUDA_VISIBLE_DEVICES`` in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytest_llenergy.devices.mig import Instance, is_mig_enabled, list_instances
from pytest_llenergy.devices.nvml import Session, read_or_none
from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.record.environment import Board


@dataclass(frozen=True)
class Inventory:
    """Boards and MIG instances that the driver shows.

    Attributes:
        boards: Boards in PCI order.
        instances: MIG instances of all boards.
        driver: Driver version.
        mig_enabled: UUIDs of the boards in MIG mode, with or without instances.
        used_bytes: Memory in use by UUID, where the driver reports it.
        driver_missing: Why no driver is available; None if one is.
        lost: Error by PCI position for each board that is lost. Such a board keeps its position and is not in
            ``boards``.
        errors: Messages of all other failures; see ``read_answering``.
    """

    boards: tuple[Board, ...] = ()
    instances: tuple[Instance, ...] = ()
    driver: str | None = None
    mig_enabled: frozenset[str] = frozenset()
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    driver_missing: str | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the boards."""
        return tuple(board.uuid for board in self.boards)

    def instance(self, uuid: str) -> Instance | None:
        """Return the instance with this UUID; None for the UUID of a board."""
        return next((instance for instance in self.instances if instance.uuid == uuid), None)

    def board_instances(self, uuid: str) -> tuple[Instance, ...]:
        """Return the instances of a board. A board with instances cannot be used as a whole."""
        return tuple(instance for instance in self.instances if instance.board == uuid)

    def index(self, uuid: str) -> int:
        """Return the PCI position of a board, or of the board of an instance."""
        index = self._position(uuid)
        for lost in sorted(self.lost):
            index += lost <= index
        return index

    def device(self, uuid: str) -> Board:
        """Return the description of a board, or of an instance, named as CUDA names it."""
        board, instance = self.boards[self._position(uuid)], self.instance(uuid)
        if instance is None:
            return board
        name = " ".join(filter(None, (board.name, "MIG", instance.profile)))
        return Board(uuid, name, board.pci_bus_id, memory_bytes=instance.memory_bytes)

    def _position(self, uuid: str) -> int:
        instance = self.instance(uuid)
        return self.uuids.index(instance.board if instance else uuid)


class _LostError(DeviceError):
    """The board has fallen off the bus. NVML still counts it, so the others keep their positions."""


def read_inventory(*, without_lost: bool = False) -> Inventory:
    """Read all boards and MIG instances. Without a driver the inventory is empty.

    Args:
        without_lost: Leave lost boards out instead of failing.

    Raises:
        DeviceError: A board or instance does not answer. Skipping it would shift the positions of the others.
    """
    return _read_inventory(_LostError if without_lost else ())


def read_answering() -> Inventory:
    """Read all boards that answer, for display only. ``lost`` and ``errors`` have the failures."""
    try:
        return _read_inventory(DeviceError)
    except DeviceError as error:
        return Inventory(errors=(str(error),))


def _read_inventory(tolerated: type[DeviceError] | tuple[()]) -> Inventory:
    try:
        session = Session()
    except NoDriverError as error:
        return Inventory(driver_missing=str(error))
    lost: dict[int, str] = {}
    errors: list[str] = []
    try:
        boards = _list_boards(session, tolerated, lost)
        instances: list[Instance] = []
        for board in boards:
            try:
                instances += list_instances(session, board)
            except tolerated as error:
                errors.append(str(error))
        uuids = [*(board.uuid for board in boards), *(instance.uuid for instance in instances)]
        used = {uuid: read_used_bytes(session.module, uuid) for uuid in uuids}
        return Inventory(
            boards=tuple(boards),
            instances=tuple(instances),
            driver=read_or_none(session.module, lambda: str(session.module.nvmlSystemGetDriverVersion())),
            mig_enabled=frozenset(board.uuid for board in boards if is_mig_enabled(session, board.uuid)),
            used_bytes={uuid: size for uuid, size in used.items() if size is not None},
            lost=lost,
            errors=tuple(errors),
        )
    finally:
        session.close()


def read_used_bytes(module: Any, uuid: str) -> int | None:
    """Return the memory in use on a board or instance; None if the driver does not report it.

    Version 2 of the call, new in driver 510, excludes what the driver reserves for itself; version 1 has
    since included it, some hundred MB (nvml.h: ``nvmlMemory_t``, ``nvmlMemory_v2_t``).
    """
    for version in (module.nvmlMemory_v2, None):
        used = read_or_none(module, partial(_read_used, module, uuid, version))
        if used is not None:
            return used
    return None


def _read_used(module: Any, uuid: str, version: int | None) -> int:
    return int(module.nvmlDeviceGetMemoryInfo(module.nvmlDeviceGetHandleByUUID(uuid), version).used)


def _list_boards(
    session: Session, tolerated: type[DeviceError] | tuple[()], lost: dict[int, str]
) -> list[Board]:
    """Return the boards that answer. Adds the tolerated errors of others to ``lost``."""
    module, boards = session.module, []
    try:
        count = int(module.nvmlDeviceGetCount())
    except module.NVMLError as error:
        raise DeviceError(f"NVML: the driver does not count its GPUs ({error}); see nvidia-smi") from None
    for index in range(count):
        try:
            boards.append(_read_board(module, index))
        except tolerated as error:
            lost[index] = str(error)
    return boards


def _read_board(module: Any, index: int) -> Board:
    try:
        handle = module.nvmlDeviceGetHandleByIndex(index)
        uuid, name = str(module.nvmlDeviceGetUUID(handle)), str(module.nvmlDeviceGetName(handle))
        pci_bus_id = str(module.nvmlDeviceGetPciInfo(handle).busId)
    except module.NVMLError as error:
        kind = _LostError if isinstance(error, module.NVMLError_GpuIsLost) else DeviceError
        raise kind(f"NVML: GPU {index} does not answer ({error}); see nvidia-smi") from None
    return Board(
        uuid=uuid,
        name=name,
        pci_bus_id=pci_bus_id,
        memory_bytes=read_or_none(module, lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)),
        power_limit_w=read_or_none(
            module, lambda: float(module.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000
        ),
    )
