# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of work with and without metering, while another process decodes continuously."""

from __future__ import annotations

import json
import math
import subprocess
import time
from dataclasses import dataclass
from statistics import fmean, stdev

from pytest_llenergy.energy import measure

from .part import Notebook, module_command

#: Seconds of a span with or without metering, and seconds left out after each switch.
SPAN_S, SWITCH_S = 0.8, 0.2


@dataclass(frozen=True)
class Ratio:
    """Speed with metering over that without: mean over pairs of spans, with its standard uncertainty."""

    value: float
    u: float
    pairs: int


def measure_ratio(notebook: Notebook, device: str, uuid: str, pairs: int) -> Ratio:
    """Alternate metering in an order in which drift cancels (ABBA), while a process decodes on ``device``."""
    command = module_command("decoder", device)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as decoder:
        assert decoder.stdin is not None
        assert decoder.stdout is not None
        try:
            started = json.loads(decoder.stdout.readline())
            notebook.find(f"metered work: {started['what']}")
            # The first steps of a process are slower than the rest.
            time.sleep(1.0)
            spans = [
                _span(uuid, metered=metered)
                for pair in range(pairs)
                for metered in ((True, False) if pair % 2 else (False, True))
            ]
            decoder.stdin.close()
            chunks: list[tuple[int, int]] = json.loads(decoder.stdout.readline())
        finally:
            decoder.kill()
    rates = [_rate(chunks, start_ns, end_ns) for _, start_ns, end_ns in spans]
    logs = []
    for place in range(0, len(spans), 2):
        (first, *_), on, off = spans[place], rates[place], rates[place + 1]
        logs.append(math.log(on / off) if first else math.log(off / on))
    return Ratio(math.exp(fmean(logs)), stdev(logs) / math.sqrt(len(logs)), len(logs))


def _span(uuid: str, *, metered: bool) -> tuple[bool, int, int]:
    """Return whether the span was metered, and its start and end (monotonic ns) without the switching."""
    if not metered:
        time.sleep(SWITCH_S)
        return False, *_wait()
    with measure([uuid], ("nvml",)) as energy, energy.window("span"):
        time.sleep(SWITCH_S)
        return True, *_wait()


def _wait() -> tuple[int, int]:
    start_ns = time.monotonic_ns()
    time.sleep(SPAN_S)
    return start_ns, time.monotonic_ns()


def _rate(chunks: list[tuple[int, int]], start_ns: int, end_ns: int) -> float:
    """Return the chunks per second among those that lie within the interval."""
    inside = [(start, end) for start, end in chunks if start >= start_ns and end <= end_ns]
    if len(inside) < 3:
        raise RuntimeError("too few chunks of work in a span: the work is too slow")
    return (len(inside) - 1) / ((inside[-1][0] - inside[0][0]) / 1e9)
