# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: started together, checked against the plan, and killed together when one fails."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_llenergy.backends.interpreter import activated_environment
from pytest_llenergy.errors import WorkerError, warn_caller
from pytest_llenergy.ranks import failure, timeouts
from pytest_llenergy.ranks.host import Host, StartedRank
from pytest_llenergy.ranks.meeting import choose_address
from pytest_llenergy.ranks.plan import (
    INTERFACES,
    LOCALHOST,
    ProcessPlan,
    RankPlan,
    check_placement,
    inherited_environment,
)
from pytest_llenergy.ranks.start_method import StartMethod
from pytest_llenergy.ranks.timeouts import TimeLimit
from pytest_llenergy.ranks.transport import Spooled
from pytest_llenergy.record.record import RankInfo
from pytest_llenergy.record.timeline import RankTimeline, convert_times

Result = TypeVar("Result")

#: Makes the names of groups unique in this process, whatever supervisor they have.
_numbers = itertools.count()

STOP = ("stop", None)


class _Rank:
    """One rank as pytest controls it."""

    def __init__(self, plan: RankPlan, host: Host, started: StartedRank) -> None:
        self.plan = plan
        self.host = host
        self.pid = started.pid
        self.forked = started.forked
        self.log = started.log
        self.channel = started.channel

    def make_failure(self, report: dict[str, Any]) -> failure.Failure:
        """Return the failure that the rank reports."""
        return failure.Failure(self.plan, self.pid, report)


