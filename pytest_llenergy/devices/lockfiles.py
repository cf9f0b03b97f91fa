# SPDX-License-Identifier: Apache-2.0
"""One lock file per device; the kernel's flock decides who holds it.

Files are made once and never removed, hold nothing, and are opened for reading only: anybody may lock them,
whoever made them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from pytest_llenergy.devices.lease import CPU, DeviceLock
from pytest_llenergy.devices.lockdir import FILE_PREFIX, LOCK_DIR_VARIABLE, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.timeouts import LOCK_FILE_RETRY_S
from pytest_llenergy.errors import DeviceError

#: Opening must not wait for the other end of a named pipe that somebody put there.
OPEN_FLAGS = READ_FLAGS | os.O_NONBLOCK

#: For all to read, whatever the umask: a lock that others cannot open would lock them out.
FILE_MODE = 0o644

#: Where a file cannot be made with its mode at once, others may come in between.
ATTEMPTS = 10

#: ``renameat2``: fail where the new name is taken (Linux: include/uapi/linux/fs.h).
RENAME_NOREPLACE = 1


def lock_name(device: str) -> str:
    """The name of a device's file."""
    return f"{FILE_PREFIX}{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"


def try_lock(directory: LockDirectory, claim: DeviceLock) -> int | None:
    """Lock a device if it is free. Returns the descriptor that holds the lock, ``None`` when others have it.

    Raises ``DeviceError`` for a file that cannot be trusted.
    """
    name = lock_name(claim.device)
    for _ in range(ATTEMPTS):
        descriptor = open_lock_file(directory, name)
        if not lock_descriptor(descriptor, claim):
            os.close(descriptor)
            return None
        if is_current(directory, name, descriptor):
            return descriptor
        # Somebody cleaned the directory: a lock on a file that others cannot find excludes nobody.
        os.close(descriptor)
    raise DeviceError(
        f"lock file {directory.path / name} is removed again and again; stop what removes it, or set "
        f"{LOCK_DIR_VARIABLE} to another directory"
    )


def lock_descriptor(descriptor: int, claim: DeviceLock) -> bool:
    """Lock an open file, unless others have it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if claim.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(claim: DeviceLock, descriptor: int) -> None:
    """Give up a device of ours."""
    if claim.device == CPU:
        # Also where a copy of the descriptor has been left in some process.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    # A GPU is not unlocked, which would take it from processes that still use it.
    os.close(descriptor)


def is_current(directory: LockDirectory, name: str, descriptor: int) -> bool:
    """Whether the open file is the one that has this name."""
    try:
        there = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def check_lock_file(directory: LockDirectory, device: str) -> None:
    """Raise ``DeviceError`` if a device's file is not as ours are. One that is missing is not made."""
    with suppress(FileNotFoundError):
        os.close(open_lock_file(directory, lock_name(device), make=False))


def open_lock_file(directory: LockDirectory, name: str, *, make: bool = True) -> int:
    """Open a lock file, made if it is missing. Raises ``DeviceError`` for one that is not as ours are.

    Raises ``FileNotFoundError`` for one that is missing and not to be made.
    """
    path = directory.path / name
    for attempt in range(ATTEMPTS):
        try:
            descriptor = _open_or_create(directory, name) if make else _open(directory, name)
        except FileExistsError:
            continue
        except FileNotFoundError:
            if not make:
                raise
            if directory.is_gone():
                raise directory.gone() from None
            continue
        except PermissionError:
            # Its maker has not given it its mode yet.
            time.sleep(LOCK_FILE_RETRY_S * attempt)
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise lock_file_error(path, "is a symbolic link") from None
            raise lock_file_error(path, f"cannot be opened ({error.strerror})") from None
        wrong = _find_fault(os.fstat(descriptor))
        if wrong is None:
            return descriptor
        os.close(descriptor)
        raise lock_file_error(path, wrong)
    raise lock_file_error(path, "cannot be opened (Permission denied)")


def lock_file_error(path: Path, what: str) -> DeviceError:
    """The error for a file in our place that is none of ours."""
    return DeviceError(f"lock file {path} {what}; remove it, or set {LOCK_DIR_VARIABLE} to another directory")


def _open(directory: LockDirectory, name: str) -> int:
    descriptor = os.open(name, OPEN_FLAGS, dir_fd=directory.descriptor)
    state = os.fstat(descriptor)
    if state.st_uid == os.geteuid() and _find_fault(state) is None and state.st_mode & FILE_MODE != FILE_MODE:
        # Its maker, we, died before it had its mode.
        os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _open_or_create(directory: LockDirectory, name: str) -> int:
    try:
        return _open(directory, name)
    except FileNotFoundError:
        pass
    # Named as a ticket in the making: what somebody leaves who dies here is removed as those are.
    unready = f"{FILE_PREFIX}new-{time.monotonic_ns():020d}-{os.urandom(8).hex()}"
    descriptor = _create(directory, unready)
    try:
        moved = _rename_if_free(directory, unready, name)
    except OSError:
        os.close(descriptor)
        _remove(directory, unready)
        raise
    if moved:
        return descriptor
    os.close(descriptor)
    _remove(directory, unready)
    return _create(directory, name)


def _create(directory: LockDirectory, name: str) -> int:
    # Never O_CREAT on a file that may exist: in a sticky directory the kernel refuses that for another
    # user's file (fs.protected_regular).
    descriptor = os.open(name, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, FILE_MODE, dir_fd=directory.descriptor)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _rename_if_free(directory: LockDirectory, old: str, new: str) -> bool:
    """Rename; ``FileExistsError`` if the new name is taken. False where this cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    there = directory.descriptor
    if rename(there, old.encode(), there, new.encode(), RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))


def _remove(directory: LockDirectory, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory.descriptor)


def _find_fault(state: os.stat_result) -> str | None:
    if not stat.S_ISREG(state.st_mode):
        return "is no regular file"
    if state.st_nlink > 1:
        return f"has {state.st_nlink} names"
    if state.st_mode & 0o022:
        return f"is writable by others (mode {stat.S_IMODE(state.st_mode):04o})"
    return None
