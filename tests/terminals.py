# SPDX-License-Identifier: Apache-2.0
"""A run as a person sees it: on a pseudo-terminal, what it writes drawn by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyte

#: What would decide about width and colours in place of the terminal.
DECIDING = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CI", "BUILD_NUMBER", "COLORTERM")


@dataclass
class Seen:
    """``frames`` are the screens one after the other, ``raw`` is all that was written."""

    frames: list[list[str]] = field(default_factory=list)
    raw: str = ""
    code: int = -1

    @property
    def screen(self) -> list[str]:
        """What is there in the end, without what is empty at its end."""
        last = list(self.frames[-1])
        while last and not last[-1]:
            last.pop()
        return last

    def ever(self, text: str) -> bool:
        """Whether a line with this text was there at some moment."""
        return any(text in line for frame in self.frames for line in frame)


def pytest_on_terminal(
    *arguments: str,
    columns: int = 80,
    rows: int = 60,
    environment: Mapping[str, str] | None = None,
    answers: Sequence[tuple[str, str]] = (),
) -> Seen:
    """Run pytest here on a terminal of that size. Each of ``answers`` is typed once its prompt is there."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    own = {name: value for name, value in os.environ.items() if name not in DECIDING}
    own |= {"TERM": "xterm-256color", **(environment or {})}
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=own, start_new_session=True
    )
    os.close(slave)
    try:
        return _watched(process, master, pyte.Screen(columns, rows), list(answers))
    finally:
        os.close(master)
        process.kill()
        process.wait()


def _watched(
    process: subprocess.Popen[bytes], master: int, screen: pyte.Screen, answers: list[tuple[str, str]]
) -> Seen:
    seen, stream = Seen(), pyte.ByteStream(screen)
    while True:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:
            # Linux says so when nobody has the other side any more.
            chunk = b""
        if not chunk:
            seen.code = process.wait(60)
            return seen
        stream.feed(chunk)
        seen.raw += chunk.decode(errors="replace")
        seen.frames.append([line.rstrip() for line in screen.display])
        if answers and answers[0][0] in seen.raw:
            os.write(master, answers.pop(0)[1].encode())
