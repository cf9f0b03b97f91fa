# SPDX-License-Identifier: Apache-2.0
"""The processes that an engine has started, where it does not name them itself. Linux."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """All processes below this one, by number."""
    below: dict[int, list[int]] = {}
    for process in PROC.iterdir() if PROC.is_dir() else ():
        # One may end meanwhile.
        with suppress(OSError, ValueError, IndexError):
            if process.name.isdigit():
                # The name in parentheses may hold anything, spaces and parentheses too (proc_pid_stat(5)).
                parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
                below.setdefault(parent, []).append(int(process.name))
    found, waiting = [], [pid]
    while waiting:
        children = below.get(waiting.pop(), [])
        found += children
        waiting += children
    return sorted(found)


def command(pid: int) -> bytes:
    """Its command line, or the title that it has given itself; empty when it is gone."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes()
    return b""


def environment(pid: int) -> dict[str, str]:
    """The variables that it was started with; none when it is gone."""
    told: list[bytes] = []
    with suppress(OSError):
        told = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    pairs = (each.decode(errors="replace").partition("=") for each in told)
    return {name: value for name, _, value in pairs if name}
