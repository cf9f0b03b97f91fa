# SPDX-License-Identifier: Apache-2.0
"""CPU time of other processes, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from pytest_llenergy.ranks.usage import cpu_time_used_s, cpu_times_s

#: Uses as much CPU time as each line of its input says, and then waits.
BUSY = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        pass
    print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the clocks of other processes are Linux's")
def test_cpu_time_counts_work_and_not_waiting() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        idle = cpu_times_s([child.pid])
        child.stdin.write("0.2\n")
        child.stdin.flush()
        child.stdout.readline()
        busy = cpu_times_s([child.pid])
        assert busy[child.pid] - idle[child.pid] >= 0.2
        assert cpu_time_used_s(idle, busy) >= 0.2
        counted = psutil.Process(child.pid).cpu_times()
        # psutil's are in ticks of ten milliseconds.
        assert busy[child.pid] <= counted.user + counted.system + 0.02
        child.kill()
