# SPDX-License-Identifier: Apache-2.0
"""Find, kill and reap the descendants of a process.

Standard library only, without psutil, which takes longer to import than a supervisor to start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pytest_llenergy import real_time
from pytest_llenergy.ranks import timeouts

#: prctl(2): include/uapi/linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36

#: Parts of the command lines of processes that remove named shared memory and semaphores once all processes
#: that made any have gone, and then end (multiprocessing/resource_tracker.py; torch's torch_shm_manager).
CLEANERS = (b"multiprocessing.resource_tracker", b"loky.backend.resource_tracker", b"torch_shm_manager")
#: Part of the command line of a process that puts back the settings of boards when its parent ends, and then
#: ends too (devices/board_settings.py).
RESTORER = b"pytest_llenergy.devices.board_settings"


def become_subreaper(on: bool = True) -> None:
    """Become the parent of every descendant whose parent ends, even in another session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be a subreaper for a while. What was adopted stays a child."""
    become_subreaper()
    try:
        yield
    finally:
        become_subreaper(False)


def _read_all(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the pid of every process, and a file of it in ``/proc``, as far as it can be read."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(process.name), (process / name).read_bytes()


def children_by_parent() -> dict[int, list[int]]:
    """Return the children of every visible process. Empty where there is no ``/proc``."""
    found: dict[int, list[int]] = {}
    for pid, stat in _read_all("stat"):
        # The name in parentheses may contain spaces and parentheses too (proc_pid_stat(5)).
        fields = stat.rpartition(b")")[2].split()
        # A zombie runs nothing, unless it has other threads than its first.
        if fields[0] != b"Z" or int(fields[17]) > 1:
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def children() -> set[int]:
    """Return the running children of this process."""
    return set(children_by_parent().get(os.getpid(), ()))


def descendants(roots: Collection[int]) -> set[int]:
    """Return these processes and all their descendants."""
    below, found, waiting = children_by_parent(), set(roots), list(roots)
    while waiting:
        fresh = set(below.get(waiting.pop(), ())) - found
        found |= fresh
        waiting += fresh
    return found


def find_by_variable(name: str, value: str) -> set[int]:
    """Return the processes that were started with this environment variable."""
    wanted = f"{name}={value}".encode()
    return {pid for pid, environment in _read_all("environ") if wanted in environment.split(b"\0")}


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid and exit code of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def kill_tree(roots: Collection[int], *, but_restorers: bool = False) -> None:
    """Kill these processes and all their descendants.

    All are stopped before the first is killed, so that none can start another one meanwhile. Processes that
    remove shared memory of the others are killed last, if they have not ended by themselves in time. With
    ``but_restorers`` processes that put back the settings of boards go on.
    """
    stopped: set[int] = set()
    cleaners: set[int] = set()
    spared: set[int] = set()
    while fresh := descendants(roots) - stopped - cleaners - spared:
        cleaners |= {pid for pid in fresh if _runs(pid, *CLEANERS)}
        spared |= {pid for pid in fresh if but_restorers and _runs(pid, RESTORER)}
        stopped |= fresh - cleaners - spared
        send_signal(fresh - cleaners - spared, signal.SIGSTOP)
    send_signal(stopped, signal.SIGKILL)
    deadline = real_time.monotonic() + timeouts.CLEANER_TIMEOUT_S
    while cleaners and real_time.monotonic() < deadline:
        real_time.sleep(timeouts.CLEANER_POLL_S)
        cleaners &= {pid for found in children_by_parent().values() for pid in found}
    send_signal(cleaners, signal.SIGKILL)


def kill_children(but_restorers: Callable[[], bool] = lambda: False) -> None:
    """Kill and reap all descendants of this process, and wait until none is left."""
    pause_s = timeouts.KILL_POLL_S
    while left := children():
        kill_tree(left, but_restorers=but_restorers())
        list(reap())
        real_time.sleep(pause_s)
        # A process may be stuck in a driver for hours.
        pause_s = min(2 * pause_s, timeouts.STUCK_POLL_S)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of these processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _runs(pid: int, *parts: bytes) -> bool:
    """Return whether one of these is a part of a process's command line."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(part in command for part in parts)
    return False
