# SPDX-License-Identifier: Apache-2.0
"""A service for tests: runs in a real agent and does what real ones must survive."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from pytest_llenergy import errors
from pytest_llenergy.cluster.agent import AgentContext
from pytest_llenergy.cluster.wire import Hello


class TrialService:
    """Verbs ``trial.*``."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "echo": lambda value: value,
            "sleep": lambda seconds: time.sleep(seconds),
            "raise": self._raise,
            "object": object,
            "bytes": lambda count: b"x" * count,
            "connect": self._connect,
            "start": self._start,
            "signal": lambda number: os.kill(os.getpid(), number),
            "thread_niceness": lambda: [
                os.getpriority(os.PRIO_PROCESS, int(tid))
                for tid in os.listdir("/proc/self/task")  # noqa: PTH208
            ],
            "garbage": self._garbage,
        }

    def close(self) -> None:
        pass

    @staticmethod
    def _raise(name: str) -> None:
        raise (
            getattr(errors, name, None) or RuntimeError("something unexpected")
            if name == ""
            else getattr(errors, name)("the reason")
        )

    def _connect(self, group: str, rank: int) -> None:
        connection = self._context.connect(Hello("rank", self._context.slot, group, rank))
        connection.send((os.getpid(), rank))

    @staticmethod
    def _start() -> int:
        """Start a process that a plain kill of the agent would leave behind."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    @staticmethod
    def _garbage() -> None:
        """Write to the control connection what is not a message."""
        for each in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(each) > 2 and "socket" in os.readlink(f"/proc/self/fd/{each}"):
                os.write(int(each), b"\x00\x00\x00\x04nope")
        signal.pause()
