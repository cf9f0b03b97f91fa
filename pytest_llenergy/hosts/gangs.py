# SPDX-License-Identifier: Apache-2.0
"""Leases on the hosts of a cluster (``--energy-cluster``), which the tests of a run use one after another.

Agents, leases and ranks stay for the next test if it asks for the same. A worker of pytest-xdist gives them
back after each test, for other workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from pytest_llenergy.devices.lease import Lease, join_leases
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError, LeaseTimeoutError
from pytest_llenergy.hosts.agent_ranks import LeaseAnswer
from pytest_llenergy.hosts.launchers import Cluster, Gang, NeverError, Shape, choose_shape
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.hosts.timeouts import ANSWER_TIMEOUT_S, METERS_TIMEOUT_S
from pytest_llenergy.ranks.plan import HostDevices
from pytest_llenergy.ranks.pool import RankPool
from pytest_llenergy.record.environment import Environment, is_same_boot
from pytest_llenergy.record.record import Flag

#: How long an agent waits for devices before pytest reports who holds them (seconds).
WAIT_S = 3.0


@dataclass(frozen=True)
class GangOptions:
    """The options of a run that a gang obeys. Times are seconds."""

    lease_timeout: float
    busy_timeout: float
    start_method: Literal["spawn", "forkserver"]


@dataclass(frozen=True)
class GangLease:
    """What a test holds on the hosts of a cluster.

    Attributes:
        lease: All its devices, in the order of the ranks.
        hosts: Its devices on each host.
        remote_hosts: These hosts.
        environments: Machine and packages of these hosts, by name.
        flags: What a reader of the record must know about the hosts.
    """

    lease: Lease
    hosts: Sequence[HostDevices]
    remote_hosts: Sequence[RemoteHost]
    environments: Mapping[str, Environment]
    flags: Sequence[Flag] = ()

    @property
    def boards(self) -> list[tuple[RemoteHost, Sequence[str]]]:
        """Each host with the UUIDs of its leased boards."""
        return [(host, each.lease.uuids) for host, each in zip(self.remote_hosts, self.hosts, strict=True)]


@dataclass
class _Held:
    """A gang, and what the last test requested and leased on its hosts."""

    shape: Shape
    gang: Gang
    request: GpuRequest | None = None
    lease: GangLease | None = None

    @property
    def hosts(self) -> dict[str, RemoteHost]:
        """Its hosts, by name."""
        return {host.name: host for host in self.gang.hosts}


def open_cluster(name: str, environment: Mapping[str, str]) -> Cluster:
    """Return the launcher ``slurm``, ``ray`` or ``ray:HOST:PORT``, with the environment of the run.

    Raises ``PlanError`` if it is not available here, ``WorkerError`` if it does not answer.
    """
    kind, _, address = name.partition(":")
    if kind == "slurm":
        from pytest_llenergy.hosts.slurm import SlurmCluster

        return SlurmCluster(environment)
    from pytest_llenergy.hosts.ray import RayCluster

    return RayCluster(address or environment.get("RAY_ADDRESS"))


class BusyBoardsError(DeviceError):
    """Other processes still used boards without a lease when the wait for them ended."""


def _refuse_same(
    hosts: Mapping[str, RemoteHost], leased: Mapping[str, LeaseAnswer], *, exclusive: bool
) -> None:
    """Refuse hosts that show the same board or machine, whose energy would be counted twice.

    Raises:
        DeviceError: Names both hosts.
    """
    owners: dict[str, str] = {}
    for name, host in hosts.items():
        for uuid in leased[name].lease.uuids:
            if (other := owners.setdefault(uuid, name)) != name:
                raise DeviceError(f"{other} and {name} both show {uuid}: give each board to one of them")
        for other in hosts if exclusive else ():
            if other != name and is_same_boot(host.facts.boot_id, hosts[other].facts.boot_id):
                raise DeviceError(
                    f"{name} and {other} are one machine, which --energy-meter would read twice: name meters "
                    "of GPUs, or start one agent on each machine"
                )


class GangKeeper:
    """Leases hosts for one test after another.

    Args:
        cluster: The launcher.
        pool: The ranks.
        options: Options of the run.
        keeps: Whether a gang is kept for the next test.
    """

    def __init__(self, cluster: Cluster, pool: RankPool, options: GangOptions, *, keeps: bool) -> None:
        self._cluster = cluster
        self._pool = pool
        self._options = options
        self._keeps = keeps
        self._held: _Held | None = None
        #: Why hosts that were lost are not used again, by name.
        self._lost: dict[str, str] = {}
        #: Machine and packages of each host that was used, by name.
        self._environments: dict[str, Environment] = {}

    def lease(
        self, request: GpuRequest, test: str, *, exclusive: bool, on_wait: Callable[[str], None]
    ) -> GangLease:
        """Lease the hosts and devices of a test.

        Args:
            request: What it requests.
            test: Its name, which other waiting processes show.
            exclusive: Whether it needs each host for itself.
            on_wait: Called with a line about the holders while it waits.

        Raises:
            NeverError: The cluster can never provide them; the test is skipped.
            DeviceError: They did not become free in time.
            WorkerError: An agent does not start, or a host was lost.
        """
        held = self._held
        if held is not None and self._note_lost(held):
            self.give_back()
        elif held is not None and held.lease is not None and held.request == request:
            return held.lease
        offers = [each for each in self._cluster.offers() if each.name not in self._lost]
        shape = choose_shape(request, offers)
        held = self._held
        if held is None or held.shape != shape:
            self.give_back()
            gang = self._cluster.gang(shape, self._options.lease_timeout, on_wait, self._lost)
            held = self._held = _Held(shape, gang)
        try:
            return self._lease_devices(held, request, test, exclusive, on_wait)
        except BaseException:
            self._note_lost(held)
            self.give_back()
            raise

    def finish_test(self) -> None:
        """Keep hosts and ranks for the next test, if it may use them."""
        held = self._held
        if held is None:
            return
        if not self._keeps or self._note_lost(held):
            self.give_back()
        elif not self._pool.uses(held.hosts):
            self._release(held)

    def give_back(self) -> None:
        """Give an idle gang back: its end would disturb a test on pytest's own host."""
        held, self._held = self._held, None
        if held is not None:
            # The ranks first. The agents release the devices when they end, even one that waits for some.
            self._pool.use_hosts({})
            held.gang.close()

    def close(self) -> None:
        """Give everything back, after the ranks were closed."""
        self.give_back()
        self._cluster.close()

    def _lease_devices(
        self,
        held: _Held,
        request: GpuRequest,
        test: str,
        exclusive: bool,
        on_wait: Callable[[str], None],
    ) -> GangLease:
        """Lease the devices on each host, in an order in which no two runs wait for each other."""
        self._pool.use_hosts({})
        self._release(held)
        # Of each host, without what concerns only all of them.
        share = replace(request, n=held.shape.per_host, per_host=None, fallback=None)
        found: dict[str, LeaseAnswer] = {}
        hosts = held.hosts
        for name, host in sorted(hosts.items()):
            host.start_method = self._options.start_method
            found[name] = self._lease_on(host, share, test, exclusive, on_wait)
        _refuse_same(hosts, found, exclusive=exclusive)
        devices = [HostDevices(name, found[name].lease, found[name].cpus) for name in hosts]
        flags = [
            msgspec.structs.replace(flag, detail=f"{name}: {flag.detail}")
            for name, each in found.items()
            for flag in each.flags
        ]
        environments = self._describe(held.gang.hosts)
        self._pool.use_hosts(hosts)
        lease = join_leases([each.lease for each in devices])
        held.request = request
        held.lease = GangLease(lease, devices, held.gang.hosts, environments, flags)
        return held.lease

    def _lease_on(
        self,
        host: RemoteHost,
        request: GpuRequest,
        test: str,
        exclusive: bool,
        on_wait: Callable[[str], None],
    ) -> LeaseAnswer:
        """Lease devices of one host, and report who holds or uses them meanwhile."""
        options = self._options
        begin_s = time.monotonic()
        while True:
            passed_s = time.monotonic() - begin_s
            # An agent that waits answers nothing else, such as a request to stop waiting.
            wait_s, busy_timeout_s = (
                min(max(0.0, limit_s - passed_s), WAIT_S)
                for limit_s in (options.lease_timeout, options.busy_timeout)
            )
            given = (request, exclusive, wait_s, busy_timeout_s, test)
            try:
                answer: LeaseAnswer = host.call("ranks.lease", ANSWER_TIMEOUT_S, *given)
            except LeaseTimeoutError as error:
                if passed_s + WAIT_S >= options.lease_timeout:
                    raise
                on_wait(str(error))
                continue
            if answer.shortage is not None:
                raise NeverError(f"{host.name}: {answer.shortage}")
            if answer.busy is None:
                return answer
            if passed_s + WAIT_S >= options.busy_timeout:
                raise BusyBoardsError(f"{host.name}: {answer.busy}")
            on_wait(f"{host.name}: {answer.busy}")

    def _describe(self, hosts: Sequence[RemoteHost]) -> dict[str, Environment]:
        """Return machine and packages of each host, which is asked once in a run."""
        new = [host for host in hosts if host.name not in self._environments]
        for host, each in zip(new, [host.begin("ranks.environment") for host in new], strict=True):
            self._environments[host.name] = each.result(METERS_TIMEOUT_S)
        return {host.name: self._environments[host.name] for host in hosts}

    def _note_lost(self, held: _Held) -> bool:
        """Remember hosts that were lost. Returns whether any was.

        If all of several are lost at once, none is to blame: their launcher has ended, or the network of
        pytest's host has failed.
        """
        lost = held.gang.lost()
        if not len(lost) == held.shape.hosts > 1:
            self._lost.update(lost)
        return bool(lost)

    def _release(self, held: _Held) -> None:
        held.lease = held.request = None
        for host in held.hosts.values():
            host.release()
