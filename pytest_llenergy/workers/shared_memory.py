# SPDX-License-Identifier: Apache-2.0
"""Shared memory with a name, which outlives those who made it. Standard library only; Linux."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

#: Where the C library keeps it (shm_overview(7)), named semaphores too (sem_overview(7)).
SHM = Path("/dev/shm")


def names() -> frozenset[str]:
    """All that there is now."""
    try:
        return frozenset(each.name for each in SHM.iterdir())
    except OSError:
        return frozenset()


def mapped(pids: Collection[int]) -> set[str]:
    """What these processes have mapped and nobody has removed."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                # Address, permissions, offset, device, inode, and the path with all its blanks.
                path = line.split(maxsplit=5)[5:]
                if path and path[0].startswith(f"{SHM}/"):
                    found.add(path[0].removeprefix(f"{SHM}/"))
    return {name for name in found if not name.endswith(" (deleted)")}


def remove(candidates: Collection[str]) -> None:
    """Remove those of these that no process has mapped which can be seen."""
    if not candidates:
        return
    used = mapped([int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()])
    for name in set(candidates) - used:
        with suppress(OSError):
            (SHM / name).unlink()
