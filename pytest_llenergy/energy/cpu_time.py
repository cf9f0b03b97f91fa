# SPDX-License-Identifier: Apache-2.0
"""CPU time of the host, and of processes with all their descendants.

The kernel has a CPU clock of every process, in nanoseconds, of all its threads including those that have
ended. The time of a process that was waited for moves to its parent, as that of an ended child
(proc_pid_stat(5): cutime and cstime), so that the sum over a tree stays the same. Those fields are truncated
to ticks of 10 ms, and miss a process that nobody in the tree waited for, as after SIGCHLD was ignored: the
last reading of its own clock takes their place.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from pytest_llenergy import real_time

#: Busy states of psutil; nice, irq and softirq exist on some systems only.
BUSY_STATES = ("user", "nice", "system", "irq", "softirq")

#: Possible mount points of the root control group (version 2).
GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))

PROC = Path("/proc")

#: Coarsest step in which Linux reports CPU time (USER_HZ = 100).
TICK_S = 0.01

#: Makes the id of a process's CPU clock, as clock_getcpuclockid(3) does (``MAKE_PROCESS_CPUCLOCK`` and
#: ``CPUCLOCK_SCHED``, include/linux/posix-timers_types.h).
CPUCLOCK_SCHED = 2

#: A process id is handed out before its process exists. Ids without a process are tried again for this long.
UNBORN_S = 0.25

#: Beyond this many new process ids, listing all processes is cheaper than trying each.
MANY_IDS = 256

#: Share of time for listing all processes, where nothing tells whether there are new ones.
LISTING_SHARE = 0.01

#: Readings are repeated while processes end in between, but not for ever.
PASSES = 5


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of the host since it started: busy with its processes, and stolen by its hypervisor."""

    busy_s: float
    stolen_s: float


def read_cpu_time(groups: Sequence[Path] = GROUPS) -> CpuTime:
    """Return the CPU time of the host, summed over all logical CPUs."""
    import psutil

    times = psutil.cpu_times()
    busy_s = read_root_cgroup_busy_s(groups)
    if busy_s is None:
        busy_s = sum(getattr(times, state, 0.0) for state in BUSY_STATES)
    return CpuTime(busy_s, getattr(times, "steal", 0.0))


def read_root_cgroup_busy_s(groups: Sequence[Path]) -> float | None:
    """Return the busy CPU seconds of /proc/stat, but to the microsecond instead of ticks of 10 ms.

    The root group's cpu.stat is the sum of the kernel's CPU states, not of its processes (kernel:
    kernel/cgroup/rstat.c, ``root_cgroup_cputime``). ``None`` if the root group is not visible, as in most
    containers.
    """
    for group in groups:
        # Every group but the root has cgroup.events; any other group is only a part of the host.
        if not (group / "cgroup.events").exists() and (group / "cpu.stat").exists():
            fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            if "user_usec" in fields:
                return (int(fields["user_usec"]) + int(fields["system_usec"])) / 1e6
    return None


class Usage(NamedTuple):
    """CPU seconds of a process: its own, and of ended children, which may be too low by ``truncated_s``."""

    own_s: float
    ended_s: float
    truncated_s: float


class Process(Protocol):
    """A process whose CPU time is followed."""

    parent: int

    def read(self) -> Usage | None:
        """Return its CPU time so far; ``None`` once it was waited for."""

    def close(self) -> None:
        """Release all resources."""


class ProcessTable(Protocol):
    """The processes of the host."""

    def newcomers(self) -> Iterable[int]:
        """Return ids of processes that may be new since the last call; at the first call, of all."""

    def open(self, pid: int) -> Process | None:
        """Return the process with this id, or ``None`` if it does not exist."""


