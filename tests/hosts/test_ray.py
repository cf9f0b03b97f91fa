# SPDX-License-Identifier: Apache-2.0
"""Gangs of a real Ray: devices, waits, refusals, and what is left when something is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from pytest_llenergy.errors import LeaseTimeoutError, PlanError, WorkerError
from pytest_llenergy.hosts.launchers import Gang, NeverError, Shape
from pytest_llenergy.hosts.ray import RayCluster
from pytest_llenergy.hosts.remote_host import RemoteHost
from pytest_llenergy.ranks import proctree

from .ray_cluster import ROOT, RayHost, RayNodes

#: Within this time nothing of a gang may be left (seconds), whatever was killed. Five are promised, but other
#: tests may run beside these.
GONE_S = 20.0

#: How often pytest is killed while it starts a gang.
STORM = 30


@pytest.fixture
def cluster(ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """A connection to the cluster, as pytest on its first host has it."""
    for name, value in ray_cluster.environment.items():
        monkeypatch.setenv(name, value)
    connected = RayCluster()
    yield connected
    connected.close()
    for host in ray_cluster.hosts:
        host.wait_until_free(GONE_S)


def start(cluster: RayCluster, hosts: int = 2, per_host: int = 2, wait_s: float = 30.0) -> Gang:
    return cluster.gang(Shape(hosts, per_host), wait_s, lambda line: None)


def client_of(cluster: RayCluster) -> int:
    return cluster._client._popen.pid


def boards(host: RemoteHost) -> list[str]:
    found, _meters = host.call("ranks.inventory", 60.0)
    return [board.uuid for board in found]


def wait_until_lost(gang: Gang, slot: int, timeout_s: float = GONE_S) -> str:
    """Return the reason why the host was lost."""
    deadline_s = time.monotonic() + timeout_s
    while gang.hosts[slot].lost is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return gang.lost()[gang.hosts[slot].name]


@pytest.mark.slow
def test_a_gang_has_its_devices_on_every_host(cluster: RayCluster, ray_cluster: RayNodes) -> None:
    assert [(offer.name, offer.devices) for offer in cluster.offers()] == [
        (host.name, 4) for host in ray_cluster.hosts
    ]
    # All four of a host: Ray gives them in any order.
    gang = start(cluster, per_host=4)
    assert [client.name for client in gang.hosts] == [host.name for host in ray_cluster.hosts]
    for remote, host in zip(gang.hosts, ray_cluster.hosts, strict=True):
        assert remote.facts.host == host.name
        assert boards(remote) == list(host.uuids)
        assert len(host.holders()) == 1
    gang.close()
    for host in ray_cluster.hosts:
        host.wait_until_free(GONE_S)
    # The GPUs are free again.
    start(cluster, per_host=4).close()
    assert "ray" not in sys.modules


@pytest.mark.slow
def test_a_part_of_the_devices_and_none(cluster: RayCluster, ray_cluster: RayNodes) -> None:
    gangs = [start(cluster, per_host=1), start(cluster, per_host=3), start(cluster, per_host=0)]
    for slot, host in enumerate(ray_cluster.hosts):
        devices = [boards(gang.hosts[slot]) for gang in gangs]
        assert [len(each) for each in devices] == [1, 3, 0]
        assert sorted(uuid for each in devices for uuid in each) == list(host.uuids)
    for gang in gangs:
        gang.close()


@pytest.mark.parametrize("shape", [Shape(3, 1), Shape(2, 5)], ids=str)
@pytest.mark.slow
def test_never_is_not_busy(cluster: RayCluster, shape: Shape, ray_cluster: RayNodes) -> None:
    begin_s = time.monotonic()
    one, other = (host.name for host in ray_cluster.hosts)
    with pytest.raises(NeverError, match=rf"cannot provide {shape}: {one} has 4, {other} has 4$"):
        cluster.gang(shape, 600.0, lambda line: None)
    assert time.monotonic() - begin_s < 60.0


@pytest.mark.slow
def test_busy_is_not_never_and_leaves_nothing(cluster: RayCluster) -> None:
    holding = start(cluster, hosts=2, per_host=3)
    lines: list[str] = []
    other = RayCluster()
    try:
        with pytest.raises(
            LeaseTimeoutError, match=r"did not free 2 hosts with 2 GPUs each within 3 s: `ray s"
        ):
            other.gang(Shape(2, 2), 3.0, lines.append)
        assert lines == [f"other programs hold GPUs of the Ray cluster {other.address}"]
        # What was refused holds nothing.
        start(cluster, hosts=2, per_host=1).close()
        holding.close()
        start(other, hosts=2, per_host=4).close()
    finally:
        other.close()


@pytest.mark.slow
def test_an_interrupted_wait_leaves_nothing(cluster: RayCluster) -> None:
    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    holding = start(cluster, per_host=4)
    with pytest.raises(KeyboardInterrupt):
        cluster.gang(Shape(2, 1), 600.0, interrupt)
    holding.close()
    # One that still waited would get a GPU soon.
    time.sleep(3.0)
    start(cluster, per_host=4, wait_s=0.0).close()


@pytest.mark.slow
def test_a_wait_ends_when_the_gpus_are_free(cluster: RayCluster) -> None:
    holding = start(cluster, per_host=4)
    other = RayCluster()
    try:
        gang = other.gang(Shape(2, 4), 60.0, lambda line: holding.close())
        assert len(gang.hosts) == 2
    finally:
        other.close()


@pytest.mark.parametrize(
    "killed",
    ["client", pytest.param("actor", marks=pytest.mark.slow), pytest.param("agent", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_killed_process_leaves_nothing(cluster: RayCluster, ray_cluster: RayNodes, killed: str) -> None:
    gang = start(cluster)
    lost = ray_cluster.hosts[1]
    pids = {
        "client": lambda: {client_of(cluster)},
        "actor": lost.holders,
        "agent": lost.agents,
    }[killed]()
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    took_s = lost.wait_until_free(GONE_S)
    print(f"{killed}: gone after {took_s:.3f} s")
    reason = wait_until_lost(gang, 1)
    assert reason == "nodeb: its agent has closed its connection"
    if killed == "client":
        ray_cluster.hosts[0].wait_until_free(GONE_S)
        # Another one takes its place.
        gang.close()
        start(cluster).close()
    else:
        # The other host is as before, and the cluster can be used again.
        assert gang.hosts[0].lost is None
        gang.close()
        start(cluster, per_host=4).close()


def wait_until_ended(pids: set[int]) -> None:
    deadline_s = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


PROGRAM = """
import time
from pytest_llenergy.hosts.launchers import Shape
from pytest_llenergy.hosts.ray import RayCluster
gang = RayCluster().gang(Shape(2, 4), 30.0, print)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_pytest_that_is_killed_at_any_moment_leaves_nothing(
    cluster: RayCluster, ray_cluster: RayNodes
) -> None:
    for delay_s in (random.uniform(0.0, 4.0) for _ in range(STORM)):
        with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.DEVNULL) as process:
            time.sleep(delay_s)
            below = proctree.descendants({process.pid}) - {process.pid}
            process.kill()
        # An actor that was about to start would have started its agent by now.
        time.sleep(2.0)
        for host in ray_cluster.hosts:
            host.wait_until_free(GONE_S - 2.0)
            assert host.holders() == set()
        wait_until_ended(below)
    start(cluster, per_host=4).close()


