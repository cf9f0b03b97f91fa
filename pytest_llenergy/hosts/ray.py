# SPDX-License-Identifier: Apache-2.0
"""Hosts of a Ray cluster. Ray allocates GPUs and starts agents; it neither runs nor watches ranks.

pytest's own process never connects to Ray: see ``ray_client``.
"""

from __future__ import annotations

import itertools
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
from typing import IO, Any

import psutil

from pytest_llenergy.errors import PlanError, WorkerError
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.launchers import NONE_LOST, BusyError, HostOffer, NeverError, Shape
from pytest_llenergy.hosts.peer import Peer
from pytest_llenergy.hosts.remote_host import RemoteHost, accept_agents, close_all
from pytest_llenergy.ranks import guard
from pytest_llenergy.ranks.transport import connection_pair
from pytest_llenergy.record.text import shorten

#: ``HOST:PORT``, or ``[ADDRESS]:PORT`` for IPv6.
ADDRESS = re.compile(r"([^][:/\s]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

#: What messages call the other process.
CLIENT = "the process that speaks to the Ray cluster"

#: Time limits to connect to a cluster, for its answers, and for a word on agents that have ended (seconds).
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, ENDED_TIMEOUT_S = 60.0, 30.0, 1.0
#: Time limit for all agents of a gang to connect, once it has its GPUs (seconds).
AGENTS_TIMEOUT_S = 60.0
#: How long one call waits for GPUs that others hold (seconds); those that were just released are free then.
WAIT_S = 1.0
#: How much of the other process's output is read (bytes), and how much of it a message quotes (characters).
TAIL_BYTES, QUOTED = 2000, 200
#: Time, processes and place, with which each message in Ray's own log begins.
LOG_PREFIX = re.compile(r"^\[[^]]*\] (\S+:\d+: )?")

#: Not run with ``-m``, which would put the working directory first on the search path, nor by path, which
#: would put this directory there, where a module has the name of Ray's.
PROGRAM = """
import runpy, sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
runpy.run_module("pytest_llenergy.hosts.ray_client", run_name="__main__", alter_sys=True)
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
        self._client = _Client(self.address)
        # From now on: another cluster may start on this host.
        self.address = self._client.address
        self._numbers = itertools.count(1)
        self._gangs: list[RayGang] = []
        #: Why the cluster is not asked again.
        self._silent: str | None = None

    def offers(self) -> Sequence[HostOffer]:
        """See ``Cluster``."""
        return [HostOffer(name, gpus) for name, gpus in self._ask("offers")]

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
        name = f"pytest-llenergy {number} of {owner}"
        try:
            fits = self._ask("place", number, name, shape.hosts, shape.per_host, list(avoid))
            if not fits or not self._await_group(number, shape, wait_s, on_wait):
                raise NeverError(self._explain_never(shape, avoid))
            listener = Listener()
            names = self._ask("start", number, shape.per_host, listener.invitation.encode())
            client = self._client
            hosts = accept_agents(
                listener, names, AGENTS_TIMEOUT_S, lambda: client.explain_start(number, names)
            )
        except BaseException:
            # Also on Ctrl-C while it waits.
            self._client.release(number)
            raise
        self._gangs = [*(each for each in self._gangs if not each.closed), RayGang(hosts, client, number)]
        client.end_with(hosts)
        return self._gangs[-1]

    def _await_group(self, number: int, shape: Shape, wait_s: float, on_wait: Callable[[str], None]) -> bool:
        """Wait for the GPUs of a gang. Returns whether it can have them at all."""
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            found = self._ask("await_group", number, min(left_s, WAIT_S))
            if isinstance(found, str):
                return found == "ready"
            holders = f"held by {'; '.join(found) or 'other jobs of the cluster'}"
            if left_s <= WAIT_S:
                raise BusyError(f"{self._name} did not free {shape} within {wait_s:g} s: {holders}")
            on_wait(f"{shape} of {self._name}: {holders}")

    def _explain_never(self, shape: Shape, avoid: Mapping[str, str]) -> str:
        exist = ", ".join(f"{each.name} has {each.devices}" for each in self.offers()) or "it has no hosts"
        left_out = "".join(f"; not used: {reason}" for reason in avoid.values())
        return f"{self._name} cannot provide {shape}: {exist}{left_out}"

    def _ask(self, method: str, *args: Any) -> Any:
        """Return the cluster's answer; one that has not answered once is not asked again."""
        if self._silent is not None:
            raise WorkerError(self._silent)
        if self._client.lost is not None:
            # Its agents ended with it, and nothing else is wrong.
            self._client.close()
            self._client = _Client(self.address)
        begin_s = time.monotonic()
        try:
            return self._client.call(f"ray.{method}", ANSWER_TIMEOUT_S, *args)
        except WorkerError as error:
            if time.monotonic() - begin_s >= ANSWER_TIMEOUT_S:
                self._silent = f"{error}; it is not asked again"
            raise

    def close(self) -> None:
        """See ``Cluster``."""
        for gang in self._gangs:
            gang.close()
        self._client.close()

    @property
    def _name(self) -> str:
        return f"the Ray cluster {self.address}"


class RayGang:
    """Hosts whose GPUs one placement group holds. Implements ``Gang``."""

    def __init__(self, hosts: Sequence[RemoteHost], client: _Client, number: int) -> None:
        self.hosts: Sequence[RemoteHost] = hosts
        self.closed = False
        self._client, self._number = client, number

    def lost(self) -> Mapping[str, str]:
        """See ``Gang``. What Ray has found out by now is added."""
        lost = {host: host.lost for host in self.hosts if host.lost is not None}
        ended = self._client.ended(self._number) if lost else {}
        # Ray may have ended the agents before this process noticed that the other one has gone.
        everywhere = self._client.lost or ""
        found = {}
        for host, reason in lost.items():
            more = (ended.get(host.slot), "" if CLIENT in reason else everywhere)
            found[host.name] = "; ".join(filter(None, (reason, *more)))
        return found

    def close(self) -> None:
        """See ``Gang``."""
        self.closed = True
        close_all(self.hosts)
        self._client.release(self._number)


class _Client(Peer):
    """pytest's side of the process. It ends with this one, or with the thread that starts it.

    Attributes:
        address: ``HOST:PORT`` of the cluster.
    """

    def __init__(self, address: str) -> None:
        #: Hosts of the gangs.
        self._hosts: list[RemoteHost] = []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        ours, theirs = connection_pair()
        with theirs:
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, "-c", PROGRAM, guard.PACKAGE_PARENT),
                    *(str(os.getpid()), str(theirs.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        super().__init__(
            ours,
            f"Ray cluster {address}",
            lambda _: f"{CLIENT} {address} has ended{self._tail()}",
            local=True,
        )
        self.on_lost = self._give_up_hosts
        try:
            self.address: str = self.call("ray.connect", CONNECT_TIMEOUT_S, address)
        except BaseException:
            self.close()
            raise

    def release(self, gang: int) -> None:
        """Free the GPUs of a gang. Ray ends its actors, if they have not ended."""
        self.begin("ray.release", gang)

    def ended(self, gang: int) -> Mapping[int, str]:
        """Return why agents have ended, by slot, as far as Ray has found out."""
        found: dict[int, str] = {}
        with suppress(WorkerError):
            found = self.call("actors.ended", ENDED_TIMEOUT_S, gang)
        return found

    def explain_start(self, gang: int, names: Sequence[str]) -> str | None:
        """Return why an agent cannot come any more, or None."""
        for slot, reason in self.ended(gang).items():
            return f"{names[slot]}: {reason}"
        return self.lost

    def end_with(self, hosts: Sequence[RemoteHost]) -> None:
        """Give hosts up when the process ends: Ray ends their agents then, if its head answers."""
        self._hosts = [*(each for each in self._hosts if each.lost is None), *hosts]
        if self.lost is not None:
            self._give_up_hosts(self.lost)

    def close(self) -> None:
        """End the process, and with it everything that it has started in the cluster."""
        super().close()
        self._popen.kill()
        self._popen.wait()
        self._log.close()

    def _give_up_hosts(self, reason: str) -> None:
        for each in self._hosts:
            if each.lost is None:
                each.give_up(reason)

    def _tail(self) -> str:
        """Return the last line of its output, as the end of a message."""
        with suppress(OSError, ValueError):
            size = os.fstat(self._log.fileno()).st_size
            output = os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
            if lines := output.decode(errors="replace").strip():
                return f": {shorten(LOG_PREFIX.sub('', lines.rpartition(chr(10))[2]), QUOTED)}"
        return ""
