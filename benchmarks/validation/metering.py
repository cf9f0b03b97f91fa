# SPDX-License-Identifier: Apache-2.0
"""Part 2, the cost of metering: the speed of decoding with and without a measurement, in pairs.

Once in another process than the one that decodes, and once in the same, where the reader competes for the
interpreter with a loop that launches its kernels one by one.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean, stdev

from pytest_llenergy.energy import measure

from . import stand_in
from .part import Notebook, main, module_command, need_board, need_cuda, scratch
from .work import make_steps

BUDGET_S = 90.0

#: Pairs of spans with and without metering, in each process.
PAIRS, DRY_PAIRS = 12, 2

#: Seconds of a span with or without metering, and seconds left out after each switch.
SPAN_S, SWITCH_S = 0.8, 0.2

#: Smallest acceptable throughput with metering over that without.
MIN_RATIO = 0.997

#: Chunk of work between two looks at the clock (seconds).
CHUNK_S = 0.05

Span = tuple[bool, int, int]
Chunks = list[tuple[int, int]]


@dataclass(frozen=True)
class Ratio:
    """Speed with metering over that without: mean over pairs of spans, with its standard uncertainty."""

    value: float
    u: float
    of_pairs: tuple[float, ...]


def body(notebook: Notebook) -> None:
    """Measure the ratio of speeds in another process and in the same."""
    if notebook.dry:
        with scratch("metering") as directory, stand_in.board(directory) as uuid:
            _check(notebook, "in another process", lambda: measure_beside(notebook, "cpu", uuid, DRY_PAIRS))
            _check(notebook, "in the same process", lambda: measure_within(notebook, uuid, DRY_PAIRS))
        return
    need_cuda()
    uuid = need_board()
    _check(notebook, "in another process", lambda: measure_beside(notebook, "cuda:0", uuid, PAIRS))
    _check(notebook, "in the same process", lambda: measure_within(notebook, uuid, PAIRS))


def _check(notebook: Notebook, where: str, measure_ratio: Callable[[], Ratio]) -> None:
    what = f"speed of decoding {where} with metering over without, above {MIN_RATIO}"
    try:
        found = measure_ratio()
    except Exception as error:
        # Record a failed check so that the results so far are kept.
        notebook.check(what, False, f"{type(error).__name__}: {error}")
        return
    notebook.data[where] = {"ratio": found.value, "u": found.u, "of_pairs": list(found.of_pairs)}
    low, high = found.value - 2 * found.u, found.value + 2 * found.u
    known = True if low > MIN_RATIO else False if high < MIN_RATIO else None
    notebook.check(what, known, f"{found.value:.4f} ± {found.u:.4f} ({len(found.of_pairs)} pairs)")


def measure_beside(notebook: Notebook, device: str, uuid: str, pairs: int) -> Ratio:
    """Switch metering on and off while a process decodes on ``device``."""
    command = module_command("decoder", device, f"--chunk={CHUNK_S}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as decoder:
        assert decoder.stdin is not None
        assert decoder.stdout is not None
        try:
            started = json.loads(decoder.stdout.readline())
            notebook.find(f"metered work: {started['what']}")
            # The first steps of a process are slower than the rest.
            time.sleep(1.0)
            spans = _alternate(uuid, pairs, lambda until_s: time.sleep(until_s - time.monotonic()))
            decoder.stdin.close()
            chunks: Chunks = json.loads(decoder.stdout.readline())
        finally:
            decoder.kill()
    return _ratio(spans, chunks)


def measure_within(notebook: Notebook, uuid: str, pairs: int) -> Ratio:
    """Switch metering on and off in the process that decodes."""
    if notebook.dry:
        run = make_steps(notebook).run
        steps = 10
    else:
        from .decoder import Decoder

        decoder = Decoder("cuda:0", as_graph=False)
        notebook.find(f"metered work in the same process: {decoder.what}")
        run = decoder.run
        run(20)
        begin_s = time.monotonic()
        run(20)
        steps = max(1, round(20 * CHUNK_S / (time.monotonic() - begin_s)))
    chunks: Chunks = []

    def work(until_s: float) -> None:
        while time.monotonic() < until_s:
            start_ns = time.monotonic_ns()
            run(steps)
            chunks.append((start_ns, time.monotonic_ns()))

    work(time.monotonic() + 1.0)
    return _ratio(_alternate(uuid, pairs, work), chunks)


def _alternate(uuid: str, pairs: int, work: Callable[[float], None]) -> list[Span]:
    """Work in spans in an order that cancels drift (ABBA): metered or not, start and end (monotonic ns)."""
    spans = []
    for pair in range(pairs):
        for metered in (True, False) if pair % 2 else (False, True):
            meters = measure([uuid], ("nvml",)) if metered else None
            with meters or nullcontext(), meters.window("span") if meters else nullcontext():
                work(time.monotonic() + SWITCH_S)
                start_ns = time.monotonic_ns()
                work(time.monotonic() + SPAN_S)
                spans.append((metered, start_ns, time.monotonic_ns()))
    return spans


def _ratio(spans: list[Span], chunks: Chunks) -> Ratio:
    rates = [_rate(chunks, start_ns, end_ns) for _, start_ns, end_ns in spans]
    logs = []
    for place in range(0, len(spans), 2):
        (first, *_), on, off = spans[place], rates[place], rates[place + 1]
        logs.append(math.log(on / off) if first else math.log(off / on))
    return Ratio(math.exp(fmean(logs)), stdev(logs) / math.sqrt(len(logs)), tuple(map(math.exp, logs)))


def _rate(chunks: Chunks, start_ns: int, end_ns: int) -> float:
    """Return the chunks per second among those that lie within the interval."""
    inside = [(start, end) for start, end in chunks if start >= start_ns and end <= end_ns]
    if len(inside) < 3:
        raise RuntimeError("too few chunks of work in a span: the work is too slow")
    return (len(inside) - 1) / ((inside[-1][0] - inside[0][0]) / 1e9)


if __name__ == "__main__":
    sys.exit(main("metering", body, BUDGET_S))
