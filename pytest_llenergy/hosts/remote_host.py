# SPDX-License-Identifier: Apache-2.0
"""Another host, as pytest uses it through its agent: a ``Host`` whose clock has an offset."""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from pytest_llenergy.errors import WorkerError
from pytest_llenergy.hosts import timeouts
from pytest_llenergy.hosts.clock import ClockLine, Exchange, Offset
from pytest_llenergy.hosts.connection import Listener, end_addresses
from pytest_llenergy.hosts.host_facts import HostFacts, describe, refuse_differences
from pytest_llenergy.hosts.peer import Peer
from pytest_llenergy.ranks.host import StartedRank, StartMethod
from pytest_llenergy.ranks.plan import INTERFACES, ProcessPlan

#: Exchanges of clock readings when a gang starts, and in each gap between rounds.
FIRST_EXCHANGES, LATER_EXCHANGES = 32, 8


class RemoteHost(Peer):
    """A ``Host`` with an agent, whose leases, clock and meters are asked for, too.

    Attributes:
        name: Its name in messages and of its domains.
        slot: Its position in the gang.
        facts: What its agent reports about it.
        clock: Its clock against pytest's.
        start_method: How its ranks start.
    """

    def __init__(self, connection: Connection, name: str, slot: int, facts: HostFacts) -> None:
        self.slot, self.facts = slot, facts
        self.clock = ClockLine()
        self.start_method: StartMethod = "spawn"
        #: The addresses of pytest's host and of this one on their connection.
        self.addresses = end_addresses(connection)
        self._channels = itertools.count()
        self._exchanging = threading.Lock()
        super().__init__(connection, name)

    # Clock

    def exchange(self, count: int = LATER_EXCHANGES) -> Offset:
        """Read both clocks ``count`` times, add the readings to ``clock``, and return the offset.

        Several threads may call it, one after the other: groups of readings must not overlap.

        Raises:
            WorkerError: The host is lost.
        """
        exchanges = []
        with self._exchanging:
            for _ in range(count):
                pending = self.begin("clock")
                arrived_ns, left_ns = pending.result(timeouts.MISSED_S)
                # Without the time that the agent took, as in NTP (RFC 5905, section 8).
                received_ns = pending.received_ns - (left_ns - arrived_ns)
                exchanges.append(Exchange(pending.sent_ns, arrived_ns, received_ns))
            return self.clock.add(exchanges)

    def to_local(self, time_ns: int) -> int:
        """See ``Host``."""
        return self.clock.to_local(time_ns)

    # Devices

    def release(self) -> None:
        """Release the devices, after the ranks have ended. Those of a lost host are free already."""
        with suppress(WorkerError):
            self._ask("release")

    # Ranks

    def prepare(
        self, group: str, environment: Mapping[str, str], preload: Sequence[str], timeout_s: float
    ) -> None:
        """See ``Host``."""
        here = str(Path.cwd())
        self.call(
            "ranks.prepare",
            timeout_s + timeouts.ANSWER_TIMEOUT_S,
            group,
            dict(environment),
            tuple(preload),
            timeout_s,
            self.start_method,
            here,
            [path or here for path in sys.path if isinstance(path, str)],
        )

    def meet(
        self,
        group: str,
        plan: ProcessPlan,
        hosts: Mapping[str, RemoteHost],
        environment: Mapping[str, str],
    ) -> tuple[str, dict[str, dict[str, str]]]:
        """See ``Host``."""
        if len(hosts) == 1:
            url, master = self._ask("meet_here", group, len(plan.ranks))
            return url, {self.name: master}
        everyone = list(hosts.values())
        address, port, variables = _meet(everyone, environment)
        if 1 < plan.nodes < len(hosts):
            # Those of the first model are right already.
            for start in range(plan.nodes, len(hosts), plan.nodes):
                variables |= _meet(everyone[start : start + plan.nodes], environment)[2]
        return f"tcp://{address}:{port}", variables

    def start(
        self,
        group: str,
        rank: int,
        environment: Mapping[str, str],
        boot: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        python: str | None = None,
    ) -> StartedRank:
        """See ``Host``. The rank runs under the lease of its own host; descriptors cannot cross."""
        channel = next(self._channels)
        connection = self.link.open_channel(channel)
        try:
            # The agent has the search path from ``prepare``.
            own = {**boot, "sys_path": None}
            pid, forked = self._ask("start", group, rank, dict(environment), own, python, channel)
        except BaseException:
            connection.close()
            raise
        return StartedRank(pid, forked, connection, partial(self._read_tail, group, rank))

    def _read_tail(self, group: str, rank: int) -> list[str]:
        lines: list[str] = []
        with suppress(WorkerError):
            lines = self._ask("tail", group, rank)
        return lines

    def exit_code(self, group: str, pid: int) -> int | None:
        """See ``Host``."""
        code: int | None = self._ask("exit_code", group, pid)
        return code

    def write_stacks(self, group: str) -> None:
        """See ``Host``."""
        self._ask("write_stacks", group)

    def kill(self, group: str) -> None:
        """See ``Host``. A lost host kills its ranks itself."""
        self._ask("kill", group)

    def _ask(self, method: str, *args: Any) -> Any:
        return self.call(f"ranks.{method}", timeouts.ANSWER_TIMEOUT_S, *args)


