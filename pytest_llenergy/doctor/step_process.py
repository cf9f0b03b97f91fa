# SPDX-License-Identifier: Apache-2.0
"""Run steps in fresh processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pytest_llenergy.doctor import probe
from pytest_llenergy.doctor.steps import Step
from pytest_llenergy.workers import guard, proctree
from pytest_llenergy.workers.failure import read_tail, signal_name
from pytest_llenergy.workers.plan import RankPlan, inherited_environment

#: How long a process that closed its report may take to end, and one that was killed (seconds).
REAP_S = 5.0
#: How long the other ranks may take to say what happened to them once one has failed (seconds).
SETTLE_S = 1.0

#: What a signal often means.
SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGILL: "illegal instruction",
    signal.SIGSEGV: "invalid memory access",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGBUS: "memory that could not be had",
    signal.SIGABRT: "it gave up",
    signal.SIGKILL: "out of memory?",
}


class StepProcess:
    """A process that takes ``steps`` as one rank. ``died`` once it ended, or fell silent, within a step."""

    def __init__(self, plan: RankPlan, steps: Sequence[str], directory: Path, rendezvous: str = "") -> None:
        self.plan = plan
        self.died: bool = False
        self._log = directory / f"{steps[0]}-{plan.rank}.log"
        self._buffer = b""
        self._versions: dict[str, str] = {}
        self.fileno: int
        self.fileno, theirs = os.pipe()
        request = {
            "device": None if plan.device == "cpu" else plan.device,
            "steps": list(steps),
            "report": theirs,
            "sys_path": [path for path in sys.path if isinstance(path, str)],
            "rank": plan.rank,
            "world_size": plan.world_size,
            "rendezvous": rendezvous,
        }
        command = [sys.executable, probe.__file__, json.dumps(request)]
        try:
            with self._log.open("wb") as log:
                # Its guard ends as it does, and before that all it has left behind.
                self._popen = subprocess.Popen(
                    guard.guarded_command(os.getpid(), directory, theirs, command),
                    pass_fds=[theirs],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**inherited_environment(), **plan.environment()},
                )
        except BaseException:
            os.close(self.fileno)
            raise
        finally:
            os.close(theirs)
        self._since_s = time.monotonic()

    def take(self) -> Step | None:
        """The next step that is done, of those whose lines have been read; ``None`` if there is none."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            said: dict[str, Any] = json.loads(line)
            self._versions.update(said.get("versions", {}))
            if said["state"] != "running":
                return self._step(said["step"], said["state"], said["detail"], said["duration_s"])
        return None

    def read(self, step: str) -> Step | None:
        """As ``take``, after reading what is there; at the end of the process ``step`` has failed by that."""
        data = os.read(self.fileno, 65536)
        self._buffer += data
        return self.take() if data else self.fail(step, self._death())

    def fail(self, step: str, how: str) -> Step:
        """The step in which the process died or fell silent."""
        self.died = True
        return self._step(step, "failed", how, time.monotonic() - self._since_s)

    def silent(self, step: str, timeout_s: float) -> Step:
        """The step that has not been done in time."""
        # A process that it started may hold the report open after its death.
        dead = self._popen.poll() is not None
        return self.fail(step, self._death() if dead else f"no answer within {timeout_s:g} s")

    def output(self) -> list[str]:
        """The last lines that it wrote."""
        return read_tail(self._log, 0)

    def close(self) -> None:
        """End it and what it started. One that the kernel does not let go is left behind."""
        with suppress(ProcessLookupError, PermissionError):
            # Sessions of their own and orphans included: its guard has adopted them.
            proctree.kill_tree({self._popen.pid})
            os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)
        os.close(self.fileno)

    def _step(self, name: str, state: Any, detail: str, duration_s: float) -> Step:
        versions, self._versions = self._versions, {}
        self._since_s = time.monotonic()
        return Step(name, state, detail, duration_s, versions)

    def _death(self) -> str:
        try:
            code = self._popen.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return "the process closed its report"
        if code >= 0:
            return f"the process ended with exit code {code} and no answer"
        meaning = SIGNAL_MEANINGS.get(-code)
        return f"killed by {signal_name(-code)}" + (f" ({meaning})" if meaning else "")


def collect_steps(children: Sequence[StepProcess], step: str, timeout_s: float) -> dict[StepProcess, Step]:
    """What each says of a step that they take together, in the order in which they say it.

    Once one has failed the others have ``SETTLE_S`` left, and those that stay silent are not in the answer.
    """
    deadline_s, failed = time.monotonic() + timeout_s, False
    said: dict[StepProcess, Step] = {}
    for child in children:
        done = child.take()
        if done is not None:
            said[child] = done
    while waiting := {child.fileno: child for child in children if child not in said}:
        ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            if not failed:
                said.update((child, child.silent(step, timeout_s)) for child in waiting.values())
            break
        for descriptor in ready:
            assert isinstance(descriptor, int)
            child = waiting[descriptor]
            done = child.read(step)
            if done is not None:
                said[child] = done
                if done.state == "failed":
                    deadline_s, failed = min(deadline_s, time.monotonic() + SETTLE_S), True
    return said
