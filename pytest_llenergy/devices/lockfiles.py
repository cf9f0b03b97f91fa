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

from pytest_llenergy.devices.lease import CPU, Claim
from pytest_llenergy.devices.lockdir import PREFIX, READ, VARIABLE, Directory
from pytest_llenergy.devices.timeouts import LOCK_FILE_RETRY_S
from pytest_llenergy.errors import DeviceError

#: Opening must not wait for the other end of a named pipe that somebody put there.
OPEN = READ | os.O_NONBLOCK

#: For all to read, whatever the umask: a lock that others cannot open would lock them out.
MODE = 0o644

#: Where a file cannot be made with its mode at once, others may come in between.
TRIES = 10

#: ``renameat2``: fail where the new name is taken (Linux: include/uapi/linux/fs.h).
RENAME_NOREPLACE = 1


def lock_name(device: str) -> str:
    """The name of a device's file."""
    return f"{PREFIX}{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"


def try_lock(directory: Directory, claim: Claim) -> int | None:
    """Lock a device if it is free. Returns the descriptor that holds the lock, ``None`` when others have it.

    Raises ``DeviceError`` for a file that cannot be trusted.
    """
    name = lock_name(claim.device)
    for _ in range(TRIES):
        descriptor = open_checked(directory, name)
        if not lock_open(descriptor, claim):
            os.close(descriptor)
            return None
        if is_at(directory, name, descriptor):
            return descriptor
        # Somebody cleaned the directory: a lock on a file that others cannot find excludes nobody.
        os.close(descriptor)
    raise DeviceError(
        f"lock file {directory.path / name} is removed again and again; stop what removes it, or set "
        f"{VARIABLE} to another directory"
    )


def lock_open(descriptor: int, claim: Claim) -> bool:
    """Lock an open file, unless others have it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if claim.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(claim: Claim, descriptor: int) -> None:
    """Give up a device of ours."""
    if claim.device == CPU:
        # Also where a copy of the descriptor has been left in some process.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    # A GPU is not unlocked, which would take it from processes that still use it.
    os.close(descriptor)


def is_at(directory: Directory, name: str, descriptor: int) -> bool:
    """Whether the open file is the one that has this name."""
    try:
        there = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def check(directory: Directory, device: str) -> None:
    """Raise ``DeviceError`` if a device's file is not as ours are. One that is missing is not made."""
    with suppress(FileNotFoundError):
        os.close(open_checked(directory, lock_name(device), make=False))


def open_checked(directory: Directory, name: str, *, make: bool = True) -> int:
    """Open a lock file, made if it is missing. Raises ``DeviceError`` for one that is not as ours are.

    Raises ``FileNotFoundError`` for one that is missing and not to be made.
    """
    path = directory.path / name
    for attempt in range(TRIES):
        try:
            descriptor = _open_or_make(directory, name) if make else _open(directory, name)
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
                raise refuse(path, "is a symbolic link") from None
            raise refuse(path, f"cannot be opened ({error.strerror})") from None
        wrong = _wrong(os.fstat(descriptor))
        if wrong is None:
            return descriptor
        os.close(descriptor)
        raise refuse(path, wrong)
    raise refuse(path, "cannot be opened (Permission denied)")


def refuse(path: Path, what: str) -> DeviceError:
    """The error for a file in our place that is none of ours."""
    return DeviceError(f"lock file {path} {what}; remove it, or set {VARIABLE} to another directory")


def _open(directory: Directory, name: str) -> int:
    descriptor = os.open(name, OPEN, dir_fd=directory.descriptor)
    state = os.fstat(descriptor)
    if state.st_uid == os.geteuid() and _wrong(state) is None and state.st_mode & MODE != MODE:
        # Its maker, we, died before it had its mode.
        os.fchmod(descriptor, MODE)
    return descriptor


def _open_or_make(directory: Directory, name: str) -> int:
    try:
        return _open(directory, name)
    except FileNotFoundError:
        pass
    # Named as a ticket in the making: what somebody leaves who dies here is removed as those are.
    unready = f"{PREFIX}new-{time.monotonic_ns():020d}-{os.urandom(8).hex()}"
    descriptor = _make(directory, unready)
    try:
        moved = _move(directory, unready, name)
    except OSError:
        os.close(descriptor)
        _remove(directory, unready)
        raise
    if moved:
        return descriptor
    os.close(descriptor)
    _remove(directory, unready)
    return _make(directory, name)


def _make(directory: Directory, name: str) -> int:
    # Never O_CREAT on a file that may exist: in a sticky directory the kernel refuses that for another
    # user's file (fs.protected_regular).
    descriptor = os.open(name, OPEN | os.O_CREAT | os.O_EXCL, MODE, dir_fd=directory.descriptor)
    os.fchmod(descriptor, MODE)
    return descriptor


def _move(directory: Directory, old: str, new: str) -> bool:
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


def _remove(directory: Directory, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory.descriptor)


def _wrong(state: os.stat_result) -> str | None:
    if not stat.S_ISREG(state.st_mode):
        return "is no regular file"
    if state.st_nlink > 1:
        return f"has {state.st_nlink} names"
    if state.st_mode & 0o022:
        return f"is writable by others (mode {stat.S_IMODE(state.st_mode):04o})"
    return None