def _meet(
    hosts: Sequence[RemoteHost], environment: Mapping[str, str]
) -> tuple[str, int, dict[str, dict[str, str]]]:
    """Return address and port at which the ranks of several hosts meet, and the variables about it by host.

    The hosts reach the first of them as pytest does; if pytest is there too, by the address at which they
    have reached pytest.
    """
    first, other = hosts[0], hosts[1]
    own, address = first.addresses
    if address == own:
        address = other.addresses[0]
    port, master_port = first.call("ranks.free_ports", timeouts.ANSWER_TIMEOUT_S)
    master = {"MASTER_ADDR": address, "MASTER_PORT": str(master_port)}
    # An administrator may have chosen an interface for all hosts.
    unset = [each for each in INTERFACES if each not in environment]
    asked = [each.begin("ranks.interface_to", address) for each in hosts]
    names = [each.result(timeouts.ANSWER_TIMEOUT_S) for each in asked]
    return (
        address,
        port,
        {
            host.name: master | (dict.fromkeys(unset, name) if name else {})
            for host, name in zip(hosts, names, strict=True)
        },
    )


def accept_agents(
    listener: Listener,
    names: Sequence[str],
    timeout_s: float,
    explain: Callable[[], str | None] = lambda: None,
) -> list[RemoteHost]:
    """Return the hosts of a gang, whose launcher has started an agent for each slot, with their clocks read.

    Args:
        listener: What they connect to. It is closed.
        names: Names of their hosts, by slot.
        timeout_s: Time limit for all connections (seconds).
        explain: Returns why an agent cannot come any more, or None.

    Raises:
        WorkerError: An agent does not come, or its host has other versions; all are ended.
    """
    deadline_s = time.monotonic() + timeout_s
    awaited = dict(enumerate(names))
    hosts: list[RemoteHost] = []
    try:
        while awaited:
            connection = listener.accept(timeouts.EXPECT_POLL_S)
            if connection is not None:
                # If it ends at once, its launcher says why.
                with suppress(EOFError, OSError):
                    _, slot, facts = pickle.loads(connection.recv_bytes())
                    facts = msgspec.convert(facts, HostFacts)
                    hosts.append(RemoteHost(connection, awaited.pop(slot), slot, facts))
                continue
            reason = explain()
            if reason is None and time.monotonic() > deadline_s:
                reason = f"no connection within {timeout_s:g} s"
            if reason is not None:
                raise WorkerError(f"no agent has started on {', '.join(awaited.values())}: {reason}")
        hosts.sort(key=lambda host: host.slot)
        refuse_differences(describe(), {host.name: host.facts for host in hosts})
        for host in hosts:
            host.exchange(FIRST_EXCHANGES)
    except BaseException:
        close_all(hosts)
        raise
    finally:
        listener.close()
    return hosts


def close_all(hosts: Sequence[RemoteHost]) -> None:
    """End the agents of several hosts."""
    for host in hosts:
        host.close()
