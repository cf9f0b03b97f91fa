# SPDX-License-Identifier: Apache-2.0
"""Leases on the hosts of a cluster (``--energy-cluster``), which the tests of a run use one after another.

Agents, leases and ranks stay for the next test if it asks for the same. An idle gang is given back soon,
since other runs may wait for its hosts. A worker of pytest-xdist gives it back at once, for other workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from pytest_llenergy.devices.lease import Lease, join_leases
from pytest_llenergy.devices.request import GpuRequest
from pytest_llenergy.errors import DeviceError, LeaseTimeoutError, WorkerError
from pytest_llenergy.hosts.agent_ranks import LeaseAnswer
from pytest_llenergy.hosts.launchers import Cluster, Gang, NeverError, Shape, choose_shape
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.hosts.timeouts import DESCRIBE_TIMEOUT_S
from pytest_llenergy.ranks.plan import HostDevices
from pytest_llenergy.ranks.pool import RankPool
from pytest_llenergy.record.environment import Environment, hardware_facts, is_same_boot
from pytest_llenergy.record.record import Flag

#: How long an agent waits for devices before pytest reports who holds them (seconds).
WAIT_S = 3.0

#: A start that failed after this long or longer is not tried again (seconds).
SLOW_START_S = 10.0

#: How long an idle gang is kept for the next test (seconds).
IDLE_S = 5.0


@dataclass(frozen=True)
class GangOptions:
    """The options of a run that a gang obeys. Times are seconds."""

    lease_timeout: float
    busy_timeout: float
    start_method: Literal["spawn", "forkserver"]
    rank_logs: Path | None


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
    """A gang, and what the last test leased on its hosts.

    ``request`` is that of the test, and ``share`` what it asks of each host.
    """

    shape: Shape
    gang: Gang
    request: GpuRequest | None = None
    share: GpuRequest | None = None
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


def _share_of_host(request: GpuRequest, shape: Shape) -> GpuRequest:
    """Return what a request asks of each host, without what concerns only all of them."""
    return replace(
        request, n=shape.per_host, per_host=None, fallback=None, tensor_across_hosts=False, roles={}
    )


def _refuse_same(hosts: Mapping[str, RemoteHost], leases: Mapping[str, Lease], *, exclusive: bool) -> None:
    """Refuse hosts that show the same board or machine, whose energy would be counted twice.

    Raises:
        DeviceError: Names both hosts.
    """
    owners: dict[str, str] = {}
    for name, host in hosts.items():
        for uuid in leases[name].uuids:
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
        #: Why gangs did not start although that took long: they would only fail again.
        self._failed: dict[Shape, str] = {}
        # Held while a gang is given back, so that no test gets it meanwhile.
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

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
        with self._lock:
            self._stop_timer()
            held = self._held
            if held is not None and self._note_lost(held):
                self._give_back()
            elif held is not None and held.lease is not None and held.request == request:
                return held.lease
            offers = [each for each in self._cluster.offers() if each.name not in self._lost]
            shape = choose_shape(request, offers)
            held = self._held
            if held is None or held.shape != shape:
                self._give_back()
                held = self._held = self._start(shape, on_wait)
            elif held.lease is not None and held.share == _share_of_host(request, shape):
                # The same devices, requested with another ``per_host`` or fallback.
                held.request = request
                return held.lease
            try:
                return self._lease_devices(held, request, test, exclusive, on_wait)
            except BaseException:
                self._note_lost(held)
                self._give_back()
                raise

    def finish_test(self) -> None:
        """Keep hosts and ranks for the next test, for a while."""
        with self._lock:
            held = self._held
            if held is None:
                return
            if not self._keeps or self._note_lost(held):
                self._give_back()
                return
            if not self._pool.uses(held.hosts):
                self._release(held)
            self._timer = threading.Timer(IDLE_S, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def give_back(self) -> None:
        """Give an idle gang back at once, since its end would disturb a test on pytest's own host."""
        with self._lock:
            self._stop_timer()
            self._give_back()

    def close(self) -> None:
        """Give everything back, after the ranks were closed."""
        with self._lock:
            self._stop_timer()
            self._give_back()
            self._cluster.close()

    def _start(self, shape: Shape, on_wait: Callable[[str], None]) -> _Held:
        options = self._options
        if shape in self._failed:
            raise WorkerError(f"not started again: {self._failed[shape]}")
        begin_s = time.monotonic()
        try:
            gang = self._cluster.gang(shape, options.lease_timeout, on_wait, self._lost)
        except WorkerError as error:
            if time.monotonic() - begin_s >= SLOW_START_S:
                self._failed[shape] = str(error)
            raise
        for host in gang.hosts:
            host.start_method, host.logs = options.start_method, options.rank_logs
        return _Held(shape, gang)

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
        held.request, held.share = request, _share_of_host(request, held.shape)
        leases: dict[str, Lease] = {}
        flags: list[Flag] = []
        hosts = held.hosts
        for name in sorted(hosts):
            found = self._lease_on(hosts[name], held.share, test, exclusive, on_wait)
            leases[name] = found.lease
            flags += [msgspec.structs.replace(flag, detail=f"{name}: {flag.detail}") for flag in found.flags]
        _refuse_same(hosts, leases, exclusive=exclusive)
        devices = [HostDevices(name, leases[name], host.usable_cpus()) for name, host in hosts.items()]
        environments = self._describe(held.gang.hosts)
        if unlike := describe_unlike(environments):
            flags.append(Flag(name="host", severity="note", detail=unlike))
        self._pool.use_hosts(hosts)
        lease = join_leases([each.lease for each in devices])
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
            try:
                # An agent that waits answers nothing else, such as a request to stop waiting.
                answer = host.lease(
                    request,
                    exclusive=exclusive,
                    wait_s=min(max(0.0, options.lease_timeout - passed_s), WAIT_S),
                    busy_timeout_s=min(max(0.0, options.busy_timeout - passed_s), WAIT_S),
                    test=test,
                )
            except LeaseTimeoutError as error:
                if passed_s + WAIT_S >= options.lease_timeout:
                    total = f"{error}; {options.lease_timeout:g} s in all (--energy-lease-timeout)"
                    raise LeaseTimeoutError(total) from None
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
        for host, each in zip(new, [host.begin("host.environment") for host in new], strict=True):
            self._environments[host.name] = each.result(DESCRIBE_TIMEOUT_S)
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

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            # The ranks first. The agents release the devices when they end, even one that waits for some.
            self._pool.use_hosts({})
            held.gang.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            # A test may have begun just before.
            if self._timer is threading.current_thread():
                self._timer = None
                self._give_back()


def describe_unlike(hosts: Mapping[str, Environment]) -> str:
    """Describe how hosts of a cluster differ in hardware and software, on one line; "" if they do not.

    Args:
        hosts: The hosts by name.
    """
    facts = {
        name: {
            **hardware_facts(each),
            "system": each.host.system,
            "driver": each.driver or "none",
            "Python": each.python,
            **each.packages,
        }
        for name, each in hosts.items()
    }
    lines = []
    for fact in dict.fromkeys(fact for each in facts.values() for fact in each):
        owners: dict[str, list[str]] = {}
        for name, each in facts.items():
            owners.setdefault(each.get(fact, "none"), []).append(name)
        if len(owners) > 1:
            values = (f"{value} ({', '.join(names)})" for value, names in owners.items())
            lines.append(f"{fact}: {', '.join(values)}")
    return "; ".join(lines)
