# SPDX-License-Identifier: Apache-2.0
"""Run pytest on a pseudo-terminal and record its screens with a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyte

#: Environment variables that would override the terminal's width and colours.
OVERRIDES = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CI", "BUILD_NUMBER", "COLORTERM")


@dataclass
class TerminalOutput:
    """The output of a run: ``frames`` are the successive screens, ``raw`` is all that was written."""

    frames: list[list[str]] = field(default_factory=list)
    raw: str = ""
    code: int = -1

    @property
    def screen(self) -> list[str]:
        """The last screen without trailing empty lines."""
        last = list(self.frames[-1])
        while last and not last[-1]:
            last.pop()
        return last

    def showed(self, text: str) -> bool:
        """Return whether any line of any screen contained this text."""
        return any(text in line for frame in self.frames for line in frame)


def pytest_on_terminal(
    *arguments: str,
    columns: int = 80,
    rows: int = 60,
    environment: Mapping[str, str] | None = None,
    answers: Sequence[tuple[str, str]] = (),
) -> TerminalOutput:
    """Run pytest on a terminal of this size; ``answers`` are pairs of a prompt and the text to type at it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    variables = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
    variables |= {"TERM": "xterm-256color", **(environment or {})}
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=variables, start_new_session=True
    )
    os.close(slave)
    try:
        return _record_screens(process, master, pyte.Screen(columns, rows), list(answers))
    finally:
        os.close(master)
        process.kill()
        process.wait()


def _record_screens(
    process: subprocess.Popen[bytes], master: int, screen: pyte.Screen, answers: list[tuple[str, str]]
) -> TerminalOutput:
    output, stream = TerminalOutput(), pyte.ByteStream(screen)
    while True:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:
            # Linux raises an error once the other end is closed.
            chunk = b""
        if not chunk:
            output.code = process.wait(60)
            return output
        output.raw += chunk.decode(errors="replace")
        # On a busy machine one chunk has several screens: each begins with what erases a line.
        for part in re.split(rb"(?=\x1b\[2K)", chunk):
            stream.feed(part)
            output.frames.append([line.rstrip() for line in screen.display])
        if answers and answers[0][0] in output.raw:
            os.write(master, answers.pop(0)[1].encode())
