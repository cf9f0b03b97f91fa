# SPDX-License-Identifier: Apache-2.0
"""A function measured in the process itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytest_llenergy.model.timeline import Iteration, RankTimeline, RoundTimeline


@dataclass
class CallWorkload:
    """A callable and what it returned last. ``peak_memory_bytes`` is not known: the process does more."""

    function: Callable[[], Any]
    peak_memory_bytes: int | None = field(default=None, init=False)
    result: Any = field(default=None, init=False)

    def ready(self) -> None:
        """Collect garbage now, so that it is not collected meanwhile."""
        gc.collect()

    def work(self, iterations: int = 1) -> None:
        """Call it so often."""
        cpu_before = time.process_time()
        start_ns = time.monotonic_ns()
        for _ in range(iterations):
            self.result = self.function()
        end_ns = time.monotonic_ns()
        self._cpu_time_s = time.process_time() - cpu_before
        # A look at the clock after each call would cost more than a short call does.
        self._iteration = Iteration(start_ns=start_ns, end_ns=end_ns, repeats=iterations)

    def timeline(self) -> RoundTimeline:
        """When it ran."""
        rank = RankTimeline(rank=0, iterations=(self._iteration,), cpu_time_s=self._cpu_time_s)
        return RoundTimeline(ranks=(rank,))
