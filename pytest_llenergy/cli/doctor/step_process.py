# SPDX-License-Identifier: Apache-2.0
"""Run steps in fresh processes, and collect their results."""

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

from pytest_llenergy.cli.doctor import probe
from pytest_llenergy.cli.doctor.steps import Step
from pytest_llenergy.ranks import guard, proctree
from pytest_llenergy.ranks.failure import signal_name
from pytest_llenergy.ranks.plan import RankPlan, inherited_environment
from pytest_llenergy.ranks.rank_log import read_tail

#: Time of a process to end after it has closed its report, or was killed.
EXIT_TIMEOUT_S = 5.0
#: Time of the other ranks to report once one has failed: a cause that they share shows within it, and a rank
#: that waits for the failed one never reports.
OTHER_RANKS_TIMEOUT_S = 1.0

#: Usual cause of a signal.
SIGNAL_MEANINGS: dict[int, str] = {
    signal.SIGILL: "illegal instruction",
    signal.SIGSEGV: "invalid memory access",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGBUS: "memory not available",
    signal.SIGABRT: "abort",
    signal.SIGKILL: "out of memory?",
}


class StepProcess:
    """A process that runs ``steps`` as one rank. ``died`` is whether it ended or hung during a step."""

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
                # The guard ends all processes that this one leaves behind, then ends with the same status.
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

    def next_step(self) -> Step | None:
        """Return the next finished step among the lines that have been read, or None."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            message: dict[str, Any] = json.loads(line)
            self._versions.update(message.get("versions", {}))
            if message["state"] != "running":
                return self._step(message["step"], message["state"], message["detail"], message["duration_s"])
        return None

    def read(self, step: str) -> Step | None:
        """Read what the process has written, then act as ``next_step``; if it has ended, ``step`` failed."""
        data = os.read(self.fileno, 65536)
        self._buffer += data
        return self.next_step() if data else self.failed_step(step, self._death())

    def failed_step(self, step: str, how: str) -> Step:
        """Return the step in which the process died or stopped answering as failed."""
        self.died = True
        return self._step(step, "failed", how, time.monotonic() - self._since_s)

    def timed_out_step(self, step: str, timeout_s: float) -> Step:
        """Return the step that did not finish in time as failed."""
        # After its death, a process that it started may keep the report open.
        dead = self._popen.poll() is not None
        return self.failed_step(step, self._death() if dead else f"no answer within {timeout_s:.3g} s")

    def output(self) -> list[str]:
        """Return the last lines that the process wrote."""
        return read_tail(self._log, 0)

    def close(self) -> None:
        """End the process and all that it started. One that the kernel cannot end is left behind."""
        with suppress(ProcessLookupError, PermissionError):
            # Includes orphans and processes in other sessions, which the guard has adopted.
            proctree.kill_tree({self._popen.pid})
            os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(EXIT_TIMEOUT_S)
        os.close(self.fileno)

    def _step(self, name: str, state: Any, detail: str, duration_s: float) -> Step:
        versions, self._versions = self._versions, {}
        self._since_s = time.monotonic()
        return Step(name, state, detail, duration_s, versions)

    def _death(self) -> str:
        try:
            code = self._popen.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the process closed its report"
        if code >= 0:
            return f"the process ended with exit code {code} and no answer"
        meaning = SIGNAL_MEANINGS.get(-code)
        return f"killed by {signal_name(-code)}" + (f" ({meaning})" if meaning else "")


def collect_steps(processes: Sequence[StepProcess], step: str, timeout_s: float) -> dict[StepProcess, Step]:
    """Return the result of each process for a step that they run together, in order of arrival.

    Once one has failed, the others have ``OTHER_RANKS_TIMEOUT_S`` left, and those that stay silent have no
    result.

    Args:
        processes: The processes, one for each rank.
        step: Name of the step.
        timeout_s: Time limit of the step (seconds).
    """
    deadline_s, failed = time.monotonic() + timeout_s, False
    results: dict[StepProcess, Step] = {}
    for process in processes:
        done = process.next_step()
        if done is not None:
            results[process] = done
    while waiting := {process.fileno: process for process in processes if process not in results}:
        ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            if not failed:
                results.update(
                    (process, process.timed_out_step(step, timeout_s)) for process in waiting.values()
                )
            break
        for descriptor in ready:
            assert isinstance(descriptor, int)
            process = waiting[descriptor]
            done = process.read(step)
            if done is not None:
                results[process] = done
                if done.state == "failed":
                    deadline_s, failed = min(deadline_s, time.monotonic() + OTHER_RANKS_TIMEOUT_S), True
    return results
