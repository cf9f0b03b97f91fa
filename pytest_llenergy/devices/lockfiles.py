# SPDX-License-Identifier: Apache-2.0
"""Lock devices with one file each; the kernel's ``flock`` decides which process holds the lock.

Lock files are created once, never removed, and stay empty. They are opened for reading only, so that every
user can lock a file that another user created. Their content, mode and other names do not matter. Only a
process that may remove what another user put in the place of a lock file does so: root, or the owner of the
directory.
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

from pytest_llenergy.devices.lease import CPU, DeviceLock
from pytest_llenergy.devices.lockdir import FILE_PREFIX, LOCK_DIR_VARIABLE, READ_FLAGS, LockDirectory
from pytest_llenergy.devices.timeouts import LOCK_FILE_RETRY_S
from pytest_llenergy.errors import DeviceError

#: Non-blocking, so that opening does not wait for the other end if the file was replaced by a named pipe.
OPEN_FLAGS = READ_FLAGS | os.O_NONBLOCK

#: Readable by all, whatever the umask, since others cannot lock a file that they cannot open.
FILE_MODE = 0o644

#: Number of attempts, since another process may create, replace or remove the file between two system calls.
ATTEMPTS = 10

#: ``renameat2``: fail if the new name is taken (Linux: include/uapi/linux/fs.h).
RENAME_NOREPLACE = 1


def lock_name(device: str) -> str:
    """Return the name of a device's lock file."""
    return f"{FILE_PREFIX}{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"


def try_lock(directory: LockDirectory, lock: DeviceLock) -> int | None:
    """Lock a device if it is free.

    Returns:
        The descriptor that holds the lock, or None if another process holds it.

    Raises:
        DeviceError: No such file can be opened or created.
    """
    name = lock_name(lock.device)
    for _ in range(ATTEMPTS):
        descriptor = open_lock_file(directory, name)
        if not lock_descriptor(descriptor, lock):
            os.close(descriptor)
            return None
        if is_current(directory, name, descriptor):
            return descriptor
        # The file has been removed: a lock on a file that others cannot find excludes nobody.
        os.close(descriptor)
    raise DeviceError(
        f"lock file {directory.path / name} is removed again and again; stop what removes it, or set "
        f"{LOCK_DIR_VARIABLE} to another directory"
    )


def lock_descriptor(descriptor: int, lock: DeviceLock) -> bool:
    """Lock an open file. Returns False if another process holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if lock.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(lock: DeviceLock, descriptor: int) -> None:
    """Release the lock of this process on a device."""
    if lock.device == CPU:
        # Frees the CPU even if another process still has a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    # A GPU is not unlocked explicitly: it stays locked while other processes that use it have copies.
    os.close(descriptor)


def is_current(directory: LockDirectory, name: str, descriptor: int) -> bool:
    """Return whether the open file is still the one with this name.

    Args:
        directory: The lock directory.
        name: Name of the file.
        descriptor: Descriptor of the open file.
    """
    try:
        current = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(current, os.fstat(descriptor))


def is_held(directory: LockDirectory, device: str) -> bool:
    """Return whether any process holds a lock on a device, which is locked for an instant if none does."""
    try:
        descriptor = os.open(lock_name(device), OPEN_FLAGS, dir_fd=directory.descriptor)
    except OSError:
        return False
    try:
        return not lock_descriptor(descriptor, DeviceLock(device))
    finally:
        os.close(descriptor)


def check_lock_file(directory: LockDirectory, device: str) -> None:
    """Raise ``DeviceError`` if the lock file of a device exists and cannot be locked."""
    with suppress(FileNotFoundError):
        os.close(open_lock_file(directory, lock_name(device), create=False))


def open_lock_file(directory: LockDirectory, name: str, *, create: bool = True) -> int:
    """Open a lock file; create it if it is missing.

    Raises:
        DeviceError: Something else is in its place, or it cannot be opened.
        FileNotFoundError: The file is missing and ``create`` is false.
    """
    fault: str | None = "it is replaced again and again"
    for attempt in range(ATTEMPTS):
        try:
            descriptor = _open_or_create(directory, name) if create else _open(directory, name)
        except FileExistsError:
            continue
        except FileNotFoundError:
            if not create:
                raise
            if directory.is_gone():
                raise directory.gone_error() from None
            continue
        except PermissionError:
            # Perhaps its creator has not set the mode yet.
            fault = "you have no permission to open it"
            time.sleep(LOCK_FILE_RETRY_S * attempt)
            continue
        except OSError as error:
            fault = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            if _move_away(directory, name):
                continue
            raise _lock_file_error(directory, name, fault) from None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        if not _move_away(directory, name):
            raise _lock_file_error(directory, name, "it is not a regular file")
    raise _lock_file_error(directory, name, fault)


def _lock_file_error(directory: LockDirectory, name: str, fault: str | None) -> DeviceError:
    try:
        owner = user_name(os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False).st_uid)
    except OSError:
        owner = "an unknown user"
    return DeviceError(
        f"lock file {directory.path / name} of {owner}: {fault}; its owner or an administrator must remove "
        f"it, or set {LOCK_DIR_VARIABLE} to another directory"
    )


def user_name(uid: int) -> str:
    """Return the name of a user, or its number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _move_away(directory: LockDirectory, name: str) -> bool:
    """Rename something that is not a regular file, so that no process holds a lease by it.

    Returns False if this process may not: in a sticky directory only its owner, root, and the owner of the
    directory may.
    """
    parent = directory.descriptor
    with suppress(OSError):
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.rename(name, f"{name}.unusable.{os.urandom(4).hex()}", src_dir_fd=parent, dst_dir_fd=parent)
            return True
    return False


def _open(directory: LockDirectory, name: str) -> int:
    descriptor = os.open(name, OPEN_FLAGS, dir_fd=directory.descriptor)
    state = os.fstat(descriptor)
    is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink == 1
    if is_own and state.st_mode & FILE_MODE != FILE_MODE:
        # A process of this user created the file and died before it set the mode.
        os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _open_or_create(directory: LockDirectory, name: str) -> int:
    try:
        return _open(directory, name)
    except FileNotFoundError:
        pass
    # Named like a new ticket, so that it is removed as an abandoned ticket if this process dies now.
    temporary = f"{FILE_PREFIX}new-{time.monotonic_ns():020d}-{os.urandom(8).hex()}"
    descriptor = _create(directory, temporary)
    try:
        renamed = _rename_if_free(directory, temporary, name)
    except OSError:
        os.close(descriptor)
        _remove(directory, temporary)
        raise
    if renamed:
        return descriptor
    os.close(descriptor)
    _remove(directory, temporary)
    return _create(directory, name)


def _create(directory: LockDirectory, name: str) -> int:
    # Always with O_EXCL: in a sticky directory the kernel refuses O_CREAT on another user's existing file
    # (fs.protected_regular).
    descriptor = os.open(name, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, FILE_MODE, dir_fd=directory.descriptor)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _rename_if_free(directory: LockDirectory, old: str, new: str) -> bool:
    """Rename, or raise ``FileExistsError`` if the new name is taken. Returns False if unsupported."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    parent = directory.descriptor
    if rename(parent, old.encode(), parent, new.encode(), RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))


def _remove(directory: LockDirectory, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory.descriptor)
