# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the host has. NVML only: asking CUDA would freeze visibility in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytest_llenergy.devices import mig
from pytest_llenergy.devices.mig import Instance, instances_of
from pytest_llenergy.devices.nvml import Session, optional
from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.model.environment import Board


@dataclass(frozen=True)
class Present:
    """What the driver shows: boards in PCI order, and the MIG instances of those that are divided.

    ``mig_enabled`` are the UUIDs of the boards in MIG mode, with instances or without. ``used_bytes`` is the
    memory in use, by UUID, where the driver tells it. ``missing`` is why there is no driver. ``lost`` is what
    NVML said of each board that is lost and so is not among ``boards``, by its place in PCI order, which it
    keeps.
    """

    boards: tuple[Board, ...] = ()
    instances: tuple[Instance, ...] = ()
    driver: str | None = None
    mig_enabled: frozenset[str] = frozenset()
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    missing: str | None = None
    lost: Mapping[int, str] = field(default_factory=dict)

    @property
    def uuids(self) -> tuple[str, ...]:
        """Those of the boards."""
        return tuple(board.uuid for board in self.boards)

    def instance(self, uuid: str) -> Instance | None:
        """The instance with this UUID; ``None`` for a board's."""
        return next((instance for instance in self.instances if instance.uuid == uuid), None)

    def parts(self, uuid: str) -> tuple[Instance, ...]:
        """The instances that the board with this UUID is divided into. Such a board cannot be used whole."""
        return tuple(instance for instance in self.instances if instance.board == uuid)

    def index(self, uuid: str) -> int:
        """The place in PCI order of a board, or of the board that an instance is a part of."""
        place = self._position(uuid)
        for lost in sorted(self.lost):
            place += lost <= place
        return place

    def device(self, uuid: str) -> Board:
        """A board, or an instance as if it were one, named as CUDA names it."""
        board, instance = self.boards[self._position(uuid)], self.instance(uuid)
        if instance is None:
            return board
        name = " ".join(filter(None, (board.name, "MIG", instance.profile)))
        return Board(uuid, name, board.pci_bus_id, memory_bytes=instance.memory_bytes)

    def _position(self, uuid: str) -> int:
        instance = self.instance(uuid)
        return self.uuids.index(instance.board if instance else uuid)


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
        return _boards(session)


def present(*, without_lost: bool = False) -> Present:
    """Boards and MIG instances; empty without a driver, saying why.

    Raises as ``boards`` does, ``without_lost`` only for boards that do not answer and are not lost either.
    """
    try:
        session = Session()
    except NoDriverError as error:
        return Present(missing=str(error))
    try:
        lost: dict[int, str] = {}
        found = _boards(session, lost if without_lost else None)
        instances = [instance for board in found for instance in instances_of(session, board)]
        uuids = [*(board.uuid for board in found), *(instance.uuid for instance in instances)]
        used = {uuid: used_bytes(session.module, uuid) for uuid in uuids}
        return Present(
            boards=tuple(found),
            instances=tuple(instances),
            driver=str(session.module.nvmlSystemGetDriverVersion()),
            mig_enabled=frozenset(board.uuid for board in found if mig.enabled(session, board.uuid)),
            used_bytes={uuid: each for uuid, each in used.items() if each is not None},
            lost=lost,
        )
    finally:
        session.close()


def used_bytes(module: Any, uuid: str) -> int | None:
    """Memory in use on a board or instance, without what the driver keeps for itself where that is told.

    Version 1 of the call counts the driver's own share, some hundred MB, since driver 510; version 2, which
    came with it, does not (nvml.h: ``nvmlMemory_t``, ``nvmlMemory_v2_t``). ``None`` if neither answers.
    """
    for version in (module.nvmlMemory_v2, None):
        used = optional(module, partial(_used, module, uuid, version))
        if used is not None:
            return used
    return None


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

            return optional(module, read)
    except DeviceError:
        # Joules that were measured are not given up for want of a temperature.
        return None


def _used(module: Any, uuid: str, version: int | None) -> int:
    return int(module.nvmlDeviceGetMemoryInfo(module.nvmlDeviceGetHandleByUUID(uuid), version).used)


def _boards(session: Session, lost: dict[int, str] | None = None) -> list[Board]:
    """All boards; those that are lost are noted in ``lost`` instead, where it is given."""
    found = []
    for index in range(session.module.nvmlDeviceGetCount()):
        try:
            found.append(_board(session.module, index))
        except _LostError as error:
            if lost is None:
                raise
            lost[index] = str(error)
    return found


class _LostError(DeviceError):
    """The board has fallen off the bus. NVML counts it still, so that the others keep their numbers."""


def _board(module: Any, index: int) -> Board:
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
        memory_bytes=optional(module, lambda: int(module.nvmlDeviceGetMemoryInfo(handle).total)),
        power_limit_w=optional(module, lambda: float(module.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000),
    )
