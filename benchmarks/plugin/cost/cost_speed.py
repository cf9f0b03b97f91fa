# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of a workload with and without metering: ``cost_speed.py LOOP BOARDS CYCLES DIRECTORY``.

The work never pauses; metering is switched on and off next to it. With no board nothing is metered, and the
result is the method's own error. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cost_world import boards

from pytest_llenergy.energy import measure

T = TypeVar("T")

#: Time for which metering stays on, and off (seconds). Opening and closing belong to neither.
SPAN_S = 2.0

#: Initial time in which a reader polls closely to learn the ticks and no window can be open yet (s).
LEARNING_S = 2.5

#: Approximate duration of one timed chunk of work (seconds).
CHUNK_S = 0.05

WARM_UP_S = 1.0

#: Threads of the loop in another process: one per core.
THREADS = os.cpu_count() or 1

#: Multiplies matrices until its input is closed, then prints when chunks began (monotonic ns). Its argument
#: is the approximate duration of a chunk (s).
MATRICES = """
import json, select, sys, time
import numpy
chunk_s = float(sys.argv[1])
a = numpy.random.default_rng(0).random((192, 192), dtype=numpy.float32)
def chunk(turns):
    for _ in range(turns):
        a @ a
def seconds(turns):
    start = time.perf_counter()
    chunk(turns)
    return time.perf_counter() - start
turns = 1
while (spent := seconds(turns)) < chunk_s / 2:
    turns *= 2
turns = max(1, round(turns * chunk_s / spent))
times = [time.monotonic_ns()]
while not select.select([sys.stdin], [], [], 0)[0]:
    chunk(turns)
    times.append(time.monotonic_ns())
print(json.dumps(times))
"""


@dataclass(frozen=True)
class Span:
    """A time without a change of metering (monotonic ns)."""

    metered: bool
    start_ns: int
    end_ns: int


def switch_metering(uuids: list[str], cycles: int) -> list[Span]:
    """Switch metering off and on, starting and ending with off; without boards it stays off."""
    spans = []
    time.sleep(WARM_UP_S)
    for index in range(2 * cycles + 1):
        on = index % 2 == 1
        with ExitStack() as stack:
            if on and uuids:
                measuring = stack.enter_context(measure(uuids, ("nvml",)))
                # The loop keeps running meanwhile.
                time.sleep(LEARNING_S)
                stack.enter_context(measuring.window("span"))
            start_ns = time.monotonic_ns()
            time.sleep(SPAN_S)
            spans.append(Span(on, start_ns, time.monotonic_ns()))
    return spans


def arithmetic(turns: int) -> float:
    """Return the seconds of ``turns`` hundred iterations in Python, which hold the interpreter's lock."""
    total = 0
    start_s = time.perf_counter()
    for turn in range(turns * 100):
        total += turn * turn % 7
    return time.perf_counter() - start_s


def run_beside_python(
    switching: Callable[[], list[T]], chunk_s: float = CHUNK_S
) -> tuple[list[int], list[T]]:
    """Return when the chunks of a loop in this process began, and the spans."""
    turns = 1
    while (spent_s := arithmetic(turns)) < chunk_s / 2:
        turns *= 2
    turns = max(1, round(turns * chunk_s / spent_s))
    spans: list[T] = []
    switcher = threading.Thread(target=lambda: spans.extend(switching()))
    switcher.start()
    times = [time.monotonic_ns()]
    while switcher.is_alive():
        arithmetic(turns)
        times.append(time.monotonic_ns())
    return times, spans


def run_beside_matrices(
    switching: Callable[[], list[T]], chunk_s: float = CHUNK_S
) -> tuple[list[int], list[T]]:
    """Return the same for matrices in another process, on all cores."""
    variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    with subprocess.Popen(
        [sys.executable, "-c", MATRICES, str(chunk_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as child:
        spans = switching()
        printed, _ = child.communicate()
    return json.loads(printed), spans


def mean_chunks(times: list[int], spans: list[Span]) -> list[float | None]:
    """Return the mean seconds of the chunks that lie entirely in each span; None if there is none.

    Not the median, since the reader wakes in only a few of them.
    """
    means: list[float | None] = []
    for span in spans:
        first, after = bisect_left(times, span.start_ns), bisect_left(times, span.end_ns)
        inside = times[first:after]
        means.append((inside[-1] - inside[0]) / (len(inside) - 1) / 1e9 if len(inside) > 1 else None)
    return means


def main(loop: str, number: int, cycles: int, directory: Path) -> None:
    """Run the loop and print the chunks of each span, alternately off and on."""
    run_beside = {"python": run_beside_python, "matrices": run_beside_matrices}[loop]
    with boards(max(1, number), directory) as uuids:
        times, spans = run_beside(lambda: switch_metering(uuids[:number], cycles))
    print(f"\n{json.dumps(mean_chunks(times, spans))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
