# SPDX-License-Identifier: Apache-2.0
"""A real Ray of several hosts on this machine: one raylet for each, on loopback addresses of its own.

The second host has its own monotonic clock and host name. Each host has its own boards (the stand-in for
NVML) and lock directory. `ray stop` is never used, since it would end every Ray of the user: each raylet runs
under a guard of the package, which ends with the test session and kills all descendants.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from pytest_llenergy.ranks import proctree

from ..nvml_sim.boards import Board
from ..nvml_sim.world import World
from .agents import SHIFT_S, another_host, can_be_another_host

__all__ = ["RayHost", "RayNodes", "ray_cluster", "required_or_skip"]

ROOT = Path(__file__).parents[2]

#: What the tests of several hosts need is missing: skip, or fail where it must not be missing.
REQUIRED_VARIABLE = "LLENERGY_TEST_CLUSTER"

#: Time limit for `ray start`, which takes 4 to 8 s on an idle machine.
START_TIMEOUT_S = 180.0

#: Runs a command under a guard: its arguments are the pid of this process, an open file, and the command.
UNDER_GUARD = """
import os, sys
from pytest_llenergy.ranks.guard import fork_under_guard
fork_under_guard(int(sys.argv[1]), "", int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def required_or_skip(reason: str) -> None:
    """Skip a test, or fail it with LLENERGY_TEST_CLUSTER=required."""
    if os.environ.get(REQUIRED_VARIABLE) == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class RayHost:
    """One raylet with its boards, in the order of their PCI addresses."""

    name: str
    address: str
    uuids: tuple[str, ...]
    world: World
    locks: Path
    guard: subprocess.Popen[bytes] = field(repr=False)

    def agents(self) -> set[int]:
        """Return the processes of the package on this host: agents, and what runs below them."""
        below = proctree.descendants({self.guard.pid}) - {self.guard.pid}
        return {pid for pid in below if _is_ours(pid)}

    def raylet(self) -> int:
        """Return the pid of the raylet."""
        (pid,) = [
            pid for pid in proctree.descendants({self.guard.pid}) if _command(pid)[0].endswith("/raylet")
        ]
        return pid

    def head(self) -> int:
        """Return the pid of the control store, which only the first host of a cluster has."""
        (pid,) = [pid for pid in proctree.descendants({self.guard.pid}) if "gcs_server" in _command(pid)[0]]
        return pid

    def holders(self) -> set[int]:
        """Return the pids of the actors that hold boards."""
        return {pid for pid in proctree.descendants({self.guard.pid}) if "Holder" in _command(pid)[0]}

    def wait_until_free(self, timeout_s: float) -> float:
        """Wait until no process of the package is left. Returns the seconds that it took."""
        begin_s = time.monotonic()
        while left := self.agents():
            waited_s = time.monotonic() - begin_s
            assert waited_s < timeout_s, {pid: _command(pid) for pid in left}
            time.sleep(0.01)
        return time.monotonic() - begin_s

    def stop(self) -> None:
        """Kill the raylet and everything below it."""
        self.guard.send_signal(signal.SIGTERM)
        self.guard.wait(60)
        self.world.close()


#: Numbers of hosts, which are the ends of their addresses, in all clusters of this process.
NUMBERS = itertools.count(2)


class RayNodes:
    """The hosts of one Ray cluster; the first is the head, and the host of pytest."""

    def __init__(self, directory: Path, library: Path) -> None:
        self._directory = directory
        self._library = library
        # Two test sessions on one machine must not share addresses: Ray has fixed default ports.
        self._net = f"127.{os.getpid() >> 8 & 127 | 64}.{os.getpid() & 255}"
        #: Unix sockets have short paths.
        self._scratch = Path(tempfile.mkdtemp(prefix="llray-", dir="/tmp"))
        first = next(NUMBERS)
        with socket.create_server((f"{self._net}.{first}", 0)) as server:
            self.address = f"{self._net}.{first}:{server.getsockname()[1]}"
        self.hosts: list[RayHost] = []
        self._numbers = itertools.chain([first], NUMBERS)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for pytest, which runs on the first host."""
        head = self.hosts[0]
        return {
            "RAY_ADDRESS": self.address,
            "LLENERGY_LOCK_DIR": str(head.locks),
            **head.world.environment(self._library.parent),
        }

    def add(
        self,
        name: str | None,
        boards: int,
        *,
        shift_s: int = SHIFT_S,
        wrapper: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> RayHost:
        """Start a raylet and wait until it runs.

        Args:
            name: Host name of its own; None for that of this machine.
            boards: Number of its boards.
            shift_s: How far its monotonic clock is ahead (seconds).
            wrapper: Command that starts the given command.
            variables: More environment variables.
        """
        number = next(self._numbers)
        place = self._directory / str(number)
        locks = place / "locks"
        locks.mkdir(parents=True)
        locks.chmod(0o1777)
        ahead_s = shift_s if name is not None else 0
        start_ns = time.monotonic_ns() + (ahead_s - 10) * 10**9
        uuids = tuple(f"GPU-{number:08x}-0000-0000-0000-{index:012x}" for index in range(boards))
        world = World(place / "world", boards_of(uuids), start_ns=start_ns)
        address = f"{self._net}.{number}"
        environment = {
            **{key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "LLENERGY_LOCK_DIR": str(locks),
            "LLENERGY_CACHE_DIR": str(place),
            # Not in the order of PCI addresses, which agents restore.
            "CUDA_VISIBLE_DEVICES": ",".join(reversed(uuids)),
            **world.environment(self._library.parent),
            "RAY_worker_niceness": "0",
            **(variables or {}),
        }
        host = another_host(name, shift_s) if name is not None else []
        log = place / "ray.log"
        with log.open("wb") as output, Path(os.devnull).open() as nothing:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", UNDER_GUARD, str(os.getpid()), str(nothing.fileno())),
                    *("/usr/bin/env", *host, *wrapper, *self._start_command(address, boards)),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[nothing.fileno()],
                start_new_session=True,
            )
        started = RayHost(name or socket.gethostname(), address, uuids, world, locks, process)
        self.hosts.append(started)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"ray start ended or hangs:\n{log.read_text()}")
            time.sleep(0.05)
        return started

    def _start_command(self, address: str, boards: int) -> list[str]:
        head, _, port = self.address.partition(":")
        if address == head:
            place = ["--head", f"--port={port}", f"--temp-dir={self._scratch}", "--include-dashboard=false"]
        else:
            place = [f"--address={self.address}"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={address}"),
            *(f"--num-gpus={boards}", "--num-cpus=2", f"--object-store-memory={80 << 20}", "--block"),
            "--disable-usage-stats",
        ]

    def stop(self) -> None:
        """Kill all raylets."""
        for host in reversed(self.hosts):
            host.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)


def boards_of(uuids: Sequence[str]) -> list[Board]:
    """Return boards whose counters do not tick together."""
    return [
        Board(uuid=uuid, latch_phase_ns=23_000_000 * number, latch_jitter_ns=2_000_000)
        for number, uuid in enumerate(uuids)
    ]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return [""]


def _is_ours(pid: int) -> bool:
    return any("pytest_llenergy" in part for part in _command(pid))


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[RayNodes]:
    """Start Ray with two hosts of four boards each."""
    if find_spec("ray") is None:
        required_or_skip("ray is not installed: pip install 'pytest-llenergy[ray]'")
    if not can_be_another_host():
        required_or_skip("hosts with a clock of their own need root and unshare")
    nodes = RayNodes(tmp_path_factory.mktemp("ray"), nvml_library)
    try:
        nodes.add(None, 4)
        nodes.add("nodeb", 4)
        yield nodes
    finally:
        nodes.stop()
