# SPDX-License-Identifier: Apache-2.0
"""Progress lines shown while tests wait or run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, cast

import pytest

from pytest_llenergy.model.text import one_line, short_test_name, shorten

if TYPE_CHECKING:
    from pytest_llenergy.measure.remaining_time import Step


# A step of a measurement in words, and the one line of a terminal that shows the last of them.

#: Least room for the name of a test (characters).
LEAST_NAME = 12


def told(step: Step) -> str:
    """``round 3 of 6, 4.1 J so far, 5 s left``."""
    parts = [f"{step.stage} {step.number}"]
    if step.of is not None and step.number <= step.of:
        parts[0] += f" of {step.of}"
    elif step.stage == "round" and step.reached is not None:
        # Rounds are added until this is reached, or the time for it is over.
        parts[0] += f", u {step.reached:.1%} for {step.target:.1%}"
    if step.energy_j is not None:
        parts.append(f"{step.energy_j:.3g} J{' (estimated)' if step.estimated else ''} so far")
    if step.left_s is not None:
        parts.append(f"{span(step.left_s)} left")
    return ", ".join(parts)


def span(seconds: float) -> str:
    """``5 s``, ``2 min 5 s`` or ``1 h 2 min``, rounded."""
    whole = round(seconds)
    if whole < 60:
        return f"{max(1, whole)} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


class LiveLine:
    """One line below what a terminal shows, redrawn in place and gone at the end. ``write`` gets to it.

    Nothing is drawn between two calls: there is no thread, since that would run in the measured stretches.
    ``column`` is where the cursor stands now, and where it stands again after ``end``.
    """

    def __init__(self, write: Callable[[str], None], column: int, *, color: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        class LeavesCursor(Console):
            def show_cursor(self, show: bool = True) -> bool:
                # A run that is killed would leave the shell without one.
                return False

        self._console = LeavesCursor(
            file=cast("IO[str]", _Stream(write)),
            force_terminal=True,
            force_interactive=True,
            color_system="standard" if color else None,
            no_color=not color,
            highlight=False,
        )
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._column = column
        if column:
            write("\n")
        self._live.start()

    def show(self, test: str, what: str, width: int) -> None:
        """Draw a test and what it does in place of what was there; of a long name the middle is left out."""
        from rich.cells import cell_len
        from rich.text import Text

        name, what = short_test_name(test), one_line(what)
        room = max(LEAST_NAME, width - cell_len(what) - 2)
        if cell_len(name) > room:
            name = shorten(name, room * len(name) // cell_len(name))
        self._console.width = width
        line = Text.assemble((name, "cyan"), f": {what}", no_wrap=True, overflow="ellipsis", end="")
        self._live.update(line, refresh=True)

    def end(self) -> None:
        """Take it away."""
        from rich.control import Control

        self._live.stop()
        if self._column:
            self._console.control(Control.move_to_column(self._column, -1))


class _Stream:
    """As much of a file as a console needs."""

    encoding = "utf-8"

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def write(self, text: str) -> int:
        self._write(text)
        return len(text)

    def flush(self) -> None:
        """Done with every write."""


# What people see while they wait for a test: a line that changes in place, or a line now and then.
#
# Only the process that runs the tests shows anything, and only if it has the terminal to itself: workers of
# pytest-xdist are silent.

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
                self._print(f"energy: {short_test_name(test)}: {one_line(step)} ({spent} since it began)")

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