@pytest.mark.slow
def test_a_killed_pytest_leaves_nothing(cluster: RayCluster, ray_cluster: RayNodes) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert all(host.agents() for host in ray_cluster.hosts)
        below = proctree.descendants({process.pid}) - {process.pid}
        process.kill()
        took_s = [host.wait_until_free(GONE_S) for host in ray_cluster.hosts]
        print(f"pytest: gone after {max(took_s):.3f} s")
    wait_until_ended(below)
    # Ray frees the GPUs of a driver that has gone.
    start(cluster, per_host=4).close()


@contextmanager
def third_host(nodes: RayNodes, *wrapper: str, **variables: str) -> Iterator[RayHost]:
    """Yield a host for one test: the only one with six boards."""
    host = nodes.add("nodec", 6, wrapper=wrapper, variables=variables)
    try:
        yield host
    finally:
        host.stop()
        nodes.hosts.remove(host)


@pytest.mark.slow
def test_a_killed_raylet_leaves_nothing(cluster: RayCluster, ray_cluster: RayNodes) -> None:
    with third_host(ray_cluster) as host:
        gang = start(cluster, hosts=1, per_host=6)
        raylet = host.raylet()
        # `ray start --block` ends the others when it finds one gone; without --block nobody does.
        os.kill(psutil.Process(raylet).ppid(), signal.SIGSTOP)
        os.kill(raylet, signal.SIGKILL)
        print(f"raylet: gone after {host.wait_until_free(GONE_S):.3f} s")
        wait_until_lost(gang, 0)


