# SPDX-License-Identifier: Apache-2.0
"""Find and kill the descendants of a process.

Standard library only, without psutil: the supervisor and its guard import this module, and must start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_llenergy.ranks import timeouts

#: prctl(2): include/uapi/linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36

PROC = Path("/proc")

#: Parts of the command lines of processes that remove named shared memory and semaphores once all processes
#: that made any have gone, and then end (multiprocessing/resource_tracker.py; torch's torch_shm_manager).
CLEANERS = (b"multiprocessing.resource_tracker", b"loky.backend.resource_tracker", b"torch_shm_manager")
#: Part of the command line of a process that puts back the settings of boards when its parent ends, and then
#: ends too (devices/board_settings.py).
RESTORER = b"pytest_llenergy.devices.board_settings"


def become_subreaper() -> None:
    """Become the parent of every descendant whose parent ends, even in another session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be a subreaper for a while. What was adopted stays a child."""
    become_subreaper()
    try:
        yield
    finally:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children_by_parent() -> dict[int, list[int]]:
    """Return the children of every visible process. Empty where there is no ``/proc``."""
    found: dict[int, list[int]] = {}
    with suppress(OSError):
        for process in PROC.iterdir():
            parent = _parent(process) if process.name.isdigit() else None
            if parent is not None:
                found.setdefault(parent, []).append(int(process.name))
    return found


def descendants(roots: Collection[int]) -> set[int]:
    """Return these processes and all their descendants."""
    below, found, waiting = children_by_parent(), set(roots), list(roots)
    while waiting:
        for child in below.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def find_by_variable(name: str, value: str) -> set[int]:
    """Return the processes that were started with this environment variable."""
    wanted, found = f"{name}={value}".encode(), set()
    for process in PROC.iterdir() if PROC.is_dir() else ():
        with suppress(OSError):
            if process.name.isdigit() and wanted in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
    return found


def kill_tree(roots: Collection[int], *, but_restorers: bool = False) -> None:
    """Kill these processes and all their descendants.

    All are stopped before the first is killed, so that none can start another one meanwhile. Processes that
    remove shared memory of the others are killed last, if they have not ended by themselves in time.

    Args:
        roots: The processes.
        but_restorers: Whether processes that put back the settings of boards go on.
    """
    stopped: set[int] = set()
    cleaners: set[int] = set()
    spared: set[int] = set()
    while fresh := descendants(roots) - stopped - cleaners - spared:
        cleaners |= {pid for pid in fresh if _runs(pid, *CLEANERS)}
        spared |= {pid for pid in fresh if but_restorers and _runs(pid, RESTORER)}
        for pid in fresh - cleaners - spared:
            _send_signal(pid, signal.SIGSTOP)
            stopped.add(pid)
    for pid in stopped:
        _send_signal(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeouts.CLEANER_TIMEOUT_S
    while cleaners and time.monotonic() < deadline:
        time.sleep(timeouts.CLEANER_POLL_S)
        cleaners &= {pid for found in children_by_parent().values() for pid in found}
    for pid in cleaners:
        _send_signal(pid, signal.SIGKILL)


def _runs(pid: int, *parts: bytes) -> bool:
    """Return whether one of these is a part of a process's command line."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return any(part in command for part in parts)


def _send_signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parent(process: Path) -> int | None:
    try:
        # The name in parentheses may contain spaces and parentheses too (proc_pid_stat(5)).
        state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    # A zombie runs nothing, unless it has other threads than its first.
    return None if state == b"Z" and not _has_threads(process) else int(parent)


def _has_threads(process: Path) -> bool:
    with suppress(OSError):
        return len(list((process / "task").iterdir())) > 1
    return False
