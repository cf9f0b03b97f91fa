# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: started together, checked against the plan, and killed together when one fails."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import posix
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pytest_llenergy import real_time
from pytest_llenergy.backends.interpreter import activated_environment
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.ranks import failure, timeouts
from pytest_llenergy.ranks.host import Host, StartedRank, StartMethod
from pytest_llenergy.ranks.plan import (
    LOCALHOST,
    ProcessPlan,
    RankPlan,
    check_placement,
    inherited_environment,
)
from pytest_llenergy.ranks.transport import set_time_limit, wait
from pytest_llenergy.record.record import RankInfo
from pytest_llenergy.record.timeline import RankTimeline, convert_times

Result = TypeVar("Result")

#: Makes the names of groups unique in this process.
_numbers = itertools.count()


@dataclass(frozen=True)
class _Rank(StartedRank):
    """One rank as pytest controls it."""

    plan: RankPlan
    host: Host


class RankGroup:
    """Running ranks. Any failure kills the whole group; ``alive`` is false from then on.

    The device lease whose ``descriptors`` it gets lasts until no process of the ranks is left. Raises
    ``WorkerError`` if a rank does not start, or differs from the plan.
    """

    def __init__(self, plan: ProcessPlan, hosts: Mapping[str, Host], descriptors: Sequence[int] = ()) -> None:
        if os.open is not posix.open:
            raise WorkerError(
                "ranks need real files, and functions of os are replaced, as by pyfakefs: replace them only "
                "around the code that needs it"
            )
        self.plan = plan
        self.alive: bool = True
        #: Called with what a function in a rank sends before it returns; see ``RankServer``.
        self.on_message: Callable[[Any], object] = lambda _: None
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._hosts = {name: hosts[name] for name in plan.hosts}
        self._ranks: list[_Rank] = []
        start = real_time.monotonic()
        try:
            self._start(descriptors)
            facts = self._collect_answers(timeouts.START_TIMEOUT_S)
            self.ranks: tuple[RankInfo, ...] = check_placement(plan, facts)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError):
                raise WorkerError(f"the ranks cannot be started: {error}") from error
            raise
        self.start_s: float = real_time.monotonic() - start

    @property
    def start_method(self) -> StartMethod:
        """How the ranks were actually started."""
        return "forkserver" if all(rank.forked for rank in self._ranks) else "spawn"

    @property
    def has_dead_rank(self) -> bool:
        """Whether a rank ended while all were idle: living ones only answer."""
        lost = any(host.lost is not None for host in self._hosts.values())
        return lost or bool(wait([rank.connection for rank in self._ranks], 0))

    def request(self, verb: str, payloads: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Send one request to each rank, and return the answers in rank order.

        The verbs are those of ``server.RankServer``. One thread requests at a time; ``kill`` may come from
        another.

        Raises:
            OutcomeInRank: A rank raised an outcome of pytest. The group has been killed.
            LLEnergyError: A rank failed, or did not answer in time. The group has been killed.
        """
        if not self.alive:
            raise WorkerError("these ranks have been ended; the next call of the fixture starts others")
        try:
            self._send(verb, payloads)
            return self._collect_answers(timeout_s)
        except BaseException as error:
            killed_meanwhile = not self.alive
            self.kill()
            if killed_meanwhile and isinstance(error, Exception):
                raise WorkerError("the ranks were ended while they worked: their test is over") from None
            raise

    def request_all(self, verb: str, payload: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Send the same request to every rank; see ``request``."""
        return self.request(verb, [payload] * len(self._ranks), timeout_s)

    def to_local_times(self, timeline: RankTimeline) -> RankTimeline:
        """Return the timeline of a rank with all times on the clock of pytest's host."""
        name = self.plan.ranks[timeline.rank].host
        return timeline if name == LOCALHOST else convert_times(timeline, self._hosts[name].to_local)

    def close(self) -> None:
        """Ask the ranks to stop, then kill the remaining ones."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.connection.send(("stop", None))
        deadline = real_time.monotonic() + timeouts.RANK_STOP_TIMEOUT_S
        waiting = [rank.connection for rank in self._ranks]
        while waiting and (readable := wait(waiting, max(0.0, deadline - real_time.monotonic()))):
            # Ranks send nothing any more, so that a readable connection is a closed one.
            waiting = [each for each in waiting if each not in readable]
        self.kill()

    def kill(self) -> None:
        """Kill every rank and all their descendants."""
        if not self.alive:
            return
        self.alive = False
        ranks, self._ranks = self._ranks, []
        self._on_reachable(lambda host: host.kill(self._name))
        # Only now: another thread that waits for an answer has seen the connections end.
        for rank in ranks:
            rank.connection.close()

    def _start(self, descriptors: Sequence[int]) -> None:
        plan = self.plan
        environment = activated_environment(inherited_environment(), plan.python)
        by_host = {name: [each for each in plan.ranks if each.host == name] for name in self._hosts}

        def prepare(name: str) -> None:
            # Before any rank is started, since one supervisor serves all ranks of a host.
            variables = {**environment, **by_host[name][0].environment()}
            self._hosts[name].prepare(self._name, variables, plan.preload, timeouts.START_TIMEOUT_S)

        _at_once(prepare, self._hosts)
        first = self._hosts[plan.ranks[0].host]
        rendezvous, meeting = first.meet(self._name, plan, self._hosts, environment)
        common = {
            "sys_path": None if plan.python else list(map(str, sys.path)),
            "launch": plan.launch,
            "framework": plan.framework,
            "process_group": plan.process_group,
            "rendezvous": rendezvous,
            "nodes": plan.nodes,
            "parallel": msgspec.to_builtins(plan.parallel),
            "divided": plan.divided,
        }

        def start(name: str) -> list[_Rank]:
            host, ranks = self._hosts[name], []
            for each in by_host[name]:
                own = {**each.environment(), **meeting[name]}
                boot = {**common, **vars(each), "environment": own}
                variables = {**environment, **own}
                started = host.start(self._name, each.rank, variables, boot, descriptors, plan.python)
                set_time_limit(started.connection, timeouts.PARTIAL_MESSAGE_TIMEOUT_S)
                ranks.append(_Rank(**vars(started), plan=each, host=host))
            return ranks

        self._ranks = [rank for ranks in _at_once(start, self._hosts) for rank in ranks]

    def _on_reachable(self, call: Callable[[Host], None]) -> None:
        def attempt(name: str) -> None:
            with suppress(WorkerError):
                call(self._hosts[name])

        _at_once(attempt, self._hosts)

    def _send(self, verb: str, payloads: Sequence[Any]) -> None:
        messages: dict[int, bytes] = {}
        for rank, payload in zip(self._ranks, payloads, strict=True):
            # Payloads live as long as the request, so that their ids are unique.
            if id(payload) not in messages:
                messages[id(payload)] = pickle.dumps((verb, payload))
            # If the rank is gone or stopped, it will not answer.
            with suppress(OSError):
                rank.connection.send_bytes(messages[id(payload)])

    def _collect_answers(self, timeout_s: float | None) -> list[Any]:
        """Return one answer from each rank; blocks without polling, so that pytest uses no CPU meanwhile."""
        answers: dict[int, Any] = {}
        failures: list[failure.Failure] = []
        #: Those that have answered send nothing more, but may end before the others have.
        watched = {rank.connection: rank for rank in self._ranks}
        deadline = math.inf if timeout_s is None else real_time.monotonic() + timeout_s
        while silent := [rank.plan for rank in watched.values() if rank.plan.rank not in answers]:
            readable = wait(list(watched), max(0.0, deadline - real_time.monotonic()))
            if not readable:
                break
            for rank in [watched[each] for each in readable]:
                try:
                    state, value = rank.connection.recv()
                except Exception:
                    # The connection ended, or the message is incomplete.
                    state, value = "error", failure.describe_death(rank.host, self._name, rank.pid)
                else:
                    if state == "error":
                        value["time_ns"] = rank.host.to_local(value["time_ns"])
                if state == "message":
                    self.on_message(value)
                elif state == "ok":
                    answers[rank.plan.rank] = value
                else:
                    del watched[rank.connection]
                    failures.append(failure.Failure(rank.plan, rank.pid, value))
                    if rank.host.lost is not None:
                        more_s = timeouts.LOST_HOSTS_TIMEOUT_S
                    elif len(self._hosts) > 1:
                        more_s = timeouts.OTHER_HOSTS_TIMEOUT_S
                    else:
                        more_s = timeouts.OTHER_RANKS_TIMEOUT_S
                    deadline = min(deadline, real_time.monotonic() + more_s)
        if silent and not failures:
            self._on_reachable(lambda host: host.write_stacks(self._name))
        if silent or failures:
            outputs = [(rank.plan, rank.tail()) for rank in self._ranks]
            if failures:
                failure.raise_first_cause(failures, outputs)
            failure.raise_hang(silent, timeout_s or 0.0, outputs)
        return [answers[rank.plan.rank] for rank in self._ranks]


def _at_once(work: Callable[[str], Result], names: Collection[str]) -> list[Result]:
    """Return the result of ``work`` for each name, at the same time for all."""
    threads = ThreadPoolExecutor(len(names))
    try:
        return list(threads.map(work, names)) if len(names) > 1 else list(map(work, names))
    finally:
        # After an error the others are not waited for. ``kill`` follows, and then nothing can start.
        threads.shutdown(wait=False)
