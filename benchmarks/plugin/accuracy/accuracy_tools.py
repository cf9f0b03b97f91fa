# SPDX-License-Identifier: Apache-2.0
"""Adapters for tools that measure a window of which they know only the start and the end."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol

from pytest_llenergy.energy import Window, measure

J_PER_KWH = 3.6e6

#: ``NVML_FI_DEV_POWER_INSTANT`` of the GPU (nvml.h).
INSTANT_POWER = (186, 0)

#: Polling interval of a power monitor, as in `nvidia-smi --loop-ms=100` (seconds).
POLL_S = 0.1

OURS_WINDOW = "pytest-llenergy, window"


@dataclass(frozen=True)
class Answer:
    """Joules with their standard uncertainty, if the tool states one, or the reason why there are none."""

    energy_j: float | None
    u_j: float | None = None
    reason: str | None = None


#: Gives the answer of a window that has ended. Called some ticks later.
Ask = Callable[[], Answer]


class Tool(Protocol):
    """One tool, ready to measure."""

    name: str

    def begin(self, window: str = "burst") -> None: ...

    def end(self) -> Ask: ...

    def close(self) -> None: ...


class OurWindow:
    """A window of ``pytest_llenergy.energy.measure``."""

    name = OURS_WINDOW

    def __init__(self, uuid: str) -> None:
        self._measuring = measure([uuid])
        self._measuring.start()
        self._open = ""

    def begin(self, window: str = "burst") -> None:
        self._open = window
        self._measuring.begin(window)

    def end(self) -> Ask:
        return partial(self._answer, self._measuring.end(self._open))

    def _answer(self, window: Window) -> Answer:
        found = window.record
        return Answer(found.energy_j, found.energy_u_j, found.reason)

    def close(self) -> None:
        self._measuring.stop()


class Zeus:
    """``ZeusMonitor``: the counter at both ends, or power times duration if the counter did not advance."""

    def __init__(self, *, approximate: bool) -> None:
        self.name = "Zeus, approx_instant_energy" if approximate else "Zeus"
        monitor = import_module("zeus.monitor").ZeusMonitor
        self._monitor: Any = monitor(gpu_indices=[0], cpu_indices=[], approx_instant_energy=approximate)

    def begin(self, window: str = "burst") -> None:
        self._monitor.begin_window("burst", sync_execution=False)

    def end(self) -> Ask:
        return partial(Answer, self._monitor.end_window("burst", sync_execution=False).gpu_energy[0])

    def close(self) -> None:
        pass


class CodeCarbon:
    """``start_task`` and ``stop_task`` of a tracker with its defaults; the GPU's part of the energy."""

    name = "CodeCarbon"

    def __init__(self) -> None:
        tracker = import_module("codecarbon").OfflineEmissionsTracker
        self._tracker: Any = tracker(country_iso_code="USA", save_to_file=False, log_level="critical")
        self._task = 0

    def begin(self, window: str = "burst") -> None:
        self._task += 1
        self._tracker.start_task(f"burst {self._task}")

    def end(self) -> Ask:
        return partial(Answer, self._tracker.stop_task(f"burst {self._task}").gpu_energy * J_PER_KWH)

    def close(self) -> None:
        self._tracker.stop()


class PowerPolling:
    """The power reading every 100 ms, interpolated linearly and integrated from begin to end."""

    name = "power every 100 ms"

    def __init__(self, uuid: str | None = None) -> None:
        self._nvml: Any = import_module("pynvml")
        self._nvml.nvmlInit()
        by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
        self._handle = by_index(0) if uuid is None else by_uuid(uuid)
        self._samples: list[tuple[float, float]] = []
        self._start_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [INSTANT_POWER])
            self._samples.append((time.monotonic(), value.value.uiVal / 1000))

    def begin(self, window: str = "burst") -> None:
        self._start_s = time.monotonic()

    def end(self) -> Ask:
        return partial(self._answer, self._start_s, time.monotonic())

    def _answer(self, start_s: float, end_s: float) -> Answer:
        # Interpolation up to the end of the window needs the sample after it.
        while self._samples[-1][0] <= end_s:
            time.sleep(POLL_S / 10)
        return Answer(_trapezoids(self._samples, start_s, end_s))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _trapezoids(samples: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Integrate linearly interpolated samples that extend beyond the interval on both sides."""
    times = [when for when, _ in samples]
    first, last = bisect_left(times, start_s), bisect_left(times, end_s)
    inside = [
        (start_s, _line(samples[first - 1], samples[first], start_s)),
        *samples[first:last],
        (end_s, _line(samples[last - 1], samples[last], end_s)),
    ]
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in pairwise(inside))


def _line(before: tuple[float, float], after: tuple[float, float], when: float) -> float:
    return before[1] + (after[1] - before[1]) * (when - before[0]) / (after[0] - before[0])


def open_tools(uuid: str) -> list[Tool]:
    """Return every tool in the order in which windows are opened: the slowest to open is outermost."""
    return [CodeCarbon(), Zeus(approximate=True), Zeus(approximate=False), PowerPolling(), OurWindow(uuid)]
