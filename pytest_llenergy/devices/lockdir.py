# SPDX-License-Identifier: Apache-2.0
"""The directory in which all users of a host meet to share its devices out."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pytest_llenergy.devices.mounts import NETWORK, Mount, mount_of, mounts
from pytest_llenergy.errors import DeviceError

VARIABLE = "LLENERGY_LOCK_DIR"

#: The same for every user, whatever their TMPDIR is. The first is for administrators to make. Not /dev/shm:
#: systemd-logind removes a user's files there when they log out (RemoveIPC=, logind.conf(5)).
CANDIDATES = ("/run/lock/llenergy", "/run/lock", "/tmp", "/private/tmp")

#: Every file of ours in that directory begins so.
PREFIX = "llenergy-"

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Directory:
    """The open directory. What is done by ``descriptor`` is done there, whatever becomes of the path."""

    path: Path
    descriptor: int

    def is_gone(self) -> bool:
        """Whether the path leads elsewhere by now, or nowhere: nobody else will meet us here."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except OSError:
            return True

    def gone(self) -> DeviceError:
        """The error for that."""
        return DeviceError(
            f"lock directory {self.path} is gone; make it again, or set {VARIABLE} to another directory"
        )

    def close(self) -> None:
        """Release the descriptor. Called once."""
        os.close(self.descriptor)


class _UnfitError(DeviceError):
    """Nobody can use the directory."""


def lock_directory(
    environment: Mapping[str, str] = os.environ,
    candidates: Sequence[str] = CANDIDATES,
    mountinfo: Path = Path("/proc/self/mountinfo"),
) -> Directory:
    """Open ``LLENERGY_LOCK_DIR``, or the first candidate that every user of the host would find fit.

    Fit is a real directory (no symbolic link) of a local file system that belongs to root, or to us if it is
    named on purpose, in which nobody can remove what others made: sticky, or closed to others. A candidate
    that is not named must be open to others. The caller closes it. Raises
    ``DeviceError`` with the reason.
    """
    named = environment.get(VARIABLE)
    if named:
        _check_name(named)
        try:
            return _open(Path(named), mountinfo, named=True)
        except _UnfitError as error:
            raise DeviceError(str(error)) from None
    refusals = []
    for candidate in candidates:
        try:
            return _open(Path(candidate), mountinfo, named=False)
        except _UnfitError as error:
            refusals.append(str(error))
    raise DeviceError(
        f"no directory for leases: {'; '.join(refusals)}; have an administrator make {candidates[0]} "
        f"(root, mode 1777), or set {VARIABLE}"
    )


def _check_name(named: str) -> None:
    if not Path(named).is_absolute():
        # Two runs from different directories would lock different files for one board.
        raise DeviceError(f"{VARIABLE}={named!r} is not an absolute path; name the directory from / on")
    if not named.isprintable():
        # It is told to people, and a message is one line.
        raise DeviceError(f"{VARIABLE}={named!r} has characters that cannot be shown; name another directory")


def _open(path: Path, mountinfo: Path, *, named: bool) -> Directory:
    what = f"{VARIABLE}={str(path)!r}" if named else str(path)
    mend = f"; name a directory of root's or your own, mode 1777 if others use it too, in {VARIABLE}"
    mend = mend if named else ""
    try:
        descriptor = os.open(path, READ | os.O_DIRECTORY)
    except OSError as error:
        not_entered = error.errno in (errno.ELOOP, errno.ENOTDIR)
        reason = "is a symbolic link" if not_entered and path.is_symlink() else error.strerror
        if isinstance(error, PermissionError):
            reason = _closed_to_all(path, named)
            if reason is None:
                raise _not_for_you(what, "use it", mend) from None
        raise _UnfitError(f"{what}: {reason}{mend}") from None
    refusal = _refusal(os.fstat(descriptor), named) or _remote(path, mountinfo)
    if refusal is None and os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        refusal = "its file system is read-only"
    if refusal is not None:
        os.close(descriptor)
        raise _UnfitError(f"{what}: {refusal}{mend}")
    if not os.access(path, os.W_OK | os.X_OK):
        os.close(descriptor)
        raise _not_for_you(what, "write in it", mend)
    return Directory(path, descriptor)


def _not_for_you(what: str, action: str, mend: str) -> DeviceError:
    # Never the next candidate: others meet here.
    mend = mend or f"; ask its administrator, or set {VARIABLE}"
    return DeviceError(f"{what}: you may not {action}{mend}")


def _closed_to_all(path: Path, named: bool) -> str | None:
    """Why nobody meets in a directory that we may not open; ``None`` if others may."""
    try:
        return _refusal(path.lstat(), named)
    except OSError:
        return None


def _refusal(state: os.stat_result, named: bool) -> str | None:
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid not in ((0, os.geteuid()) if named else (0,)):
        return (
            f"it belongs to uid {state.st_uid}, who is neither root nor you" if named else "it is not root's"
        )
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return f"others may remove files in it (mode {mode:04o}, not sticky)"
    if not named and not mode & 0o022:
        return f"only root may write in it (mode {mode:04o})"
    return None


def _remote(path: Path, mountinfo: Path) -> str | None:
    mount = found_mount(path, mountinfo)
    if mount is not None and re.match(NETWORK, mount.kind):
        return f"it is on a network file system ({mount.kind}), whose locks do not hold"
    return None


@lru_cache(maxsize=16)
def found_mount(path: Path, mountinfo: Path) -> Mount | None:
    """The mount that holds a path; ``None`` where the system does not tell. Read once a process."""
    return mount_of(path.resolve(), mounts(mountinfo))
