# SPDX-License-Identifier: Apache-2.0
"""Is work slower while it is metered? Another process decodes without a pause; metering goes on and off."""

from __future__ import annotations

import json
import math
import subprocess
import time
from dataclasses import dataclass
from statistics import fmean, stdev

from pytest_llenergy.meters import measure

from .part import Notebook, module_command

#: Seconds of a span, metered or not, and of what is left out after each switch.
SPAN_S, SWITCH_S = 0.8, 0.2


@dataclass(frozen=True)
class Ratio:
    """Steps a second while metered over those while not: the mean over pairs of spans, and its u."""

    value: float
    u: float
    pairs: int


def ratio(notebook: Notebook, device: str, uuid: str, pairs: int) -> Ratio:
    """Alternate, in an order that drift cancels in (ABBA). The process decodes on ``device``."""
    command = module_command("decoder", device)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as decoder:
        assert decoder.stdin is not None
        assert decoder.stdout is not None
        try:
            told = json.loads(decoder.stdout.readline())
            notebook.find(f"metered work: {told['what']}")
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
    """Whether it was metered, and from when to when (monotonic ns), without the switching."""
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
    """Chunks a second among those that lie within."""
    inside = [(start, end) for start, end in chunks if start >= start_ns and end <= end_ns]
    if len(inside) < 3:
        raise RuntimeError("too few chunks of work in a span; the work is too slow for it")
    return (len(inside) - 1) / ((inside[-1][0] - inside[0][0]) / 1e9)
