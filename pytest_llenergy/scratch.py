# SPDX-License-Identifier: Apache-2.0
"""Temporary directories of a run. The next run removes those whose processes were killed before they could.

A directory is locked (flock) by the processes that use it. The kernel ends the lock with the last of them,
so an unlocked directory is not in use. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

#: Names of all directories of this module begin with this and a checksum of the host's name. On a shared file
#: system, locks of other hosts may be invisible.
PREFIX = f"llenergy-{zlib.crc32(os.fsencode(os.uname().nodename)):08x}-"

#: Directories that this process has swept.
_swept: set[Path] = set()


class ScratchDirectory:
    """A private directory that is locked until this process and all that inherit ``descriptor`` have ended.

    Args:
        parent: Where to create it; by default the system's directory for temporary files.

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if parent not in _swept:
            _swept.add(parent)
            sweep(parent)
        while True:
            self.path: Path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                self.descriptor: int = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                # Another process has swept it already.
                continue
            # File systems without locks have none that a sweep could get either.
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            # Another process may have swept it before it was locked.
            if _is_same(self.path, self.descriptor):
                return
            os.close(self.descriptor)

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it; later calls do nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def sweep(parent: Path) -> None:
    """Remove the directories that killed processes of this user have left on this host, in ``parent``."""
    with suppress(OSError):
        for path in [Path(entry.path) for entry in os.scandir(parent) if entry.name.startswith(PREFIX)]:
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid != os.geteuid():
                        continue
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_same(path, descriptor):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)


def _is_same(path: Path, descriptor: int) -> bool:
    """Return whether a path is, and is not a link to, the directory that is open."""
    try:
        found, opened = path.lstat(), os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
