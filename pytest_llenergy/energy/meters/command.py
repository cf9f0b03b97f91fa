# SPDX-License-Identifier: Apache-2.0
"""An external power meter: a program that prints watts, one number a line.

``--energy-meter='command:PROGRAM ARGS'``, with ``@2%`` at the end if its accuracy is known, ``@3000W`` for
its highest power and ``@sum=4`` if it prints a line for each of four sensors. Each number is the mean power
from the previous one to the moment at which it arrives.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO

from pytest_llenergy import real_time
from pytest_llenergy.energy.meters.base import Domain, MeterSpec, Stated, Targets, parse_stated
from pytest_llenergy.energy.timeouts import FIRST_LINE_TIMEOUT_S, MIN_SILENCE_S, PROGRAM_END_TIMEOUT_S
from pytest_llenergy.errors import MeterError
from pytest_llenergy.lifetime import die_with_parent

#: A program counts as silent after this many of its usual intervals without a line.
SILENT_INTERVALS = 5
#: Latest intervals that show the usual one.
REMEMBERED_INTERVALS = 50

#: Lines are of several sensors if the lower quartile of their intervals is below this share of the mean.
TOGETHER_SHARE = 0.3

#: A longer pause than this share of the usual interval ends the lines that several sensors print together, or
#: than this time, until the interval is known (seconds).
PAUSE_SHARE, PAUSE_S = 0.5, 0.1

#: Lines within this time after the first one (seconds), up to so many, show whether several come at a moment.
WATCHED_S, FIRST_LINES = 0.5, 500

#: Largest part of the output to read at once.
CHUNK_BYTES = 1 << 16


class CommandMeter:
    """Run a program until the meter is closed. A thread reads the lines of its output as they arrive."""

    name = "command"
    poll_period_s: float = 0.01
    #: A late reading of the meter misses no line.
    integrates_itself: bool = True

    def __init__(self, command: str, stated: Stated, first_line_s: float = FIRST_LINE_TIMEOUT_S) -> None:
        """Start the program, and wait for its first lines.

        Raises:
            MeterError: If it cannot be started, ends, prints no number in time, or several at a moment
                although no sum is stated.
        """
        arguments = _split(command)
        self._program = Path(arguments[0]).name
        self._stated = stated
        #: Lines of a moment that has more sensors, how many it had, and when the latest came.
        self._moment: list[float] = []
        self._lines = 0
        self._line_s = 0.0
        #: When the first lines came.
        self._arrivals: list[float] = []
        self._intervals: deque[float] = deque(maxlen=REMEMBERED_INTERVALS)
        self._last_s: float | None = None
        self._energy_j = 0.0
        self._reason: str | None = None
        #: Why a value was left out since the last reading.
        self._left_out: str | None = None
        self._closing = False
        self._changed = threading.Condition()
        # A file instead of a pipe, so that a program with much error output does not block.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the meter
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            self._stderr.close()
            raise MeterError(f"command: {self._program} cannot be started ({error.strerror})") from None
        self._thread = threading.Thread(target=self._read_lines, name="llenergy-command", daemon=True)
        self._thread.start()
        self._wait_for_lines(first_line_s)
        self.domains: tuple[Domain] = (
            Domain(
                name=f"external:{self._program}",
                kind="measured",
                source=f"watts printed by: {self._program}",
                scope="external: whatever the meter is plugged into",
                # Integrated joules have no step; the resolution of the watts is unknown.
                resolution_j=0.0,
                accuracy=stated.accuracy.words,
                limits=stated.accuracy.limits,
                covers_others=True,
                integrated=True,
                highest_w=stated.highest_w,
                flags=stated.accuracy.flags,
            ),
        )

    def _wait_for_lines(self, first_line_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._reason or self._last_s is not None, first_line_s)
            if self._last_s is None:
                self._fail(
                    f"printed no line within {first_line_s:g} s; "
                    f"it must flush each one (try: stdbuf -oL {self._program})"
                )
            elif not self._stated.sensors:
                self._changed.wait_for(lambda: self._reason, WATCHED_S)
                self._check_first_lines()
            reason = self._reason or (None if self._energy_j else self._left_out)
        if reason:
            self.close()
            raise MeterError(reason)

    def _check_first_lines(self) -> None:
        """Refuse a program whose lines come several at a moment, since nothing tells whether to add them."""
        gaps_s = [after_s - before_s for before_s, after_s in pairwise(self._arrivals)]
        silent_s = real_time.monotonic() - self._arrivals[-1]
        # The gap that goes on counts if it is the longest one already.
        gaps_s = sorted([*gaps_s, silent_s] if silent_s > max(gaps_s, default=0.0) else gaps_s)
        # A busy machine reads some lines late, with the next ones, but not as many.
        if gaps_s[len(gaps_s) // 4] < TOGETHER_SHARE * statistics.fmean(gaps_s):
            self._fail(
                "prints several lines at a moment; if they are of N sensors, write @sum=N behind it to add "
                "them; if they are of one, it must flush each line, or state @sum=1"
            )

    def _read_lines(self) -> None:
        assert isinstance(self._process.stdout, io.BufferedReader)
        # In the end, half a number that was cut off.
        rest = b""
        while chunk := self._process.stdout.read1(CHUNK_BYTES):
            # Of all lines that have arrived, however long a busy machine then takes for each.
            now_s = real_time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                watts = _parse_watts(line)
                with self._changed:
                    if watts is None:
                        shown = line.decode(errors="replace").rstrip()
                        self._fail(f"printed {shown!r}, which is not a number of watts")
                        return
                    self._take(now_s, watts)
                    self._changed.notify()
        self._note_end()

    def _take(self, now_s: float, watts: float) -> None:
        """Take a line. Those of several sensors, if the user has stated so, are added to one value."""
        if len(self._arrivals) < FIRST_LINES:
            self._arrivals.append(now_s)
        self._end_moment(now_s)
        self._line_s = now_s
        self._lines += 1
        self._moment.append(watts)
        if len(self._moment) < max(1, self._stated.sensors):
            return
        watts = sum(self._moment)
        self._moment.clear()
        if watts > self._stated.highest_w:
            self._left_out = (
                f"command: {self._program} printed {watts:.0f} W, more than {self._stated.highest_w:g} W; "
                f"write @{math.ceil(watts)}W behind it if that is possible"
            )
            watts = 0.0
        self._add(now_s, watts)

    def _end_moment(self, now_s: float) -> None:
        """Leave out lines of several sensors that are too few or too many, as after one has failed."""
        pause_s = PAUSE_SHARE * statistics.median(self._intervals) if self._intervals else PAUSE_S
        if now_s - self._line_s <= pause_s:
            return
        if self._stated.sensors > 1 and self._lines not in (0, self._stated.sensors):
            self._left_out = f"command: {self._program} {self._wrong_number(self._lines)}"
            if self._moment:
                self._moment.clear()
                self._add(self._line_s, 0.0)
        self._lines = 0

    def _wrong_number(self, lines: int) -> str:
        sensors = self._stated.sensors
        return (
            f"printed {lines} line{'s' * (lines != 1)} at a moment, and @sum={sensors} needs {sensors}; "
            "state how many sensors it has, and let it print their lines together"
        )

    def _add(self, now_s: float, watts: float) -> None:
        """Add a value: the mean power since the previous one."""
        if self._last_s is not None:
            self._intervals.append(now_s - self._last_s)
            self._energy_j += watts * (now_s - self._last_s)
        self._last_s = now_s

    def _fail(self, what: str) -> None:
        self._reason = self._reason or f"command: {self._program} {what}"
        self._changed.notify()

    def _note_end(self) -> None:
        """Record why the output has ended, unless the meter is being closed."""
        if self._closing:
            return
        try:
            status = self._process.wait(PROGRAM_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            what = "closed its output"
        else:
            self._signal(signal.SIGKILL)
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
            error_line = self._last_error_line()
            what = f"ended {how}" + (f": {error_line}" if error_line else "")
        with self._changed:
            self._fail(what)

    def _last_error_line(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def read(self) -> list[float | str]:
        with self._changed:
            assert self._last_s is not None
            now_s = real_time.monotonic()
            self._end_moment(now_s)
            silent_s = now_s - self._last_s
            if self._reason is None and silent_s > self._longest_silence_s():
                return [f"command: {self._program} has printed nothing for {silent_s:.1f} s"]
            too_high, self._left_out = self._left_out, None
            return [self._reason or too_high or self._energy_j]

    def _longest_silence_s(self) -> float:
        if not self._intervals:
            return FIRST_LINE_TIMEOUT_S
        return max(MIN_SILENCE_S, SILENT_INTERVALS * statistics.median(self._intervals))

    def close(self) -> None:
        """End the program and everything in its session."""
        self._closing = True
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PROGRAM_END_TIMEOUT_S)
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._thread.join(PROGRAM_END_TIMEOUT_S)
        if self._process.stdout is not None and not self._thread.is_alive():
            self._process.stdout.close()
        self._stderr.close()

    def _signal(self, number: signal.Signals) -> None:
        # The process group outlives its leader. Its number is reused once all processes are gone, so this is
        # called before the leader is reaped, or right after.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _split(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise MeterError(f"command: {command!r} is not a command line ({error})") from None
    if not arguments:
        raise MeterError("command: no program; write --energy-meter='command:PROGRAM ARGS'")
    return arguments


def _parse_watts(line: bytes) -> float | None:
    try:
        watts = float(line)
    except ValueError:
        return None
    return watts if math.isfinite(watts) and watts >= 0 else None


def open_command(_targets: Targets, argument: str) -> list[CommandMeter]:
    """Start the program. It may measure CPUs and GPUs alike.

    Raises:
        MeterError: If the program cannot be started, ends, prints anything but numbers, or prints nothing for
            five seconds.
    """
    return [CommandMeter(*parse_stated(argument, "the program"))]


def check_argument(argument: str) -> None:
    """Check that the program exists, without starting it. Raises ``MeterError``."""
    program, *_ = _split(parse_stated(argument, "the program")[0])
    if shutil.which(program) is None:
        problem = "is not an executable file" if os.sep in program else "is not a program on PATH"
        raise MeterError(f"command: {program!r} {problem}; install it, or write its whole path")


SPEC = MeterSpec(
    name="command",
    kind="measured",
    open=open_command,
    takes_argument=True,
    by_default=False,
    check=check_argument,
)
