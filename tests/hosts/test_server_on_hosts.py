# SPDX-License-Identifier: Apache-2.0
"""Servers on the hosts of a cluster: each is on one host, whose agent looks for its processes."""

from __future__ import annotations

import pytest

from pytest_llenergy.devices.processes import sees_all_pids

from ..backends.servers.start import sharded
from ..nvml_sim.world import WORLD_VARIABLE
from .two_hosts import TwoHosts

pytest.importorskip("aiohttp")

TEST = """
import pytest

@pytest.mark.gpus({gpus})
def test_it(energy, backend):
    energy(backend.generate, ["abc"], max_new_tokens=4)
"""
OPTIONS = ["--energy-rounds=2", "--energy-warmup=0", "--energy-budget=0.1", "--energy-backend=server"]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.slow
def test_each_board_of_the_host_must_have_a_process(
    two_hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    if not sees_all_pids():
        pytest.skip("the agent cannot see the processes on its boards")
    # Ranks inherit it from pytest, as on any host.
    monkeypatch.setenv(WORLD_VARIABLE, str(two_hosts.hosts[0].world.path))
    command = f"--energy-server={sharded(shards, first=0.1)}"
    output = two_hosts.run(TEST.format(gpus=2), command, *OPTIONS)
    (record,) = two_hosts.report.records
    (rank,) = record.ranks
    assert rank.device.split(",") == record.devices, output
    idle = record.devices[shards:]
    flags = [flag for each in record.rounds for flag in each.flags if flag.name == "gpu-processes"]
    assert [flag.detail.split(": ")[:2] for flag in flags] == [["n1", each] for each in idle] * 2
    assert record.status == ("measured" if shards == 2 else "invalid")


@pytest.mark.slow
def test_a_server_for_two_hosts_is_refused(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(TEST.format(gpus=4), f"--energy-server={sharded('{gpus}')}", *OPTIONS)
    assert (
        "server does not offer one model over several hosts (it needs 4 devices, and a host has 2)" in output
    )
