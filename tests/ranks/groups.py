# SPDX-License-Identifier: Apache-2.0
"""Helpers: groups of real ranks on the CPU, calls in them, and work that hangs or leaves processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.ranks import group, transport
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.host import StartMethod
from pytest_llenergy.ranks.local import LocalHost
from pytest_llenergy.ranks.plan import LOCALHOST, ProcessPlan, plan_processes
from pytest_llenergy.ranks.workload import call_workload

PLAIN = Capabilities(data=True)
TORCH = Capabilities(data=True, framework="torch")
#: Preloads a module that imports fast.
LIGHT = Capabilities(data=True, preload=("decimal",))


METHODS: tuple[StartMethod, ...] = ("spawn", "forkserver")


def plan(n: int, capabilities: Capabilities = PLAIN, threads: int | None = 1) -> ProcessPlan:
    """Plan ``n`` ranks that share two cores."""
    return plan_processes(capabilities, None, Lease(devices=("cpu",) * n), [0, 1], threads)


def run(
    ranks: RankGroup, function: Callable[..., Any] | str, *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """Return the results of all ranks."""
    workload = call_workload(ranks, function, args, {}, timeout_s)
    workload.run_round()
    return workload.results()


def run_until_it_hangs(ranks: RankGroup, function: Callable[..., Any] | str, *args: Any) -> None:
    """Call what hangs, with a limit that ends once all ranks have said that they have begun."""

    def wait(connections: Iterable[Connection], timeout_s: float) -> list[Connection]:
        deadline = time.monotonic() + 60
        while not all("begun" in rank.tail() for rank in ranks._ranks):
            assert time.monotonic() < deadline, "the ranks do not get to where they hang"
            time.sleep(0.01)
        return transport.wait(connections, 0)

    workload = call_workload(ranks, function, args, {}, 60.0)
    workload.prepare_round()
    workload._timeout_s = 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "wait", wait)
        workload.work()


def start(host: LocalHost, n: int = 2, capabilities: Capabilities = LIGHT) -> RankGroup:
    """Start ranks on this host."""
    return RankGroup(plan(n, capabilities), {LOCALHOST: host})


def leave_daemon() -> int:
    """Leave a grandchild in a session of its own, with no inherited descriptor and no living parent."""
    import os
    import time

    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        daemon = os.fork()
        if daemon:
            os.write(write, str(daemon).encode())
            os._exit(0)
        os.closerange(0, 100)
        time.sleep(300)
    os.wait()
    return int(os.read(read, 20))


def hold_the_lock_of_the_interpreter() -> None:
    import ctypes

    print("begun", flush=True)
    ctypes.PyDLL(None).sleep(300)
