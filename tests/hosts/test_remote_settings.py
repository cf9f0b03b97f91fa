# SPDX-License-Identifier: Apache-2.0
"""Boards of other hosts get their settings back although the driver is slow, and however the agent ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.devices.board_settings import GpuSettings
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.hosts.remote_host import RemoteHost, apply_on_hosts

from ..ranks.survivors import await_none, marked, survivors
from .agents import AgentGang
from .two_hosts import FakeHost, TwoHosts

LIMIT_W = GpuSettings(power_limit_w=300.0)

#: Lets a guard wait for a shorter time.
IMPATIENT = "from pytest_llenergy.ranks import timeouts; timeouts.RESTORE_TIMEOUT_S = 1.0"


@contextmanager
def leased(hosts: Sequence[FakeHost], directory: Path, program: str = "") -> Iterator[list[RemoteHost]]:
    """Yield agents that have leased all boards of their hosts."""
    named = {host.name: {"environment": host.environment, "program": program} for host in hosts}
    with closing(AgentGang(named)) as gang:
        for client in gang.hosts:
            answer = client.lease(GpuRequest(2), exclusive=False, wait_s=5.0, busy_timeout_s=5.0, test="t")
            assert answer.lease is not None
        yield gang.hosts


def keeper(client: RemoteHost) -> psutil.Process:
    """Return the process that keeps the settings of a host's boards."""
    while True:
        for each in psutil.Process(client.facts.pid).children():
            # Right after its start it may still look like the agent.
            if "pytest_llenergy.devices.board_settings" in each.cmdline():
                return each


def left_files(host: FakeHost) -> list[str]:
    return [each.name for each in host.locks.iterdir() if each.name.startswith("llenergy-settings")]


def kill(client: RemoteHost) -> None:
    os.kill(client.facts.pid, 9)


def end_launcher(client: RemoteHost) -> None:
    psutil.Process(client.facts.pid).parent().terminate()  # type: ignore[union-attr]


@pytest.mark.parametrize("end_agent", [kill, RemoteHost.close, end_launcher])
def test_boards_are_restored_however_an_agent_ends(
    two_hosts: TwoHosts, tmp_path: Path, end_agent: Callable[[RemoteHost], None]
) -> None:
    host = two_hosts.hosts[0]
    with marked() as mark, ExitStack() as applied:
        with leased([host], tmp_path) as [client]:
            applied.enter_context(apply_on_hosts(LIMIT_W, [client]))
            assert host.limits_w() == [300.0] * 2
            for board in range(2):
                host.world.update(board, call_delay_ns=300 * 10**6, call_delay_every=1)
            end_agent(client)
            # Whoever has started the agent waits for it, and so for the boards.
            while any("pytest_llenergy.hosts.agent" in line for line in survivors(mark).values()):
                time.sleep(0.01)
            assert (host.limits_w(), left_files(host)) == ([700.0] * 2, [])
        assert await_none(mark) == {}


def test_a_driver_that_hangs_does_not_keep_a_guard_forever(two_hosts: TwoHosts, tmp_path: Path) -> None:
    host = two_hosts.hosts[0]
    with marked() as mark, ExitStack() as applied:
        with leased([host], tmp_path, IMPATIENT) as [client]:
            applied.enter_context(apply_on_hosts(LIMIT_W, [client]))
            keeper(client).suspend()
            kill(client)
            assert await_none(mark) == {}
        # For the next test that leases the boards.
        assert len(left_files(host)) == 2
