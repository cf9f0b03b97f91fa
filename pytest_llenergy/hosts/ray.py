# SPDX-License-Identifier: Apache-2.0
"""Hosts of a Ray cluster. Ray places agents and starts them; it neither runs nor watches ranks.

pytest's own process never connects to Ray: see ``ray_client``.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, Any

from pytest_llenergy.errors import LeaseTimeoutError, PlanError, WorkerError
from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.launchers import (
    NONE_LOST,
    Gang,
    HostOffer,
    NeverError,
    Shape,
    explain_never,
    read_end,
)
from pytest_llenergy.hosts.remote_host import accept_agents
from pytest_llenergy.lifetime import module_command
from pytest_llenergy.ranks.transport import connection_pair

#: ``HOST:PORT``, or ``[ADDRESS]:PORT`` for IPv6.
ADDRESS = re.compile(r"([^][:/\s]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

#: Time limits to connect to a cluster, for its answers, and for the end of a gang (seconds).
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, RELEASE_TIMEOUT_S = 60.0, 30.0, 3.0
#: Time limit for all agents of a gang to connect, once it has its GPUs (seconds).
AGENTS_TIMEOUT_S = 60.0


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

    def offers(self) -> Sequence[HostOffer]:
        """See ``Cluster``."""
        return [HostOffer(name, gpus) for name, gpus in self._ask("offers")]

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> Gang:
        """See ``Cluster``."""
        number = next(self._numbers)
        try:
            fits = self._ask("place", number, shape.hosts, shape.per_host, list(avoid))
            if not fits or not self._await_group(number, shape, wait_s, on_wait):
                raise NeverError(explain_never(f"Ray cluster {self.address}", shape, self.offers(), avoid))
            listener, client = Listener(self._client.own_address), self._client
            names = self._ask("start", number, shape.per_host, listener.invitation)
            hosts = accept_agents(listener, names, AGENTS_TIMEOUT_S, lambda: client.ask("ended", number))
        except BaseException:
            # Also on Ctrl-C while it waits.
            self._release(number)
            raise
        return Gang(hosts, lambda: self._release(number))

    def close(self) -> None:
        """See ``Cluster``."""
        self._client.close()

    def _await_group(self, number: int, shape: Shape, wait_s: float, on_wait: Callable[[str], None]) -> bool:
        """Wait for the GPUs of a gang. Returns whether it can have them at all."""
        deadline_s = time.monotonic() + wait_s
        # Each call waits for a while.
        while (found := self._ask("await_group", number)) is None:
            if time.monotonic() > deadline_s:
                raise LeaseTimeoutError(
                    f"Ray cluster {self.address} did not free {shape} within {wait_s:g} s: `ray status` "
                    "shows what is in use"
                )
            on_wait(f"other programs hold GPUs of the Ray cluster {self.address}")
        return bool(found)

    def _ask(self, method: str, *args: Any) -> Any:
        if self._client.has_ended:
            # The gangs have ended with it.
            self._client = _Client(self.address)
        return self._client.ask(method, *args)

    def _release(self, number: int) -> None:
        # Whatever happens to the client, Ray frees what it has placed.
        with suppress(WorkerError):
            self._client.ask("release", number, timeout_s=RELEASE_TIMEOUT_S)


class _Client:
    """The other process. It ends with this one, or with the thread that starts it.

    ``own_address`` is that of this host in the cluster.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self._connection, theirs = connection_pair()
        with theirs:
            self._popen = subprocess.Popen(
                module_command("pytest_llenergy.hosts.ray_client", str(os.getpid()), str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.own_address: str
        try:
            self.address, self.own_address = self.ask("connect", address, timeout_s=CONNECT_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether it can answer nothing any more."""
        return self._connection.closed or self._popen.poll() is not None

    def ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Return what a method of ``RayClient`` returns; raises ``WorkerError`` if there is no answer.

        The process is ended then, and Ray frees what it held.
        """
        limit_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        name = f"Ray cluster {self.address}"
        try:
            self._connection.send((method, args))
            if not self._connection.poll(limit_s):
                raise WorkerError(f"{name}: no answer within {limit_s:g} s")
            error, value = self._connection.recv()
        except (EOFError, OSError):
            printed = "" if self._log.closed else f": {read_end(self._log)}"
            self.close()
            raise WorkerError(f"{name}: the process that speaks to it has ended{printed}") from None
        except BaseException:
            # Also on Ctrl-C: its answer would be taken for that to the next request.
            self.close()
            raise
        if error is not None:
            raise WorkerError(f"{name}: {error}")
        return value

    def close(self) -> None:
        """End the process, and with it everything that it has started in the cluster."""
        self._connection.close()
        self._popen.kill()
        self._popen.wait()
        self._log.close()
