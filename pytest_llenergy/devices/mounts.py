# SPDX-License-Identifier: Apache-2.0
"""What is mounted where, as the kernel tells it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: File systems whose locks other hosts, or nobody, would see. FUSE may be anything, sshfs included.
NETWORK = (
    r"(nfs4?|cifs|smb3|smbfs|ncpfs|afs|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|pvfs2|coda|9p|fuse(\..*)?)$"
)


@dataclass(frozen=True)
class Mount:
    """One mount: where it is, of what kind, from what source, and which of its directories is shown there."""

    point: Path
    kind: str
    source: str
    root: str


def mounts(mountinfo: Path) -> tuple[Mount, ...]:
    """Every mount of this process, in the order of mounting; empty where the system does not tell.

    The format is that of ``/proc/PID/mountinfo``, proc_pid_mountinfo(5).
    """
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    return tuple(_mount(line) for line in lines)


def mount_of(path: Path, among: Sequence[Mount]) -> Mount | None:
    """The one that a path without symbolic links lies on; later mounts hide earlier ones."""
    holding = [mount for mount in among if path == mount.point or mount.point in path.parents]
    longest = max((len(mount.point.parts) for mount in holding), default=0)
    return next((mount for mount in reversed(holding) if len(mount.point.parts) == longest), None)


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, (kind, source) = before.split(), after.split()[:2]
    return Mount(Path(_plain(fields[4])), kind, _plain(source), _plain(fields[3]))


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
