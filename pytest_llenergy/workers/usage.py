# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory used by a rank and its descendants."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.workers import proctree

# CPU time of a rank, and of the processes of an engine in it.

#: Of another process the kernel has a clock, too: clock_getcpuclockid(3), which makes its number so
#: (``MAKE_PROCESS_CPUCLOCK`` and ``CPUCLOCK_SCHED``, include/linux/posix-timers_types.h).
CPUCLOCK_SCHED = 2


def cpu_times_s(others: Iterable[int] = ()) -> dict[int, float]:
    """Seconds that this process (0) and these have used so far; without those that have ended.

    What a child has used counts on for its parent when it has ended and was waited for (proc_pid_stat(5):
    cutime, cstime), in ticks of 10 ms. Elsewhere than on Linux of this process only.
    """
    found = {0: time.process_time()}
    for pid in others if sys.platform == "linux" else ():
        with suppress(OSError):
            found[pid] = time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED) + _of_ended_children_s(pid)
    return found


def cpu_time_used_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Seconds in between, of the processes that are there afterwards; all of what was not there before."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _of_ended_children_s(pid: int) -> float:
    import psutil

    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.children_user + times.children_system)
    return 0.0


# The processes that belong to what a rank measures, besides its own.


class BackendProcesses:
    """Those that an engine has started, and those that it found running; none where there is no engine.

    ``attached`` are those of ``workers`` that the rank has not started. ``tells_memory`` is whether the peak
    of what is measured can be had: not that of processes that ran before, nor of GPU memory that others use.
    """

    def __init__(self, workers: Sequence[BackendWorker] = (), *, on_gpu: bool = False) -> None:
        self._there = bool(workers)
        self.attached: tuple[int, ...] = tuple(
            worker.pid for worker in workers if worker.attached and worker.pid
        )
        elsewhere = any(worker.pid != os.getpid() for worker in workers)
        self.tells_memory: bool = not any(worker.attached for worker in workers) and not (
            on_gpu and elsewhere
        )

    def pids(self) -> frozenset[int]:
        """Those that are there now."""
        if not self._there:
            return frozenset()
        own = os.getpid()
        return frozenset(proctree.descendants({own, *self.attached}) - {own})

    def cpu_times_s(self) -> dict[int, float]:
        """What each has used so far, and this process (0); for ``cpu_time.used_s``."""
        return cpu_times_s(self.pids())


# Memory of this process: that of its GPUs where torch uses any, else resident memory.
#
# An engine that starts processes of its own has their resident memory counted with it. Pages that they share
# count once for each: the system tells how many are shared now, not how many were at the peak.

#: Writing 5 to clear_refs resets VmHWM (proc_pid_clear_refs(5)).
RESET_PEAK = "5"


def reset_peak_memory(others: Iterable[int] = ()) -> None:
    """Start the peak anew, where the system can; that of these processes, too."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    for process in ("self", *others):
        with suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text(RESET_PEAK)


def peak_memory_bytes(others: Iterable[int] = ()) -> int | None:
    """Highest use since the last reset, summed over devices, or over processes without any.

    ``None`` where the system does not tell.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return sum(int(torch.cuda.max_memory_allocated(index)) for index in range(torch.cuda.device_count()))
    own = _status_bytes("VmHWM")
    # One that has ended has no memory.
    theirs = (_status_bytes("VmHWM", str(pid)) or 0 for pid in others)
    return None if own is None else own + sum(theirs)


def memory_bytes() -> int | None:
    """What is in use now, caches of freed memory left out; ``None`` where the system does not tell."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        return sum(int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count()))
    return _status_bytes("RssAnon")


def _status_bytes(name: str, process: str = "self") -> int | None:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None
