# SPDX-License-Identifier: Apache-2.0
"""The CPU model: joules of busy loops of known length, alone and beside neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_llenergy.energy.meters.base import READER_THREAD, Meter, Targets
from pytest_llenergy.energy.meters.estimate import (
    AVERAGE_W,
    HIGHEST_W,
    LOWEST_W,
    EstimateMeter,
    open_estimate,
)
from pytest_llenergy.energy.trace import Series
from pytest_llenergy.energy.window import measure
from pytest_llenergy.energy.window_arithmetic import energy_between
from pytest_llenergy.errors import MeterDoesNotApply, MeterError

from .test_cpu_time import SPIN, START_S, neighbours, python, spin

pytestmark = pytest.mark.clock


def joules(meter: Meter) -> float:
    (energy_j,) = meter.read()
    assert isinstance(energy_j, float)
    return energy_j


def test_the_domain_is_marked_as_an_estimate_of_the_tests_processes() -> None:
    meter = EstimateMeter()
    (domain,) = meter.domains
    assert (domain.name, domain.kind, domain.scope) == ("cpu:processes", "estimated", "processes of the test")
    assert domain.info(meter.name).accuracy == "within a factor of 2.5; 1.69-8.58 W per busy logical CPU"
    meter.close()


def test_the_limits_are_the_extreme_cpu_families_and_contain_the_estimate() -> None:
    (domain,) = EstimateMeter().domains
    low, high = domain.limits(AVERAGE_W * 4.0, 20.0)
    assert (low, high) == pytest.approx((LOWEST_W * 4.0, HIGHEST_W * 4.0))
    assert low < AVERAGE_W * 4.0 < high


def test_busy_seconds_cost_the_power_of_a_busy_cpu_and_waiting_nothing() -> None:
    meter = EstimateMeter()
    before_j = joules(meter)
    spin(0.5)
    time.sleep(0.3)
    assert joules(meter) - before_j == pytest.approx(AVERAGE_W * 0.5, rel=0.03)


def test_reading_the_meter_costs_nothing_in_its_own_estimate() -> None:
    meter = EstimateMeter()

    def read() -> None:
        end_s = time.thread_time() + 0.3
        while time.thread_time() < end_s:
            meter.read()

    read()
    thread = threading.Thread(target=read, name=READER_THREAD)
    thread.start()
    thread.join()
    # The loop around the readings counts in this thread; the other one does nothing but read.
    assert joules(meter) < AVERAGE_W * 0.1


def test_neighbours_leave_the_estimate_of_a_window_as_it_is() -> None:
    with measure(gpus=(), meters=["estimate"]) as energy, neighbours(2), energy.window("work") as window:
        spin(0.5)
    assert window.energy_j == pytest.approx(AVERAGE_W * 0.5, rel=0.05)
    assert window.energy_u_j is not None
    assert window.energy_u_j < 0.05 * AVERAGE_W * 0.5


def test_a_short_window_that_is_read_at_its_edges_is_resolved() -> None:
    meter = EstimateMeter()
    series = Series(meter.name, meter.domains[0])
    # Busy all the time; the window is from 100 to 130 ms.
    for time_ms in (0.0, 50.0, 99.9, 130.1, 180.0):
        series.add(round(time_ms * 1e6), round(time_ms * 1e6) + 50_000, AVERAGE_W * time_ms / 1e3)
    energy = energy_between(series, 100_000_000, 130_000_000)
    assert energy.energy_j == pytest.approx(AVERAGE_W * 0.03, rel=0.02)
    assert energy.u_j is not None
    assert energy.u_j < 0.02 * AVERAGE_W * 0.03


def test_a_child_that_ends_counts_in_its_window() -> None:
    with (
        measure(gpus=(), meters=["estimate"]) as energy,
        energy.window("work") as window,
        python(SPIN.format(0.5)) as child,
    ):
        child.wait()
    assert window.energy_j is not None
    assert 0.49 <= window.energy_j / AVERAGE_W <= 0.5 + START_S


def test_a_server_that_was_started_elsewhere_counts(tmp_path: Path) -> None:
    go = tmp_path / "go"
    work = "end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    script = f'import os, time\nwhile not os.path.exists("{go}"): time.sleep(0.05)\n{work}\ntime.sleep(60)'
    command = f"{sys.executable} -c '{script}' >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.check_output(["sh", "-c", command]))
    try:
        (meter,) = open_estimate(Targets(processes=(pid,)))
        go.touch()
        deadline_s = time.monotonic() + 60
        while joules(meter) < AVERAGE_W * 0.4:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        os.kill(pid, 9)


def test_an_unknown_server_is_a_reason_and_no_estimate() -> None:
    with pytest.raises(MeterError, match=r"^estimate: it needs the processes of the test: port 80"):
        open_estimate(Targets(unknown_processes="port 80 belongs to a container"))


def test_the_model_does_not_apply_to_gpus() -> None:
    with pytest.raises(MeterDoesNotApply, match=r"^estimate: models the CPU only"):
        open_estimate(Targets(("GPU-a",)))
