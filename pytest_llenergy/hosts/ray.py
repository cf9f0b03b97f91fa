# SPDX-License-Identifier: Apache-2.0
"""Hosts of a Ray cluster. Ray allocates GPUs and starts agents; it neither runs nor watches ranks.

pytest's own process never connects to Ray: see ``ray_broker``.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import IO, Any

import psutil

from pytest_llenergy.errors import PlanError, WorkerError
from pytest_llenergy.hosts.base import NONE_LOST, BusyError, HostOffer, NeverError, Shape
from pytest_llenergy.hosts.client import AgentClient, accept_agents, close_all, give_up_with
from pytest_llenergy.hosts.wire import Listener
from pytest_llenergy.ranks import guard
from pytest_llenergy.record.text import shorten

#: ``HOST:PORT``, or ``[ADDRESS]:PORT`` for IPv6.
ADDRESS = re.compile(r"([^][:/\s]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

#: What messages call the broker.
BROKER = "the process that speaks to the Ray cluster"

#: Time limit for the broker to connect to a cluster (seconds).
CONNECT_TIMEOUT_S = 60.0
#: Time limit for the broker's answers, without the time that a request may wait for GPUs (seconds).
ANSWER_TIMEOUT_S = 30.0
#: Time limit for all agents of a gang to connect, once it has its GPUs (seconds).
AGENTS_TIMEOUT_S = 60.0
#: How much of the broker's output is read (bytes), and how much of it a message quotes (characters).
TAIL_BYTES, QUOTED = 2000, 200
#: Time, processes and place, with which each message in Ray's own log begins.
LOG_PREFIX = re.compile(r"^\[[^]]*\] (\S+:\d+: )?")

#: Not run with ``-m``, which would put the working directory first on the search path, nor by path, which
#: would put this directory there, where a module has the name of Ray's.
PROGRAM = """
import runpy, sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
runpy.run_module("pytest_llenergy.hosts.ray_broker", run_name="__main__", alter_sys=True)
"""


class RayCluster:
    """Hosts of a running Ray cluster that pytest's host is part of. Implements ``Cluster``.

    Args:
        address: ``HOST:PORT`` of the cluster; by default ``RAY_ADDRESS``, or the cluster on this host.

    Raises:
        PlanError: Ray is not installed, or the address is not one of a cluster.
        WorkerError: The cluster cannot be reached, or runs another version of Ray or Python.
    """

    def __init__(self, address: str | None = None) -> None:
        if find_spec("ray") is None:
            raise PlanError("ray is not installed: pip install 'pytest-llenergy[ray]'")
        self.address: str = address or os.environ.get("RAY_ADDRESS") or "auto"
        if self.address != "auto" and not ADDRESS.fullmatch(self.address):
            raise PlanError(
                f"{self.address!r} is not an address that hosts of a Ray cluster use: name HOST:PORT, which "
                "`ray start` prints, and run pytest on a host of the cluster"
            )
        self._broker = _Broker(self.address)
        # From now on: another cluster may start on this host.
        self.address = self._broker.address
        self._numbers = itertools.count(1)
        self._gangs: list[RayGang] = []
        #: Why the cluster is not asked again.
        self._failed: str | None = None

    def offers(self) -> Sequence[HostOffer]:
        """See ``Cluster``."""
        return [
            HostOffer(offer["name"], offer["gpus"], "; ".join(offer["holders"]) or None)
            for offer in self._request("offers")
        ]

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> RayGang:
        """See ``Cluster``."""
        number = next(self._numbers)
        owner = f"{psutil.Process().username()}, process {os.getpid()} on {platform.node()}"
        listener = Listener()
        try:
            answer = self._request(
                "gang",
                wait_s + ANSWER_TIMEOUT_S,
                lambda holders: on_wait(f"{shape} of {self._name}: {_describe_holders(holders)}"),
                gang=number,
                name=f"pytest-llenergy {number} of {owner}",
                hosts=shape.hosts,
                per_host=shape.per_host,
                wait_s=wait_s,
                avoid=list(avoid),
                invitation=listener.invitation.encode(),
            )
            self._refuse(answer, shape, wait_s, avoid)
            names = answer["names"]
            clients = accept_agents(
                listener, names, AGENTS_TIMEOUT_S, lambda: self._broker.explain(number, names)
            )
            _refuse_niceness(clients)
            self._broker.end_with(clients)
        except BaseException:
            # Also on Ctrl-C while it waits.
            self._broker.release(number)
            listener.close()
            raise
        gang = RayGang(clients, listener, self._broker, number)
        self._gangs.append(gang)
        return gang

    def _request(
        self,
        verb: str,
        timeout_s: float = ANSWER_TIMEOUT_S,
        on_wait: Callable[[list[str]], object] = len,
        **arguments: Any,
    ) -> Any:
        """Return the broker's answer; a cluster that has not answered once is not asked again."""
        if self._failed is not None:
            raise WorkerError(self._failed)
        try:
            if self._broker.has_ended:
                # Its agents ended with it, and nothing else is wrong.
                self._broker.close()
                self._broker = _Broker(self.address)
            return self._broker.request(verb, timeout_s, on_wait, **arguments)
        except _SilentError as error:
            self._failed = f"{error}; it is not asked again"
            raise WorkerError(str(error)) from None

    def _refuse(
        self, answer: Mapping[str, Any], shape: Shape, wait_s: float, avoid: Mapping[str, str]
    ) -> None:
        if "never" in answer:
            exist = (
                ", ".join(f"{each.name} has {each.devices}" for each in self.offers()) or "it has no hosts"
            )
            left_out = "".join(f"; not used: {reason}" for reason in avoid.values())
            raise NeverError(f"{self._name} cannot provide {shape}: {exist}{left_out}")
        if "busy" in answer:
            raise BusyError(
                f"{self._name} did not free {shape} within {wait_s:g} s: {_describe_holders(answer['busy'])}"
            )

    def close(self) -> None:
        """See ``Cluster``."""
        for gang in self._gangs:
            gang.close()
        self._broker.close()

    @property
    def _name(self) -> str:
        return f"the Ray cluster {self.address}"


