# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the host has. NVML only: asking CUDA would freeze visibility in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytest_llenergy.devices import mig
from pytest_llenergy.devices.mig import Instance, list_instances
from pytest_llenergy.devices.nvml import Session, read_or_none
from pytest_llenergy.errors import DeviceError, NoDriverError
from pytest_llenergy.model.environment import Board


@dataclass(frozen=True)
class Inventory:
    """What the driver shows: boards in PCI order, and the MIG instances of those that are divided.

    ``mig_enabled`` are the UUIDs of the boards in MIG mode, with instances or without. ``used_bytes`` is the
    memory in use, by UUID, where the driver tells it. ``missing`` is why there is no driver. ``lost`` is what
    NVML said of each board that is lost and so is not among ``boards``, by its place in PCI order, which it
    keeps. ``refusals`` is what else was asked in vain, see ``answering``.
    """

    boards: tuple[Board, ...] = ()
    instances: tuple[Instance, ...] = ()
    driver: str | None = None
    mig_enabled: frozenset[str] = frozenset()
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    missing: str | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()

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
def open_optional_session() -> Iterator[Session | None]:
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


def read_inventory(*, without_lost: bool = False) -> Inventory:
    """Boards and MIG instances; empty without a driver, saying why.

    Raises ``DeviceError`` for one that does not answer: without it the indices of others would shift. A
    board that is lost keeps its place, and may be left out.
    """
    return _read_inventory(_LostError if without_lost else ())


def read_answering() -> Inventory:
    """What answers, for people to see and never to lease. ``refusals`` say why the rest does not.

    ``lost`` are then all boards that do not answer.
    """
    try:
        return _read_inventory(DeviceError)
    except DeviceError as error:
        return Inventory(refusals=(str(error),))


def _read_inventory(spared: type[DeviceError] | tuple[()]) -> Inventory:
    """What answers; what does not is left out where its error is one that is to be spared."""
    try:
        session = Session()
    except NoDriverError as error:
        return Inventory(missing=str(error))
    lost: dict[int, str] = {}
    refusals: list[str] = []
    try:
        found = _list_boards(session, spared, lost)
        instances: list[Instance] = []
        for board in found:
            try:
                instances += list_instances(session, board)
            except spared as error:
                refusals.append(str(error))
        uuids = [*(board.uuid for board in found), *(instance.uuid for instance in instances)]
        used = {uuid: read_used_bytes(session.module, uuid) for uuid in uuids}
        return Inventory(
            boards=tuple(found),
            instances=tuple(instances),
            driver=read_or_none(session.module, lambda: str(session.module.nvmlSystemGetDriverVersion())),
            mig_enabled=frozenset(board.uuid for board in found if mig.is_mig_enabled(session, board.uuid)),
            used_bytes={uuid: each for uuid, each in used.items() if each is not None},
            lost=lost,
            refusals=tuple(refusals),
        )
    finally:
        session.close()


def read_used_bytes(module: Any, uuid: str) -> int | None:
    """Memory in use on a board or instance, without what the driver keeps for itself where that is told.

    Version 1 of the call counts the driver's own share, some hundred MB, since driver 510; version 2, which
    came with it, does not (nvml.h: ``nvmlMemory_t``, ``nvmlMemory_v2_t``). ``None`` if neither answers.
    """
    for version in (module.nvmlMemory_v2, None):
        used = read_or_none(module, partial(_used, module, uuid, version))
        if used is not None:
            return used
    return None


def read_temperature_c(uuid: str) -> float | None:
    """The board's temperature in degrees Celsius; ``None`` where the driver does not tell."""
    try:
        with open_optional_session() as session:
            if session is None:
                return None
            module = session.module

            def read() -> float:
                return float(module.nvmlDeviceGetTemperature(module.nvmlDeviceGetHandleByUUID(uuid), 0))

            return read_or_none(module, read)
    except DeviceError:
        # Joules that were measured are not given up for want of a temperature.
        return None


def _used(module: Any, uuid: str, version: int | None) -> int:
    return int(module.nvmlDeviceGetMemoryInfo(module.nvmlDeviceGetHandleByUUID(uuid), version).used)


def _list_boards(
    session: Session, spared: type[DeviceError] | tuple[()], lost: dict[int, str]
) -> list[Board]:
    """All boards; those whose error is to be spared are noted in ``lost`` instead."""
    module, found = session.module, []
    try:
        count = int(module.nvmlDeviceGetCount())
    except module.NVMLError as error:
        raise DeviceError(f"NVML: the driver does not count its GPUs ({error}); see nvidia-smi") from None
    for index in range(count):
        try:
            found.append(_read_board(module, index))
        except spared as error:
            lost[index] = str(error)
    return found


class _LostError(DeviceError):
    """The board has fallen off the bus. NVML counts it still, so that the others keep their numbers."""


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
