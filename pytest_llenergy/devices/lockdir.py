# SPDX-License-Identifier: Apache-2.0
"""The lock directory that all users of a host share."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_llenergy.errors import DeviceError

LOCK_DIR_VARIABLE = "LLENERGY_LOCK_DIR"

#: Tried in this order, which is the same for every user, whatever their TMPDIR. Administrators may create the
#: first. Not /dev/shm: systemd-logind removes a user's files there at logout (RemoveIPC=, logind.conf(5)).
CANDIDATES = ("/run/lock/llenergy", "/run/lock", "/tmp", "/private/tmp")

#: Prefix of every file of this package in the directory.
FILE_PREFIX = "llenergy-"

#: Files are readable by all, whatever the umask: others cannot lock a file that they cannot open.
FILE_MODE = 0o644

#: Why this user cannot use a directory that others share.
NOT_YOURS = "you may not write to it"

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class LockDirectory:
    """The open lock directory, which its user closes."""

    path: Path
    descriptor: int

    def create(self, name: str) -> int:
        """Create a file that does not exist, readable by all. Returns its descriptor, for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(name, flags, FILE_MODE, dir_fd=self.descriptor)
        os.fchmod(descriptor, FILE_MODE)
        return descriptor

    def list_names(self, prefix: str, suffix: str = "") -> list[str]:
        """Return the names of our files that begin and end so."""
        names = sorted(os.listdir(self.descriptor))  # noqa: PTH208 - by descriptor
        return [name for name in names if name.startswith(prefix) and name.endswith(suffix)]

    def close(self) -> None:
        """Close the descriptor; call once."""
        os.close(self.descriptor)


def open_lock_directory(environment: Mapping[str, str] = os.environ) -> LockDirectory:
    """Open ``LLENERGY_LOCK_DIR``, or the first candidate that several users may write to.

    Raises:
        DeviceError: Others could remove the files of this user, or this user may not write there.
    """
    named = environment.get(LOCK_DIR_VARIABLE)
    refusals = []
    for path in map(Path, [named] if named else CANDIDATES):
        fault = _find_fault(path, is_named=bool(named))
        if fault is None:
            return LockDirectory(path, os.open(path, READ_FLAGS | os.O_DIRECTORY))
        refusals.append(f"{path}: {fault}")
        if fault == NOT_YOURS:
            # Those whom it is for lock there; locks in another one would hold nobody back.
            break
    where = f"{LOCK_DIR_VARIABLE}=" if named else "no lock directory for leases: "
    raise DeviceError(
        f"{where}{'; '.join(refusals)}; make one that root or you own, with mode 1777 if others use it too "
        f"(default: {CANDIDATES[0]}), and set {LOCK_DIR_VARIABLE} to its absolute path"
    )


def _find_fault(path: Path, *, is_named: bool) -> str | None:
    """Explain why a directory cannot be used; None if it can."""
    try:
        state = path.lstat()
    except OSError as error:
        return error.strerror
    mode, is_sticky = stat.S_IMODE(state.st_mode), bool(state.st_mode & stat.S_ISVTX)
    if not path.is_absolute():
        # Two runs from different directories would lock different files for one board.
        return "it is no absolute path"
    if stat.S_ISLNK(state.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(state.st_mode):
        return "it is no directory"
    if not is_sticky and (mode & 0o022 or state.st_uid not in (0, os.geteuid())):
        return f"others may remove your files in it (owner {user_name(state.st_uid)}, mode {mode:04o})"
    if not is_named and not mode & 0o022:
        return f"only {user_name(state.st_uid)} may write to it (mode {mode:04o})"
    return None if os.access(path, os.W_OK | os.X_OK) else NOT_YOURS


def user_name(uid: int) -> str:
    """Return the name of a user, or its number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