class RayGang:
    """Hosts whose GPUs one placement group holds. Implements ``Gang``."""

    def __init__(
        self, clients: Sequence[AgentClient], listener: Listener, broker: _Broker, number: int
    ) -> None:
        self.hosts: Sequence[AgentClient] = clients
        #: Ranks connect to it later.
        self._listener = listener
        self._broker = broker
        self._number = number

    def lost(self) -> Mapping[str, str]:
        """See ``Gang``. What Ray has found out by now is added."""
        reasons = {client: client.lost for client in self.hosts if client.lost is not None}
        ended = self._broker.ended(self._number) if reasons else {}
        # Ray may have ended the agents before this process noticed that the broker has gone.
        everywhere = self._broker.explain_end() if reasons and self._broker.has_ended else ""
        found = {}
        for client, reason in reasons.items():
            more = (ended.get(client.slot), "" if BROKER in reason else everywhere)
            found[client.name] = "; ".join(filter(None, (reason, *more)))
        return found

    def close(self) -> None:
        """See ``Gang``."""
        close_all(self.hosts)
        self._listener.close()
        self._broker.release(self._number)


class _SilentError(WorkerError):
    """The cluster has not answered within a time limit."""


class _Broker:
    """pytest's side of the broker. It ends with this process, or with the thread that starts it.

    Attributes:
        address: ``HOST:PORT`` of the cluster.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._buffer = b""
        #: Why agents have ended, by gang and slot.
        self._ended: dict[int, dict[int, str]] = {}
        #: Hosts of the gangs. Those that were closed leave it when the next gang starts.
        self._clients: list[AgentClient] = []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self._popen: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, guard.PACKAGE_PARENT, str(os.getpid()), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._stdout: IO[bytes] = self._popen.stdout
        try:
            answer = self._receive(time.monotonic() + CONNECT_TIMEOUT_S)
            if "error" in answer:
                raise WorkerError(f"Ray cluster {address}: {answer['error']}")
            self.address: str = answer["ok"]
            # One thread for all gangs.
            give_up_with(self._popen.pid, self._clients, self.explain_end)
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._popen.poll() is not None

    def request(
        self,
        verb: str,
        timeout_s: float = ANSWER_TIMEOUT_S,
        on_wait: Callable[[list[str]], object] = len,
        **arguments: Any,
    ) -> Any:
        """Return the answer.

        Args:
            verb: A verb of the broker.
            timeout_s: Time limit (seconds).
            on_wait: Called with the holders of GPUs whenever they change.
            **arguments: JSON values.

        Raises:
            WorkerError: The broker is gone or does not answer, or Ray refuses.
        """
        number = self._send(verb, arguments)
        deadline_s = time.monotonic() + timeout_s
        while True:
            answer = self._receive(deadline_s)
            if answer.get("event") == "waiting":
                on_wait(answer["holders"])
            if answer.get("id") == number:
                if "error" in answer:
                    raise WorkerError(f"Ray cluster {self._address}: {answer['error']}")
                return answer["ok"]

    def release(self, gang: int) -> None:
        """Free the GPUs of a gang. Ray ends its actors, if they have not ended."""
        with suppress(WorkerError):
            self._send("release", {"gang": gang})

    def ended(self, gang: int) -> Mapping[int, str]:
        """Return why agents have ended, by slot, as far as Ray has found out."""
        with suppress(WorkerError):
            while wait([self._stdout.fileno()], 0):
                self._receive(time.monotonic())
        return self._ended.get(gang, {})

    def explain(self, gang: int, names: Sequence[str]) -> str | None:
        """Return why an agent cannot come any more, or None."""
        for slot, reason in self.ended(gang).items():
            return f"{names[slot]}: {reason}"
        return self.explain_end() if self._popen.poll() is not None else None

    def end_with(self, clients: Sequence[AgentClient]) -> None:
        """Give hosts up when the broker ends: Ray ends their agents then, if its head answers."""
        self._clients[:] = [*(each for each in self._clients if each.lost is None), *clients]
        if self.has_ended:
            # Perhaps before the thread that waits for that could know these hosts.
            for each in self._clients:
                each.give_up(self.explain_end())

    def close(self) -> None:
        """End the broker, and with it everything that it has started in the cluster."""
        for each in (self._stdin, self._stdout):
            each.close()
        self._popen.kill()
        self._popen.wait()
        self._log.close()

    def _send(self, verb: str, arguments: Mapping[str, Any]) -> int:
        number = next(self._numbers)
        try:
            self._stdin.write(json.dumps({"id": number, "verb": verb, **arguments}).encode() + b"\n")
        except (OSError, ValueError):
            raise WorkerError(self.explain_end()) from None
        return number

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        """Return the next answer or event; note why agents have ended."""
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not wait([self._stdout.fileno()], left_s):
                raise _SilentError(f"Ray cluster {self._address} does not answer{self._tail()}")
            part = os.read(self._stdout.fileno(), 1 << 16)
            if not part:
                raise WorkerError(self.explain_end())
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("event") == "ended":
            self._ended.setdefault(answer["gang"], {})[answer["slot"]] = answer["reason"]
        return answer

    def explain_end(self) -> str:
        """Return that the process has ended, with the last line of its output."""
        return f"{BROKER} {self._address} has ended{self._tail()}"

    def _tail(self) -> str:
        with suppress(OSError, ValueError):
            size = os.fstat(self._log.fileno()).st_size
            lines = os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(
                errors="replace"
            )
            if lines.strip():
                return f": {shorten(LOG_PREFIX.sub('', lines.strip().rpartition(chr(10))[2]), QUOTED)}"
        return ""


def _refuse_niceness(clients: Sequence[AgentClient]) -> None:
    """Refuse hosts whose ranks would be at Ray's nice 15: other processes would take their time."""
    for client in clients:
        for difference in client.unlike_pytest:
            if difference.startswith("niceness"):
                close_all(clients)
                raise WorkerError(f"{client.name}: {difference}: start Ray there with RAY_worker_niceness=0")


def _describe_holders(holders: Sequence[str]) -> str:
    return f"held by {'; '.join(holders)}" if holders else "Ray does not report who holds them"
