# SPDX-License-Identifier: Apache-2.0
"""Show progress while a test waits or is measured: one line redrawn in place, or single lines.

Only the process that runs the tests shows progress, and only if it has the terminal to itself: workers of
pytest-xdist are silent, as is ``-q``. Both still show what a test waits for. No thread redraws the line,
since it would run during measured rounds.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, cast

import pytest

from pytest_llenergy import real_time
from pytest_llenergy.plugin.stash import is_worker
from pytest_llenergy.record.quantity import format_energy
from pytest_llenergy.record.text import one_line, short_test_name, shorten

if TYPE_CHECKING:
    from pytest_llenergy.measure.remaining_time import Step


#: How progress is shown.
DisplayMode: TypeAlias = Literal["silent", "lines", "live"]

#: Minimum width of the name of a test (characters).
MIN_NAME_WIDTH = 12

#: Time before the first line of the mode ``lines``, and between further ones.
FIRST_LINE_S, NEXT_LINE_S = 10.0, 30.0

#: Time for the terminal to draw a step before a quiet gap begins.
DRAWING_S = 0.05

#: Values of ``TERM`` for terminals that cannot move their cursor.
DUMB_TERMINALS = ("dumb", "unknown")


def describe_step(step: Step) -> str:
    """Describe a step of a measurement, such as ``round 3 of 6, 4.1 J so far, 5 s left``."""
    parts = [f"{step.stage} {step.number}"]
    if step.of is not None and step.number <= step.of:
        parts[0] += f" of {step.of}"
    elif step.stage == "round" and step.reached is not None:
        # An added round: rounds are added until the target or the budget is reached.
        parts[0] += f", u {step.reached:.1%} for {step.target:.1%}"
    if step.energy_j is not None:
        parts.append(f"{format_energy(step.energy_j)}{' (estimated)' if step.estimated else ''} so far")
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


class LiveLine:
    """A line below the terminal's last, redrawn in place and removed at the end.

    Args:
        write: Writes text to the terminal.
        column: Column of the cursor now, to which ``end`` returns it.
        color: Whether the terminal shows colors.
    """

    def __init__(self, write: Callable[[str], None], column: int, *, color: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        class CursorConsole(Console):
            def show_cursor(self, show: bool = True) -> bool:
                # A hidden cursor would stay hidden in the shell after a killed run.
                return False

        self._console = CursorConsole(
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

    def show(self, test: str, step: str, width: int) -> None:
        """Redraw the line with a test and its step; a long name is shortened in the middle."""
        from rich.cells import cell_len
        from rich.text import Text

        name, step = short_test_name(test), one_line(step)
        room = max(MIN_NAME_WIDTH, width - cell_len(step) - 2)
        if cell_len(name) > room:
            name = shorten(name, room * len(name) // cell_len(name))
        self._console.width = width
        line = Text.assemble((name, "cyan"), f": {step}", no_wrap=True, overflow="ellipsis", end="")
        self._live.update(line, refresh=True)

    def end(self) -> None:
        """Remove the line."""
        from rich.control import Control

        self._live.stop()
        if self._column:
            self._console.control(Control.move_to_column(self._column, -1))


class _Stream:
    """The methods of a text file that a console uses."""

    encoding = "utf-8"

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def write(self, text: str) -> int:
        self._write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""


class Progress:
    """Shows the progress of one test at a time, in the process that runs it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._in_worker = is_worker(config)
        self._mode = select_display_mode(config, self._reporter)
        self._line: LiveLine | None = None
        self._waiting_s = -math.inf

    @contextmanager
    def track(self, test: str) -> Iterator[Callable[[str], None]]:
        """Show progress while a test is prepared or measured; yields a function to call with each step."""
        start_s = real_time.monotonic()
        last_s = start_s + FIRST_LINE_S - NEXT_LINE_S
        shown = ""

        def show(step: str) -> None:
            nonlocal last_s, shown
            now_s = real_time.monotonic()
            if self._mode == "live":
                # A wait repeats its step, and redrawing would disturb another process that measures.
                if step != shown:
                    self._show(test, step)
                shown = step
            elif self._mode == "lines" and now_s >= last_s + NEXT_LINE_S:
                last_s = now_s
                elapsed = format_duration(now_s - start_s)
                self._print(f"energy: {short_test_name(test)}: {one_line(step)} ({elapsed} since it began)")

        try:
            yield show
        finally:
            self._end_line()

    @contextmanager
    def track_wait(self, test: str) -> Iterator[Callable[[str], None]]:
        """Show what a test waits for, even with ``-q``: a silent wait looks like a hang.

        Yields a function to call with who holds it, before anything is measured.
        """
        if self._mode == "live":
            with self.track(test) as show:
                yield show
            return
        start_s = real_time.monotonic()

        def say(step: str) -> None:
            now_s = real_time.monotonic()
            # Workers of pytest-xdist often wait for each other, which is no news.
            first_s = start_s if not self._in_worker else start_s + FIRST_LINE_S
            if now_s >= max(first_s, self._waiting_s + NEXT_LINE_S):
                self._waiting_s = now_s
                elapsed = format_duration(now_s - start_s)
                self._print(f"energy: {short_test_name(test)}: {one_line(step)} ({elapsed} so far)")

        # A new wait is shown at once, further lines of it as seldom as others; workers share the terminal.
        if not self._in_worker:
            self._waiting_s = -math.inf
        yield say

    def stop_live(self) -> None:
        """Stop redrawing, since a debugger writes to the terminal from now on."""
        self._line = None
        if self._mode == "live":
            self._mode = "lines"

    def _show(self, test: str, step: str) -> None:
        writer = self._reporter._tw
        # A closed terminal must not fail the test.
        with suppress(OSError, ValueError), self._uncaptured():
            if self._line is None:
                column = writer.width_of_current_line % writer.fullwidth
                self._line = LiveLine(self._write, column, color=writer.hasmarkup)
            self._line.show(test, step, writer.fullwidth)
        real_time.sleep(DRAWING_S)

    def _end_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with suppress(OSError, ValueError), self._uncaptured():
                line.end()

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError), self._uncaptured():
            if self._in_worker:
                # Its standard output is not shown; its standard error is that of the controller.
                sys.stderr.write(f"\n{line}\n")
                sys.stderr.flush()
            elif self._reporter is not None:
                self._reporter.write_line(line)
                self._reporter.flush()
        real_time.sleep(DRAWING_S)

    def _write(self, text: str) -> None:
        self._reporter.write_raw(text, flush=True)

    @contextmanager
    def _uncaptured(self) -> Iterator[None]:
        """Suspend pytest's capturing, as its own live logs do during a test."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        # Resumed capturing installs its own streams, but the test may have installed others.
        streams = sys.stdout, sys.stderr
        try:
            with nullcontext() if capture is None else capture.global_and_fixture_disabled():
                yield
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


def select_display_mode(config: pytest.Config, reporter: Any) -> DisplayMode:
    """Decide how a run shows progress.

    Returns:
        ``"silent"`` with ``-q`` and in workers of pytest-xdist, whose output is not shown. ``"live"`` on a
        terminal to which nothing else writes during a test: with pytest's own reporter, without live logs or
        ``--setup-show``, and with output captured at file descriptors. Otherwise ``"lines"``.
    """
    if reporter is None or is_worker(config) or config.get_verbosity() < 0:
        return "silent"
    others = (
        type(reporter).__module__ != "_pytest.terminal"
        or config.getoption("capture", "no") != "fd"
        or config.getoption("setupshow", False)
        or _logs_live(config)
    )
    can_move = bool(reporter.isatty) and os.environ.get("TERM", "dumb") not in DUMB_TERMINALS
    return "live" if can_move and not others else "lines"


def _logs_live(config: pytest.Config) -> bool:
    # Without the logging plugin its options do not exist.
    if not config.pluginmanager.has_plugin("logging-plugin"):
        return False
    return config.getoption("log_cli_level", None) is not None or bool(config.getini("log_cli"))
