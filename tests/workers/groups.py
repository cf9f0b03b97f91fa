# SPDX-License-Identifier: Apache-2.0
"""Helpers: groups of real ranks on the CPU, calls in them, and work that hangs or leaves processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.local import LocalHost
from pytest_llenergy.workers.plan import LOCALHOST, ProcessPlan, plan_processes
from pytest_llenergy.workers.start_method import StartMethod
from pytest_llenergy.workers.workload import call_workload

PLAIN = Capabilities(data=True)
TORCH = Capabilities(data=True, framework="torch")
#: Preloads a module that imports fast.
LIGHT = Capabilities(data=True, preload=("decimal",))


METHODS: tuple[StartMethod, ...] = ("spawn", "forkserver")


def plan(n: int, capabilities: Capabilities = PLAIN, threads: int | None = 1) -> ProcessPlan:
    """Plan ``n`` ranks that share two cores."""
    return plan_processes(capabilities, None, Lease(devices=("cpu",) * n), [0, 1], threads)


def run(
    ranks: RankGroup, function: Callable[..., Any] | str, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Return the results of all ranks."""
    workload = call_workload(ranks, function, args, {}, timeout_s)
    workload.run_round()
    return workload.results()


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

    print("holding", flush=True)
    ctypes.PyDLL(None).sleep(300)
