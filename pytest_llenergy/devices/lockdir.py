# SPDX-License-Identifier: Apache-2.0
"""The lock directory that all users of a host share."""

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

# What is mounted where, as the kernel tells it.

#: File systems whose locks other hosts, or nobody, would see. FUSE may be anything, sshfs included.
NETWORK_FILE_SYSTEMS = (
    r"(nfs4?|cifs|smb3|smbfs|ncpfs|afs|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|pvfs2|coda|9p|fuse(\..*)?)$"
)


@dataclass(frozen=True)
class Mount:
    """One mount: where it is, of what kind, from what source, and which of its directories is shown there."""

    point: Path
    kind: str
    source: str
    root: str


def read_mounts(mountinfo: Path) -> tuple[Mount, ...]:
    """Every mount of this process, in the order of mounting; empty where the system does not tell.

    The format is that of ``/proc/PID/mountinfo``, proc_pid_mountinfo(5).
    """
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    return tuple(_parse_mount(line) for line in lines)


def select_mount(path: Path, among: Sequence[Mount]) -> Mount | None:
    """The one that a path without symbolic links lies on; later mounts hide earlier ones."""
    holding = [mount for mount in among if path == mount.point or mount.point in path.parents]
    longest = max((len(mount.point.parts) for mount in holding), default=0)
    return next((mount for mount in reversed(holding) if len(mount.point.parts) == longest), None)


def _parse_mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, (kind, source) = before.split(), after.split()[:2]
    return Mount(Path(_unescape(fields[4])), kind, _unescape(source), _unescape(fields[3]))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# The directory in which all users of a host meet to share its devices out.

LOCK_DIR_VARIABLE = "LLENERGY_LOCK_DIR"

#: The same for every user, whatever their TMPDIR is. The first is for administrators to make. Not /dev/shm:
#: systemd-logind removes a user's files there when they log out (RemoveIPC=, logind.conf(5)).
CANDIDATES = ("/run/lock/llenergy", "/run/lock", "/tmp", "/private/tmp")

#: Every file of ours in that directory begins so.
FILE_PREFIX = "llenergy-"

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class LockDirectory:
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
            f"lock directory {self.path} is gone; make it again, or set {LOCK_DIR_VARIABLE} to another directory"
        )

    def close(self) -> None:
        """Release the descriptor. Called once."""
        os.close(self.descriptor)


class _UnfitError(DeviceError):
    """Nobody can use the directory."""


