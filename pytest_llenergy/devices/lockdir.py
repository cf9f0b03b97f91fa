# SPDX-License-Identifier: Apache-2.0
"""Find the lock directory that all users of a host share, and reject unsafe directories."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pytest_llenergy.devices.condition import FIRST_PID_NAMESPACE
from pytest_llenergy.errors import DeviceError

LOCK_DIR_VARIABLE = "LLENERGY_LOCK_DIR"

#: Tried in this order, which is the same for every user, whatever their TMPDIR. Administrators may create the
#: first.
#: Not /dev/shm: systemd-logind removes a user's files there at logout (``RemoveIPC=``, logind.conf(5)).
CANDIDATES = ("/run/lock/llenergy", "/run/lock", "/tmp", "/private/tmp")

#: Prefix of every file of this package in the directory.
FILE_PREFIX = "llenergy-"

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC

#: File systems whose locks other hosts see, or nobody sees. FUSE may be anything, including sshfs.
NETWORK_FILE_SYSTEMS = (
    r"(nfs4?|cifs|smb3|smbfs|ncpfs|afs|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|pvfs2|coda|9p|fuse(\..*)?)$"
)

#: Files that container runtimes leave in the root directory.
CONTAINER_MARKERS = (".dockerenv", "run/.containerenv")


@dataclass(frozen=True)
class LockDirectory:
    """The open lock directory. All access uses ``descriptor``, so that replacing the path has no effect."""

    path: Path
    descriptor: int

    def is_gone(self) -> bool:
        """Return whether the path no longer leads to this directory, so that other processes use another."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except OSError:
            return True

    def gone_error(self) -> DeviceError:
        """Return the error for a directory that is gone."""
        return DeviceError(
            f"lock directory {self.path} was removed; create it again, or set {LOCK_DIR_VARIABLE} to another "
            "directory"
        )

    def close(self) -> None:
        """Close the descriptor; call once."""
        os.close(self.descriptor)


class _UnfitError(DeviceError):
    """The directory is unsuitable for every user, so that the next candidate may be tried."""


def open_lock_directory(
    environment: Mapping[str, str] = os.environ,
    candidates: Sequence[str] = CANDIDATES,
    mountinfo: Path = Path("/proc/self/mountinfo"),
) -> LockDirectory:
    """Open ``LLENERGY_LOCK_DIR``, or the first candidate that every user of the host would accept.

    An acceptable directory is not a symbolic link, is on a local file system, belongs to root (or to this
    user if the variable names it), and protects files from removal by others: it is sticky, or not writable
    by others. A candidate must also be writable by others.

    Returns:
        The open directory, which the caller closes.

    Raises:
        DeviceError: No directory is acceptable, or this user cannot access the shared one.
    """
    named = environment.get(LOCK_DIR_VARIABLE)
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
        f"no usable lock directory: {'; '.join(refusals)}; ask an administrator to create {candidates[0]} "
        f"(owner root, mode 1777), or set {LOCK_DIR_VARIABLE}"
    )


def _check_name(named: str) -> None:
    if not Path(named).is_absolute():
        # Two runs from different directories would lock different files for one board.
        raise DeviceError(f"{LOCK_DIR_VARIABLE}={named!r} is not an absolute path")
    if not named.isprintable():
        # Messages, which are one line each, name the directory.
        raise DeviceError(f"{LOCK_DIR_VARIABLE}={named!r} contains unprintable characters")


def _open(path: Path, mountinfo: Path, *, named: bool) -> LockDirectory:
    label = f"{LOCK_DIR_VARIABLE}={str(path)!r}" if named else str(path)
    remedy = (
        f"; set {LOCK_DIR_VARIABLE} to a directory that root or you own, with mode 1777 if others use it too"
        if named
        else ""
    )
    try:
        descriptor = os.open(path, READ_FLAGS | os.O_DIRECTORY)
    except OSError as error:
        not_entered = error.errno in (errno.ELOOP, errno.ENOTDIR)
        reason = "is a symbolic link" if not_entered and path.is_symlink() else error.strerror
        if isinstance(error, PermissionError):
            reason = _explain_closed(path, named)
            if reason is None:
                raise _permission_error(label, "open", remedy) from None
        raise _UnfitError(f"{label}: {reason}{remedy}") from None
    fault = _find_fault(os.fstat(descriptor), named) or _find_network_fault(path, mountinfo)
    if fault is None and os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        fault = "its file system is read-only"
    if fault is not None:
        os.close(descriptor)
        raise _UnfitError(f"{label}: {fault}{remedy}")
    if not os.access(path, os.W_OK | os.X_OK):
        os.close(descriptor)
        raise _permission_error(label, "write to", remedy)
    return LockDirectory(path, descriptor)