def _unless_it_fails(call: Callable[[str], Result], group: str, instead: Result) -> Result:
    """Return the result of a call for a group, or something instead if its host is lost."""
    with suppress(WorkerError):
        return call(group)
    return instead


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
        self._busy = threading.Lock()
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._hosts = {name: hosts[name] for name in plan.hosts}
        self._ranks: list[_Rank] = []
        start = time.monotonic()
        limit = TimeLimit(timeouts.START_TIMEOUT_S)
        try:
            with limit.counting():
                try:
                    environment = inherited_environment() if environment is None else environment
                    self._start(descriptors, environment, limit)
                except OSError as error:
                    raise WorkerError(f"the ranks cannot be started: {error}") from error
                self.ranks: tuple[RankInfo, ...] = check_placement(plan, self._collect_answers(limit))
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
        """Whether a rank or its supervision ended while idle.

        Living ranks only answer, so a readable connection is closed.
        """
        if not self.alive or self._busy.locked():
            return False
        if any(host.lost is not None for host in self._hosts.values()):
            return True
        return bool(wait([*(rank.channel.connection for rank in self._ranks), *self._sentinels()], 0))

    def request(
        self, verb: str, payloads: Sequence[Any], limit: TimeLimit | float | None = None
    ) -> list[Any]:
        """Send one request to each rank and wait for all answers.

        One thread requests at a time; ``kill`` may come from another.

        Args:
            verb: One of the verbs of ``server.Server``.
            payloads: One for each rank. Ranks may share one, which is then encoded once.
            limit: Time limit for all answers (seconds), or one that several requests share.

        Returns:
            The answers in rank order.

        Raises:
            OutcomeInRank: A rank raised an outcome of pytest. The group has been killed.
            LLEnergyError: A rank failed, or did not answer in time. The group has been killed.
        """
        if not self.alive:
            raise WorkerError("these ranks have been ended; the next call of the fixture starts others")
        if not self._busy.acquire(blocking=False):
            raise WorkerError("these ranks are at work for another thread")
        try:
            limit = limit if isinstance(limit, TimeLimit) else TimeLimit(limit)
            with limit.counting(), self._sending() as send:
                for rank, payload in zip(self._ranks, payloads, strict=True):
                    rank.log.mark()
                    send(rank, verb, payload)
                return self._collect_answers(limit)
        except BaseException as error:
            killed_meanwhile = not self.alive
            self.kill()
            if killed_meanwhile and isinstance(error, Exception):
                raise WorkerError("the ranks were ended while they worked: their test is over") from None
            raise
        finally:
            self._busy.release()

    def request_all(
        self, verb: str, payload: Any = None, limit: TimeLimit | float | None = None
    ) -> list[Any]:
        """Send the same request to every rank; see ``request``.

        Args:
            verb: As for ``request``.
            payload: The same for each rank.
            limit: As for ``request``.
        """
        return self.request(verb, [payload] * len(self._ranks), limit)

    def to_local_times(self, timeline: RankTimeline) -> RankTimeline:
        """Return the timeline of a rank with all times on the clock of pytest's host."""
        name = self.plan.ranks[timeline.rank].host
        return timeline if name == LOCALHOST else convert_times(timeline, self._hosts[name].to_local)

    def all_hosts_have(self, path: str) -> bool:
        """Return whether all hosts of the ranks have the same file as pytest's host."""
        return all(host.has_file(path) for host in self._hosts.values())

    def close(self) -> None:
        """Ask the ranks to stop, then kill the remaining ones."""
        if not self.alive:
            return
        for rank in self._ranks:
            with suppress(OSError):
                rank.channel.send(Spooled(pickle.dumps(STOP)))
        deadline = time.monotonic() + timeouts.RANK_STOP_TIMEOUT_S
        waiting = [rank.channel.connection for rank in self._ranks]
        sentinels = self._sentinels()
        while waiting and (readable := wait([*waiting, *sentinels], max(0.0, deadline - time.monotonic()))):
            if not sentinels.keys().isdisjoint(readable):
                break
            # Ranks send nothing any more, so that a readable connection is a closed one.
            waiting = [each for each in waiting if each not in readable]
        self.kill()

    def kill(self) -> None:
        """Kill every rank and all their descendants."""
        self.alive = False
        ranks, self._ranks = self._ranks, []
        nothing: list[int] = []
        killed = self._on_hosts(lambda name: _unless_it_fails(self._hosts[name].kill, self._name, nothing))
        stuck = [pid for pids in killed for pid in pids]
        # Only now: another thread that waits for an answer has seen the connections end.
        for rank in ranks:
            rank.channel.close()
        if stuck:
            pids = ", ".join(map(str, stuck))
            warn_caller(
                f"ranks that were killed have not ended (pid {pids}): they wait in the kernel, and their "
                "devices stay leased until they end"
            )

    @contextmanager
    def _sending(self) -> Iterator[Callable[[_Rank, str, Any], None]]:
        """Yield a function that sends a request to a rank. Files of messages are removed at the end."""
        messages: dict[tuple[int, Path], Spooled] = {}

        def send(rank: _Rank, verb: str, payload: Any) -> None:
            # Payloads live as long as the request, so that their ids are unique.
            key = id(payload), rank.channel.directory
            # If the rank is gone, the request will report it.
            with suppress(BrokenPipeError, ConnectionResetError):
                if key not in messages:
                    messages[key] = rank.channel.encode((verb, payload))
                rank.channel.send(messages[key])

        try:
            yield send
        finally:
            for message in messages.values():
                message.remove()

    def _start(self, descriptors: Sequence[int], environment: Mapping[str, str], limit: TimeLimit) -> None:
        python = self.plan.python
        environment = activated_environment(environment, python)

        def prepare(name: str) -> None:
            # Before any rank is started, since one supervisor serves all ranks of a host.
            variables = {**environment, **self._plans_on(name)[0].environment()}
            self._hosts[name].prepare(self._name, variables, self.plan.preload, limit.left_s())

        self._on_hosts(prepare)
        rendezvous, meeting = self._arrange_meetings(environment)
        sys_path = None if python else [path for path in sys.path if isinstance(path, str)]

        def start(name: str) -> list[_Rank]:
            host, ranks = self._hosts[name], []
            for each in self._plans_on(name):
                own = {**each.environment(), **meeting[name]}
                boot = {
                    "environment": own,
                    "sys_path": sys_path,
                    "launch": self.plan.launch,
                    "framework": self.plan.framework,
                    "process_group": self.plan.process_group,
                    "rendezvous": rendezvous,
                    "rank": each.rank,
                    "local_rank": each.local_rank,
                    "world_size": each.world_size,
                    "nodes": self.plan.nodes,
                    "devices": each.devices,
                    "parallel": msgspec.to_builtins(self.plan.parallel),
                    "divided": self.plan.divided,
                    "threads": each.threads,
                    "cpus": each.cpus,
                }
                variables = {**environment, **own}
                started = host.start(self._name, each.rank, variables, boot, descriptors, python)
                ranks.append(_Rank(each, host, started))
            return ranks

        self._ranks = [rank for ranks in self._on_hosts(start) for rank in ranks]
        #: Private to pytest and the ranks of the first host.
        self.directory: Path = self._ranks[0].channel.directory

    def _plans_on(self, name: str) -> list[RankPlan]:
        return [each for each in self.plan.ranks if each.host == name]

    def _arrange_meetings(self, environment: Mapping[str, str]) -> tuple[str, dict[str, dict[str, str]]]:
        """Return the URL at which all ranks meet, and the variables about it for the ranks of each host.

        If a backend spreads each of several models over hosts, the variables are about the hosts of a model.
        """
        names, nodes = list(self._hosts), self.plan.nodes
        url, variables = self._arrange_meeting(names, environment)
        if 1 < nodes < len(names):
            # Those of the first model are right already. A second offer of its first host might contain the
            # port at which all ranks meet.
            for start in range(nodes, len(names), nodes):
                variables |= self._arrange_meeting(names[start : start + nodes], environment)[1]
        return url, variables

    def _arrange_meeting(
        self, names: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[str, dict[str, dict[str, str]]]:
        """Return the URL at which the ranks of these hosts meet, and their variables by host."""
        first = self._hosts[names[0]]
        if len(names) > 1:
            offer = first.offer_meeting(self._name)
            routes = self._on_hosts(lambda name: self._hosts[name].find_routes(offer), names)
            address, (port, master_port) = choose_address(offer, names, routes), offer.free_ports
            master = {"MASTER_ADDR": address, "MASTER_PORT": str(master_port)}
            # An administrator may have chosen an interface for all hosts.
            unset = [each for each in INTERFACES if each not in environment]
            interfaces = [dict.fromkeys(unset, route[address]) for route in routes]
            url = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
            return url, {name: {**master, **each} for name, each in zip(names, interfaces, strict=True)}
        master = {}
        try:
            address, port = first.master_address(self._name)
            master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        except WorkerError:
            # Only ranks that communicate need it.
            if self.plan.process_group:
                raise
        return first.rendezvous_url(self._name), {names[0]: master}

    def _on_hosts(self, work: Callable[[str], Result], names: Sequence[str] = ()) -> list[Result]:
        """Return the result of ``work`` for each name, by default all hosts', at the same time for all."""
        names = names or list(self._hosts)
        if len(names) == 1:
            return [work(name) for name in names]
        threads = ThreadPoolExecutor(len(names))
        try:
            return list(threads.map(work, names))
        finally:
            # After an error the others are not waited for. ``kill`` follows, and then nothing can start.
            threads.shutdown(wait=False)

    def _sentinels(self) -> dict[int, Host]:
        return {each: host for host in self._hosts.values() for each in host.sentinels(self._name)}

    def _collect_answers(self, limit: TimeLimit) -> list[Any]:
        """Return one answer from each rank; blocks without polling, so that pytest uses no CPU meanwhile."""
        answers: dict[int, Any] = {}
        failures: list[failure.Failure] = []
        waiting = {rank.channel.connection: rank for rank in self._ranks}
        #: They send nothing more, but may end before the others have answered.
        answered: dict[Any, _Rank] = {}
        sentinels = self._sentinels()
        others_deadline = math.inf
        while waiting:
            left_s = min(limit.left_s(), max(0.0, others_deadline - time.monotonic()))
            readable = wait([*waiting, *answered, *sentinels], left_s)
            if not readable:
                break
            ended = [answered.pop(connection) for connection in list(answered) if connection in readable]
            for rank in ended:
                failures.append(rank.make_failure(failure.describe_death(rank.host, self._name, rank.pid)))
            ready = [rank for connection, rank in waiting.items() if connection in readable]
            for rank in ready:
                state, value = self._receive(rank)
                del waiting[rank.channel.connection]
                if state == "ok":
                    answers[rank.plan.rank] = value
                    answered[rank.channel.connection] = rank
                else:
                    failures.append(rank.make_failure(value))
            if not ready and not ended:
                # No rank lives without supervision, but what it has forked may keep its connection open.
                host = next(sentinels[each] for each in readable if isinstance(each, int))
                sentinels = {each: other for each, other in sentinels.items() if other is not host}
                report: dict[str, Any] = {}
                for connection, rank in [each for each in waiting.items() if each[1].host is host]:
                    report = report or failure.describe_death(host, self._name, rank.pid)
                    failures.append(rank.make_failure(report))
                    del waiting[connection]
            if failures:
                others_deadline = min(others_deadline, time.monotonic() + self._patience_s(failures))
        if failures:
            outputs = [(rank.plan, rank.log.tail()) for rank in self._ranks]
            silent = [rank.plan for rank in waiting.values()]
            failure.raise_first_cause(failures, len(self._ranks), outputs, silent)
        if waiting:
            self._raise_hang(list(waiting.values()), limit.seconds or 0.0)
        return [answers[rank.plan.rank] for rank in self._ranks]

    def _patience_s(self, failures: Sequence[failure.Failure]) -> float:
        """Return how long to wait for the failures of other ranks."""
        if any(each.host_lost is not None for each in failures):
            return timeouts.AFTER_LOSS_TIMEOUT_S
        if len(self._hosts) > 1 and all(each.is_echo for each in failures):
            return timeouts.OTHER_HOSTS_TIMEOUT_S
        return timeouts.OTHER_RANKS_TIMEOUT_S

    def _receive(self, rank: _Rank) -> tuple[str, Any]:
        try:
            state, value = rank.channel.receive(remove=True)
        except WorkerError as error:
            # This process has no room for the message.
            return "error", {"time_ns": time.monotonic_ns(), "message": str(error)}
        except Exception:
            # The connection ended, or the message is incomplete or malformed.
            return "error", failure.describe_death(rank.host, self._name, rank.pid)
        if state == "error":
            value["time_ns"] = rank.host.to_local(value["time_ns"])
        return state, value

    def _raise_hang(self, silent: Sequence[_Rank], timeout_s: float) -> None:
        nothing: Mapping[int, str] = {}
        by_host = self._on_hosts(
            lambda name: _unless_it_fails(self._hosts[name].write_stacks, self._name, nothing)
        )
        missing = {rank: reason for reasons in by_host for rank, reason in reasons.items()}
        outputs = []
        for rank in self._ranks:
            number = rank.plan.rank
            reasons = [f"({missing[number]})"] if number in missing else []
            outputs.append((rank.plan, [*rank.log.tail(), *reasons]))
        failure.raise_hang([rank.plan for rank in silent], len(self._ranks), timeout_s, outputs)
