# SPDX-License-Identifier: Apache-2.0
"""A server as a child of this process, with what it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_llenergy.errors import BackendError

if TYPE_CHECKING:
    import psutil

#: How long a server may take to end when it is told to, and then what it has left behind (seconds).
PATIENCE_S, REST_S = 3.0, 0.5

#: How much of its output is shown, in bytes and lines.
TAIL_BYTES, TAIL_LINES = 8192, 20


class ServerProcess:
    """Started with the environment of this process, and so with its devices. Its output goes to a file."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises ``BackendError`` when there is no such program."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        self._name = words[0]
        try:
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._output.close()
            raise BackendError(f"server: {words[0]} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """Of the command itself; the server may be a child of it."""
        return self._child.pid

    def pids(self) -> set[int]:
        """The command and all that it has started."""
        return {each.pid for each in self._family()}

    def died(self, within_s: float = 0.0) -> str | None:
        """How it ended and its last line; ``None`` while it runs, and has not ended ``within_s`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(within_s)
        status = self._child.returncode
        if status is None:
            return None
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self._name} ended with {how}: {self._last_line()}"

    def tail(self) -> list[str]:
        """The last lines of its output."""
        size = os.fstat(self._output.fileno()).st_size
        # Not read: the child writes where a read would leave the file's position.
        written = os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        lines = written.decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]

    def show(self) -> None:
        """Put the tail into the output of this rank, which failures are told with."""
        for line in self.tail():
            sys.stdout.write(f"{self._name}: {line}\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Tell it to end, then make sure of it and of all that it has started."""
        import psutil

        family = self._family()
        with suppress(ProcessLookupError):
            self._child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(family, 0)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(alive, REST_S if alive else 0)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        psutil.wait_procs(alive, REST_S)
        self._output.close()

    def _family(self) -> list[psutil.Process]:
        import psutil

        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _last_line(self) -> str:
        return (self.tail() or ["it has written nothing"])[-1].strip()
