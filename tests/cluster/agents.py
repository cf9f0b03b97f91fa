# SPDX-License-Identifier: Apache-2.0
"""Real agents on this host, each if wanted in a time namespace and with a host name of its own (root)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

from pytest_llenergy.cluster.agent import agent_command
from pytest_llenergy.cluster.client import AgentClient, accept_agents, close_all
from pytest_llenergy.cluster.wire import Invitation, Listener

#: How far the monotonic clock of a shifted agent is ahead (seconds).
SHIFT_S = 5000

#: Added to an agent that tests start: verbs that misbehave.
TRIAL = """
from pytest_llenergy.cluster import agent
agent.SERVICES["trial"] = "tests.cluster.trial:TrialService"
"""


@cache
def can_shift() -> bool:
    """Return whether this process may make time namespaces."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--time", "--monotonic", "1", "--uts", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def own_host(name: str, shift_s: int = SHIFT_S) -> list[str]:
    """Return the beginning of a command line that runs on a host with this name and its own clock."""
    namespace = ["unshare", "--time", "--monotonic", str(shift_s), "--uts", "--fork", "--kill-child"]
    return [*namespace, "sh", "-c", 'hostname "$0" && exec "$@"', name]


def start_agent(
    invitation: Invitation | str,
    slot: int = 0,
    *,
    on_host: str | None = None,
    shift_s: int = SHIFT_S,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    python: str = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start an agent as a launcher does: in a session of its own, with the invitation on standard input.

    Args:
        invitation: What it reads.
        slot: Its slot.
        on_host: Name of a host with its own clock; None for this host.
        shift_s: How far the clock of that host is ahead (seconds).
        environment: More environment variables.
        prefix: Programs that run it, such as nice.
        python: Its interpreter.
    """
    command = agent_command(slot, python)
    command[2] = command[2].replace("main(", f"{TRIAL.strip()}\nmain(", 1)
    host = own_host(on_host, shift_s) if on_host is not None else []
    popen = subprocess.Popen(
        [*host, *prefix, *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    assert popen.stdin is not None
    text = invitation if isinstance(invitation, str) else invitation.encode()
    popen.stdin.write(f"{text}\n".encode())
    popen.stdin.close()
    return popen


def end_agent(popen: subprocess.Popen[bytes]) -> str:
    """Wait for the end of an agent and return what it has reported."""
    assert popen.stderr is not None
    with popen.stderr:
        report = popen.stderr.read().decode()
    popen.wait()
    return report


@contextmanager
def gang(*hosts: str | None, timeout_s: float = 60.0) -> Iterator[list[AgentClient]]:
    """Yield the clients of one agent for each host: a name for one with its own clock, None for this host."""
    with ExitStack() as end:
        listener = Listener()
        end.callback(listener.close)
        for slot, host in enumerate(hosts):
            popen = start_agent(listener.invitation, slot, on_host=host)
            end.callback(end_agent, popen)
        names = [host or f"host{slot}" for slot, host in enumerate(hosts)]
        clients = accept_agents(listener, names, timeout_s)
        end.callback(close_all, clients)
        yield clients
