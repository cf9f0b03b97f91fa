# SPDX-License-Identifier: Apache-2.0
"""Is a workload slower while it is metered? ``cost_speed.py LOOP BOARDS PAIRS DIRECTORY``.

Blocks of the same work with and without metering, in turn and next to each other. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cost_world import boards

from pytest_llenergy.meters import measure

#: Length of a block (seconds).
BLOCK_S = 0.25

WARM_UP_S = 1.0

#: Before every block: meters wait for a tick when they are opened, and a loop is slower after a rest.
REST_S = 0.15

#: Threads of the loop in another process: as many as there are cores.
THREADS = os.cpu_count() or 1

#: Multiplies matrices as often as each line of its input says, and answers with the seconds it took.
MATRICES = """
import sys, time
import numpy
a = numpy.random.default_rng(0).random((384, 384), dtype=numpy.float32)
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        a @ a
    print(time.perf_counter() - start, flush=True)
"""

Loop = Callable[[int], float]
"""Does so many turns of the work and returns the seconds they took."""


def python_loop(turns: int) -> float:
    """Arithmetic in this process, which holds the interpreter's lock that the reader needs too."""
    total = 0
    start_s = time.perf_counter()
    for turn in range(turns * 1000):
        total += turn * turn % 7
    return time.perf_counter() - start_s


@contextmanager
def matrices() -> Iterator[Loop]:
    """Matrices in another process, on all cores."""
    variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    child = subprocess.Popen(
        [sys.executable, "-c", MATRICES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    to_child: IO[str] = child.stdin
    from_child: IO[str] = child.stdout

    def loop(turns: int) -> float:
        to_child.write(f"{turns}\n")
        to_child.flush()
        return float(from_child.readline())

    try:
        yield loop
    finally:
        to_child.close()
        child.wait()


def turns_for(loop: Loop, seconds: float) -> int:
    """How many turns take about so long."""
    # The first ones start threads and fill caches.
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < WARM_UP_S:
        loop(1)
    turns = 1
    while (spent_s := loop(turns)) < seconds / 4:
        turns *= 2
    return max(1, round(turns * seconds / spent_s))


def pairs(loop: Loop, uuids: list[str], number: int) -> list[tuple[float, float]]:
    """Seconds of a block without and with metering; which of them comes first alternates."""
    turns = turns_for(loop, BLOCK_S)
    results = []
    for index in range(number):
        spent: dict[bool, float] = {}
        for metered in (False, True) if index % 2 == 0 else (True, False):
            if metered:
                measuring = measure(uuids, ("nvml",))
                with measuring, measuring.window("block"):
                    # As long as without meters: a loop is slower after a rest.
                    time.sleep(REST_S)
                    spent[metered] = loop(turns)
            else:
                # See above.
                time.sleep(REST_S)
                spent[metered] = loop(turns)
        results.append((spent[False], spent[True]))
    return results


def main(name: str, number: int, n_pairs: int, directory: Path) -> None:
    """Run the pairs and print them."""
    with boards(number, directory) as uuids:
        if name == "python":
            results = pairs(python_loop, uuids, n_pairs)
        else:
            with matrices() as loop:
                results = pairs(loop, uuids, n_pairs)
    print(f"\n{json.dumps(results)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
