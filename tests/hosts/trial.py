# SPDX-License-Identifier: Apache-2.0
"""An object for tests: it answers calls in a real agent and does what agents must survive."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import DeviceError, MeterError, WorkerError


class Trial:
    """Answers the calls ``trial.*``."""

    def __init__(self, _link: Any) -> None:
        pass

    def close(self) -> None:
        """Do nothing."""

    def echo(self, value: object) -> object:
        """Return the value."""
        return value

    def sleep(self, seconds: float) -> None:
        """Keep the thread busy."""
        time.sleep(seconds)

    def await_file(self, path: str) -> None:
        """Return once the file exists."""
        while not Path(path).exists():
            time.sleep(0.01)

    def unsendable(self) -> object:
        """Return what cannot be pickled."""
        return lambda: None

    def start(self) -> int:
        """Start a process that killing the agent alone would leave behind."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def fail(self, how: str) -> None:
        """Raise an error."""
        if how == "meter":
            raise MeterError("no meter opens")
        if how == "worker":
            raise WorkerError("a rank failed", "its traceback")
        if how == "mute":
            raise DeviceError
        raise ValueError(f"unexpected\n{how}")

    def garbage(self, data: Any) -> None:
        """Write to the connection what is not a message."""
        for each in list(Path("/proc/self/fd").iterdir()):
            if each.exists() and int(each.name) > 2 and str(each.readlink()).startswith("socket"):
                os.write(int(each.name), data)
        signal.pause()
