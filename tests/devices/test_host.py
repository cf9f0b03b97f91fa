# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device: CPU time counts what was used, and the facts are those of this process."""

from __future__ import annotations

import os
import time

import pytest

from pytest_llenergy.devices.host import cpu_time, host, usable_cpus


def test_cpu_time_counts_the_work_of_this_process() -> None:
    before, own_s = cpu_time(), time.process_time()
    while time.process_time() - own_s < 0.3:
        pass
    after = cpu_time()
    # Ticks of 10 ms on every CPU.
    assert after.busy_s - before.busy_s >= 0.3 - 0.02 * (os.cpu_count() or 1)
    assert after.stolen_s >= before.stolen_s >= 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_only_the_cpus_that_this_process_may_use_count() -> None:
    allowed = os.sched_getaffinity(0)
    only = min(allowed)
    os.sched_setaffinity(0, {only})
    try:
        assert usable_cpus() == (only,)
        assert host().logical_cpus == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cpus() == tuple(sorted(allowed))
