# SPDX-License-Identifier: Apache-2.0
"""CPU time counts what was used."""

from __future__ import annotations

import os
import time

from pytest_llenergy.meters.estimate import read_cpu_time


def test_cpu_time_counts_the_work_of_this_process() -> None:
    before, own_s = read_cpu_time(), time.process_time()
    while time.process_time() - own_s < 0.3:
        pass
    after = read_cpu_time()
    # Ticks of 10 ms on every CPU.
    assert after.busy_s - before.busy_s >= 0.3 - 0.02 * (os.cpu_count() or 1)
    assert after.stolen_s >= before.stolen_s >= 0
