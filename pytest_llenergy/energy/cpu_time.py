# SPDX-License-Identifier: Apache-2.0
"""CPU time of the host, and of processes with all their descendants.

The kernel has a CPU clock of every process, in nanoseconds, of all its threads including those that have
ended. The time of a process that was waited for moves to its parent, as that of an ended child
(proc_pid_stat(5): cutime and cstime), so that the sum over a tree stays the same. Those fields are truncated
to ticks of 10 ms, and miss a process that nobody in the tree waited for: the last reading of its own clock
counts instead.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pytest_llenergy import real_time

#: Busy states of psutil; nice, irq and softirq exist on some systems only.
BUSY_STATES = ("user", "nice", "system", "irq", "softirq")

PROC = Path("/proc")

#: Coarsest step in which Linux reports CPU time (USER_HZ = 100).
TICK_S = 0.01

#: Makes the id of a process's CPU clock, as clock_getcpuclockid(3) does (``MAKE_PROCESS_CPUCLOCK`` and
#: ``CPUCLOCK_SCHED``, include/linux/posix-timers_types.h).
CPUCLOCK_SCHED = 2

#: Share of time for listing all processes where nothing tells that there are new ones.
LISTING_SHARE = 0.01


class CpuTime(NamedTuple):
    """CPU seconds of the host since it started: busy with its processes, and stolen by its hypervisor."""

    busy_s: float
    stolen_s: float


def read_cpu_time() -> CpuTime:
    """Return the CPU time of the host, summed over all logical CPUs."""
    import psutil

    times = psutil.cpu_times()
    busy_s = sum(getattr(times, state, 0.0) for state in BUSY_STATES)
    return CpuTime(busy_s, getattr(times, "steal", 0.0))


def explain_hidden_host(proc: Path = PROC) -> str | None:
    """Return why the CPU time of the host is unknown here, ``None`` if it is known."""
    try:
        if (proc / "stat").stat().st_dev != proc.stat().st_dev:
            return f"{proc}/stat is not the host's, since a container mounts its own over it, as lxcfs does"
        if not any(map(int, (proc / "stat").read_text().split("\n")[0].split()[1:])):
            return f"{proc}/stat shows no CPU time, as in gVisor"
    except OSError:
        # Not Linux.
        return None
    return None


class Usage(NamedTuple):
    """CPU seconds of a process: its own, and of ended children, truncated to ticks."""

    own_s: float
    ended_s: float


class Process:
    """A process whose CPU time is followed.

    Raises:
        psutil.Error: It cannot be read.
    """

    def __init__(self, pid: int) -> None:
        import psutil

        self._process, self._error = psutil.Process(pid), psutil.Error
        self._own = pid == os.getpid()
        self._clock = (~pid << 3) | CPUCLOCK_SCHED
        self.parent: int = 0 if self._own else self._process.ppid()

    def read(self) -> Usage | None:
        """Return its CPU time so far; ``None`` once it was waited for.

        Children that have ended are reported on Linux only.
        """
        if self._own:
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            return Usage(time.process_time(), children.ru_utime + children.ru_stime)
        try:
            with self._process.oneshot():
                times, self.parent = self._process.cpu_times(), self._process.ppid()
            own_s = times.user + times.system
            if sys.platform == "linux":
                own_s = time.clock_gettime(self._clock)
            if not self._process.is_running():
                return None
        except (OSError, self._error):
            return None
        return Usage(own_s, times.children_user + times.children_system)


class ProcessTable:
    """The processes of the host."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._latest: bytes | None = None
        self._listed_s = self._listing_s = 0.0

    def open(self, pid: int) -> Process | None:
        """Return the process with this id, or ``None`` if it does not exist."""
        import psutil

        with suppress(psutil.Error):
            return Process(pid)
        return None

    def newcomers(self) -> set[int]:
        """Return ids of processes that are new since the last call; at the first call, of all.

        On Linux the latest process id, at the end of /proc/loadavg, tells whether any may be. Some containers
        make it up, and a process may appear after its id. So all are listed now and then.
        """
        import psutil

        latest, begin_s = None, real_time.monotonic()
        with suppress(OSError):
            latest = (PROC / "loadavg").read_bytes().rpartition(b" ")[2]
        if latest == self._latest and begin_s - self._listed_s < self._listing_s / LISTING_SHARE:
            return set()
        known, self._latest = self._known, latest
        # A test may have replaced the files.
        with suppress(OSError):
            self._known = set(psutil.pids())
        self._listed_s, self._listing_s = begin_s, real_time.monotonic() - begin_s
        return self._known - known


class ProcessTree:
    """CPU time of some processes and all their descendants, since this object was made.

    What descendants used before they were first seen counts too; what the roots and the descendants that
    exist at the start used before it does not. A descendant stays one when its parent ends. One thread at a
    time may read.

    Args:
        roots: Process ids.
        table: The processes of the host.
    """

    def __init__(self, roots: Collection[int], table: ProcessTable | None = None) -> None:
        self._table = table or ProcessTable()
        #: Members with their last usage, parents before their children.
        self._members: dict[int, tuple[Process, Usage]] = {}
        #: CPU time of members that have ended: waited for by members, and by others.
        self._ended_s = self._orphaned_s = 0.0
        for root in roots:
            self._add(root, self._table.open(root))
        self._start_s = 0.0
        self._start_s = self.cpu_time_s()

    @property
    def pids(self) -> set[int]:
        """The ids of the members at the last reading."""
        return set(self._members)

    def cpu_time_s(self) -> float:
        """Return the CPU time in seconds."""
        self._admit_descendants(self._table.newcomers())
        # A child that ends behind the reading of its parent counts by its own clock, and only once.
        pids = self.pids
        for pid, (process, before) in list(self._members.items()):
            usage = process.read()
            if usage is not None:
                self._members[pid] = process, usage
                continue
            del self._members[pid]
            if process.parent in pids:
                self._ended_s += before.own_s
            else:
                self._orphaned_s += before.own_s
        usages = [usage for _, usage in self._members.values()]
        reported_s = sum(usage.ended_s for usage in usages)
        # Children that started and ended between two readings are in the kernel's times alone.
        self._ended_s = max(self._ended_s, reported_s)
        # What the kernel never reports must not hide what it reports later.
        unreported_s = max(0.0, self._ended_s - reported_s - 2 * TICK_S * len(usages))
        self._ended_s -= unreported_s
        self._orphaned_s += unreported_s
        return sum(usage.own_s for usage in usages) + self._ended_s + self._orphaned_s - self._start_s

    def close(self) -> None:
        """Release all resources."""
        self._members.clear()

    def _add(self, pid: int, process: Process | None) -> None:
        usage = process.read() if process is not None else None
        if process is not None and usage is not None:
            self._members[pid] = process, usage
            self._ended_s += usage.ended_s

    def _admit_descendants(self, pids: Collection[int]) -> None:
        """Admit the descendants of members among these."""
        opened = {pid: self._table.open(pid) for pid in pids if pid not in self._members}
        strangers = {pid: process for pid, process in opened.items() if process is not None}
        # Ids start again at the end, so a child may have a lower one than its parent.
        while found := [pid for pid, process in strangers.items() if process.parent in self._members]:
            for pid in found:
                self._add(pid, strangers.pop(pid))
