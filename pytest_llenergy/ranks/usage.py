# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of a rank and of the processes of its backend.

Read from the kernel and not through psutil, whose CPU times have ticks of 10 ms and which has no peak memory.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_llenergy.backends.base import BackendWorker
from pytest_llenergy.ranks import proctree

#: The kernel has a CPU clock of every process, in nanoseconds; clock_getcpuclockid(3) makes its id so
#: (``MAKE_PROCESS_CPUCLOCK`` and ``CPUCLOCK_SCHED``, include/linux/posix-timers_types.h).
CPUCLOCK_SCHED = 2


def cpu_times_s(others: Iterable[int] = ()) -> dict[int, float]:
    """Return the CPU time (s) that processes have used so far, by pid, with this process as 0.

    The time of a child that was waited for counts for its parent (proc_pid_stat(5): cutime, cstime), in ticks
    of 10 ms. Processes that have ended are missing, as are all others where the system is not Linux.
    """
    times_s = {0: time.process_time()}
    for pid in others if sys.platform == "linux" else ():
        import psutil

        with suppress(OSError, psutil.Error):
            now_s = time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
            ended = psutil.Process(pid).cpu_times()
            times_s[pid] = now_s + ended.children_user + ended.children_system
    return times_s


def cpu_time_used_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the CPU time (s) between two readings of the processes in the second; new ones count in full."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


class BackendProcesses:
    """Processes that a backend has started or attached to, besides that of its rank."""

    def __init__(self, workers: Sequence[BackendWorker] = (), *, on_gpu: bool = False) -> None:
        self._has_workers = bool(workers)
        #: Pids of those that stand for a server or that the rank has not started.
        self.servers: tuple[int, ...] = tuple(
            worker.pid for worker in workers if (worker.server or worker.attached) and worker.pid
        )
        # The peak memory of processes that ran before is unknown, and so is GPU memory of others.
        elsewhere = on_gpu and any(worker.pid != os.getpid() for worker in workers)
        self.has_peak_memory: bool = not elsewhere and not any(worker.attached for worker in workers)

    def pids(self) -> frozenset[int]:
        """Return their current pids."""
        if not self._has_workers:
            return frozenset()
        own = os.getpid()
        return frozenset(proctree.descendants({own, *self.servers}) - {own})

    def cpu_times_s(self) -> dict[int, float]:
        """Return the CPU time (s) of each and of this process so far, by pid; see ``cpu_times_s``."""
        return cpu_times_s(self.pids())


def reset_peak_memory(others: Iterable[int] = ()) -> None:
    """Reset the peak memory of this process, its GPUs and other processes, where the system can."""
    if (cuda := _cuda_in_use()) is not None:
        for index in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(index)
    for process in ("self", *others):
        # 5 resets VmHWM (proc_pid_clear_refs(5)).
        with suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_memory_bytes(others: Iterable[int] = ()) -> int | None:
    """Return the peak since the last reset, or ``None`` if the system does not report it.

    That is GPU memory summed over devices if this process uses torch with CUDA; otherwise resident memory
    summed over processes. Shared pages count for each process.
    """
    if (cuda := _cuda_in_use()) is not None:
        return sum(int(cuda.max_memory_allocated(index)) for index in range(cuda.device_count()))
    here = _status_bytes("VmHWM")
    # A process that has ended has no memory.
    return None if here is None else here + sum(_status_bytes("VmHWM", pid) or 0 for pid in others)


def memory_bytes(pid: int | None = None) -> int | None:
    """Return the memory that this process uses without caches of freed memory, or another one on the CPU."""
    if pid is None and (cuda := _cuda_in_use()) is not None:
        cuda.empty_cache()
        return sum(int(cuda.memory_allocated(index)) for index in range(cuda.device_count()))
    return _status_bytes("RssAnon", pid or "self")


def _cuda_in_use() -> Any:
    """Return ``torch.cuda`` if this process has initialised it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _status_bytes(name: str, process: int | str = "self") -> int | None:
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
        if match := re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE):
            return int(match.group(1)) * 1024
    return None
