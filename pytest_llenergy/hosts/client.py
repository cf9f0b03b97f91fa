# SPDX-License-Identifier: Apache-2.0
"""pytest's side of the agents: requests, answers, and hosts that are lost."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from pytest_llenergy import errors
from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.clock import ClockLine, Exchange, Offset, read_suspended_ns
from pytest_llenergy.hosts.host_facts import (
    HostFacts,
    ProcessSettings,
    allow_open_files,
    describe,
    refuse_differences,
)
from pytest_llenergy.hosts.wire import Control, Hello, Listener, WireCall, WireReply, shut_down

#: Exchanges of clock readings when a gang starts, and in each gap between rounds.
FIRST_EXCHANGES, LATER_EXCHANGES = 32, 8

#: Open files of pytest for each host, and those that it keeps for everything else.
FILES_PER_HOST, SPARE_FILES = 4, 64


class Pending:
    """A request whose answer is awaited: begin several, on different hosts, before the first ``result``."""

    def __init__(self, client: AgentClient, number: int, verb: str) -> None:
        self._client, self._number, self._verb = client, number, verb
        #: The answer with its arrival, or why the host was lost.
        self.answers: queue.SimpleQueue[tuple[int, WireReply] | str] = queue.SimpleQueue()
        self.sent_ns = time.monotonic_ns()
        self.received_ns = self.sent_ns

    def result(self, timeout_s: float) -> Any:
        """Return the value.

        Raises:
            WorkerError: No answer in time, the host is lost, or the verb failed with an unexpected error.
            LLEnergyError: The verb raised an error of this package, whose class it keeps.
        """
        name = self._client.name
        try:
            found = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            self._client.forget(self._number)
            raise WorkerError(f"{name}: no answer to {self._verb} within {timeout_s:g} s") from None
        if isinstance(found, str):
            raise WorkerError(found)
        self.received_ns, answer = found
        if answer.error is None:
            return answer.ok
        own_class = getattr(errors, answer.error_class or "", WorkerError)
        if not issubclass(own_class, WorkerError):
            raise own_class(f"{name}: {answer.error}")
        raise own_class(f"{name}: {answer.error}", answer.details)


class AgentClient:
    """One host of a gang.

    Args:
        listener: What its agent connects to.
        connection: The control connection of the agent.
        name: Name of the host in messages and of its domains.
        slot: Its position in the gang.

    Attributes:
        facts: What the agent reported about its host; set by ``accept_agents``.
        unlike_pytest: Settings of the agent's process that differ from pytest's and could not be undone.
        clock: The clock of the host against pytest's.
    """

    facts: HostFacts

    def __init__(self, listener: Listener, connection: Connection, name: str, slot: int) -> None:
        self._listener = listener
        self.name = name
        self.slot = slot
        self.unlike_pytest: list[str] = []
        self.clock = ClockLine()
        self._lost: str | None = None
        self._closed = False
        #: Of ranks that may live.
        self._ranks: list[Connection] = []
        self._lock = threading.Lock()
        self._exchange_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._control = Control(connection)
        self._thread = threading.Thread(target=self._receive, name=f"llenergy-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the host is lost, such as "n2: its agent has not answered for 3 s"; None if it is not."""
        return self._lost

    def begin(self, verb: str, **arguments: Any) -> Pending:
        """Send a request.

        Args:
            verb: Service and verb, such as ``host.describe``. Each service serves one request at a time.
            **arguments: Primitives.

        Raises:
            WorkerError: The host is lost.
        """
        number = next(self._numbers)
        pending = Pending(self, number, verb)
        with self._lock:
            if self._lost is None:
                self._pending[number] = pending
            else:
                pending.answers.put(self._lost)
                return pending
        try:
            self._control.send(WireCall(number, verb, arguments))
        except BlockingIOError:
            self._lose(f"its agent has not read for {timeouts.MISSED_S:g} s")
        except OSError:
            # The receiving thread finds out why, and answers.
            pass
        except BaseException:
            self.forget(number)
            raise
        return pending

    def call(self, verb: str, timeout_s: float, **arguments: Any) -> Any:
        """Return the answer to a request; raises as ``begin`` and ``Pending.result`` do."""
        return self.begin(verb, **arguments).result(timeout_s)

    def accept_rank(self, group: str, rank: int, timeout_s: float) -> Connection:
        """Return the connection of a rank, which a service of the agent has opened or will open.

        It ends when the host is lost.

        Raises:
            WorkerError: It does not come in time, the host is lost, or this process has too many open files.
        """
        allow_open_files(SPARE_FILES)
        found = self._listener.accept(Hello("rank", self.slot, group, rank), timeout_s, lambda: self._lost)
        with self._lock:
            self._ranks = [*(each for each in self._ranks if not each.closed), found]
            if self._lost is not None:
                shut_down(found)
        return found

    def exchange(self, count: int = LATER_EXCHANGES) -> Offset:
        """Read both clocks ``count`` times, add the readings to ``clock``, and return the offset.

        Several threads may call it, one after the other: groups of readings must not overlap.

        Raises:
            WorkerError: The host is lost.
        """
        exchanges = []
        with self._exchange_lock:
            for _ in range(count):
                slept_ns = read_suspended_ns()
                pending = self.begin("clock")
                remote_ns, remote_slept_ns = pending.result(timeouts.MISSED_S)
                exchanges.append(
                    Exchange(pending.sent_ns, remote_ns, pending.received_ns, (slept_ns, remote_slept_ns))
                )
            return self.clock.add(exchanges)

    def forget(self, number: int) -> None:
        """Ignore the answer to a request if it still comes."""
        with self._lock:
            self._pending.pop(number, None)

    def give_up(self, reason: str) -> None:
        """Treat the host as lost from now on. Its agent ends, if it still runs.

        Args:
            reason: Continues a sentence that begins with its name.
        """
        if self._lost is None:
            self._lose(reason)
            self._control.shut_down()

    def close(self) -> None:
        """End the agent, with everything that it runs."""
        if self._closed:
            return
        self._closed = True
        self._lose("its agent was ended")
        self._control.shut_down()
        self._thread.join()
        self._control.close()

    def _receive(self) -> None:
        try:
            for arrival_ns, message in self._control.receive():
                if not isinstance(message, WireReply):
                    raise WorkerError("sent a request")
                with self._lock:
                    pending = self._pending.pop(message.id, None)
                if pending is not None:
                    pending.answers.put((arrival_ns, message))
        except WorkerError as error:
            self._lose(f"its agent {error}")
            self._control.shut_down()

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = f"{self.name}: {reason}"
            left = list(self._pending.values())
            self._pending.clear()
            for connection in self._ranks:
                shut_down(connection)
        for each in left:
            each.answers.put(self._lost)


