# SPDX-License-Identifier: Apache-2.0
"""Notes of changed power limits and clocks: files of the lock directory, and what puts the changes back.

A guard (``board_settings``) notes each change before it makes it. If the guard is killed, the note stays:
``llenergy doctor`` names it, and the next test that leases the board puts the change back.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.nvml import BoardHandle, Session, read_or_none
from pytest_llenergy.errors import DeviceError
from pytest_llenergy.record.environment import read_boot_id

#: Limit for notes that are read, many times the size of one.
MAX_BYTES = 4096

_PREFIX = f"{FILE_PREFIX}settings-"


class Change(msgspec.Struct, frozen=True):
    """A change of one board: of the power limit, in mW, or of the clocks."""

    uuid: str
    before_mw: int | None = None
    set_mw: int | None = None
    locks_clocks: bool = False


class _Content(msgspec.Struct, frozen=True):
    """What a note holds. It has its own name, so that a link to it counts for nothing."""

    name: str
    boot_id: str
    change: Change


class Note:
    """A note of a change, empty until it is written, which this process keeps, and locks until it ends.

    Only its writer can hold this kind of lock. With flock, any reader could make a note that was left look
    kept.

    Raises:
        OSError: The lock directory takes no more files.
    """

    def __init__(self, directory: LockDirectory, change: Change) -> None:
        self.change = change
        self._directory = directory
        self._name = f"{_prefix(change.uuid)}{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._name, flags, 0o600, dir_fd=directory.descriptor)
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def write(self) -> None:
        """Write the note, before the change is made."""
        os.write(self._descriptor, msgspec.json.encode(_Content(self._name, read_boot_id(), self.change)))
        # Others could have locked it before.
        os.fchmod(self._descriptor, 0o644)

    def remove(self) -> None:
        """Remove the note, because the change is not in force."""
        os.unlink(self._name, dir_fd=self._directory.descriptor)
        self.leave()

    def leave(self) -> None:
        """Leave the note to the next test that leases the board."""
        os.close(self._descriptor)


def restore_change(session: Session, board: BoardHandle, change: Change) -> None:
    """Put a change back. A power limit that somebody else has set since stays.

    Raises:
        NVMLError: The driver refuses.
    """
    nvml = session.module
    try:
        limit_mw = nvml.nvmlDeviceGetPowerManagementLimit(board.handle) if change.set_mw is not None else None
        if limit_mw is not None and limit_mw == change.set_mw != change.before_mw:
            nvml.nvmlDeviceSetPowerManagementLimit(board.handle, change.before_mw)
    finally:
        if change.locks_clocks:
            nvml.nvmlDeviceResetGpuLockedClocks(board.handle)


def restore_left_changes(directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Put back what killed runs have left on boards, which this process must have leased.

    Raises:
        DeviceError: A board cannot be changed.
    """
    for uuid in uuids:
        for name, change in _read_left(directory, _prefix(uuid)).items():
            if change is not None:
                _restore_in_session(change, directory.path / name)
            with suppress(OSError):
                os.unlink(name, dir_fd=directory.descriptor)


def describe_left_changes(directory: LockDirectory) -> Iterator[tuple[str, bool]]:
    """Yield a line for each note of a killed run, and whether its change may still be in force."""
    for name, change in _read_left(directory, _PREFIX).items():
        if change is None:
            continue
        path, limit_mw = directory.path / name, _read_limit_mw(change)
        what = f"a power limit of {change.set_mw / 1000:g} W" if change.set_mw else "locked graphics clocks"
        if limit_mw is not None and not limit_mw == change.set_mw != change.before_mw:
            found = f"noted {what}, but the board has {limit_mw / 1000:g} W, which stays"
            yield f"{change.uuid}: a killed run {found}; as root: rm {path}", False
        else:
            found = f"{'may have' if limit_mw is None else 'has'} left {what} on it"
            advice = f"as root, run a test that leases it, or: {_by_hand(change, path)}"
            yield f"{change.uuid}: a killed run {found}; {advice}", True


def _prefix(uuid: str) -> str:
    """Return what names of notes about a board begin with."""
    return f"{_PREFIX}{hashlib.sha256(uuid.encode()).hexdigest()[:16]}-"


def _read_left(directory: LockDirectory, prefix: str) -> dict[str, Change | None]:
    """Return the changes of notes that no process keeps, by name of the note; None for one that is void."""
    left = {}
    for name in sorted(os.listdir(directory.descriptor)):  # noqa: PTH208 - by descriptor
        if not name.startswith(prefix):
            continue
        try:
            descriptor = os.open(name, READ_FLAGS | os.O_NONBLOCK, dir_fd=directory.descriptor)
        except OSError:
            # Just removed, or a link that somebody else has put there.
            continue
        try:
            state = os.fstat(descriptor)
            # Others could make root change a board.
            if stat.S_ISREG(state.st_mode) and state.st_uid in (0, os.geteuid()):
                fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                left[name] = _decode(name, os.read(descriptor, MAX_BYTES))
        except BlockingIOError:
            # Its guard is at work: this test is a part of the one that holds the board.
            continue
        finally:
            os.close(descriptor)
    return left


def _decode(name: str, content: bytes) -> Change | None:
    """Return the change, or None if it was never made, or is over."""
    try:
        note = msgspec.json.decode(content, type=_Content)
    except msgspec.DecodeError:
        # Its writer was killed before it had changed anything.
        return None
    boot_id = read_boot_id()
    # A reboot resets power limits and clocks (nvml.h).
    is_over = bool(note.boot_id and boot_id) and note.boot_id != boot_id
    return None if is_over or note.name != name else note.change


def _by_hand(change: Change, path: Path) -> str:
    restoring = "-rgc" if change.before_mw is None else f"-pl {change.before_mw / 1000:g}"
    return f"nvidia-smi -i {change.uuid} {restoring}; rm {path}"


def _read_limit_mw(change: Change) -> int | None:
    """Return the power limit that a board has; None if no limit was changed, or the driver reports none."""
    if change.set_mw is not None:
        with suppress(DeviceError), closing(Session()) as session:
            handle = session.open_board(change.uuid).handle
            read = session.module.nvmlDeviceGetPowerManagementLimit
            return read_or_none(session.module, lambda: int(read(handle)))
    return None


def _restore_in_session(change: Change, path: Path) -> None:
    with closing(Session()) as session:
        try:
            restore_change(session, session.open_board(change.uuid), change)
        except session.module.NVMLError as error:
            raise DeviceError(
                f"{change.uuid}: a killed run has left a power limit or clock on it, which cannot be put "
                f"back ({error}); as root, run pytest once, or: {_by_hand(change, path)}"
            ) from None
