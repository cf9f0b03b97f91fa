# SPDX-License-Identifier: Apache-2.0
"""Fixtures and marks of a test on two hosts, and the joules of both."""

from __future__ import annotations

import pytest

from .two_hosts import WORK, TwoHosts

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
@pytest.mark.energy_options(rounds=3, iterations=1, warmup=0)
@pytest.mark.energy_gate(budget="1 MJ")
def test_call(workers, energy):
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


FALLBACK = (
    WORK
    + """
@pytest.mark.gpus(4, per_host=2, fallback="cpu")
def test_it(gpus, workers):
    assert gpus.fallback == "cpu"
    assert [visible for _, visible, _ in workers.run(where)] == [""] * 4
    assert {host for host, _, _ in workers.run(where)} == {platform.node()}

@pytest.mark.gpus(4, per_host=2)
def test_gpus(gpus, workers):
    pass
"""
)


@pytest.mark.slow
def test_a_host_with_too_few_gpus_makes_the_whole_test_fall_back(two_hosts: TwoHosts) -> None:
    """Otherwise some ranks would run on GPUs and others, unnoticed, on CPUs."""
    two_hosts.hosts[1].environment["CUDA_VISIBLE_DEVICES"] = "0"
    output = two_hosts.run(FALLBACK)
    assert "1 passed, 1 skipped" in output, output
    assert "n2: gpus(2): " in output, output


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


@pytest.mark.slow
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


LOST_LATER = (
    WORK
    + """
import psutil

def end_agent():
    if os.environ["CUDA_VISIBLE_DEVICES"].startswith("GPU-n2"):
        for parent in psutil.Process().parents():
            if any("hosts.agent" in word for word in parent.cmdline()):
                parent.kill()
                break
    time.sleep(30)

@pytest.mark.gpus(4, per_host=2)
def test_lost(workers, energy_meter):
    with energy_meter("first"):
        workers.run(where, 0.3)
    with energy_meter("second"):
        workers.run(where, 0.3)
    time.sleep(3)
    with energy_meter("third"):
        workers.run(end_agent)
"""
)


@pytest.mark.slow
def test_unread_windows_of_a_host_that_is_lost_say_so_and_keep_the_others(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(LOST_LATER)
    assert "1 failed" in output, output
    (record,) = two_hosts.report.records
    assert [window.name for window in record.windows] == ["first", "second", "third"]
    for window in record.windows:
        assert window.energy_j is None
        assert (window.reason or "").startswith("n2: its agent ")
        assert window.by_domain["n2/gpu:GPU-n2-0"].energy_j is None
        assert window.by_domain["n1/gpu:GPU-n1-0"].energy_j is not None


def test_work_in_the_process_of_pytest_is_refused_on_several_hosts(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(
        """
import pytest

@pytest.mark.gpus(4, per_host=2)
def test_alone(benchmark):
    benchmark(sum, [1])

@pytest.mark.gpus(4, per_host=2)
def test_with_ranks(benchmark, workers):
    benchmark(workers.run, max, 1, 2)

@pytest.mark.gpus(2)
def test_with_ranks_on_one_host(benchmark, workers):
    benchmark(workers.run, max, 1, 2)
"""
    )
    assert "3 errors" in output, output
    assert "gpus(4, per_host=2) asks for several hosts, and the code" in output
    refusal = "benchmark measures the energy of pytest's own host, and the test uses others; use "
    assert output.count(f"{refusal}energy(workers.call(...)) instead") >= 2, output


FIRST_WINDOWS = (
    WORK
    + """
import threading

@pytest.mark.gpus(4, per_host=2)
def test_it(workers, energy_meter):
    windows = []

    def measure(number):
        with energy_meter(f"w{number}") as window:
            time.sleep(0.5)
        windows.append(window)

    threads = [threading.Thread(target=measure, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(window.energy_j > 0 for window in windows), windows
"""
)


@pytest.mark.slow
def test_the_first_windows_of_a_test_may_open_in_several_threads(two_hosts: TwoHosts) -> None:
    output = two_hosts.run(FIRST_WINDOWS)
    assert "1 passed" in output, output
    assert len(two_hosts.report.records[0].windows) == 4
