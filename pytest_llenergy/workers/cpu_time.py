# SPDX-License-Identifier: Apache-2.0
"""CPU time of a rank, and of the processes of an engine in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

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


def used_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Seconds in between, of the processes that are there afterwards; all of what was not there before."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _of_ended_children_s(pid: int) -> float:
    import psutil

    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.children_user + times.children_system)
    return 0.0
