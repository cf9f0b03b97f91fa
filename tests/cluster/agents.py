# SPDX-License-Identifier: Apache-2.0
"""Real agents on this host, each if wanted in a time namespace and with a host name of its own (root)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from pytest_llenergy.cluster.agent import agent_command
from pytest_llenergy.cluster.client import AgentClient, accept_agents, close_all
from pytest_llenergy.cluster.wire import Invitation, Listener

ROOT = Path(__file__).parents[2]

#: How far the monotonic clock of another host is ahead (seconds).
SHIFT_S = 5000

#: Gives an agent the service of tests.
WITH_TRIAL = """
from pytest_llenergy.cluster import agent
agent.SERVICES["trial"] = "tests.cluster.trial:TrialService"
"""


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
    invitation: Invitation | str,
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
    python, option, source, *arguments = agent_command(slot)
    begins = source.index("main(*")
    command = [python, option, f"{source[:begins]}{program}\n{source[begins:]}", *arguments]
    popen = subprocess.Popen(
        [*(another_host(host) if host is not None else ()), *prefix, *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        start_new_session=True,
    )
    assert popen.stdin is not None
    text = invitation if isinstance(invitation, str) else invitation.encode()
    with suppress(BrokenPipeError), popen.stdin:
        popen.stdin.write(f"{text}\n".encode())
    # ``communicate`` would flush it again.
    popen.stdin = None
    return popen


def await_end(popen: subprocess.Popen[bytes], timeout_s: float = 60.0) -> str:
    """Wait for the end of an agent and return what it has reported."""
    _, report = popen.communicate(timeout=timeout_s)
    return report.decode()


@contextmanager
def gang(*hosts: str | None, **options: object) -> Iterator[list[AgentClient]]:
    """Yield the clients of an agent for each host: a name for another host, None for this one.

    ``options`` are those of ``start_agent``. The processes are the attribute ``popen`` of the clients.
    """
    with ExitStack() as end:
        listener = Listener()
        end.callback(listener.close)
        agents = [
            start_agent(listener.invitation, slot, host=host, **options)  # type: ignore[arg-type]
            for slot, host in enumerate(hosts)
        ]
        for popen in agents:
            end.callback(await_end, popen)
        names = [host or f"host{slot}" for slot, host in enumerate(hosts)]
        clients = accept_agents(listener, names, 60.0)
        for client, popen in zip(clients, agents, strict=True):
            client.popen = popen  # type: ignore[attr-defined]
        end.callback(close_all, clients)
        yield clients