def _permission_error(label: str, action: str, remedy: str) -> DeviceError:
    # Not an _UnfitError: other users share this directory, so the next candidate would be a different one.
    remedy = remedy or f"; ask its administrator, or set {LOCK_DIR_VARIABLE}"
    return DeviceError(f"{label}: you have no permission to {action} it{remedy}")


def _explain_closed(path: Path, named: bool) -> str | None:
    """Explain why other users cannot share a directory that this user cannot open; None if they may."""
    try:
        return _find_fault(path.lstat(), named)
    except OSError:
        return None


def _find_fault(state: os.stat_result, named: bool) -> str | None:
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid not in ((0, os.geteuid()) if named else (0,)):
        return f"it belongs to uid {state.st_uid}, not to root{' or you' if named else ''}"
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return f"others may remove files in it (mode {mode:04o}, not sticky)"
    if not named and not mode & 0o022:
        return f"only root may write to it (mode {mode:04o})"
    return None


def _find_network_fault(path: Path, mountinfo: Path) -> str | None:
    mount = find_mount(path, mountinfo)
    if mount is not None and re.match(NETWORK_FILE_SYSTEMS, mount.kind):
        return f"it is on a network file system ({mount.kind}), where locks are unreliable"
    return None


@dataclass(frozen=True)
class Mount:
    """A mount: its mount point, file system type, source, and which directory of the source it shows."""

    point: Path
    kind: str
    source: str
    root: str


@lru_cache(maxsize=16)
def find_mount(path: Path, mountinfo: Path) -> Mount | None:
    """Return the mount that holds a path; None if unknown. The file is read once per process."""
    return select_mount(path.resolve(), read_mounts(mountinfo))


def read_mounts(mountinfo: Path) -> tuple[Mount, ...]:
    """Parse a file in the format of ``/proc/PID/mountinfo`` (proc_pid_mountinfo(5)); empty without one."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    return tuple(_parse_mount(line) for line in lines)


def select_mount(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds a path without symbolic links; later mounts hide earlier ones."""
    holding = [mount for mount in mounts if path == mount.point or mount.point in path.parents]
    longest = max((len(mount.point.parts) for mount in holding), default=0)
    return next((mount for mount in reversed(holding) if len(mount.point.parts) == longest), None)


def _parse_mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, (kind, source) = before.split(), after.split()[:2]
    return Mount(Path(_unescape(fields[4])), kind, _unescape(source), _unescape(fields[3]))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), text)


def explain_uncoordinated(directory: Path, root: Path = Path("/")) -> str | None:
    """Explain why leases in this directory are invisible to the rest of the host; None if they are visible.

    They are invisible if this is a container that does not share the directory with the host. ``root``
    differs only in tests.
    """
    evidence = detect_container(root)
    if evidence is None or _is_mounted_from_host(find_mount(directory, root / "proc/self/mountinfo")):
        return None
    return (
        f"GPU leases are not coordinated with the host: this is a container ({evidence}) that does not share "
        f"{directory} with the host; mount a directory of the host, such as "
        f"-v {CANDIDATES[0]}:{CANDIDATES[0]}, and set {LOCK_DIR_VARIABLE} to it"
    )


def detect_container(root: Path = Path("/")) -> str | None:
    """Return the evidence that this process runs in a container, or None."""
    for marker in CONTAINER_MARKERS:
        if (root / marker).exists():
            return f"/{marker}"
    try:
        namespace = (root / "proc/self/ns/pid").readlink().name
    except OSError:
        return None
    return None if namespace == f"pid:[{FIRST_PID_NAMESPACE}]" else "a separate pid namespace"


def _is_mounted_from_host(mount: Mount | None) -> bool:
    """Return whether the mount shows part of a file system or a whole disk.

    The in-memory file systems that container runtimes create are mounted whole. A ``/dev/shm`` of the runtime
    has the source ``shm``; the one of the host (``--ipc=host``) has another source.
    """
    if mount is None or mount.point == Path("/"):
        return False
    shm = mount.point == Path("/dev/shm") and mount.source != "shm"
    return mount.root != "/" or mount.source.startswith("/dev/") or shm
