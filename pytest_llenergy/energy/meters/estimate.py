# SPDX-License-Identifier: Apache-2.0
"""Estimate of CPU energy on hosts without any counter: CPU time of the work times published watts.

    E = P_full · t_busy

with t_busy the CPU seconds of the processes that do the work: the one that opens the meter with all its
descendants, and a server that was started elsewhere. P_full is the power of a busy logical CPU, including
what it draws when idle: a process is charged for a CPU while it runs on it. Neither other processes nor idle
CPUs count, so that the estimate does not depend on how long the work waits for its turn.

The coefficients are those of the Cloud Carbon Footprint project
(https://www.cloudcarbonfootprint.org/docs/methodology/, appendix I), derived from SPECpower results. The
estimate uses its average over processor families (AWS: 3.5 W); the limits are the lowest and the highest
family in its table, so the true value of a given host may lie anywhere between them. It covers processor
power only: no memory, no fans, no supply losses.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from pytest_llenergy.energy.cpu_time import TICK_S, ProcessTree
from pytest_llenergy.energy.meters.base import READER_THREAD, Domain, Meter, MeterSpec, Targets
from pytest_llenergy.errors import MeterDoesNotApply, MeterError

#: Watts per logical CPU at full load: average over families, lowest, highest.
AVERAGE_W, LOWEST_W, HIGHEST_W = 3.5, 1.69, 8.58
FACTOR = max(HIGHEST_W / AVERAGE_W, AVERAGE_W / LOWEST_W)

#: Step of the CPU clocks. Children of other processes that start and end between two readings are known to
#: two ticks of 10 ms only; that shows in the spread of the rounds.
STEP_S = 1e-6

#: Age of a reading. The clock of a process that runs on another CPU may lag by a tick of the scheduler (1 to
#: 10 ms) on some kernels; at the edges of a round nothing runs elsewhere.
MAX_AGE_S = 1e-5


class EstimateMeter:
    """This process and its descendants as one domain.

    Args:
        processes: Processes that were started elsewhere and work for the test, such as a server.
    """

    name = "estimate"
    poll_period_s: float = 0.05

    def __init__(self, processes: tuple[int, ...] = ()) -> None:
        self._tree = ProcessTree({os.getpid(), *processes})
        #: CPU time for reading: of the thread that only reads, and in other threads.
        self._reader_s = self._elsewhere_s = 0.0
        self._busy_s = 0.0
        self.domains: tuple[Domain, ...] = (
            Domain(
                name="cpu:processes",
                kind="estimated",
                source="CPU time x Cloud Carbon Footprint coefficients",
                scope="processes of the test",
                resolution_j=AVERAGE_W * STEP_S,
                accuracy=f"within a factor of {FACTOR:.2g}; {LOWEST_W}-{HIGHEST_W} W per busy logical CPU",
                limits=_limits,
                covers_others=True,
                rests=True,
                update_period_s=TICK_S,
                max_age_s=MAX_AGE_S,
            ),
        )

    def read(self) -> list[float | str]:
        begin_s = time.thread_time()
        busy_s = self._tree.cpu_time_s()
        if threading.current_thread().name == READER_THREAD:
            self._reader_s = time.thread_time()
        else:
            self._elsewhere_s += time.thread_time() - begin_s
        # The end of a reading is subtracted before it is part of this process's time.
        self._busy_s = max(self._busy_s, busy_s - self._reader_s - self._elsewhere_s)
        return [AVERAGE_W * self._busy_s]

    def close(self) -> None:
        self._tree.close()


def _limits(energy_j: float, _duration_s: float) -> tuple[float, float]:
    return energy_j * LOWEST_W / AVERAGE_W, energy_j * HIGHEST_W / AVERAGE_W


def open_estimate(targets: Targets) -> Sequence[Meter]:
    """Open the estimate.

    Raises:
        MeterDoesNotApply: If the test uses GPUs, which the model does not cover.
        MeterError: If processes that work for the test are unknown.
    """
    if not targets.cpu:
        raise MeterDoesNotApply("estimate: models the CPU only, and the test uses GPUs")
    if targets.unknown_processes is not None:
        raise MeterError(f"estimate: it needs the processes of the test: {targets.unknown_processes}")
    return [EstimateMeter(targets.processes)]


SPEC = MeterSpec(name="estimate", kind="estimated", open=open_estimate, host_wide=False)
