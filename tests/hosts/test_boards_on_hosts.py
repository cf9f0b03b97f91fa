# SPDX-License-Identifier: Apache-2.0
"""Boards of a test on two hosts, and other processes that use them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ..nvml_sim.boards import Process
from .two_hosts import WORK, TwoHosts


def await_file(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a file that a test of a run makes."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


SETTINGS = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
@pytest.mark.gpu_settings(power_limit_w=300)
def test_it(workers):
    workers.run(where)
"""
)


def test_settings_of_boards_are_for_the_host_of_pytest(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(SETTINGS)
    assert "1 skipped" in output, output
    assert "gpu_settings needs --energy-cluster=local" in output


BUSY = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
def test_it(workers):
    workers.run(where)
"""
)


@pytest.mark.slow
def test_a_wait_for_processes_without_a_lease_is_shown_and_ends(two_hosts: TwoHosts) -> None:
    two_hosts.hosts[1].world.update(0, processes=(Process(1, 2 << 30),))
    process = two_hosts.start(BUSY, "--energy-lease-timeout=300")
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if "GPU-n2-0" in line:
            break
    assert "n2: GPU-n2-0: busy with process 1" in seen
    two_hosts.hosts[1].world.update(0, processes=())
    output, _ = process.communicate(timeout=120)
    assert "1 passed" in output, seen + output


@pytest.mark.slow
def test_boards_that_stay_busy_are_an_error_or_a_skip(two_hosts: TwoHosts) -> None:
    two_hosts.hosts[1].world.update(0, processes=(Process(1, 2 << 30),))
    output = two_hosts.run(BUSY, "--energy-lease-timeout=0.5")
    assert "1 error" in output, output
    output = two_hosts.run(BUSY, "--energy-lease-timeout=0.5", "--energy-busy=skip")
    assert "1 skipped" in output, output
    assert "n2: GPU-n2-0: busy with process 1" in output
