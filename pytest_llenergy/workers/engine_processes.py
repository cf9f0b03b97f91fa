# SPDX-License-Identifier: Apache-2.0
"""The processes that belong to what a rank measures, besides its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pytest_llenergy.backends.base import EngineWorker
from pytest_llenergy.workers import family
from pytest_llenergy.workers.cpu_time import cpu_times_s


class EngineProcesses:
    """Those that an engine has started, and those that it found running; none where there is no engine.

    ``attached`` are those of ``workers`` that the rank has not started. ``tells_memory`` is whether the peak
    of what is measured can be had: not that of processes that ran before, nor of GPU memory that others use.
    """

    def __init__(self, workers: Sequence[EngineWorker] = (), *, on_gpu: bool = False) -> None:
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
        return frozenset(family.descendants({own, *self.attached}) - {own})

    def cpu_times_s(self) -> dict[int, float]:
        """What each has used so far, and this process (0); for ``cpu_time.used_s``."""
        return cpu_times_s(self.pids())
