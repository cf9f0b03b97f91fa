# SPDX-License-Identifier: Apache-2.0
"""Whole runs of pytest on two hosts whose agents start without Slurm or Ray: fast, and one has its own clock.

This module is also the plugin of such a run, which replaces the launcher.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.cluster import launchers
from pytest_llenergy.cluster.base import NONE_LOST, HostOffer, NeverError, Shape
from pytest_llenergy.cluster.client import AgentClient, accept_agents, close_all
from pytest_llenergy.cluster.wire import Listener
from pytest_llenergy.model.report import Report
from pytest_llenergy.report.store import read_report

from ..nvml_sim import Board, World
from .agents import ROOT, SHIFT_S, await_end, can_be_another_host, start_agent
from .runs import CUDA_STAND_IN, RUN_TIMEOUT_S

#: Environment variable with the hosts of a run.
HOSTS_VARIABLE = "TEST_TWO_HOSTS"

#: Environment variable that lets the fixture ``workers`` use torch.
WITH_TORCH_VARIABLE = "TEST_TWO_HOSTS_WITH_TORCH"


@dataclass
class FakeHost:
    """A host with two boards, whose clock is ``shift_ns`` ahead; ``prefix`` runs its agent."""

    name: str
    world: World
    shift_ns: int
    environment: dict[str, str]
    prefix: list[str] = field(default_factory=list)

    @property
    def locks(self) -> Path:
        """Its lock directory."""
        return Path(self.environment["LLENERGY_LOCK_DIR"])

    def true_j(self, index: int, start_s: float, duration_s: float) -> float:
        """Return the energy of a board from a moment of this process's clock on."""
        start_ns = round(start_s * 1e9) + self.shift_ns
        return self.world.true_energy_j(index, start_ns, start_ns + round(duration_s * 1e9))

    def limits_w(self) -> list[float]:
        """Return the present power limits of its boards."""
        return [self.world.board(index).power_limit_w for index in range(2)]


class Gang:
    """Agents of the hosts of a run."""

    def __init__(self, names: Sequence[str], hosts: Mapping[str, Mapping[str, Any]]) -> None:
        self._end = ExitStack()
        self._listener = Listener()
        self._end.callback(self._listener.close)
        for slot, name in enumerate(names):
            agent = start_agent(self._listener.invitation, slot, **hosts[name])
            self._end.callback(await_end, agent)
        self.hosts: Sequence[AgentClient] = accept_agents(self._listener, names, 60.0)
        self._end.callback(close_all, self.hosts)

    def lost(self) -> Mapping[str, str]:
        return {each.name: each.lost for each in self.hosts if each.lost is not None}

    def close(self) -> None:
        self._end.close()


class Cluster:
    """The launcher of a run."""

    def __init__(self, *_: object) -> None:
        self._hosts: dict[str, dict[str, Any]] = json.loads(os.environ[HOSTS_VARIABLE])

    def offers(self) -> Sequence[HostOffer]:
        return [HostOffer(name, 2) for name in self._hosts]

    def gang(
        self,
        shape: Shape,
        wait_s: float,
        on_wait: Callable[[str], None],
        avoid: Mapping[str, str] = NONE_LOST,
    ) -> Gang:
        names = [name for name in self._hosts if name not in avoid]
        if len(names) < shape.hosts:
            raise NeverError("; ".join(avoid.values()) or f"two_hosts cannot provide {shape}")
        return Gang(names[: shape.hosts], self._hosts)

    def close(self) -> None:
        pass


if HOSTS_VARIABLE in os.environ:
    # This is the plugin of a run. Without torch, whose import takes most of the time of a short run.
    launchers.open_cluster = Cluster  # type: ignore[assignment]
    if WITH_TORCH_VARIABLE not in os.environ:
        pytest.MonkeyPatch().setattr("pytest_llenergy.api.workers.find_spec", lambda _: None)


@dataclass
class TwoHosts:
    """Runs pytest on hosts ``n1`` and ``n2``; ``prefix`` runs pytest."""

    hosts: list[FakeHost]
    directory: Path
    prefix: list[str] = field(default_factory=list)

    def command(self, source: str, *options: str) -> list[str]:
        """Write a test file, and return the command that runs it."""
        (self.directory / "test_it.py").write_text(source)
        plugins = ["-p", "no:cacheprovider", "-p", __name__]
        report = f"--energy-report={self.directory / 'energy.json'}"
        run = [sys.executable, "-m", "pytest", "test_it.py", "-rs", *plugins, report]
        return [*run, "--energy-cluster=slurm", *options]

    def start(self, source: str, *options: str, **more: Any) -> subprocess.Popen[str]:
        """Start a run."""
        described = {
            each.name: {
                "host": each.name if each.shift_ns else None,
                "prefix": each.prefix,
                "environment": each.environment,
            }
            for each in self.hosts
        }
        path = f"{ROOT}{os.pathsep}{CUDA_STAND_IN}"
        # Under pytest-xdist the run would take itself for a worker.
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment = {**outer, HOSTS_VARIABLE: json.dumps(described), "PYTHONPATH": path}
        return subprocess.Popen(
            [*self.prefix, *self.command(source, *options)],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )

    def run(self, source: str, *options: str) -> str:
        """Run a test file to its end and return the output."""
        output, _ = self.start(source, *options).communicate(timeout=RUN_TIMEOUT_S)
        return output

    @property
    def report(self) -> Report:
        """The report of the latest run."""
        return read_report(self.directory / "energy.json")


@pytest.fixture
def two_hosts(tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    """Two hosts with two boards each, n2 with a clock of its own where that is possible."""
    with ExitStack() as end:
        hosts = []
        for number, name in enumerate(("n1", "n2")):
            shift_ns = SHIFT_S * 10**9 if number and can_be_another_host() else 0
            home = tmp_path / name
            home.mkdir(mode=0o700)
            slots = ("00000000:17:00.0", "00000000:25:00.0")
            boards = [
                Board(uuid=f"GPU-{name}-{i}", pci_bus_id=slots[i], power_w=100.0 + 50 * i) for i in range(2)
            ]
            begin_ns = time.monotonic_ns() + shift_ns - 10 * 10**9
            world = end.enter_context(World(home / "world", boards, start_ns=begin_ns))
            environment = {"LLENERGY_LOCK_DIR": str(home), **world.environment(nvml_library.parent)}
            hosts.append(FakeHost(name, world, shift_ns, environment))
        project = tmp_path / "project"
        project.mkdir()
        # pytest's own host has no boards.
        locks = tmp_path / "locks"
        locks.mkdir(mode=0o700)
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(locks))
        yield TwoHosts(hosts, project)
