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
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_llenergy.hosts import gangs
from pytest_llenergy.record.report import Report
from pytest_llenergy.report.store import read_report

from ..nvml_sim import Board, World
from .agents import ROOT, SHIFT_S, Launcher, can_be_another_host
from .runs import CUDA_STAND_IN, RUN_TIMEOUT_S

#: Environment variable with the hosts of a run.
HOSTS_VARIABLE = "TEST_TWO_HOSTS"

#: Environment variable that lets the fixture ``workers`` use torch.
WITH_TORCH_VARIABLE = "TEST_TWO_HOSTS_WITH_TORCH"

#: Beginning of a test file, with work that returns where it ran.
WORK = """
import os, platform, sys, time
import pytest

def where(seconds=0.0):
    time.sleep(seconds)
    return platform.node(), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]
"""


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


if HOSTS_VARIABLE in os.environ:
    # This is the plugin of a run. Without torch, whose import takes most of the time of a short run.
    gangs.open_cluster = lambda *_: Launcher(json.loads(os.environ[HOSTS_VARIABLE]), devices=2)
    if WITH_TORCH_VARIABLE not in os.environ:
        pytest.MonkeyPatch().setattr("pytest_llenergy.plugin.handles.workers.find_spec", lambda _: None)


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
