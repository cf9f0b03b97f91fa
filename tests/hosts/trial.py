# SPDX-License-Identifier: Apache-2.0
"""A service for tests: it runs in a real agent and does what agents must survive."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import DeviceError, MeterError, WorkerError
from pytest_llenergy.hosts.agent import AgentContext
from pytest_llenergy.hosts.wire import Hello


class TrialService:
    """Verbs ``trial.*``."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        """See ``Service``."""
        return {
            "echo": lambda value: value,
            "sleep": lambda seconds: time.sleep(seconds),
            "await_file": _await_file,
            "fail": _fail,
            "object": object,
            "bytes": lambda count: b"x" * count,
            "connect": self._connect,
            "start": _start,
            "settings_of_child": _settings_of_child,
            "garbage": _send_garbage,
        }

    def close(self) -> None:
        """See ``Service``."""

    def _connect(self, group: str, rank: int) -> None:
        connection = self._context.connect(Hello("rank", self._context.slot, group, rank))
        connection.send({"rank": rank})
        connection.close()


def _await_file(path: str) -> None:
    """Return once the file exists."""
    while not Path(path).exists():
        time.sleep(0.01)


def _fail(how: str) -> None:
    if how == "meter":
        raise MeterError("no meter opens")
    if how == "worker":
        raise WorkerError("a rank failed", "its traceback")
    if how == "mute":
        raise DeviceError
    if how == "broken":
        raise _BrokenError
    raise ValueError(f"unexpected\n{how}")


class _BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _start() -> int:
    """Start a process that killing the agent alone would leave behind."""
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def _settings_of_child() -> list[str]:
    """Return niceness, limit of open files and threads of a process that this service starts."""
    command = ["sh", "-c", "nice; ulimit -Sn; cat /proc/self/oom_score_adj; echo ${OMP_NUM_THREADS-unset}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _send_garbage(data: bytes) -> None:
    """Write to the control connection what is not a message."""
    for each in list(Path("/proc/self/fd").iterdir()):
        if each.exists() and int(each.name) > 2 and str(each.readlink()).startswith("socket"):
            os.write(int(each.name), data)
    signal.pause()
