# SPDX-License-Identifier: Apache-2.0
"""Record a pytest run on a pseudo-terminal: what it wrote, when, and what the screen then showed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyte

#: Variables that would override the terminal's width and colours, or belong to this machine only.
DECIDING = ("COLUMNS", "LINES", "NO_COLOR", "CI", "COLORTERM", "PYTEST_ADDOPTS", "GITHUB_ACTIONS")

#: Longest pause shown, and how long the last picture stays (seconds).
LONGEST_S, LAST_S = 0.8, 8.0

#: Changes within this time form one picture (seconds).
FRAME_S = 0.08

#: Time between two keys (seconds).
TYPING_S = 0.05


@dataclass(frozen=True)
class Stretch:
    """Characters of one colour and weight, from a column on."""

    column: int
    text: str
    color: str
    bold: bool


@dataclass(frozen=True)
class Frame:
    """The screen from a moment on, as stretches per row."""

    at_s: float
    rows: tuple[tuple[Stretch, ...], ...]


@dataclass
class Recording:
    """Written text with its time, in seconds after pauses are shortened."""

    title: str
    columns: int
    rows: int
    events: list[tuple[float, str]] = field(default_factory=list)

    def add(self, after_s: float, text: str) -> None:
        """Add text written after a pause."""
        last_s = self.events[-1][0] if self.events else 0.0
        self.events.append((round(last_s + min(after_s, LONGEST_S), 3), text))

    @property
    def length_s(self) -> float:
        """Length with time to read the end (seconds)."""
        return self.events[-1][0] + LAST_S

    def cast(self) -> str:
        """Return an asciinema file, version 2."""
        header: dict[str, Any] = {"version": 2, "width": self.columns, "height": self.rows}
        header |= {"title": self.title, "env": {"TERM": "xterm-256color"}}
        lines: list[Any] = [header, *([at, "o", text] for at, text in self.events)]
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)

    @classmethod
    def read(cls, text: str) -> Recording:
        """Read an asciinema file."""
        header, *events = (json.loads(line) for line in text.splitlines())
        made = cls(header["title"], header["width"], header["height"])
        made.events = [(at_s, written) for at_s, _, written in events]
        return made

    def frames(self) -> list[Frame]:
        """Return the screen after each change, as a terminal emulator draws it."""
        screen = pyte.Screen(self.columns, self.rows)
        stream, found = pyte.Stream(screen), list[Frame]()
        for number, (at_s, text) in enumerate(self.events):
            stream.feed(text)
            following = self.events[number + 1 : number + 2]
            if following and following[0][0] - at_s < FRAME_S:
                continue
            frame = Frame(at_s, tuple(_row(screen, row) for row in range(self.rows)))
            if not found or found[-1].rows != frame.rows:
                found.append(frame)
        return found


def record(command: str, project: Path, *, columns: int, rows: int) -> Recording:
    """Record a command in a copy of a project."""
    recording = Recording(command, columns, rows)
    recording.add(0.0, "\x1b[32m$\x1b[0m ")
    for key in command:
        recording.add(TYPING_S, key)
    recording.add(0.4, "\r\n")
    with tempfile.TemporaryDirectory() as place:
        for path in project.iterdir():
            if path.is_file():
                (Path(place) / path.name).write_bytes(path.read_bytes())
        # Leases of other runs must not delay the recording.
        with tempfile.TemporaryDirectory() as locks:
            environment = {"LLENERGY_LOCK_DIR": locks, "OMP_NUM_THREADS": "1"}
            _run(recording, [sys.executable, "-m", *command.split()], Path(place), environment)
    recording.add(0.1, "\x1b[32m$\x1b[0m ")
    return recording


def _run(recording: Recording, arguments: Sequence[str], place: Path, environment: Mapping[str, str]) -> None:
    own = {name: value for name, value in os.environ.items() if name not in DECIDING}
    own |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    master, slave = pty.openpty()
    size = struct.pack("HHHH", recording.rows, recording.columns, 0, 0)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
    process = subprocess.Popen(
        arguments, cwd=place, stdin=slave, stdout=slave, stderr=slave, env=own, start_new_session=True
    )
    os.close(slave)
    last_s, rest = time.monotonic(), b""
    while True:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:
            # Linux raises this when the other side is closed.
            chunk = b""
        if not chunk:
            break
        rest += chunk
        try:
            text, rest = rest.decode(), b""
        except UnicodeDecodeError:
            continue
        now_s = time.monotonic()
        # Do not publish the temporary directory.
        recording.add(now_s - last_s, text.replace(str(place), "/home/you/project"))
        last_s = now_s
    os.close(master)
    if process.wait() != 0:
        raise SystemExit(f"the recorded run ended with {process.returncode}\n{recording.cast()}")


def _row(screen: pyte.Screen, number: int) -> tuple[Stretch, ...]:
    runs: list[Stretch] = []
    for column in range(screen.columns):
        char = screen.buffer[number][column]
        look = Stretch(column, char.data, char.fg, char.bold)
        last = runs[-1] if runs else None
        if last is not None and (last.color, last.bold) == (look.color, look.bold):
            runs[-1] = replace(last, text=last.text + char.data)
        else:
            runs.append(look)
    if runs:
        runs[-1] = replace(runs[-1], text=runs[-1].text.rstrip())
    return tuple(run for run in runs if run.text.strip())