def accept_agents(
    listener: Listener,
    names: Sequence[str],
    timeout_s: float,
    explain: Callable[[], str | None] = lambda: None,
) -> list[AgentClient]:
    """Return the agents of a gang, whose launcher has started one for each slot.

    Their versions are checked, settings that the launcher changed are undone, and their clocks are read.

    Args:
        listener: What they connect to.
        names: Names of their hosts, by slot.
        timeout_s: Time limit for all connections (seconds).
        explain: Returns why an agent cannot come any more, or None.

    Raises:
        WorkerError: An agent does not come, its host has other versions, or there are too many hosts for the
            open files that this process may have; all are ended.
    """
    allow_open_files(FILES_PER_HOST * len(names) + SPARE_FILES)
    deadline_s = time.monotonic() + timeout_s
    awaited = {Hello("agent", slot): name for slot, name in enumerate(names)}
    clients: list[AgentClient] = []
    try:
        # In the order in which they come, to notice soon if one of them is lost.
        while awaited:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                hello, connection = listener.accept_first(awaited, left_s, explain)
            except WorkerError as error:
                whose = "its agent has" if len(awaited) == 1 else "their agents have"
                raise WorkerError(f"{', '.join(awaited.values())}: {whose} not started: {error}") from None
            clients.append(AgentClient(listener, connection, awaited.pop(hello), hello.slot))
        clients.sort(key=lambda client: client.slot)
        described = [client.begin("host.describe") for client in clients]
        wanted = ProcessSettings.read()
        adopted = [client.begin("host.adopt", settings=wanted.as_primitives()) for client in clients]
        for client, facts, left in zip(clients, described, adopted, strict=True):
            client.facts = HostFacts.from_primitives(facts.result(timeouts.DESCRIBE_TIMEOUT_S))
            client.unlike_pytest = left.result(timeouts.DESCRIBE_TIMEOUT_S)
        refuse_differences(describe(devices=False), {client.name: client.facts for client in clients})
        for client in clients:
            client.exchange(FIRST_EXCHANGES)
    except BaseException:
        close_all(clients)
        raise
    return clients


def give_up_with(launcher: int, clients: Sequence[AgentClient], explain: Callable[[], str]) -> None:
    """Give hosts up when the process that started their agents ends, since nothing else may end the agents.

    Args:
        launcher: Pid of the process, a child of this one.
        clients: The hosts, to which more may be added.
        explain: Returns how it ended.
    """

    def watch() -> None:
        with suppress(ChildProcessError):
            # Whoever started it reaps it.
            os.waitid(os.P_PID, launcher, os.WEXITED | os.WNOWAIT)
        for client in clients:
            if client.lost is None:
                client.give_up(explain())

    threading.Thread(target=watch, name="llenergy-launcher", daemon=True).start()


def close_all(clients: Sequence[AgentClient]) -> None:
    """Close several agents."""
    for client in clients:
        with suppress(OSError):
            client.close()
