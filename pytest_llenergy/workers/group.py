# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: started together, checked against the plan, and killed together when one fails."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.backends.interpreter import activated_environment
from pytest_llenergy.errors import PlanError, WorkerError, warn_caller
from pytest_llenergy.model.record import RankInfo
from pytest_llenergy.workers import failure, timeouts
from pytest_llenergy.workers.host import Host, StartedRank
from pytest_llenergy.workers.plan import (
    LOCALHOST,
    ProcessPlan,
    RankPlan,
    check_placement,
    inherited_environment,
)
from pytest_llenergy.workers.start_method import StartMethod
from pytest_llenergy.workers.transport import Channel

#: Makes the names of groups unique in this process, whatever supervisor they have.
_numbers = itertools.count()


class _Rank:
    """One rank as pytest controls it."""

    def __init__(self, plan: RankPlan, host: Host, started: StartedRank, directory: Path) -> None:
        self.plan = plan
        self.host = host
        self.pid = started.pid
        self.forked = started.forked
        self.log = started.log
        #: Whether the log outlives the group: then it must not be truncated.
        self.keeps_log = not self.log.is_relative_to(directory)
        #: Where the output of the current request begins, in bytes.
        self.log_start = 0
        self.channel = Channel(started.connection, directory)

    def make_failure(self, report: dict[str, Any]) -> failure.Failure:
        """Combine the report of the rank with its output."""
        return failure.Failure(self.plan, self.pid, report, self.output())

    def mark_log(self) -> None:
        """Mark the start of the output of the next request."""
        # If the supervisor is gone, so is the log; the request will report it.
        with suppress(FileNotFoundError):
            self.log_start = self.log_size()
            if self.log_start and not self.keeps_log:
                # Otherwise the output of all tests that share these ranks would accumulate.
                os.truncate(self.log, 0)
                self.log_start = 0

    def output(self) -> list[str]:
        """Return the last lines that the rank printed since the current request began."""
        return failure.read_tail(self.log, self.log_start)

    def output_with_stacks(self, start: int) -> list[str]:
        """Return the output with the stacks, or the reason why the log has none after ``start`` bytes."""
        if failure.has_stacks(self.log, start):
            return self.output()
        return [*self.output(), f"({failure.explain_missing_stacks(self.local_pid)})"]

    def owes_stacks(self, start: int) -> bool:
        """Return whether the rank may still write its stacks."""
        return not failure.has_stacks(self.log, start) and failure.may_write_stacks(self.local_pid)

    @property
    def local_pid(self) -> int | None:
        """Its pid, or ``None`` on another host."""
        return self.pid if self.plan.host == LOCALHOST else None

    def log_size(self) -> int:
        """Return the size of its log in bytes; 0 if it is gone together with the supervisor."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0


class RankGroup:
    """Running ranks. Any failure kills the whole group; ``alive`` is false from then on.

    Args:
        plan: What to start.
        hosts: Each host of the plan, by its name.
        descriptors: Open files of the device lease, which lasts until no process of the ranks is left.
        environment: What ranks inherit; by default pytest's environment.

    Raises:
        WorkerError: A rank does not start.
        WorkerPlacementError: The started ranks differ from the plan.
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
        #: What an earlier test has left or changed in the ranks that these replace.
        self.leftovers: list[str] = []
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._hosts = [hosts[name] for name in plan.hosts]
        self._ranks: list[_Rank] = []
        start = time.monotonic()
        try:
            try:
                environment = inherited_environment() if environment is None else environment
                self._start(hosts, descriptors, environment)
            except OSError as error:
                raise WorkerError(f"the ranks cannot be started: {error}") from error
            self.ranks: tuple[RankInfo, ...] = check_placement(plan, self._await_start())
        except BaseException:
            self.kill()
            raise
        self.start_s: float = time.monotonic() - start

    @property
    def start_method(self) -> StartMethod:
        """How the ranks were actually started."""
        return "forkserver" if all(rank.forked for rank in self._ranks) else "spawn"

    @property
    def has_dead_rank(self) -> bool:
        """Whether a rank ended while idle. Living ranks only answer, so a readable connection is closed."""
        if not self.alive or self._busy.locked():
            return False
        return bool(wait([rank.channel.connection for rank in self._ranks], 0))

    def request(self, verb: str, payloads: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Send one request to each rank and wait for all answers.

        One thread requests at a time; ``kill`` may come from another.

        Args:
            verb: One of the verbs of ``server.Server``.
            payloads: One for each rank.
            timeout_s: Time limit for all answers.

        Returns:
            The answers in rank order.

        Raises:
            OutcomeInRank: A rank raised an outcome of pytest. The group has been killed.
            LLEnergyError: A rank failed, or did not answer in time. The group has been killed.
        """
        if os.getpid() != self._owner:
            raise PlanError(
                f"these ranks belong to the process that started them (pid {self._owner}); a forked child of "
                "it cannot use them"
            )
        if not self.alive:
            raise WorkerError("these ranks have been ended; the next call of the fixture starts others")
        if not self._busy.acquire(blocking=False):
            raise WorkerError("these ranks are at work for another thread")
        try:
            for rank, payload in zip(self._ranks, payloads, strict=True):
                rank.mark_log()
                with suppress(BrokenPipeError, ConnectionResetError):
                    rank.channel.send((verb, payload))
            return self._collect_answers(timeout_s)
        except BaseException as error:
            killed_meanwhile = not self.alive
            self.kill()
            if killed_meanwhile and isinstance(error, Exception):
                raise WorkerError("the ranks were ended while they worked: their test is over") from None
            raise
        finally:
            self._busy.release()

    def request_all(self, verb: str, payload: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Send the same request to every rank; see ``request``.

        Args:
            verb: As for ``request``.
            payload: The same for each rank.
            timeout_s: Time limit for all answers (seconds).
        """
        return self.request(verb, [payload] * len(self._ranks), timeout_s)

    def close(self) -> None:
        """Ask the ranks to stop, then kill the remaining ones. Does nothing in a forked child of pytest."""
        if not self.alive or os.getpid() != self._owner:
            return
        for rank in self._ranks:
            with suppress(OSError):
                rank.channel.send(("stop", None))
        deadline = time.monotonic() + timeouts.RANK_STOP_TIMEOUT_S
        waiting = [rank.channel.connection for rank in self._ranks]
        while waiting and (readable := wait(waiting, max(0.0, deadline - time.monotonic()))):
            # Ranks send nothing any more, so that a readable connection is a closed one.
            waiting = [each for each in waiting if each not in readable]
        self.kill()

    def kill(self) -> None:
        """Kill every rank and all their descendants. Does nothing in a forked child of pytest."""
        if os.getpid() != self._owner:
            return
        self.alive = False
        ranks, self._ranks = self._ranks, []
        stuck = []
        for host in self._hosts:
            with suppress(WorkerError):
                stuck += host.kill(self._name)
        # Only now: another thread that waits for an answer has seen the connections end.
        for rank in ranks:
            rank.channel.close()
        if stuck:
            pids = ", ".join(map(str, stuck))
            warn_caller(
                f"ranks that were killed have not ended (pid {pids}): they wait in the kernel, and their "
                "devices stay leased until they end"
            )

    def _start(
        self, hosts: Mapping[str, Host], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        first, python = hosts[self.plan.hosts[0]], self.plan.python
        environment = activated_environment(environment, python)
        environments = {each.rank: {**environment, **each.environment()} for each in self.plan.ranks}
        for each in self.plan.ranks:
            # Before any rank is started, since one supervisor serves all ranks of a host.
            hosts[each.host].prepare(self._name, environments[each.rank], self.plan.preload)
        address, port = first.master_address(self._name)
        master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for each in self.plan.ranks:
            host = hosts[each.host]
            variables = {**environments[each.rank], **master}
            started = host.start(self._name, each.rank, variables, descriptors, python)
            rank = _Rank(each, host, started, host.directory(self._name))
            self._ranks.append(rank)
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.channel.connection.send(
                    {
                        "environment": {**each.environment(), **master},
                        "sys_path": None if python else [p for p in sys.path if isinstance(p, str)],
                        "launch": self.plan.launch,
                        "framework": self.plan.framework,
                        "process_group": self.plan.process_group,
                        "rendezvous": first.rendezvous_url(self._name),
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

    def _await_start(self) -> list[dict[str, Any]]:
        try:
            return self._collect_answers(timeouts.RANK_START_TIMEOUT_S)
        except WorkerError as error:
            error.before_ready = True
            raise

    def _collect_answers(self, timeout_s: float | None) -> list[Any]:
        """Return one answer from each rank; blocks without polling, so that pytest uses no CPU meanwhile."""
        answers: dict[int, Any] = {}
        failures: list[failure.Failure] = []
        waiting = {rank.channel.connection: rank for rank in self._ranks}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting:
            left_s = None
            if deadline is not None:
                left_s = min(max(0.0, deadline - time.monotonic()), timeouts.LONGEST_POLL_S)
            readable = wait(list(waiting), left_s)
            if not readable:
                break
            for connection in readable:
                # Typed as anything that ``wait`` accepts; it was given connections only.
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    state, value = rank.channel.receive()
                except Exception:
                    # The connection ended, or the message is incomplete or malformed.
                    state, value = "error", failure.describe_death(rank.host, self._name, rank.pid)
                if state == "ok":
                    answers[rank.plan.rank] = value
                else:
                    failures.append(rank.make_failure(value))
                    others_deadline = time.monotonic() + timeouts.OTHER_RANKS_TIMEOUT_S
                    deadline = min(deadline or float("inf"), others_deadline)
        if failures:
            outputs = [(rank.plan, rank.output()) for rank in self._ranks]
            silent = [rank.plan for rank in waiting.values()]
            failure.raise_first_cause(failures, len(self._ranks), outputs, silent)
        if waiting:
            self._raise_hang(list(waiting.values()), timeout_s or 0.0)
        return [answers[rank.plan.rank] for rank in self._ranks]

    def _raise_hang(self, silent: Sequence[_Rank], timeout_s: float) -> None:
        starts = [rank.log_size() for rank in self._ranks]
        for host in self._hosts:
            with suppress(WorkerError):
                host.send_signal(self._name, failure.STACKS_SIGNAL)
        self._await_stacks(starts)
        outputs = [
            (rank.plan, rank.output_with_stacks(start))
            for rank, start in zip(self._ranks, starts, strict=True)
        ]
        failure.raise_hang([rank.plan for rank in silent], len(self._ranks), timeout_s, outputs)

    def _await_stacks(self, starts: Sequence[int]) -> None:
        """Wait until the logs stop growing: a hanging rank cannot report when it has written its stacks."""
        deadline = time.monotonic() + timeouts.STACKS_TIMEOUT_S
        sizes: list[int] = []
        while time.monotonic() < deadline:
            before, sizes = sizes, [rank.log_size() for rank in self._ranks]
            owed = any(rank.owes_stacks(start) for rank, start in zip(self._ranks, starts, strict=True))
            if sizes == before and not owed:
                return
            time.sleep(timeouts.STACKS_POLL_S)
