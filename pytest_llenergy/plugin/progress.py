# SPDX-License-Identifier: Apache-2.0
"""Show progress while a test waits or is measured: one line redrawn in place, or a line now and then.

Only the process that runs the tests shows progress. With ``-q``, and in workers of pytest-xdist, that is only
what a test waits for: a silent wait looks like a hang. No thread redraws the line, since it would run during
measured rounds.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy import real_time
from pytest_llenergy.plugin.stash import is_worker
from pytest_llenergy.record.text import one_line, short_test_name, shorten

if TYPE_CHECKING:
    from pytest_llenergy.measure.round_plan import Step

#: Time before the first line of a test, and between further ones, where no line is redrawn.
FIRST_LINE_S, NEXT_LINE_S = 10.0, 30.0

#: Time for the terminal to draw a step before a quiet gap begins.
DRAWING_S = 0.05


def describe_step(step: Step) -> str:
    """Describe a step of a measurement, such as ``round 3 of 6, 5 s left``."""
    parts = [f"{step.stage} {step.number}"]
    if step.of is not None and step.number <= step.of:
        parts[0] += f" of {step.of}"
    elif step.stage == "round" and step.reached is not None:
        # An added round: rounds are added until the target or the budget is reached.
        parts[0] += f", u {step.reached:.1%} for {step.target:.1%}"
    if step.left_s is not None:
        parts.append(f"{format_duration(step.left_s)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Format a rounded duration, such as ``5 s``, ``2 min 5 s`` or ``1 h 2 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{max(1, whole)} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


class Progress:
    """Shows the progress of one test at a time, in the process that runs it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._in_worker = is_worker(config)
        self._is_quiet = self._in_worker or self._reporter is None or config.get_verbosity() < 0
        self._is_live = not self._is_quiet and can_redraw(config, self._reporter)
        #: Column at which pytest's own line goes on; None while no line is drawn below it.
        self._column: int | None = None
        self._said_s = -math.inf

    @contextmanager
    def track(self, test: str, *, waits: bool = False) -> Iterator[Callable[[str], None]]:
        """Show progress while a test is prepared or measured, or ``waits`` before it.

        Yields a function to call with each step.
        """
        start_s, shown = real_time.monotonic(), ""
        # A wait of the only process is shown at once.
        first_s = start_s + (0.0 if waits and not self._in_worker else FIRST_LINE_S)

        def show(step: str) -> None:
            nonlocal shown
            now_s, step = real_time.monotonic(), one_line(step)
            if self._is_live:
                # A wait repeats its step, and redrawing would disturb another process that measures.
                if step != shown:
                    self._draw(short_test_name(test), step)
                    real_time.sleep(DRAWING_S)
                shown = step
            elif (waits or not self._is_quiet) and now_s >= max(first_s, self._said_s + NEXT_LINE_S):
                self._said_s = now_s
                elapsed = f"{format_duration(now_s - start_s)} {'so far' if waits else 'since it began'}"
                self._print(f"energy: {short_test_name(test)}: {step} ({elapsed})")
                real_time.sleep(DRAWING_S)

        if not self._in_worker:
            self._said_s = -math.inf
        try:
            yield show
        finally:
            if self._column is not None:
                column, self._column = self._column, None
                # Back to where pytest's own line ended.
                self._write(f"\r\x1b[K\x1b[A\x1b[{column}C" if column else "\r\x1b[K")

    def stop_live(self) -> None:
        """Stop redrawing, since a debugger writes to the terminal from now on."""
        self._column, self._is_live = None, False

    def _draw(self, name: str, step: str) -> None:
        """Draw the line below pytest's own; a long name is shortened in the middle."""
        from rich.cells import cell_len, set_cell_size

        writer = self._reporter._tw
        width, start = writer.fullwidth, "\r\x1b[K"
        if self._column is None:
            self._column = writer.width_of_current_line % width
            # At the end of a full line, the terminal itself begins the next one.
            start = "\n" if self._column else ""
        room = max(12, width - cell_len(step) - 3)
        if cell_len(name) > room:
            name = shorten(name, room * len(name) // cell_len(name))
        line = f"{name}: {step}"
        self._write(start + (line if cell_len(line) < width else set_cell_size(line, width - 1)))

    def _print(self, line: str) -> None:
        if self._in_worker:
            # Its standard output is not shown; its standard error is that of the controller.
            self._show(lambda: sys.stderr.write(f"\n{line}\n"))
        elif self._reporter is not None:
            self._show(lambda: self._reporter.write_line(line, flush=True))

    def _write(self, text: str) -> None:
        self._show(lambda: self._reporter.write_raw(text, flush=True))

    def _show(self, write: Callable[[], object]) -> None:
        """Write while pytest's capturing is suspended, as its own live logs do during a test."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        # Resumed capturing installs its own streams, but the test may have installed others.
        streams = sys.stdout, sys.stderr
        try:
            # A closed terminal must not fail the test.
            shown = nullcontext() if capture is None else capture.global_and_fixture_disabled()
            with suppress(OSError, ValueError), shown:
                write()
        finally:
            sys.stdout, sys.stderr = streams


PROGRESS = pytest.StashKey[Progress]()


def progress_of(config: pytest.Config) -> Progress:
    """Return the progress display of this process, created on first use."""
    if PROGRESS not in config.stash:
        config.stash[PROGRESS] = Progress(config)
    return config.stash[PROGRESS]


def stop_live_progress(config: pytest.Config) -> None:
    """Stop redrawing the line if this run shows one."""
    if PROGRESS in config.stash:
        config.stash[PROGRESS].stop_live()


def can_redraw(config: pytest.Config, reporter: Any) -> bool:
    """Whether a line can be redrawn: on a terminal to which nothing else writes during a test."""
    logs_live = config.pluginmanager.has_plugin("logging-plugin") and (
        config.getoption("log_cli_level", None) is not None or config.getini("log_cli")
    )
    is_shared = config.getoption("capture", "no") != "fd" or config.getoption("setupshow", False) or logs_live
    own = type(reporter).__module__ == "_pytest.terminal" and bool(reporter.isatty)
    return own and not is_shared and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
