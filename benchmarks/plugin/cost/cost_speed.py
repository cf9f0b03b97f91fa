# SPDX-License-Identifier: Apache-2.0
"""Is a workload slower while it is metered? ``cost_speed.py LOOP BOARDS CYCLES DIRECTORY``.

The work never pauses; metering is switched on and off beside it. With no board nothing is metered, and what
is found is the method's own error. Prints one JSON object.
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

from pytest_llenergy.meters import measure

T = TypeVar("T")

#: How long metering stays on, and off (seconds). Opening and closing belong to neither.
SPAN_S = 2.0

#: Before this a reader looks closely to learn how counters tick, and no window of the plugin is open yet (s).
LEARNING_S = 2.5

#: How long one timed piece of the work takes, about (seconds).
CHUNK_S = 0.05

WARM_UP_S = 1.0

#: Threads of the loop in another process: as many as there are cores.
THREADS = os.cpu_count() or 1

#: Multiplies matrices until its input is closed; prints when chunks began (ns, monotonic). Is given how long
#: one takes, about (s).
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
    """A time without a change of metering (ns, monotonic)."""

    metered: bool
    start_ns: int
    end_ns: int


def switch(uuids: list[str], cycles: int) -> list[Span]:
    """Metering off and on in turn, beginning and ending with off; of no board: never on."""
    spans = []
    time.sleep(WARM_UP_S)
    for index in range(2 * cycles + 1):
        on = index % 2 == 1
        with ExitStack() as stack:
            if on and uuids:
                measuring = stack.enter_context(measure(uuids, ("nvml",)))
                # The loop goes on beside.
                time.sleep(LEARNING_S)
                stack.enter_context(measuring.window("span"))
            start_ns = time.monotonic_ns()
            time.sleep(SPAN_S)
            spans.append(Span(on, start_ns, time.monotonic_ns()))
    return spans


def arithmetic(turns: int) -> float:
    """Seconds of so many hundred turns, which hold the interpreter's lock; the reader needs it too."""
    total = 0
    start_s = time.perf_counter()
    for turn in range(turns * 100):
        total += turn * turn % 7
    return time.perf_counter() - start_s


def beside_python(switching: Callable[[], list[T]], chunk_s: float = CHUNK_S) -> tuple[list[int], list[T]]:
    """When the chunks of a loop in this process began, and the spans."""
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


def beside_matrices(switching: Callable[[], list[T]], chunk_s: float = CHUNK_S) -> tuple[list[int], list[T]]:
    """As above, of matrices in another process, on all cores."""
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
    """Seconds of the mean of the chunks that lie wholly in each span; ``None`` where none does.

    Not the median: the reader wakes in a few of them only.
    """
    means: list[float | None] = []
    for span in spans:
        first, after = bisect_left(times, span.start_ns), bisect_left(times, span.end_ns)
        inside = times[first:after]
        means.append((inside[-1] - inside[0]) / (len(inside) - 1) / 1e9 if len(inside) > 1 else None)
    return means


def main(loop: str, number: int, cycles: int, directory: Path) -> None:
    """Run the loop and print the chunks of each span, off and on in turn."""
    beside = {"python": beside_python, "matrices": beside_matrices}[loop]
    with boards(max(1, number), directory) as uuids:
        times, spans = beside(lambda: switch(uuids[:number], cycles))
    print(f"\n{json.dumps(mean_chunks(times, spans))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
