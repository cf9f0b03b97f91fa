# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of devices, agreed between the processes of one user.

The CPU is a device too: two tests that measure it at once would each count the other's joules. A lease is
a set of ``flock`` locks, which the kernel drops when the last process holding them is gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import DeviceError
from pytest_llenergy.model.environment import Board

CPU = "cpu"
POLL_S = 0.05


@dataclass(frozen=True)
class Lease:
    """Devices that belong to one test while it runs.

    ``devices`` names one device a rank: full UUIDs of GPUs or MIG instances, or ``cpu`` as often as there are
    CPU ranks. ``boards`` and ``indices`` tell of each what it is and its place in PCI order; ``divided`` are
    the UUIDs of the boards that leased instances are parts of.
    ``fallback`` is ``"cpu"`` where GPUs were asked for and the mark allowed CPU ranks instead.
    """

    devices: tuple[str, ...]
    boards: tuple[Board, ...] = ()
    indices: tuple[int, ...] = ()
    fallback: str | None = None
    divided: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        """Full UUIDs of the leased GPUs; empty for a CPU lease."""
        return tuple(board.uuid for board in self.boards)

    @property
    def exclusive(self) -> tuple[str, ...]:
        """What nobody else may use meanwhile: a board's joules are those of all its MIG instances."""
        return (*self.devices, *self.divided)

    @property
    def names(self) -> tuple[str, ...]:
        """Product names of the leased GPUs."""
        return tuple(board.name for board in self.boards)

    @property
    def visible_devices(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` is set to for a process that may use the whole lease."""
        return ",".join(self.uuids)


def lock_directory() -> Path:
    """Where the lock files lie: ``LLENERGY_LOCK_DIR``, or a private directory of this user."""
    named = os.environ.get("LLENERGY_LOCK_DIR")
    path = Path(named) if named else Path(tempfile.gettempdir()) / f"llenergy-locks-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
    except OSError as error:
        raise DeviceError(
            f"lock directory {path}: {error.strerror}; set LLENERGY_LOCK_DIR to another"
        ) from None
    if not path.is_dir() or path.is_symlink() or (not named and state.st_uid != os.getuid()):
        raise DeviceError(f"lock directory {path} is not ours; set LLENERGY_LOCK_DIR to one that is")
    return path


class Locks:
    """The locks of one test. Locks are taken in one order everywhere, so that no two tests can deadlock."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def acquire(self, devices: Sequence[str], timeout_s: float) -> None:
        """Take an exclusive lock for each distinct device, all or none.

        Raises ``DeviceError`` naming the device and its holder after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        directory = lock_directory()
        try:
            for device in sorted(set(devices)):
                self._descriptors.append(_lock(directory / _file_name(device), device, deadline))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free everything that is held."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _file_name(device: str) -> str:
    return f"{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"


def _lock(path: Path, device: str, deadline: float) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DeviceError(
            f"lock {path}: {error.strerror}; set LLENERGY_LOCK_DIR to another directory"
        ) from None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
                    raise DeviceError(
                        f"{device} is still in use by process {holder}; wait for it, or raise "
                        "--energy-lease-timeout"
                    ) from None
                time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
