# SPDX-License-Identifier: Apache-2.0
"""Boards of a test on two hosts: their settings, and other processes that use them."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ..nvml_sim.boards import Process
from .two_hosts import WORK, TwoHosts

SETTINGS = (
    WORK
    + """
from pathlib import Path

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.gpu_settings(power_limit_w="watts", graphics_clock_mhz=(900, 1200))
@pytest.mark.parametrize("watts", [300, 400])
def test_limits(workers, energy, watts):
    energy(workers.call(where, 0.1))
    Path(f"ready{watts}").touch()
    while Path("wait").exists():
        time.sleep(0.05)

@pytest.mark.gpus(4, per_host=2)
def test_after(workers):
    workers.run(where)
"""
)


def await_file(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a file that a test of a run makes."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def limits_w(hosts: TwoHosts) -> list[float]:
    return [limit_w for host in hosts.hosts for limit_w in host.limits_w()]


@pytest.mark.slow
def test_settings_hold_on_all_hosts_for_one_test(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "wait").touch()
    process = two_hosts.start(SETTINGS, "--energy-rounds=2", "--energy-warmup=0")
    await_file(two_hosts.directory / "ready300", process)
    assert limits_w(two_hosts) == [300.0] * 4
    (two_hosts.directory / "wait").unlink()
    output, _ = process.communicate(timeout=120)
    assert "3 passed" in output, output
    assert limits_w(two_hosts) == [700.0] * 4
    for record, watts in zip(two_hosts.report.records, (300.0, 400.0), strict=True):
        assert [board.uuid for board in record.gpu_settings] == list(record.devices)
        assert {board.power_limit_found_w for board in record.gpu_settings} == {watts}


def test_a_host_that_refuses_settings_skips_the_test(two_hosts: TwoHosts) -> None:
    two_hosts.hosts[1].world.update(0, settings_denied=True)
    output = two_hosts.run(SETTINGS, "--energy-rounds=2", "--energy-warmup=0", "-k300")
    assert "1 skipped" in output, output
    assert "n2: gpu_settings(power_limit_w=300" in output
    assert "only root may change boards" in output
    assert limits_w(two_hosts) == [700.0] * 4


@pytest.mark.slow
def test_agents_restore_boards_when_pytest_is_killed(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "wait").touch()
    process = two_hosts.start(SETTINGS, "--energy-rounds=2", "--energy-warmup=0")
    await_file(two_hosts.directory / "ready300", process)
    for host in two_hosts.hosts:
        for board in range(2):
            host.world.update(board, call_delay_ns=300 * 10**6, call_delay_every=1)
    process.kill()
    process.communicate()
    deadline_s = time.monotonic() + 60
    while limits_w(two_hosts) != [700.0] * 4 or any(
        name.name.startswith("llenergy-settings") for host in two_hosts.hosts for name in host.locks.iterdir()
    ):
        assert time.monotonic() < deadline_s, limits_w(two_hosts)
        time.sleep(0.05)


@pytest.mark.slow
def test_the_next_lease_restores_the_boards_of_a_host_where_all_was_killed(two_hosts: TwoHosts) -> None:
    (two_hosts.directory / "wait").touch()
    process = two_hosts.start(SETTINGS, "--energy-rounds=2", "--energy-warmup=0")
    await_file(two_hosts.directory / "ready300", process)
    agents = psutil.Process(process.pid).children(recursive=True)
    for each in agents:
        # Not even the guards can restore anything.
        with suppress(psutil.NoSuchProcess):
            each.suspend()
    for each in agents:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.communicate()
    assert limits_w(two_hosts) == [300.0] * 4
    (two_hosts.directory / "wait").unlink()
    output = two_hosts.run(SETTINGS, "-kafter")
    assert "1 passed" in output, output
    assert limits_w(two_hosts) == [700.0] * 4


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
