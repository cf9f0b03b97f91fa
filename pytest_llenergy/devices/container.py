# SPDX-License-Identifier: Apache-2.0
"""Whether leases taken here are seen by the rest of the host."""

from __future__ import annotations

from pathlib import Path

from pytest_llenergy.devices.condition import FIRST_PID_NAMESPACE
from pytest_llenergy.devices.lockdir import CANDIDATES, VARIABLE, found_mount
from pytest_llenergy.devices.mounts import Mount

#: What container engines leave in the root of the file system.
MARKERS = (".dockerenv", "run/.containerenv")


def uncoordinated(directory: Path, root: Path = Path("/")) -> str | None:
    """Why leases in this directory are not those of the host, and what to do; ``None`` if they are.

    That is so in a container whose directory is its own. ``root`` is ``/`` but in tests.
    """
    sign = container(root)
    if sign is None or _from_outside(found_mount(directory, root / "proc/self/mountinfo")):
        return None
    return (
        f"GPU leases are not coordinated with the host: this is a container ({sign}) and {directory} is its "
        f"own; mount a directory of the host, such as -v {CANDIDATES[0]}:{CANDIDATES[0]}, "
        f"and name it in {VARIABLE}"
    )


def container(root: Path = Path("/")) -> str | None:
    """The sign by which this is known to be a container; ``None`` if there is none."""
    for marker in MARKERS:
        if (root / marker).exists():
            return f"/{marker}"
    try:
        namespace = (root / "proc/self/ns/pid").readlink().name
    except OSError:
        return None
    return None if namespace == f"pid:[{FIRST_PID_NAMESPACE}]" else "a pid namespace of its own"


def _from_outside(mount: Mount | None) -> bool:
    """A part of a file system, or a whole disk, was mounted here; engines' own tmpfs are whole ones.

    Their ``/dev/shm`` is known by its source, ``shm``; that of the host (``--ipc=host``) is not.
    """
    if mount is None or mount.point == Path("/"):
        return False
    shm = mount.point == Path("/dev/shm") and mount.source != "shm"
    return mount.root != "/" or mount.source.startswith("/dev/") or shm
