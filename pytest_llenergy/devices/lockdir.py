# SPDX-License-Identifier: Apache-2.0
"""The lock directory that all users of a host share."""

from __future__ import annotations

import os
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
        DeviceError: There is none, or this user may not write there.
    """
    named = environment.get(LOCK_DIR_VARIABLE)
    path = Path(named) if named else next(filter(_is_shared, map(Path, CANDIDATES)), Path(CANDIDATES[0]))
    # Two runs from different directories would lock different files for one board.
    if path.is_absolute() and path.is_dir() and os.access(path, os.W_OK | os.X_OK):
        return LockDirectory(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    # The next candidate is not tried: those whom this one is for lock here.
    raise DeviceError(
        f"{LOCK_DIR_VARIABLE if named else 'leases'}: {path} is no directory to which you may write; make "
        f"one with mode 1777 (default: {CANDIDATES[0]}), and set {LOCK_DIR_VARIABLE} to its absolute path"
    )


def _is_shared(path: Path) -> bool:
    """Return whether others than the owner of a directory may write to it."""
    return path.is_dir() and bool(path.stat().st_mode & 0o022)


def user_name(uid: int) -> str:
    """Return the name of a user, or its number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
