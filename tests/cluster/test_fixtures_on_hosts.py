# SPDX-License-Identifier: Apache-2.0
"""Every fixture and mark of a test on two hosts."""

from __future__ import annotations

from .two_hosts import TwoHosts

WORK = """
import os, platform, sys, time
import pytest

def where(seconds=0.0):
    time.sleep(seconds)
    return platform.node(), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]
"""

EVERYTHING = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
def test_fixtures(gpus, workers):
    assert gpus.uuids == tuple(f"GPU-n{host}-{board}" for host in (1, 2) for board in (0, 1))
    assert gpus.indices == (0, 1, 0, 1)
    assert len(gpus.names) == len(gpus.boards) == len(gpus.devices) == 4
    assert workers.world_size == 4
    found = workers.run(where)
    assert [each[1:] for each in found] == [(uuid, str(n % 2)) for n, uuid in enumerate(gpus.uuids)]

@pytest.mark.gpus(4, per_host=2)
@pytest.mark.device_roles(prefill=[0, 1], decode=[2, 3])
@pytest.mark.energy_options(rounds=3, iterations=1, warmup=0)
@pytest.mark.energy_gate(budget="1 MJ")
def test_roles(workers, energy):
    run = energy(workers.call(where, 0.2))
    energy.extra_info["note"] = "kept"
    energy.metric("answers", 4, better="more")
    assert run.energy_j > 0

@pytest.mark.gpus(4, per_host=2)
def test_function(energy):
    assert len(energy(where, 0.2).result) == 4

@pytest.mark.gpus(4, per_host=2)
def test_pedantic(workers, energy):
    assert energy.pedantic(workers.call(where, 0.2), rounds=2, iterations=1).energy_j > 0
"""
)


def test_everything(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(EVERYTHING, "--energy-rounds=3", "--energy-warmup=0")
    assert "4 passed" in output, output


WINDOWS = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2)
def test_windows(workers, energy_meter, energy):
    workers.run(where)
    with energy_meter("both") as both:
        with energy_meter("part") as part:
            workers.run(where, 0.4)
        time.sleep(0.4)
    energy_meter.begin("pair")
    energy(workers.call(where, 0.1))
    energy_meter.end("pair")
    assert part.energy_j < both.energy_j
    assert part.by_domain["n2/gpu:GPU-n2-1"].terms.clock_j > 0
    energy_meter.extra_info["note"] = "kept"
"""
)


def test_windows_have_the_joules_of_all_hosts(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(WINDOWS, "--energy-rounds=2", "--energy-warmup=0")
    assert "1 passed" in output, output
    (record,) = two_hosts.report.records
    powers_w = {f"n{host}/gpu:GPU-n{host}-{i}": 100.0 + 50 * i for host in (1, 2) for i in (0, 1)}
    assert {meter.domain for meter in record.meters} == set(powers_w)
    assert all(meter.exclusive for meter in record.meters)
    assert [window.name for window in record.windows] == ["both", "part", "pair"]
    for window in record.windows:
        assert set(window.by_domain) == set(powers_w)
        assert window.energy_j is not None, window.reason
        assert window.energy_u_j is not None
        for name, power_w in powers_w.items():
            part = window.by_domain[name]
            assert part.energy_j is not None, part.reason
            assert part.energy_u_j is not None
            assert abs(part.energy_j - power_w * window.duration_s) <= 4 * part.energy_u_j
        assert abs(window.energy_j - 500 * window.duration_s) <= 4 * window.energy_u_j
