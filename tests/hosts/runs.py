# SPDX-License-Identifier: Apache-2.0
"""Whole runs of pytest with ``--energy-cluster``, on a real Slurm and a real Ray of two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llenergy.record.report import Report
from pytest_llenergy.report.store import read_report

from ..nvml_sim.world import World
from .agents import ROOT, SHIFT_S
from .ray_cluster import RayNodes

#: Lets torch see the boards of the stand-in for NVML.
CUDA_STAND_IN = Path(__file__).parent / "cuda_stand_in"

#: Long enough for a machine with many other tests.
RUN_TIMEOUT_S = 300


@dataclass(frozen=True)
class ClusterHost:
    """A host with its boards, whose clock is ``shift_ns`` ahead of this process's."""

    name: str
    world: World
    shift_ns: int

    def true_j(self, uuid: str, start_ns: int, end_ns: int) -> float:
        """Return the energy of a board between two moments of this process's clock."""
        number = [self.world.board(index).uuid for index in range(4)].index(uuid)
        return self.world.true_energy_j(number, start_ns + self.shift_ns, end_ns + self.shift_ns)


@dataclass(frozen=True)
class ClusterRuns:
    """Runs pytest on a cluster.

    Attributes:
        name: Value of ``--energy-cluster``.
        hosts: Its hosts, the first of which is that of pytest.
        launcher: Command that starts pytest.
        environment: Its environment.
        directory: Where it runs.
    """

    name: str
    hosts: Sequence[ClusterHost]
    launcher: Sequence[str]
    environment: Mapping[str, str]
    directory: Path

    def command(self, source: str, *options: str) -> list[str]:
        """Write a test file, and return the command that runs it."""
        (self.directory / "test_it.py").write_text(source)
        report = f"--energy-report={self.directory / 'energy.json'}"
        run = [sys.executable, "-m", "pytest", "test_it.py", "-p", "no:cacheprovider", "-rs"]
        return [*run, report, f"--energy-cluster={self.name}", *options]

    @property
    def variables(self) -> dict[str, str]:
        """Environment of pytest, whose ranks see the boards."""
        return {**self.environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{CUDA_STAND_IN}"}

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command where pytest runs, to its end."""
        return subprocess.run(
            [*self.launcher, *command],
            env=self.variables,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )

    def run(self, source: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a test file to its end."""
        return self.execute(*self.command(source, *options))

    @property
    def report(self) -> Report:
        """The report of the latest run."""
        return read_report(self.directory / "energy.json")


@pytest.fixture(params=["slurm", "ray"])
def cluster_runs(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterRuns:
    """Runs on a Slurm and on a Ray."""
    if request.param == "slurm":
        slurm = request.getfixturevalue("slurm_cluster")
        worlds = list(slurm.worlds.items())
        hosts = [
            ClusterHost(name, world, shift_s * 10**9)
            for (name, world), shift_s in zip(worlds, (0, SHIFT_S), strict=True)
        ]
        job = ["salloc", "--quiet", "--nodes=2", "--gres=gpu:4"]
        return ClusterRuns("slurm", hosts, job, slurm.environment, tmp_path)
    return runs_on_ray(request.getfixturevalue("ray_cluster"), tmp_path)


def runs_on_ray(nodes: RayNodes, directory: Path) -> ClusterRuns:
    """Return runs on a Ray cluster of two hosts."""
    hosts = [
        ClusterHost(host.name, host.world, shift_s * 10**9)
        for host, shift_s in zip(nodes.hosts, (0, SHIFT_S), strict=True)
    ]
    return ClusterRuns("ray", hosts, (), {**os.environ, **nodes.environment}, directory)