@dataclass
class _Member:
    process: Process
    usage: Usage


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
        self._table = open_process_table() if table is None else table
        self._members: dict[int, _Member] = {}
        #: CPU time of members that have ended: waited for by members, and by others.
        self._ended_s = self._orphaned_s = 0.0
        for root in roots:
            self._admit(root)
        self._start_s = 0.0
        self._start_s = self.cpu_time_s()

    @property
    def pids(self) -> set[int]:
        """The ids of the members at the last reading."""
        return set(self._members)

    def cpu_time_s(self) -> float:
        """Return the CPU time in seconds."""
        self._admit_descendants(sorted(self._table.newcomers()))
        for _ in range(PASSES):
            if not self._update():
                break
        self._balance()
        own_s = sum(member.usage.own_s for member in self._members.values())
        return own_s + self._ended_s + self._orphaned_s - self._start_s

    def close(self) -> None:
        """Release all resources."""
        for member in self._members.values():
            member.process.close()
        self._members.clear()

    def _admit(self, pid: int) -> bool:
        process = self._table.open(pid) if pid not in self._members else None
        if process is None:
            return False
        self._add(pid, process)
        return True

    def _add(self, pid: int, process: Process) -> None:
        usage = process.read()
        if usage is None:
            process.close()
            return
        self._members[pid] = _Member(process, usage)
        self._ended_s += usage.ended_s

    def _admit_descendants(self, pids: Sequence[int]) -> None:
        """Admit the descendants of members among these."""
        strangers: dict[int, Process] = {}
        for pid in pids:
            if pid in self._members and self._members[pid].process.read() is None:
                # The id belongs to another process now.
                self._remove(pid)
            process = self._table.open(pid) if pid not in self._members else None
            if process is not None:
                strangers[pid] = process
        # Ids start again at the end, so a child may have a lower one than its parent.
        while found := [pid for pid, process in strangers.items() if process.parent in self._members]:
            for pid in found:
                self._add(pid, strangers.pop(pid))
        for process in strangers.values():
            process.close()

    def _update(self) -> bool:
        """Read all members. Returns whether any has ended, so that it may count twice or not at all."""
        changed = False
        for pid, member in list(self._members.items()):
            usage = member.process.read()
            if usage is None:
                self._remove(pid)
                changed = True
                continue
            changed |= usage.ended_s != member.usage.ended_s
            member.usage = usage
        return changed

    def _remove(self, pid: int) -> None:
        member = self._members.pop(pid)
        member.process.close()
        self._ended_s += member.usage.own_s

    def _balance(self) -> None:
        """Reconcile the time of members that have ended with what the kernel reports of ended children."""
        usages = [member.usage for member in self._members.values()]
        reported_s = sum(usage.ended_s for usage in usages)
        most_s = reported_s + sum(usage.truncated_s for usage in usages if usage.ended_s)
        # Children that started and ended between two readings are in the kernel's times alone.
        self._ended_s = max(self._ended_s, reported_s)
        if self._ended_s > most_s:
            # No member waited for these.
            self._orphaned_s += self._ended_s - most_s
            self._ended_s = most_s


class OwnProcess:
    """The process that reads."""

    parent = 0

    def read(self) -> Usage:
        """Return its CPU time so far."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Usage(time.process_time(), children.ru_utime + children.ru_stime, 0.0)

    def close(self) -> None:
        """Nothing is held open."""


class LinuxProcess:
    """Another process, through its CPU clock and /proc.

    The open file stays that of this process if another one gets its id.

    Raises:
        OSError: There is no such process.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._clock = (~pid << 3) | CPUCLOCK_SCHED
        self._descriptor = os.open(proc / str(pid) / "stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.parent: int = int(self._fields()[1])
        except BaseException:
            self.close()
            raise

    def _fields(self) -> list[bytes]:
        # The name in parentheses may contain spaces and parentheses too (proc_pid_stat(5)).
        return os.pread(self._descriptor, 4096, 0).rpartition(b")")[2].split()

    def read(self) -> Usage | None:
        """Return its CPU time so far; ``None`` once it was waited for."""
        try:
            own_s = time.clock_gettime(self._clock)
            # Second: if the id was reused in between, this fails.
            fields = self._fields()
        except OSError:
            return None
        return Usage(own_s, (int(fields[13]) + int(fields[14])) * TICK_S, 2 * TICK_S)

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._descriptor)


