# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: started together, checked against the plan, asked together, ended together."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.interpreter import activated_environment
from pytest_llenergy.errors import LLEnergyWarning, PlanError, WorkerError
from pytest_llenergy.model.record import RankInfo
from pytest_llenergy.workers import failure
from pytest_llenergy.workers import failure as stacks
from pytest_llenergy.workers.host import Host, StartedRank, StartMethod
from pytest_llenergy.workers.plan import (
    LOCALHOST,
    ProcessPlan,
    RankPlan,
    check_placement,
    inherited_environment,
)
from pytest_llenergy.workers.transport import Channel

START_TIMEOUT_S = 120.0
#: How long the other ranks may take to say what happened to them once one has failed.
SETTLE_S = 2.0
STOP_TIMEOUT_S = 5.0
#: How long ranks that do not answer may take to write down where their threads are, and how often to look.
STACKS_S, LOOK_S = 5.0, 0.05
#: What the system's call takes (poll(2): milliseconds in an int).
LONGEST_WAIT_S = 2e6

_numbers = itertools.count()


class _Rank:
    """One rank as the parent holds it."""

    def __init__(self, plan: RankPlan, host: Host, started: StartedRank, directory: Path) -> None:
        self.plan = plan
        self.host = host
        self.pid = started.pid
        self.forked = started.forked
        self.log = started.log
        #: One in the group's own directory goes with it: of what is not shown nothing need be kept.
        self.keeps_log = not self.log.is_relative_to(directory)
        #: Where the output of the request in hand begins.
        self.log_start = 0
        self.channel = Channel(started.connection, directory)

    def failed(self, said: dict[str, Any]) -> failure.Failure:
        """What it said, with the output of the request in hand."""
        return failure.Failure(self.plan, self.pid, said, self.output())

    def begin(self) -> None:
        """What it prints from now on belongs to the request in hand."""
        # The log is gone when the supervisor is, which the request will tell.
        with suppress(FileNotFoundError):
            self.log_start = self.log_size()
            if self.log_start and not self.keeps_log:
                # Else the output of all tests that share these ranks would be there at once.
                os.truncate(self.log, 0)
                self.log_start = 0

    def output(self) -> list[str]:
        """What it has printed since the request in hand."""
        return failure.read_tail(self.log, self.log_start)

    def output_with_stacks(self, start: int) -> list[str]:
        """The same of a rank that was asked for its stacks when its log had ``start`` bytes."""
        if stacks.has_stacks(self.log, start):
            return self.output()
        return [*self.output(), f"({stacks.explain_missing_stacks(self.local_pid)})"]

    def owes_stacks(self, start: int) -> bool:
        """Whether they may yet come."""
        return not stacks.has_stacks(self.log, start) and stacks.may_write_stacks(self.local_pid)

    @property
    def local_pid(self) -> int | None:
        """Its pid, if it can be looked at: processes of other hosts cannot."""
        return self.pid if self.plan.host == LOCALHOST else None

    def log_size(self) -> int:
        """In bytes; 0 when it is gone, as it is with the supervisor."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0


class RankGroup:
    """Running ranks. Any failure ends the whole group; ``alive`` is false from then on.

    ``hosts`` has each host of the plan by its name. ``descriptors`` are those of the lease of GPUs, which
    then lasts until nothing of the ranks is left. ``environment`` is what ranks inherit.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        hosts: Mapping[str, Host],
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.alive: bool = True
        self._owner = os.getpid()
        self._asked = threading.Lock()
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._hosts = [hosts[name] for name in plan.hosts]
        self._ranks: list[_Rank] = []
        start = time.monotonic()
        try:
            try:
                self._start(
                    hosts, descriptors, inherited_environment() if environment is None else environment
                )
            except OSError as error:
                raise WorkerError(f"the ranks cannot be started: {error}") from error
            seen = self._first_words()
            self.ranks: tuple[RankInfo, ...] = check_placement(plan, seen)
        except BaseException:
            self.kill()
            raise
        self.start_s: float = time.monotonic() - start

    @property
    def start_method(self) -> StartMethod:
        """How they were started."""
        return "forkserver" if all(rank.forked for rank in self._ranks) else "spawn"

    @property
    def has_dead_rank(self) -> bool:
        """Whether a rank has ended that was asked for nothing: those that live say nothing by themselves."""
        if not self.alive or self._asked.locked():
            return False
        return bool(wait([rank.channel.connection for rank in self._ranks], 0))

    def request(self, verb: str, payloads: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Send one request to each rank and wait for all answers, in rank order.

        Raises ``WorkerError`` for the first rank that failed, after ending the group; pytest's own
        outcomes (skip, xfail, fail) are raised as such. One thread asks at a time; ``kill`` may come from
        another.
        """
        if os.getpid() != self._owner:
            raise PlanError(
                f"these ranks belong to the process that started them (pid {self._owner}); a forked child of "
                "it cannot use them"
            )
        if not self.alive:
            raise WorkerError("these ranks have been ended; the next call of the fixture starts others")
        if not self._asked.acquire(blocking=False):
            raise WorkerError("these ranks are at work for another thread")
        try:
            for rank, payload in zip(self._ranks, payloads, strict=True):
                rank.begin()
                with suppress(BrokenPipeError, ConnectionResetError):
                    rank.channel.send((verb, payload))
            return self._collect(timeout_s)
        except BaseException as error:
            ended = not self.alive
            self.kill()
            if ended and isinstance(error, Exception):
                raise WorkerError("the ranks were ended while they worked: their test is over") from None
            raise
        finally:
            self._asked.release()

    def request_all(self, verb: str, payload: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Send the same request to every rank."""
        return self.request(verb, [payload] * len(self._ranks), timeout_s)

    def close(self) -> None:
        """Let the ranks end by themselves, then make sure. Does nothing in a forked child of pytest."""
        if not self.alive or os.getpid() != self._owner:
            return
        for rank in self._ranks:
            with suppress(OSError):
                rank.channel.send(("stop", None))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        waiting = [rank.channel.connection for rank in self._ranks]
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            # Nothing is said any more: what can be read is the end.
            waiting = [each for each in waiting if each not in ready]
        self.kill()

    def kill(self) -> None:
        """End every rank now, and whatever they have started. Does nothing in a forked child of pytest."""
        if os.getpid() != self._owner:
            return
        self.alive = False
        ranks, self._ranks = self._ranks, []
        stuck = []
        for host in self._hosts:
            with suppress(WorkerError):
                stuck += host.end(self._name)
        # A thread that waits for an answer has now seen the end of it.
        for rank in ranks:
            rank.channel.close()
        if stuck:
            pids = ", ".join(map(str, stuck))
            warnings.warn(
                f"ranks that were killed have not ended (pid {pids}): they wait in the kernel, and their "
                "devices stay leased until they end",
                LLEnergyWarning,
                stacklevel=2,
            )

    def _start(
        self, hosts: Mapping[str, Host], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        first, python = hosts[self.plan.hosts[0]], self.plan.python
        environment = activated_environment(environment, python)
        own = {each.rank: {**environment, **each.environment()} for each in self.plan.ranks}
        for each in self.plan.ranks:
            # Before any of them is started: what is prepared for one serves all.
            hosts[each.host].prepare(self._name, own[each.rank], self.plan.preload)
        address, port = first.meeting(self._name)
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for each in self.plan.ranks:
            host = hosts[each.host]
            started = host.start(self._name, each.rank, {**own[each.rank], **meeting}, descriptors, python)
            rank = _Rank(each, host, started, host.directory(self._name))
            self._ranks.append(rank)
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.channel.connection.send(
                    {
                        "environment": {**each.environment(), **meeting},
                        "sys_path": None if python else [p for p in sys.path if isinstance(p, str)],
                        "launch": self.plan.launch,
                        "framework": self.plan.framework,
                        "process_group": self.plan.process_group,
                        "rendezvous": first.rendezvous(self._name),
                        "directory": str(host.directory(self._name)),
                        "rank": each.rank,
                        "local_rank": each.local_rank,
                        "world_size": each.world_size,
                        "devices": each.devices,
                        "parallel": msgspec.to_builtins(self.plan.parallel),
                        "divided": self.plan.divided,
                        "threads": each.threads,
                        "cpus": each.cpus,
                    }
                )

    def _first_words(self) -> list[dict[str, Any]]:
        try:
            return self._collect(START_TIMEOUT_S)
        except WorkerError as error:
            error.before_ready = True
            raise

    def _collect(self, timeout_s: float | None) -> list[Any]:
        """One answer from each rank; blocks without polling."""
        answers: dict[int, Any] = {}
        failures: list[failure.Failure] = []
        waiting = {rank.channel.connection: rank for rank in self._ranks}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting:
            left = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_S)
            ready = wait(list(waiting), left)
            if not ready:
                break
            for connection in ready:
                # Typed as anything that can be waited for; it was given connections only.
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    state, value = rank.channel.receive()
                except Exception:
                    # The end, half a message, or what is none.
                    state, value = "error", failure.describe_death(rank.host, self._name, rank.pid)
                if state == "ok":
                    answers[rank.plan.rank] = value
                else:
                    failures.append(rank.failed(value))
                    deadline = min(deadline or float("inf"), time.monotonic() + SETTLE_S)
        if failures:
            others = [(rank.plan, rank.output()) for rank in self._ranks]
            silent = [rank.plan for rank in waiting.values()]
            failure.raise_first_cause(failures, len(self._ranks), others, silent)
        if waiting:
            self._raise_hang(list(waiting.values()), timeout_s or 0.0)
        return [answers[rank.plan.rank] for rank in self._ranks]

    def _raise_hang(self, silent: Sequence[_Rank], timeout_s: float) -> None:
        starts = [rank.log_size() for rank in self._ranks]
        for host in self._hosts:
            with suppress(WorkerError):
                host.signal(self._name, stacks.STACKS_SIGNAL)
        self._await_stacks(starts)
        outputs = [
            (rank.plan, rank.output_with_stacks(start))
            for rank, start in zip(self._ranks, starts, strict=True)
        ]
        failure.raise_hang([rank.plan for rank in silent], len(self._ranks), timeout_s, outputs)

    def _await_stacks(self, starts: Sequence[int]) -> None:
        """A rank that hangs cannot say when it has finished writing: its log grows no more."""
        deadline = time.monotonic() + STACKS_S
        sizes: list[int] = []
        while time.monotonic() < deadline:
            before, sizes = sizes, [rank.log_size() for rank in self._ranks]
            owed = any(rank.owes_stacks(start) for rank, start in zip(self._ranks, starts, strict=True))
            if sizes == before and not owed:
                return
            time.sleep(LOOK_S)