@pytest.mark.slow
def test_a_host_where_ranks_would_be_nice_is_refused(cluster: RayCluster, ray_cluster: RayNodes) -> None:
    unprivileged = ("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    line = r"^(nodec|[\d.]+): niceness \d+, pytest's is \d+: start Ray there with RAY_worker_niceness=0$"
    with third_host(ray_cluster, *unprivileged, RAY_worker_niceness="15") as host:
        with pytest.raises(WorkerError, match=line) if own < 19 else nullcontext():
            start(cluster, hosts=1, per_host=6).close()
        host.wait_until_free(GONE_S)


@pytest.mark.slow
def test_a_host_without_the_package_is_named(cluster: RayCluster, ray_cluster: RayNodes) -> None:
    hide = f'mount -t tmpfs none {ROOT / "pytest_llenergy"} && exec "$@"'
    with third_host(ray_cluster, "unshare", "--mount", "sh", "-c", hide, "sh"):
        line = r"^no agent has started on (nodec|\S+): .* exited with 1: .*No module named 'pytest_llenergy"
        with pytest.raises(WorkerError, match=line):
            start(cluster, hosts=1, per_host=6)


@pytest.mark.slow
def test_a_head_that_was_killed_is_one_error(tmp_path: Path, nvml_library: Path) -> None:
    nodes = RayNodes(tmp_path, nvml_library)
    try:
        host = nodes.add(None, 4)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in nodes.environment.items():
                patch.setenv(name, value)
            cluster = RayCluster()
            gang = start(cluster, hosts=1)
            head = psutil.Process(host.head())
            head.kill()
            head.wait(10)
            begin_s = time.monotonic()
            gang.close()
            with pytest.raises(WorkerError, match=rf"^Ray cluster {cluster.address}: "):
                start(cluster, hosts=1, per_host=1)
            cluster.close()
            took_s = time.monotonic() - begin_s
            print(f"without a head: {took_s:.2f} s")
            # Ray itself would wait for a minute each.
            assert took_s < 45
    finally:
        nodes.stop()


def test_another_version_is_refused(
    ray_cluster: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "ray").mkdir()
    for each in Path(spec.origin).parent.iterdir():
        (tmp_path / "ray" / each.name).symlink_to(each)
    (tmp_path / "ray" / "_version.py").unlink()
    (tmp_path / "ray" / "_version.py").write_text('version = "2.0.1"\ncommit = ""\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    line = rf"Version mismatch: .*{version('ray')}.*2\.0\.1"
    with pytest.raises(WorkerError, match=line):
        RayCluster(ray_cluster.address)


@pytest.mark.parametrize(
    "address",
    [
        *("ray://127.0.0.1:10001", "http://127.0.0.1:8265", "127.0.0.9", "127.0.0.9:port", "::1:6379"),
        # Ray would start a cluster of its own.
        "local",
    ],
)
def test_other_addresses_than_those_of_hosts_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PlanError, match="is not an address that hosts of a Ray cluster use: name HOST:PORT"):
        RayCluster()
    with pytest.raises(PlanError, match=r"is not an address that hosts of a Ray cluster use: name HOST:PORT"):
        RayCluster(address)


@pytest.mark.parametrize("address", ["127.0.0.9:1", "[::1]:1"])
def test_an_address_without_a_cluster_is_named(address: str, ray_cluster: RayNodes) -> None:
    with pytest.raises(
        WorkerError, match=rf"^Ray cluster {re.escape(address)}: its head cannot be reached: "
    ):
        RayCluster(address)


def test_without_ray_there_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlanError, match=r"^ray is not installed: pip install 'pytest-llenergy\[ray\]'$"):
        RayCluster()
