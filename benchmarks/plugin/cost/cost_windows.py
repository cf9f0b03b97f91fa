# SPDX-License-Identifier: Apache-2.0
"""How long it takes to read the energies of the windows of a loop that share the ticks of a counter."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[3]))

from pytest_llenergy.energy.host_window import account_window, window_record
from pytest_llenergy.energy.trace import Mark
from tests.energy.waves import EPOCH, MS, S, Sensor, Wave, read_at

#: Length of a window and of the rest after it (milliseconds), in ticks of 100 ms.
LOOPS = ((20, 2), (50, 10), (150, 20))


def main() -> None:
    """Print a line for each loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=2000)
    count = parser.parse_args().windows
    for length_ms, rest_ms in LOOPS:
        rng, now_ns, steps, spans = Random(1), EPOCH, [(EPOCH - 2 * S, 80.0)], []
        for _ in range(count):
            end_ns = now_ns + round(length_ms * MS * rng.uniform(0.95, 1.05))
            steps += [(now_ns, 400.0), (end_ns, 100.0)]
            spans.append((now_ns, end_ns))
            now_ns = end_ns + rest_ms * MS
        sensor = Sensor(Wave(tuple(steps)), 100 * MS, 3 * MS)
        series = read_at(sensor, range(EPOCH - S, now_ns + S, 5 * MS))
        marks = sorted(Mark(edge, begins=edge == span[0], name="step") for span in spans for edge in span)
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        for span in spans:
            window_record("step", *span, [account_window([series], *span, [], marks)])
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - begin_s
        print(f"{count} windows of {length_ms} ms, rests of {rest_ms} ms: {wall_s:.2f} s, CPU {cpu_s:.2f} s")


if __name__ == "__main__":
    main()