class LinuxProcessTable:
    """Processes in /proc. The latest process id, at the end of /proc/loadavg, tells whether any is new."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._unborn: dict[int, float] = {}
        self._listed_s = self._listing_s = 0.0
        self._numbered = is_latest_id_right(proc)
        self._latest: int | None = None

    def open(self, pid: int) -> Process | None:
        """Return the process with this id, or ``None`` if it does not exist."""
        if pid == os.getpid():
            return OwnProcess()
        try:
            return LinuxProcess(pid, self._proc)
        except OSError:
            return None

    def newcomers(self) -> list[int]:
        """Return ids of processes that may be new since the last call; at the first call, of all."""
        if not self._numbered:
            return self._list_sometimes()
        latest, previous = self._latest_id(), self._latest
        self._latest = latest
        if previous is None or latest is None:
            return self._list()
        if previous <= latest <= previous + MANY_IDS:
            return self._born(range(previous + 1, latest + 1))
        # Ids start again at the lowest free one once they have reached the highest.
        return [pid for pid in self._list() if pid > previous or (latest < previous and pid <= latest)]

    def _born(self, new: Iterable[int]) -> list[int]:
        """Return those of new and of recent ids that have a process. Those of mere threads never have."""
        now_s = real_time.monotonic()
        waiting = {**self._unborn, **dict.fromkeys(new, now_s)}
        born = [pid for pid in waiting if _has_clock(pid)]
        self._unborn = {
            pid: since_s for pid, since_s in waiting.items() if now_s - since_s < UNBORN_S and pid not in born
        }
        return born

    def _list_sometimes(self) -> list[int]:
        now_s = real_time.monotonic()
        if now_s - self._listed_s < self._listing_s / LISTING_SHARE:
            return []
        listed = self._list()
        self._listed_s, self._listing_s = now_s, real_time.monotonic() - now_s
        return listed

    def _list(self) -> list[int]:
        with suppress(OSError):
            return [int(each.name) for each in self._proc.iterdir() if each.name.isdigit()]
        return []

    def _latest_id(self) -> int | None:
        return read_latest_id(self._proc)


def read_latest_id(proc: Path) -> int | None:
    """Return the process id that the kernel handed out last; ``None`` if the file does not tell."""
    try:
        return int((proc / "loadavg").read_bytes().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


@cache
def is_latest_id_right(proc: Path) -> bool:
    """Return whether a new thread, which gets an id too, shows. Some containers make the file up."""
    before = read_latest_id(proc)
    thread = threading.Thread(target=int, daemon=True)
    thread.start()
    thread.join()
    after = read_latest_id(proc)
    if before is None or after is None or thread.native_id is None:
        return False
    return before < thread.native_id <= after


def _has_clock(pid: int) -> bool:
    try:
        time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
    except OSError:
        return False
    return True


class PsutilProcess:
    """A process on systems other than Linux, whose ended children are not reported.

    Raises:
        psutil.Error: It cannot be read.
    """

    def __init__(self, pid: int) -> None:
        import psutil

        self._process = psutil.Process(pid)
        self._error = psutil.Error
        self.parent: int = self._process.ppid()

    def read(self) -> Usage | None:
        """Return its CPU time so far; ``None`` once it has ended."""
        try:
            if not self._process.is_running():
                return None
            times = self._process.cpu_times()
        except self._error:
            return None
        return Usage(times.user + times.system, 0.0, 0.0)

    def close(self) -> None:
        """Nothing is held open."""


class PsutilProcessTable:
    """Processes on systems other than Linux."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def open(self, pid: int) -> Process | None:
        """Return a process, or ``None`` if it cannot be read."""
        import psutil

        try:
            return PsutilProcess(pid)
        except psutil.Error:
            return None

    def newcomers(self) -> set[int]:
        """Return ids of processes that are new since the last call; at the first call, of all."""
        import psutil

        known, self._known = self._known, set(psutil.pids())
        return self._known - known


def open_process_table() -> ProcessTable:
    """Return the processes of this host."""
    return LinuxProcessTable() if sys.platform == "linux" else PsutilProcessTable()
