# SPDX-License-Identifier: Apache-2.0
"""The network between two hosts is cut in the middle of a run: no side gets an end of a connection."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.hosts.timeouts import MISSED_S
from pytest_llenergy.record.round_metric import is_valid

from .agents import ADDRESS_VARIABLE, needs_another_host
from .ray_cluster import required_or_skip
from .two_hosts import WITH_TORCH_VARIABLE, TwoHosts

#: Everything must be over so many seconds after the other side is given up: 5 are promised, and other tests
#: may run beside this one. TCP would wait for minutes.
GONE_S = 30.0


def ip(*arguments: str) -> str:
    """Run iproute2."""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Cable:
    """Two network namespaces, and a pair of devices between them. Other tests must not find these devices."""

    near: str
    far: str

    def pids(self) -> list[int]:
        """Return the processes at the far end."""
        return [int(each) for each in ip("netns", "pids", self.far).split()]

    def plug(self, state: str) -> None:
        """Set the near device ``up`` or ``down``, which neither closes nor resets a connection."""
        ip("-netns", self.near, "link", "set", "cable", state)


@pytest.fixture
def cable(two_hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    """Put pytest and n1 at one end of a cable, and n2 at the other one."""
    if shutil.which("ip") is None:
        required_or_skip("no ip; install iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    made = Cable(f"ll-{os.getpid()}-1", f"ll-{os.getpid()}-2")
    with ExitStack() as end:
        for name in (made.near, made.far):
            ip("netns", "add", name)
            end.callback(ip, "netns", "delete", name)
        peer = ("peer", "name", "cable", "netns", made.far)
        ip("-netns", made.near, "link", "add", "cable", "type", "veth", *peer)
        for number, name in enumerate((made.near, made.far), 1):
            ip("-netns", name, "address", "add", f"10.0.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-netns", name, "link", "set", device, "up")
        monkeypatch.setenv(ADDRESS_VARIABLE, "10.0.0.1")
        two_hosts.prefix = ["nsenter", f"--net=/run/netns/{made.near}"]
        two_hosts.hosts[1].prefix = ["nsenter", f"--net=/run/netns/{made.far}"]
        yield made


CUT = """
import os, platform, time
from pathlib import Path
import pytest

HERE = Path(__file__).parent

def step():
    if "torch" in __import__("sys").modules:
        import torch, torch.distributed as dist
        dist.all_reduce(torch.ones(1))
    mine = HERE / f"rounds-{os.environ['RANK']}"
    with mine.open("a") as file:
        file.write("x")
    time.sleep(0.3 if len(mine.read_text()) < 4 else 600.0)

@pytest.mark.gpus(4, per_host=2)
def test_cut(workers, energy):
    try:
        energy(workers.call(step))
    finally:
        (HERE / "ended").write_text(repr(time.time()))

@pytest.mark.gpus(2)
def test_one_host(workers):
    assert len(workers.run(platform.node)) == 2

@pytest.mark.gpus(4, per_host=2)
def test_two_hosts(workers):
    assert len(workers.run(platform.node)) == 4
"""


@needs_another_host
@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_both_sides_end_without_the_other(
    two_hosts: TwoHosts, cable: Cable, monkeypatch: pytest.MonkeyPatch, torch: bool
) -> None:
    """With torch, the ranks are also connected to each other."""
    if torch:
        monkeypatch.setenv(WITH_TORCH_VARIABLE, "1")
    lost, here = two_hosts.hosts[1], two_hosts.directory
    options = ["--energy-rounds=6", "--energy-warmup=0", "--energy-budget=1"]
    run = two_hosts.start(CUT, *options)
    rounds = here / "rounds-3"
    await_that(lambda: rounds.exists() and len(rounds.read_text()) == 4, run)
    time.sleep(0.4)
    assert cable.pids()
    assert has_leases(lost.locks)
    cable.plug("down")
    cut_s, began_s = time.monotonic(), time.time()
    await_that(lambda: not cable.pids())
    gone_s = time.monotonic() - cut_s
    await_that(lambda: not has_leases(lost.locks))
    output, _ = run.communicate(timeout=300)
    noticed_s = float((here / "ended").read_text()) - began_s
    print(f"noticed after {noticed_s:.2f} s; n2: processes {gone_s:.2f} s")
    assert max(noticed_s, gone_s) < MISSED_S + GONE_S
    assert "1 failed, 1 passed, 1 skipped" in output, output
    assert "n2: its agent has not answered for 3 s" in output.partition("SKIPPED")[2]
    (record,) = two_hosts.report.records
    assert (record.status, "n2: its agent has not answered for 3 s" in (record.reason or "")) == (
        "failed",
        True,
    )
    *finished, last = record.rounds
    assert [is_valid(each) for each in finished] == [True] * 3
    assert "unfinished" in [flag.name for flag in last.flags]
    known = {name.partition("/")[0] for name, each in last.by_domain.items() if each.energy_j is not None}
    assert known == {"n1"}
    if torch:
        cable.plug("up")
        output = two_hosts.run(CUT, *options, "-k", "test_two_hosts")
        assert "1 passed" in output, output


def has_leases(directory: Path) -> bool:
    """Return whether a process holds a lock in a lock directory."""
    for each in directory.iterdir():
        with suppress(IsADirectoryError), each.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def await_that(condition: Callable[[], bool], run: subprocess.Popen[str] | None = None) -> None:
    """Wait until something is so, while the run lasts."""
    deadline_s = time.monotonic() + 120
    while not condition():
        assert run is None or run.poll() is None, run.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
