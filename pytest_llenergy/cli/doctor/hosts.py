# SPDX-License-Identifier: Apache-2.0
"""Check the hosts of a cluster for ``llenergy doctor --cluster``, one after the other. Prints nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import msgspec

from pytest_llenergy.backends.base import Capabilities
from pytest_llenergy.devices.lease import CPU, Lease
from pytest_llenergy.errors import LLEnergyError, WorkerError
from pytest_llenergy.hosts.base import Cluster, HostOffer, Shape
from pytest_llenergy.hosts.client import AgentClient
from pytest_llenergy.hosts.host_facts import HostFacts
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.ranks.group import RankGroup
from pytest_llenergy.ranks.plan import HostDevices, plan_on_hosts
from pytest_llenergy.ranks.workload import call_workload
from pytest_llenergy.record.environment import Environment, describe_unlike
from pytest_llenergy.scratch import ScratchDirectory

#: How long to wait for a host that others use, for a host to list its meters, and for ranks (seconds).
BUSY_S, METERS_S, RANKS_S = 5.0, 60.0, 120.0

#: Size of the tensor whose sum shows the bandwidth (bytes), and how often it is summed.
TENSOR_BYTES, SUMS = 64 << 20, 5


@dataclass(frozen=True)
class HostCheckup:
    """One host.

    Attributes:
        name: Its name in the cluster.
        fault: Why it cannot be used; None if it can.
        facts: What its agent reports.
        environment: Its machine and packages.
        shortage: Why tests cannot use GPUs that its driver or the launcher counts; None if they can.
        unlike_pytest: Settings of its processes that differ from pytest's and cannot be undone.
        clock_bound_s: The difference of its clock is known within this (seconds).
    """

    name: str
    fault: str | None = None
    facts: HostFacts | None = None
    environment: Environment | None = None
    shortage: str | None = None
    unlike_pytest: Sequence[str] = ()
    clock_bound_s: float | None = None


@dataclass(frozen=True)
class Bandwidth:
    """An ``all_reduce`` over one rank on each host.

    Attributes:
        hosts: Their names, each with its network interface.
        bytes_per_s: Bus bandwidth, 2 (n - 1) / n times size over duration, as nccl-tests defines it.
        fault: Why it could not be measured; None if it was.
        missing: What is needed for it and not installed, which is no fault.
        size_bytes: Size of the tensor.
    """

    hosts: Sequence[str]
    bytes_per_s: float | None = None
    fault: str | None = None
    missing: str | None = None
    size_bytes: int = TENSOR_BYTES


def check_hosts(cluster: Cluster, add_gpus: str) -> Iterator[HostCheckup]:
    """Check every host of a cluster in turn.

    Args:
        cluster: The launcher.
        add_gpus: What the user can do if the launcher counts no GPUs at all, although there are some.
    """
    offers = cluster.offers()
    remedy = None if any(offer.devices for offer in offers) else add_gpus
    for offer in offers:
        others = [other.name for other in offers if other is not offer]
        yield _check_host(cluster, offer, others, remedy)


def _check_host(cluster: Cluster, offer: HostOffer, others: Sequence[str], remedy: str | None) -> HostCheckup:
    """Start an agent on one host, and ask it."""
    avoid = dict.fromkeys(others, "another host is checked")
    try:
        gang = cluster.gang(Shape(1, offer.devices), BUSY_S, _ignore, avoid)
    except LLEnergyError as error:
        return HostCheckup(offer.name, fault=str(error))
    try:
        (client,) = gang.hosts
        found = client.call("host.describe", METERS_S, meters=True)
        bound_s = client.exchange().bound_ns / 1e9
        facts = HostFacts.from_primitives(found)
        environment = msgspec.convert(client.call("host.environment", METERS_S), Environment)
        return HostCheckup(
            offer.name,
            None,
            facts,
            environment,
            _explain_shortage(facts, offer, remedy),
            client.unlike_pytest,
            bound_s,
        )
    except LLEnergyError as error:
        return HostCheckup(offer.name, fault=str(error))
    finally:
        gang.close()


def _explain_shortage(facts: HostFacts, offer: HostOffer, remedy: str | None) -> str | None:
    found = len(facts.devices)
    if found and remedy is not None:
        return f"none for the launcher, {found} that the driver shows; {remedy}"
    if found >= offer.devices:
        return None
    reasons = f": {'; '.join(facts.devices_missing)}" if facts.devices_missing else ""
    return f"{offer.devices} for the launcher, {found or 'none'} that the driver shows{reasons}"


def describe_differences(hosts: Sequence[HostCheckup]) -> str:
    """Describe how the hosts differ from each other, on one line; "" if they do not."""
    return describe_unlike({host.name: host.environment for host in hosts if host.environment is not None})


def measure_bandwidth(cluster: Cluster, hosts: Sequence[HostCheckup]) -> Bandwidth | None:
    """Sum a tensor over one rank on each host that can be used, with gloo; ``None`` for fewer than two.

    Args:
        cluster: The launcher.
        hosts: All hosts.
    """
    names = [host.name for host in hosts if host.fault is None]
    avoid = {host.name: host.fault for host in hosts if host.fault is not None}
    if len(names) < 2:
        return None
    without = [host.name for host in hosts if host.facts is not None and "torch" not in host.facts.packages]
    if without:
        return Bandwidth(names, missing=f"torch is not installed on {', '.join(without)}")
    try:
        gang = cluster.gang(Shape(len(names), 0), BUSY_S, _ignore, avoid)
    except LLEnergyError as error:
        return Bandwidth(names, fault=str(error).partition("\n")[0])
    scratch = ScratchDirectory()
    try:
        return _sum_on(gang.hosts, scratch)
    except LLEnergyError as error:
        return Bandwidth(names, fault=str(error).partition("\n")[0])
    finally:
        gang.close()
        scratch.remove()


def _sum_on(clients: Sequence[AgentClient], scratch: ScratchDirectory) -> Bandwidth:
    hosts = {client.name: RemoteHost(client, scratch.path, "spawn") for client in clients}
    cpu = Lease(devices=(CPU,))
    devices = [HostDevices(name, cpu, host.usable_cpus()) for name, host in hosts.items()]
    plan = plan_on_hosts(Capabilities(framework="torch", process_group=True, data=True), None, devices)
    group = RankGroup(plan, hosts, (), dict(os.environ))
    try:
        workload = call_workload(group, f"{__name__}:sum_seconds", (TENSOR_BYTES, SUMS), {}, RANKS_S)
        workload.run_round()
        results: list[tuple[float, str]] = list(workload.results())
    finally:
        group.kill()
        for host in hosts.values():
            with suppress(WorkerError):
                host.close()
    n = len(clients)
    seconds = max(took_s for took_s, _ in results)
    names = [f"{client.name} ({interface})" for client, (_, interface) in zip(clients, results, strict=True)]
    return Bandwidth(names, 2 * (n - 1) / n * TENSOR_BYTES / seconds)


def sum_seconds(size: int, times: int) -> tuple[float, str]:
    """Time an ``all_reduce``; runs in ranks.

    Args:
        size: Size of the tensor (bytes).
        times: How often it is summed.

    Returns:
        The median duration (seconds), and the network interface that gloo uses.
    """
    torch = sys.modules["torch"]
    tensor, took_s = torch.zeros(size // 4), []
    for _ in range(times + 1):
        torch.distributed.barrier()
        start_s = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        took_s.append(time.perf_counter() - start_s)
    # The first connects the ranks.
    return median(took_s[1:]), os.environ.get("GLOO_SOCKET_IFNAME", "interface chosen by gloo")


def _ignore(_line: str) -> None:
    """Ignore that a gang waits."""
