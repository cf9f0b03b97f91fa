# SPDX-License-Identifier: Apache-2.0
"""Find, kill and reap the descendants of a process.

Standard library only, without psutil, which takes longer to import than a supervisor to start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
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


def children_by_parent() -> dict[int, list[int]]:
    """Return the children of every visible process. Empty where there is no ``/proc``."""
    found: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name in parentheses may contain spaces and parentheses too (proc_pid_stat(5)).
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            # A zombie runs nothing, unless it has other threads than its first.
            if fields[0] != b"Z" or int(fields[17]) > 1:
                found.setdefault(int(fields[1]), []).append(int(process.name))
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


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid and exit code of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def kill_tree(roots: Collection[int]) -> None:
    """Kill these processes and all their descendants.

    All are stopped before the first is killed, so that none can start another one meanwhile. Processes that
    finish by themselves once the others have gone are killed last, if they have not ended in time.
    """
    stopped: set[int] = set()
    #: By pid: how long each may take.
    finishing: dict[int, float] = {}
    while fresh := descendants(roots) - stopped - finishing.keys():
        finishing |= {pid: limit_s for pid in fresh if (limit_s := _time_to_finish_s(pid))}
        send_signal(fresh - finishing.keys(), signal.SIGSTOP)
        stopped |= fresh - finishing.keys()
    send_signal(stopped, signal.SIGKILL)
    begin_s, running = real_time.monotonic(), set(finishing)
    while any(real_time.monotonic() - begin_s < finishing[pid] for pid in running):
        real_time.sleep(timeouts.KILL_POLL_S)
        running &= {pid for found in children_by_parent().values() for pid in found}
    send_signal(finishing, signal.SIGKILL)


def kill_children() -> None:
    """Kill and reap all descendants of this process, and wait until none is left."""
    pause_s = timeouts.KILL_POLL_S
    while left := children():
        kill_tree(left)
        list(reap())
        real_time.sleep(pause_s)
        # A process may be stuck in a driver for hours.
        pause_s = min(2 * pause_s, timeouts.STUCK_POLL_S)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of these processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _time_to_finish_s(pid: int) -> float:
    """Return how long a process may take to finish by itself; 0 for one that may be killed at once."""
    command = b""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if RESTORER in command:
        return timeouts.RESTORE_TIMEOUT_S
    return timeouts.CLEANER_TIMEOUT_S if any(part in command for part in CLEANERS) else 0.0
