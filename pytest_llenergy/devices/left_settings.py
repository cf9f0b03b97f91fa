# SPDX-License-Identifier: Apache-2.0
"""Files that note which power limits and clocks a guard has changed, and what puts them back after a kill.

A guard (``board_settings``) writes one for each change and keeps it locked. If it is killed, the file stays:
``llenergy doctor`` names it, and the next test that leases the board restores what it says.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pytest_llenergy.devices.lockdir import FILE_PREFIX, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.nvml import BoardHandle, Session
from pytest_llenergy.errors import DeviceError

#: Limit for files that are read, many times the size of one.
MAX_BYTES = 4096

#: Begins the names of files that note changes.
_PREFIX = f"{FILE_PREFIX}settings-"


class Change(msgspec.Struct, frozen=True):
    """A change of one board, as its file holds it: of the power limit, in mW, or of the clocks."""

    uuid: str
    before_mw: int | None = None
    set_mw: int | None = None
    locks_clocks: bool = False


def restore_left_settings(directory: LockDirectory, uuids: Sequence[str]) -> None:
    """Restore what killed runs have left on boards, which this process must have leased.

    Raises:
        DeviceError: A board cannot be restored.
    """
    for uuid in uuids:
        for name in _list_files(directory, uuid):
            with _open_left(directory, name, fcntl.LOCK_EX) as content:
                if content is None:
                    continue
                change = _decode(content)
                if change is not None and change.uuid == uuid:
                    _restore_in_session(change, directory.path / name)
                with suppress(OSError):
                    os.unlink(name, dir_fd=directory.descriptor)


def describe_left_settings(directory: LockDirectory) -> Iterator[str]:
    """Yield a line for each power limit or clock that a killed run has left on a board."""
    for name in _list_files(directory):
        with _open_left(directory, name, fcntl.LOCK_SH) as content:
            change = None if content is None else _decode(content)
        if change is not None:
            limit = "" if change.set_mw is None else f"a power limit of {change.set_mw / 1000:g} W"
            yield (
                f"{change.uuid}: a killed run has left {limit or 'locked graphics clocks'} on it; as root, "
                f"run a test that leases it, or: {_by_hand(change, directory.path / name)}"
            )


def _list_files(directory: LockDirectory, uuid: str = "") -> list[str]:
    """Return the names of the files about a board, by default about any."""
    names = os.listdir(directory.descriptor)  # noqa: PTH208
    return sorted(name for name in names if name.startswith(file_prefix(uuid) if uuid else _PREFIX))


def file_prefix(uuid: str) -> str:
    return f"{_PREFIX}{hashlib.sha256(uuid.encode()).hexdigest()[:16]}-"


@contextmanager
def _open_left(directory: LockDirectory, name: str, lock: int) -> Iterator[bytes | None]:
    """Lock and read a file about a change. Yields None if it counts for nothing."""
    try:
        descriptor = os.open(name, READ_FLAGS | os.O_NONBLOCK, dir_fd=directory.descriptor)
    except OSError:
        # Just restored, or a link that somebody else has put there.
        yield None
        return
    try:
        state = os.fstat(descriptor)
        # Others could make root change a board.
        is_trusted = stat.S_ISREG(state.st_mode) and state.st_uid in (0, os.geteuid()) and state.st_nlink == 1
        try:
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            # Of a guard at work: this test is a part of the one that holds the board.
            is_trusted = False
        yield os.read(descriptor, MAX_BYTES) if is_trusted else None
    finally:
        os.close(descriptor)


def _decode(content: bytes) -> Change | None:
    """Return the change, or None if its writer was killed before it had changed anything."""
    try:
        return msgspec.json.decode(content, type=Change)
    except msgspec.DecodeError:
        return None


def _by_hand(change: Change, path: Path) -> str:
    restoring = "-rgc" if change.before_mw is None else f"-pl {change.before_mw / 1000:g}"
    return f"nvidia-smi -i {change.uuid} {restoring}; rm {path}"


def _restore_in_session(change: Change, path: Path) -> None:
    session = Session()
    try:
        restore_board(session, session.open_board(change.uuid), change)
    except session.module.NVMLError as error:
        raise DeviceError(
            f"{change.uuid}: a killed run has left a power limit or clock on it, which cannot be put back "
            f"({error}); as root, run pytest once, or: {_by_hand(change, path)}"
        ) from None
    finally:
        session.close()


def restore_board(session: Session, board: BoardHandle, change: Change) -> None:
    nvml = session.module
    try:
        limit_mw = nvml.nvmlDeviceGetPowerManagementLimit(board.handle) if change.set_mw is not None else None
        # Somebody else may have set another limit since.
        if limit_mw is not None and limit_mw == change.set_mw != change.before_mw:
            nvml.nvmlDeviceSetPowerManagementLimit(board.handle, change.before_mw)
    finally:
        if change.locks_clocks:
            nvml.nvmlDeviceResetGpuLockedClocks(board.handle)
