# SPDX-License-Identifier: Apache-2.0
"""Measure one figure of one tool in a separate process: ``cost_probe.py WHAT TOOL BOARDS DIRECTORY``.

Prints one JSON object. Runs in the peers' interpreter.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from cost_world import boards

#: Observation time of a background reader, after the same time to settle (seconds).
OBSERVED_S, SETTLE_S = 20.0, 3.0

#: Rest between two windows (seconds).
REST_S = 0.003

CODECARBON = {"country_iso_code": "USA", "save_to_file": False, "log_level": "critical"}

Figures = dict[str, float]


class Stopwatch:
    """Milliseconds since its creation or the last call."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def ms(self) -> float:
        """Return the elapsed milliseconds and restart."""
        now_s = time.perf_counter()
        elapsed_ms, self._start_s = (now_s - self._start_s) * 1e3, now_s
        return elapsed_ms


def measure_construct(tool: str, uuids: list[str]) -> Figures:
    """Measure the construction of what reads the boards, first and again in the same process (ms).

    ``ready_ms`` is the time from the first construction until a window can be opened.
    """
    if tool == "pytest-llenergy":
        from pytest_llenergy.energy import measure
        from pytest_llenergy.energy.meters.base import Targets
        from pytest_llenergy.energy.meters.select import MeterRegistry, open_meters

        watch = Stopwatch()
        first = open_meters(("nvml",), MeterRegistry(), Targets(tuple(uuids)))
        first_ms = watch.ms()
        first.close()
        watch.ms()
        second = open_meters(("nvml",), MeterRegistry(), Targets(tuple(uuids)))
        again_ms = watch.ms()
        second.close()
        watch.ms()
        measuring = measure(uuids, ("nvml",))
        measuring.start()
        ready_ms = first_ms - again_ms + watch.ms()
        measuring.stop()
        return {"first_ms": first_ms, "again_ms": again_ms, "ready_ms": ready_ms}
    if tool == "Zeus":
        monitor = import_module("zeus.monitor").ZeusMonitor
        watch = Stopwatch()
        monitor(cpu_indices=[])
        first_ms = watch.ms()
        monitor(cpu_indices=[])
        return {"first_ms": first_ms, "again_ms": watch.ms(), "ready_ms": first_ms}
    tracker_type = import_module("codecarbon").OfflineEmissionsTracker
    watch = Stopwatch()
    tracker = tracker_type(**CODECARBON)
    first_ms = watch.ms()
    tracker.start()
    ready_ms = first_ms + watch.ms()
    tracker.stop()
    watch.ms()
    tracker_type(**CODECARBON)
    return {"first_ms": first_ms, "again_ms": watch.ms(), "ready_ms": ready_ms}


def measure_window(tool: str, uuids: list[str]) -> Figures:
    """Measure begin and end of an empty window (µs, medians): back to back, then after a rest.

    Deferred computation is left out. After a rest caches are cold and the processor is slow.
    """
    begin: Callable[[str], Any]
    end: Callable[[str], Any]
    close: Callable[[], Any] = int
    times = 300
    if tool == "pytest-llenergy":
        from pytest_llenergy.energy import measure

        measuring = measure(uuids, ("nvml",))
        measuring.start()
        # By now the background reader has found the ticks, as in a run in progress.
        time.sleep(1.0)
        begin, end, close = measuring.begin, measuring.end, measuring.stop
    elif tool == "Zeus":
        monitor = import_module("zeus.monitor").ZeusMonitor(cpu_indices=[])
        begin = partial(monitor.begin_window, sync_execution=False)
        end = partial(monitor.end_window, sync_execution=False)
        import_module("warnings").simplefilter("ignore")
    else:
        tracker = import_module("codecarbon").OfflineEmissionsTracker(**CODECARBON)
        begin, end, close = tracker.start_task, tracker.stop_task, tracker.stop
        times = 30
    figures = {}
    for name, rest_s in (("running", 0.0), ("rested", REST_S)):
        spent_us = []
        for index in range(times):
            # Nothing, or long enough for the caches to become cold.
            time.sleep(rest_s)
            start_ns = time.perf_counter_ns()
            begin(f"{name} {index}")
            end(f"{name} {index}")
            spent_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        figures[f"{name}_us"] = median(spent_us)
    close()
    return figures


class BareLoop:
    """A thread that reads every board every 100 ms and discards the values: the cost of reading alone."""

    def __init__(self, number: int) -> None:
        self._nvml: Any = import_module("pynvml")
        self._nvml.nvmlInit()
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(number)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            # The interval of the counters' ticks.
            time.sleep(0.1)
            for handle in self._handles:
                self._nvml.nvmlDeviceGetFieldValues(handle, [(83, 0)])

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._thread.join()


def measure_reader(tool: str, uuids: list[str]) -> Figures:
    """Measure the CPU time of all activity while a tool is on and its user idle (% of a core)."""
    import psutil

    stop: Callable[[], Any] = int
    if tool.startswith("pytest-llenergy"):
        from pytest_llenergy.energy import measure

        measuring = measure(uuids, ("nvml",))
        measuring.start()
        if tool.endswith("in a window"):
            measuring.begin("work")
        stop = measuring.stop
    elif tool == "CodeCarbon":
        tracker = import_module("codecarbon").OfflineEmissionsTracker(**CODECARBON)
        tracker.start()
        stop = tracker.stop
    elif tool == "Zeus":
        monitor: Any = import_module("zeus.monitor").ZeusMonitor(cpu_indices=[])
        monitor.begin_window("idle", sync_execution=False)
    elif tool.startswith("bare loop"):
        stop = BareLoop(len(uuids)).stop
    else:
        period_s = 0.1 if tool == "Zeus PowerMonitor, 100 ms" else None
        monitor = import_module("zeus.monitor").PowerMonitor(update_period=period_s)
    # Start-up is measured elsewhere.
    time.sleep(SETTLE_S)
    me = psutil.Process()

    def children_s() -> float:
        each = [child.cpu_times() for child in me.children(recursive=True)]
        return sum(times.user + times.system for times in each)

    before_s, start_s, own_s = children_s(), time.monotonic(), time.process_time()
    # The process itself is idle, so all CPU time is the tool's.
    time.sleep(OBSERVED_S)
    own_s, elapsed_s = time.process_time() - own_s, time.monotonic() - start_s
    helpers_s = children_s() - before_s
    helpers = len(me.children(recursive=True))
    stop()
    return {
        "percent": (own_s + helpers_s) / elapsed_s * 100,
        "own_percent": own_s / elapsed_s * 100,
        "helper_processes": helpers,
    }


PROBES = {"construct": measure_construct, "window": measure_window, "reader": measure_reader}


def main(what: str, tool: str, number: int, directory: Path) -> None:
    """Measure and print."""
    with boards(number, directory) as uuids:
        figures = PROBES[what](tool, uuids)
    # Tools print too, so the JSON comes last.
    print(f"\n{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
