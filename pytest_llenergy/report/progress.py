# SPDX-License-Identifier: Apache-2.0
"""A step of a measurement in words, and the one line of a terminal that shows the last of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, TYPE_CHECKING, cast

from pytest_llenergy.model.text import cut, one_line
from pytest_llenergy.report.names import short

if TYPE_CHECKING:
    # Every run that measures pays for what is imported here, and most show no line.
    from pytest_llenergy.measure.progress import Step

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

        name, what = short(test), one_line(what)
        room = max(LEAST_NAME, width - cell_len(what) - 2)
        if cell_len(name) > room:
            name = cut(name, room * len(name) // cell_len(name))
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
