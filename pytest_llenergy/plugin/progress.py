# SPDX-License-Identifier: Apache-2.0
"""Show progress while a test waits or is measured: a line now and then.

Only the process that runs the tests shows progress. With ``-q``, and in workers of pytest-xdist, that is only
what a test waits for: a silent wait looks like a hang. No thread prints, since it would run during measured
rounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llenergy import real_time
from pytest_llenergy.plugin.stash import is_worker
from pytest_llenergy.record.text import one_line, short_test_name

if TYPE_CHECKING:
    from pytest_llenergy.measure.round_plan import Step

#: Time before the first line of a test, and between further ones.
FIRST_LINE_S, NEXT_LINE_S = 10.0, 30.0

#: Time for the terminal to show a line before a quiet gap begins.
SHOWING_S = 0.05


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
        self._is_quiet = self._in_worker or config.get_verbosity() < 0
        self._said_s = -math.inf

    def track(self, test: str, *, waits: bool = False) -> Callable[[str], None]:
        """Return a function to call with each step of a test, which is measured or ``waits``."""
        start_s = real_time.monotonic()
        # A wait of the only process is shown at once.
        first_s = start_s + (0.0 if waits and not self._in_worker else FIRST_LINE_S)
        if not self._in_worker:
            self._said_s = -math.inf

        def show(step: str) -> None:
            now_s = real_time.monotonic()
            if (waits or not self._is_quiet) and now_s >= max(first_s, self._said_s + NEXT_LINE_S):
                self._said_s = now_s
                elapsed = f"{format_duration(now_s - start_s)} {'so far' if waits else 'since it began'}"
                self._print(f"energy: {short_test_name(test)}: {one_line(step)} ({elapsed})")
                real_time.sleep(SHOWING_S)

        return show

    def _print(self, line: str) -> None:
        """Print while pytest's capturing is suspended, as its own live logs do during a test."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        # Resumed capturing installs its own streams, but the test may have installed others.
        streams = sys.stdout, sys.stderr
        try:
            # A closed terminal must not fail the test.
            shown = nullcontext() if capture is None else capture.global_and_fixture_disabled()
            with suppress(OSError, ValueError), shown:
                if self._in_worker:
                    # Its standard output is not shown; its standard error is that of the controller.
                    sys.stderr.write(f"\n{line}\n")
                elif self._reporter is not None:
                    self._reporter.write_line(line, flush=True)
        finally:
            sys.stdout, sys.stderr = streams


PROGRESS = pytest.StashKey[Progress]()


def progress_of(config: pytest.Config) -> Progress:
    """Return the progress display of this process, created on first use."""
    if PROGRESS not in config.stash:
        config.stash[PROGRESS] = Progress(config)
    return config.stash[PROGRESS]