def open_lock_directory(
    environment: Mapping[str, str] = os.environ,
    candidates: Sequence[str] = CANDIDATES,
    mountinfo: Path = Path("/proc/self/mountinfo"),
) -> LockDirectory:
    """Open ``LLENERGY_LOCK_DIR``, or the first candidate that every user of the host would find fit.

    Fit is a real directory (no symbolic link) of a local file system that belongs to root, or to us if it is
    named on purpose, in which nobody can remove what others made: sticky, or closed to others. A candidate
    that is not named must be open to others. The caller closes it. Raises
    ``DeviceError`` with the reason.
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
        f"no directory for leases: {'; '.join(refusals)}; have an administrator make {candidates[0]} "
        f"(root, mode 1777), or set {LOCK_DIR_VARIABLE}"
    )


def _check_name(named: str) -> None:
    if not Path(named).is_absolute():
        # Two runs from different directories would lock different files for one board.
        raise DeviceError(
            f"{LOCK_DIR_VARIABLE}={named!r} is not an absolute path; name the directory from / on"
        )
    if not named.isprintable():
        # It is told to people, and a message is one line.
        raise DeviceError(
            f"{LOCK_DIR_VARIABLE}={named!r} has characters that cannot be shown; name another directory"
        )


def _open(path: Path, mountinfo: Path, *, named: bool) -> LockDirectory:
    what = f"{LOCK_DIR_VARIABLE}={str(path)!r}" if named else str(path)
    mend = f"; name a directory of root's or your own, mode 1777 if others use it too, in {LOCK_DIR_VARIABLE}"
    mend = mend if named else ""
    try:
        descriptor = os.open(path, READ_FLAGS | os.O_DIRECTORY)
    except OSError as error:
        not_entered = error.errno in (errno.ELOOP, errno.ENOTDIR)
        reason = "is a symbolic link" if not_entered and path.is_symlink() else error.strerror
        if isinstance(error, PermissionError):
            reason = _explain_closed(path, named)
            if reason is None:
                raise _permission_error(what, "use it", mend) from None
        raise _UnfitError(f"{what}: {reason}{mend}") from None
    refusal = _find_fault(os.fstat(descriptor), named) or _find_network_fault(path, mountinfo)
    if refusal is None and os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        refusal = "its file system is read-only"
    if refusal is not None:
        os.close(descriptor)
        raise _UnfitError(f"{what}: {refusal}{mend}")
    if not os.access(path, os.W_OK | os.X_OK):
        os.close(descriptor)
        raise _permission_error(what, "write in it", mend)
    return LockDirectory(path, descriptor)


def _permission_error(what: str, action: str, mend: str) -> DeviceError:
    # Never the next candidate: others meet here.
    mend = mend or f"; ask its administrator, or set {LOCK_DIR_VARIABLE}"
    return DeviceError(f"{what}: you may not {action}{mend}")


def _explain_closed(path: Path, named: bool) -> str | None:
    """Why nobody meets in a directory that we may not open; ``None`` if others may."""
    try:
        return _find_fault(path.lstat(), named)
    except OSError:
        return None


def _find_fault(state: os.stat_result, named: bool) -> str | None:
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


def _find_network_fault(path: Path, mountinfo: Path) -> str | None:
    mount = find_mount(path, mountinfo)
    if mount is not None and re.match(NETWORK_FILE_SYSTEMS, mount.kind):
        return f"it is on a network file system ({mount.kind}), whose locks do not hold"
    return None


@lru_cache(maxsize=16)
def find_mount(path: Path, mountinfo: Path) -> Mount | None:
    """The mount that holds a path; ``None`` where the system does not tell. Read once a process."""
    return select_mount(path.resolve(), read_mounts(mountinfo))


# Whether leases taken here are seen by the rest of the host.

#: What container engines leave in the root of the file system.
CONTAINER_MARKERS = (".dockerenv", "run/.containerenv")


def explain_uncoordinated(directory: Path, root: Path = Path("/")) -> str | None:
    """Why leases in this directory are not those of the host, and what to do; ``None`` if they are.

    That is so in a container whose directory is its own. ``root`` is ``/`` but in tests.
    """
    sign = detect_container(root)
    if sign is None or _is_mounted_from_host(find_mount(directory, root / "proc/self/mountinfo")):
        return None
    return (
        f"GPU leases are not coordinated with the host: this is a container ({sign}) and {directory} is its "
        f"own; mount a directory of the host, such as -v {CANDIDATES[0]}:{CANDIDATES[0]}, "
        f"and name it in {LOCK_DIR_VARIABLE}"
    )


def detect_container(root: Path = Path("/")) -> str | None:
    """The sign by which this is known to be a container; ``None`` if there is none."""
    for marker in CONTAINER_MARKERS:
        if (root / marker).exists():
            return f"/{marker}"
    try:
        namespace = (root / "proc/self/ns/pid").readlink().name
    except OSError:
        return None
    return None if namespace == f"pid:[{FIRST_PID_NAMESPACE}]" else "a pid namespace of its own"


def _is_mounted_from_host(mount: Mount | None) -> bool:
    """A part of a file system, or a whole disk, was mounted here; engines' own tmpfs are whole ones.

    Their ``/dev/shm`` is known by its source, ``shm``; that of the host (``--ipc=host``) is not.
    """
    if mount is None or mount.point == Path("/"):
        return False
    shm = mount.point == Path("/dev/shm") and mount.source != "shm"
    return mount.root != "/" or mount.source.startswith("/dev/") or shm
