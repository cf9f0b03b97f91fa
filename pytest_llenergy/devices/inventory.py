# SPDX-License-Identifier: Apache-2.0
"""GPUs of the host, which a process of its own reads once a run (``probe``).

CUDA is never used, since it would fix ``CUDA_VISIBLE_DEVICES`` in this process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path

import msgspec

from pytest_llenergy.devices.timeouts import KILL_TIMEOUT_S, QUERY_TIMEOUT_S
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.record.environment import Board

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Instance:
    """A MIG instance: a part of a divided board, and a device to CUDA.

    Attributes:
        uuid: UUID of the instance.
        board: UUID of its board.
        profile: Such as ``1g.10gb``; None if the driver does not report it.
    """

    uuid: str
    board: str
    profile: str | None = None
    memory_bytes: int | None = None

    @property
    def label(self) -> str:
        """UUID, with the profile if known."""
        return f"{self.uuid} ({self.profile})" if self.profile else self.uuid


@dataclass(frozen=True)
class Inventory:
    """Boards and MIG instances that the driver shows: those of NVIDIA, or on a host without any those of AMD.

    Attributes:
        boards: Boards that answer, in PCI order.
        driver: Version of the NVIDIA driver.
        driver_missing: Why no driver is available; None if one is.
        lost: The reason by PCI position for each board that does not answer, which keeps its position.
        error: Why nothing is known: the driver refuses or has not answered in time.
    """

    boards: tuple[Board, ...] = ()
    instances: tuple[Instance, ...] = ()
    driver: str | None = None
    driver_missing: str | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the boards."""
        return tuple(board.uuid for board in self.boards)

    @property
    def faults(self) -> list[str]:
        """A reason for each board, or for the driver, that does not answer."""
        return [*self.lost.values(), *([self.error] if self.error else [])]

    def instance(self, uuid: str) -> Instance | None:
        """Return the instance with this UUID; None for the UUID of a board."""
        return next((instance for instance in self.instances if instance.uuid == uuid), None)

    def board_instances(self, uuid: str) -> tuple[Instance, ...]:
        """Return the instances of a board. A board with instances cannot be used as a whole."""
        return tuple(instance for instance in self.instances if instance.board == uuid)

    def one_per_board(self, uuids: Sequence[str]) -> tuple[str, ...]:
        """Name each divided board by one of its instances, so that it counts as shared."""
        parts = ((uuid, self.board_instances(uuid)) for uuid in uuids)
        return tuple(instances[0].uuid if instances else uuid for uuid, instances in parts)

    def index(self, uuid: str) -> int:
        """Return the PCI position of a board, or of the board of an instance."""
        positions = (position for position in count() if position not in self.lost)
        return next(islice(positions, self._place(uuid), None))

    def device(self, uuid: str) -> Board:
        """Return the description of a board, or of an instance, named as CUDA names it."""
        board, instance = self.boards[self._place(uuid)], self.instance(uuid)
        if instance is None:
            return board
        name = " ".join(filter(None, (board.name, "MIG", instance.profile)))
        return msgspec.structs.replace(board, uuid=uuid, name=name, memory_bytes=instance.memory_bytes)

    def _place(self, uuid: str) -> int:
        instance = self.instance(uuid)
        return self.uuids.index(instance.board if instance else uuid)


def read_inventory() -> Inventory:
    """Return all boards and MIG instances that answer. Without a driver the inventory is empty.

    Raises:
        DeviceError: The driver refuses or does not answer.
    """
    inventory = find_gpus()
    if inventory.error is not None:
        raise DeviceError(inventory.error)
    return inventory


@cache
def find_gpus() -> Inventory:
    """Return what the driver shows, or why that is unknown: read once, until ``find_gpus.cache_clear()``."""
    if not _may_have_gpus():
        return Inventory(driver_missing="NVML: Shared Library Not Found; install the NVIDIA driver")
    process = subprocess.Popen(
        module_command("pytest_llenergy.devices.probe"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=QUERY_TIMEOUT_S)
        return msgspec.json.decode(out, type=Inventory)
    except subprocess.TimeoutExpired:
        return Inventory(error=f"the GPU driver has not answered for {QUERY_TIMEOUT_S:g} s; see nvidia-smi")
    except msgspec.DecodeError:
        why = err.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {process.returncode}"
        return Inventory(error=f"the process that queries the GPU driver failed: {why}; see llenergy doctor")
    finally:
        process.kill()
        # A process in a call of a driver that hangs may not end.
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)


def _may_have_gpus() -> bool:
    """Return whether the host has a library of a GPU driver. It is not initialised."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    if any((Path(folder) / LIBRARY).exists() for folder in folders) or find_spec("amdsmi") is not None:
        return True
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True
