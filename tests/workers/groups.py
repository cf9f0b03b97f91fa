# SPDX-License-Identifier: Apache-2.0
"""Groups of real ranks on the CPU, and calls in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import Lease
from pytest_llenergy.workers.group import RankGroup
from pytest_llenergy.workers.plan import ProcessPlan, plan_processes
from pytest_llenergy.workers.workload import call_workload

PLAIN = Capabilities(data=True)
TORCH = Capabilities(data=True, framework="torch")


def plan(n: int, capabilities: Capabilities = PLAIN, threads: int | None = 1) -> ProcessPlan:
    """Of ``n`` ranks that take turns on two cores."""
    return plan_processes(capabilities, None, Lease(devices=("cpu",) * n), [0, 1], threads)


def run(
    ranks: RankGroup, function: Callable[..., Any] | str, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """What it returns on each rank."""
    workload = call_workload(ranks, function, args, {}, timeout_s)
    workload.run_round()
    return workload.results()
