# SPDX-License-Identifier: Apache-2.0
"""What people see while they wait for a test: a line that changes in place, or a line now and then.

Only the process that runs the tests shows anything, and only if it has the terminal to itself: workers of
pytest-xdist are silent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, TypeAlias

import pytest

from pytest_llenergy.model.text import one_line
from pytest_llenergy.report.names import short
from pytest_llenergy.report.progress import LiveLine, span

Way: TypeAlias = Literal["silent", "lines", "live"]

#: Lines that stay are told only of work that takes longer, and no more often than this (seconds).
FIRST_LINE_S, NEXT_LINE_S = 10.0, 30.0

#: After a step is told the terminal may draw it, before a quiet gap begins (seconds).
DRAWN_S = 0.05

#: Terminals that cannot move their cursor.
DUMB = ("dumb", "unknown")


class Progress:
    """One a process; shows one test at a time."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._way = way_of(config, self._reporter)
        self._line: LiveLine | None = None

    @contextmanager
    def of(self, test: str) -> Iterator[Callable[[str], None]]:
        """While a test is prepared or measured. What is given is called with each step as it begins."""
        began_s = time.monotonic()
        last_s = began_s + FIRST_LINE_S - NEXT_LINE_S
        shown = ""

        def tell(step: str) -> None:
            nonlocal last_s, shown
            now_s = time.monotonic()
            if self._way == "live":
                # Who waits may be told the same again and again, beside a test that is measured.
                if step != shown:
                    self._show(test, step)
                shown = step
            elif self._way == "lines" and now_s >= last_s + NEXT_LINE_S:
                last_s = now_s
                spent = span(now_s - began_s)
                self._print(f"energy: {short(test)}: {one_line(step)} ({spent} since it began)")

        try:
            yield tell
        finally:
            self._take_away()

    def leave(self) -> None:
        """A debugger writes to the terminal from now on: nothing is redrawn any more."""
        self._line = None
        if self._way == "live":
            self._way = "lines"

    def _show(self, test: str, step: str) -> None:
        writer = self._reporter._tw
        # One that has gone must not end the test.
        with suppress(OSError, ValueError), self._uncaptured():
            if self._line is None:
                at, width = writer.width_of_current_line, writer.fullwidth
                self._line = LiveLine(self._write, at if at < width else at % width, color=writer.hasmarkup)
            self._line.show(test, step, writer.fullwidth)
        time.sleep(DRAWN_S)

    def _take_away(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with suppress(OSError, ValueError), self._uncaptured():
                line.end()

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError), self._uncaptured():
            self._reporter.write_line(line)
            self._reporter.flush()
        time.sleep(DRAWN_S)

    def _write(self, text: str) -> None:
        self._reporter.write_raw(text, flush=True)

    @contextmanager
    def _uncaptured(self) -> Iterator[None]:
        """The way to the terminal that pytest's own live logs take during a test."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        # Capturing begins anew with streams of its own, and the test may have put others there.
        streams = sys.stdout, sys.stderr
        try:
            with nullcontext() if capture is None else capture.global_and_fixture_disabled():
                yield
        finally:
            sys.stdout, sys.stderr = streams


def way_of(config: pytest.Config, reporter: Any) -> Way:
    """How progress is shown in a run.

    Live on a terminal where nobody else writes during a test. That is so with pytest's own reporter, without
    live logs or fixtures shown, and as long as pytest captures what comes from file descriptors. With ``-q``,
    and in workers of xdist, which have no reporter, nothing is shown.
    """
    if reporter is None or config.get_verbosity() < 0:
        return "silent"
    others = (
        type(reporter).__module__ != "_pytest.terminal"
        or config.getoption("capture", "no") != "fd"
        or config.getoption("setupshow", False)
        or _logs_live(config)
    )
    can_move = bool(reporter.isatty) and os.environ.get("TERM", "dumb") not in DUMB
    return "live" if can_move and not others else "lines"


def _logs_live(config: pytest.Config) -> bool:
    # It has no such options where logging is switched off.
    if not config.pluginmanager.has_plugin("logging-plugin"):
        return False
    return config.getoption("log_cli_level", None) is not None or bool(config.getini("log_cli"))
