# SPDX-License-Identifier: Apache-2.0
"""Real agents on this host without Slurm or Ray, and a launcher that starts them.

Each agent may be in a time namespace and have a host name of its own (root).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.hosts.connection import Listener
from pytest_llenergy.hosts.launchers import NONE_LOST, Gang, HostOffer, NeverError, Shape
from pytest_llenergy.hosts.remote_host import RemoteHost, accept_agents

ROOT = Path(__file__).parents[2]

#: The program of an agent.
AGENT = "pytest_llenergy.hosts.agent"

#: How far the monotonic clock of another host is ahead (seconds).
SHIFT_S = 5000

#: How long both sides of a control connection wait for beats in tests of what must not wait for them.
PATIENCE_S = 120.0

#: Environment variable with the address of pytest for agents in another network namespace.
ADDRESS_VARIABLE = "TEST_AGENT_ADDRESS"

#: Gives an agent the object of tests.
WITH_TRIAL = """
from pytest_llenergy.hosts import agent
agent.OBJECTS["trial"] = "tests.hosts.trial:Trial"
"""

#: The same, and pytest may be silent for long.
PATIENT = f"from pytest_llenergy.hosts import timeouts\ntimeouts.MISSED_S = {PATIENCE_S}\n{WITH_TRIAL}"


def another_host(name: str, shift_s: int = SHIFT_S) -> list[str]:
    """Return the beginning of a command line that runs on a host with this name and its own clock."""
    clocks = ["--monotonic", str(shift_s), "--boottime", str(shift_s)]
    namespaces = ["unshare", "--time", *clocks, "--uts", "--fork", "--kill-child"]
    return [*namespaces, "sh", "-c", 'hostname "$0" && exec "$@"', name]


@cache
def can_be_another_host() -> bool:
    """Return whether this process may make hosts with a clock and a name of their own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    command = [*another_host("n2", 1), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_another_host = pytest.mark.skipif(
    not can_be_another_host(), reason="a clock of its own needs a time namespace (root, unshare)"
)


def start_agent(
    invitation: str,
    slot: int = 0,
    *,
    host: str | None = None,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    program: str = WITH_TRIAL,
) -> subprocess.Popen[bytes]:
    """Start an agent as a launcher does: in a session of its own, with the invitation on standard input.

    Args:
        invitation: What it reads.
        slot: Its slot.
        host: Name of another host; None for this host.
        environment: More environment variables.
        prefix: Programs that run it, such as nice.
        program: Python that it runs before it begins.
    """
    command = [sys.executable, "-c", f"{program}\nfrom {AGENT} import main\nmain('{slot}')", AGENT]
    popen = subprocess.Popen(
        [*(another_host(host) if host is not None else ()), *prefix, *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        start_new_session=True,
    )
    assert popen.stdin is not None
    with suppress(BrokenPipeError), popen.stdin:
        popen.stdin.write(f"{invitation}\n".encode())
    # ``communicate`` would flush it again.
    popen.stdin = None
    return popen


def await_end(popen: subprocess.Popen[bytes], timeout_s: float = 60.0) -> str:
    """Wait for the end of an agent and return what it has reported."""
    _, report = popen.communicate(timeout=timeout_s)
    return report.decode()


class AgentGang(Gang):
    """Agents of hosts: by the name of each host, the options of ``start_agent``.

    Attributes:
        agents: Their processes.
    """

    def __init__(self, hosts: Mapping[str, Mapping[str, Any]]) -> None:
        self.agents: list[subprocess.Popen[bytes]] = []
        with ExitStack() as end:
            listener = Listener(os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"))
            for slot, options in enumerate(hosts.values()):
                self.agents.append(start_agent(listener.invitation, slot, **options))
                end.callback(await_end, self.agents[-1])
            super().__init__(accept_agents(listener, list(hosts), 60.0), end.pop_all().close)


@contextmanager
def gang(*hosts: str | None, **options: object) -> Iterator[list[RemoteHost]]:
    """Yield the clients of an agent for each host: a name for another host, None for this one.

    ``options`` are those of ``start_agent``. The processes are the attribute ``popen`` of the clients.
    """
    named = {host or f"host{slot}": {"host": host, **options} for slot, host in enumerate(hosts)}
    with closing(AgentGang(named)) as started:
        for client, popen in zip(started.hosts, started.agents, strict=True):
            client.popen = popen  # type: ignore[attr-defined]
        yield list(started.hosts)


class Launcher:
    """Starts gangs on hosts with so many GPUs each; ``hosts`` are those of ``AgentGang``."""

    def __init__(self, hosts: Mapping[str, Mapping[str, Any]], devices: int = 1) -> None:
        self.hosts, self.devices = hosts, devices
        self.gangs: list[AgentGang] = []

    def offers(self) -> Sequence[HostOffer]:
        """See ``Cluster``."""
        return [HostOffer(name, self.devices) for name in self.hosts]

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> AgentGang:
        """See ``Cluster``."""
        names = [name for name in self.hosts if name not in avoid]
        if len(names) < shape.hosts:
            raise NeverError("; ".join(avoid.values()) or f"these agents cannot provide {shape}")
        self.gangs.append(AgentGang({name: self.hosts[name] for name in names[: shape.hosts]}))
        return self.gangs[-1]

    def close(self) -> None:
        """See ``Cluster``."""
        for each in self.gangs:
            each.close()
