# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: started together, checked against the plan, asked together, ended together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pytest_llenergy.errors import WorkerError, WorkerPlacementError
from pytest_llenergy.model.record import RankInfo
from pytest_llenergy.workers import failure, rank
from pytest_llenergy.workers.plan import STALE_PREFIXES, ProcessPlan, RankPlan

START_TIMEOUT_S = 120.0
#: How long the other ranks may take to say what happened to them once one has failed.
SETTLE_S = 2.0
STOP_TIMEOUT_S = 5.0


class _Process:
    """One rank as the parent holds it."""

    def __init__(
        self, plan: RankPlan, process_plan: ProcessPlan, directory: Path, descriptors: Sequence[int]
    ) -> None:
        self.plan = plan
        self.log = directory / f"rank{plan.rank}.log"
        #: Where the output of the request in hand begins.
        self.log_start = 0
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs, self.log.open("wb") as log:
            # A new interpreter that runs the entry as a script: unlike multiprocessing's spawn it does
            # not import the parent's main module, which could import torch before the devices are set.
            self.popen = subprocess.Popen(
                [sys.executable, rank.__file__, str(theirs.fileno())],
                # The GPUs' locks too, and inheritable there: ours until the last process ends that has them.
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.connection.send(
            {
                "parent_pid": os.getpid(),
                "stale_prefixes": STALE_PREFIXES,
                "environment": plan.environment(),
                "sys_path": [path for path in sys.path if isinstance(path, str)],
                "framework": process_plan.framework,
                "rendezvous": str(directory / "rendezvous"),
                "rank": plan.rank,
                "local_rank": plan.local_rank,
                "world_size": plan.world_size,
                "device": plan.device,
                "divided": process_plan.divided,
                "threads": plan.threads,
                "cpus": plan.cpus,
            }
        )

    def failed(self, said: dict[str, Any]) -> failure.Failure:
        """What it said, with the output of the request in hand."""
        return failure.Failure(self.plan, self.popen.pid, said, failure.tail(self.log, self.log_start))

    def kill(self) -> None:
        """End the rank and what it started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.connection.close()


class RankGroup:
    """Running ranks. Any failure ends the whole group; ``alive`` is false from then on.

    ``descriptors`` are those of the lease of GPUs, which then lasts as long as a rank is there.
    """

    def __init__(self, plan: ProcessPlan, descriptors: Sequence[int] = ()) -> None:
        self.plan = plan
        self.alive = True
        self._directory = Path(tempfile.mkdtemp(prefix="llenergy-"))
        self._processes: list[_Process] = []
        start = time.monotonic()
        try:
            for each in plan.ranks:
                self._processes.append(_Process(each, plan, self._directory, descriptors))
            seen = self._collect(START_TIMEOUT_S)
            self.ranks = tuple(
                _rank_info(process, facts) for process, facts in zip(self._processes, seen, strict=True)
            )
            _check_placement(plan, seen)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - start

    def ask(self, verb: str, payloads: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Send one request to each rank and wait for all answers, in rank order.

        Raises ``WorkerError`` for the first rank that failed, after ending the group; pytest's own
        outcomes (skip, xfail, fail) are raised as such.
        """
        try:
            for process, payload in zip(self._processes, payloads, strict=True):
                process.log_start = process.log.stat().st_size
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.connection.send((verb, payload))
            return self._collect(timeout_s)
        except BaseException:
            self.kill()
            raise

    def ask_all(self, verb: str, payload: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Send the same request to every rank."""
        return self.ask(verb, [payload] * len(self._processes), timeout_s)

    def close(self) -> None:
        """Let the ranks end by themselves, then make sure."""
        if not self.alive:
            return
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.connection.send(("stop", None))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every rank now."""
        self.alive = False
        for process in self._processes:
            process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, timeout_s: float | None) -> list[Any]:
        """One answer from each rank; blocks without polling."""
        answers: dict[int, Any] = {}
        failures: list[failure.Failure] = []
        waiting = {process.connection: process for process in self._processes}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), left)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                process = waiting.pop(connection)
                try:
                    state, value = connection.recv()
                except (EOFError, OSError):
                    state, value = "error", failure.death(process.popen)
                if state == "ok":
                    answers[process.plan.rank] = value
                else:
                    failures.append(process.failed(value))
                    deadline = min(deadline or float("inf"), time.monotonic() + SETTLE_S)
        if failures:
            failure.raise_first(failures, len(self._processes))
        if waiting:
            silent = [process.plan for process in waiting.values()]
            raise WorkerError(failure.hang(silent, len(self._processes), timeout_s or 0.0))
        return [answers[process.plan.rank] for process in self._processes]


def _rank_info(process: _Process, facts: dict[str, Any]) -> RankInfo:
    return RankInfo(
        rank=process.plan.rank,
        local_rank=process.plan.local_rank,
        pid=facts["pid"],
        device=facts["device"],
        threads=facts["threads"],
        cpus=facts["cpus"],
    )


def _check_placement(plan: ProcessPlan, seen: Sequence[dict[str, Any]]) -> None:
    """Hold what runs against the plan. Raises ``WorkerPlacementError`` naming both sides."""
    pids = {facts["pid"] for facts in seen}
    if len(pids) != len(plan.ranks):
        raise WorkerPlacementError(f"planned {len(plan.ranks)} processes, found {len(pids)}")
    for planned, facts in zip(plan.ranks, seen, strict=True):
        if facts["device"] != planned.device:
            raise WorkerPlacementError(
                f"rank {planned.rank}: planned on {planned.device}, found on {facts['device']}"
            )
        if plan.framework == "torch" and facts["world_size"] != planned.world_size:
            raise WorkerPlacementError(
                f"rank {planned.rank}: planned in a world of {planned.world_size}, found in one of "
                f"{facts['world_size']}"
            )
