# SPDX-License-Identifier: Apache-2.0
"""``llenergy watch``: the power of this machine, until it is interrupted."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_llenergy.cli.run import METER_OPTIONS, domain_lines, format_seconds, open_selection
from pytest_llenergy.options.table import option_row

if TYPE_CHECKING:
    from pytest_llenergy.cli.console import Commands
    from pytest_llenergy.cli.running_total import RunningTotal

#: Shortest interval (seconds): a few ticks of common counters.
SHORTEST_S = 0.1

#: Characters of a domain that the line shows.
SHORT_NAME = 16

#: Go to the beginning of the line and erase it (ECMA-48).
ERASE = "\r\x1b[K"


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "watch",
        help="show the power of this machine as it changes",
        description="Show the watts of this machine and its joules since the start, in one line on a "
        "terminal, or a line for each interval elsewhere. Ctrl-C ends it with a summary.",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="time between two updates (default: 1)",
    )
    for name in METER_OPTIONS:
        option_row(name).add_argument(parser)
    parser.set_defaults(run=run)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_S <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: needs a number of seconds, {SHORTEST_S} or more")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show the power until SIGINT or SIGTERM comes, then the sums. Returns 0."""
    from pytest_llenergy.cli.running_total import RunningTotal
    from pytest_llenergy.energy.sampler import Sampler
    from pytest_llenergy.energy.timeouts import TICK_TIMEOUT_S
    from pytest_llenergy.energy.trace import NEIGHBOURS

    selection = open_selection(args, whole_host=True)
    # A handler must not take a lock, which the code that it interrupts may hold. Python writes to the pipe
    # whichever thread gets the signal.
    signalled, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Sampler(selection.meters) as sampler:
            sampler.await_ticks(0, TICK_TIMEOUT_S)
            totals = [RunningTotal(series) for series in sampler.series]
            start_ns = end_ns = time.monotonic_ns()
            stopped: list[int] = []
            while not stopped:
                rest_s = args.interval - (time.monotonic_ns() - end_ns) / 1e9
                stopped, _, _ = select.select([signalled], [], [], max(rest_s, 0.0))
                begin_ns, end_ns = end_ns, time.monotonic_ns()
                sampler.await_ticks(end_ns, TICK_TIMEOUT_S, NEIGHBOURS)
                powers = [total.add(begin_ns, end_ns) for total in totals]
                if not stopped:
                    _show(_line(totals, powers, (end_ns - start_ns) / 1e9), live=sys.stdout.isatty())
            if sys.stdout.isatty():
                print(ERASE, end="")
            for total in totals:
                for line in _sum_lines(total):
                    _show(line)
            for reason in selection.reasons:
                _show(f"not read: {reason}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(signalled)
        os.close(wake)
    return 0


def _sum_lines(total: RunningTotal) -> Iterator[str]:
    name = total.series.domain.name
    if total.measured_s:
        yield from domain_lines({name: total.sum()}, total.measured_s, [total.series])
    if total.missing_s:
        yield f"{name}: no joules in {format_seconds(total.missing_s)}: {total.reason}"


def _line(totals: Sequence[RunningTotal], powers: Sequence[float | None], elapsed_s: float) -> str:
    from pytest_llenergy.record.quantity import format_energy

    known = [power for power in powers if power is not None]
    watts = f"{sum(known):.1f} W" if len(known) == len(powers) else "- W"
    parts = [
        f"{each.series.domain.name[:SHORT_NAME]} {'-' if power is None else f'{power:.1f}'}"
        for each, power in zip(totals, powers, strict=True)
    ]
    kinds = "/".join(sorted({each.series.domain.kind for each in totals}))
    joules = format_energy(sum(each.energy_j for each in totals))
    return f"{watts}, {joules} in {format_seconds(elapsed_s)}, {kinds}: {', '.join(parts)}"


def _show(line: str, *, live: bool = False) -> None:
    """Print a line; ``live`` replaces the line of the terminal."""
    from pytest_llenergy.record.text import one_line

    text = one_line(line)
    if live:
        print(f"{ERASE}{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
    else:
        print(text, flush=True)
